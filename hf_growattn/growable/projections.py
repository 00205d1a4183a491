"""What a projection computes with: its own weight, the numbers behind a quantized one, and what adapters of peft add.

Neither peft nor a quantizer is imported.
"""

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from ..model.families import base_layer
from ..model.new_dims import full_tensor

MERGE_ADAPTERS = "Merge adapters other than plain LoRA into the weights (merge_and_unload() of peft)"
_DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
# Packages whose linear layers compute with something else than their weight, even where that is floating-point.
_QUANTIZERS = ("bitsandbytes.", "transformers.integrations.")
_PACKS = "support_avx512bf16_for_cpu"  # of 4-bit layers of bitsandbytes: whether their first evaluation packs them


def is_adapted(module: nn.Module) -> bool:
    """Whether peft has put anything around a projection."""
    return hasattr(module, "base_layer")


def has_other_adapters(module: Any) -> bool:
    """Whether peft has put anything around a projection but plain LoRA."""
    while is_adapted(module):
        if not isinstance(getattr(module, "lora_A", None), nn.ModuleDict) or getattr(module, "lora_variant", None):
            return True
        module = module.base_layer
    return False


def quantization(module: nn.Module) -> str | None:
    """What quantizes a module's weight, and the fix; None where the module computes with the weight's own entries."""
    weight: Any = getattr(module, "weight", None)
    if not isinstance(weight, Tensor):
        return None
    kind = type(module) if type(module).__module__.startswith(_QUANTIZERS) else type(weight)
    if not f"{kind.__module__}.".startswith("torch."):  # weights of torchao say that they are fp32
        how = f"quantized by {kind.__module__.partition('.')[0]} ({kind.__name__})"
    elif weight.dtype not in _DTYPES:
        how = f"in {weight.dtype}, quantized"
    else:
        return None
    return f"{how}. Load the model without quantization."


def is_plain(projection: Any) -> bool:
    """Whether the weight of a projection, adapters apart, holds the numbers that it computes with."""
    inside = base_layer(projection)
    is_linear = isinstance(inside, (nn.Linear, Conv1D)) and isinstance(getattr(inside, "weight", None), Tensor)
    return is_linear and quantization(inside) is None


def keep_unpacked(model: nn.Module) -> list[nn.Module]:
    """Keep evaluation from packing 4-bit weights for inference, and return the layers concerned.

    bitsandbytes does so on CPUs with AVX512-BF16. From then on gradients silently stop at such a layer.
    """
    packing = [module for module in model.modules() if getattr(module, _PACKS, False)]
    for module in packing:
        setattr(module, _PACKS, False)
    return packing


@contextlib.contextmanager
def kept_unpacked(model: nn.Module) -> Iterator[None]:
    """As `keep_unpacked`, for a while."""
    packing = keep_unpacked(model)
    try:
        yield
    finally:
        for module in packing:
            setattr(module, _PACKS, True)


@torch.no_grad()
def computed_weight(module: Any, inputs: int) -> Tensor:
    """The weight (outputs, inputs) in fp32 that a quantized projection computes with: its answer to a unit matrix."""
    inside = base_layer(module)
    numbers = [t for t in (getattr(inside, "weight", None), *inside.parameters(), *inside.buffers()) if t is not None]
    kinds = (number.dtype for number in numbers if number.is_floating_point())
    # bitsandbytes may store its packed bytes in any type, and answers in that of its inputs.
    packed = type(inside).__module__.startswith("bitsandbytes.")
    dtype = torch.float32 if packed else next(kinds, torch.float32)
    questions = torch.eye(inputs + 1, inputs, dtype=dtype, device=numbers[0].device)  # the last one is zero
    with torch.autocast(numbers[0].device.type, enabled=False), kept_unpacked(inside):
        answer = inside(questions)
    if answer.dim() != 2 or len(answer) != inputs + 1:
        raise ValueError(
            f"A {type(inside).__name__} is no linear layer, so it has no weight to be read. {MERGE_ADAPTERS}."
        )
    return (answer[:-1].float() - answer[-1].float()).T


def added_by_adapters(module: Any, name: str, dtype: torch.dtype) -> Iterator[Tensor]:
    """What each active adapter adds to a projection's "weight" or "bias", in its layout; none once they are merged."""
    if not is_adapted(module) or module.disable_adapters or module.merged:
        return
    for adapter in (adapter for adapter in module.active_adapters if adapter in module.lora_A):
        a, b, scale = module.lora_A[adapter].weight, module.lora_B[adapter], module.scaling[adapter]
        if name == "weight":
            added = scale * (full_tensor(b.weight.detach()).to(dtype) @ full_tensor(a.detach()).to(dtype))
            yield added.T if isinstance(base_layer(module), Conv1D) else added
        elif b.bias is not None:
            yield scale * full_tensor(b.bias.detach()).to(dtype)
