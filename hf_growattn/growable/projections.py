"""The projections of an attention module: how they are called and laid out, and what they compute with.

A projection computes with its own weight, with the numbers behind a quantized one, and with what adapters of peft add.
Neither peft nor a quantizer is imported.
"""

import contextlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from ..model.families import REGISTERED, base_layer, find_projections
from ..model.new_dims import full_tensor

MERGE_ADAPTERS = "Merge adapters other than plain LoRA into the weights (merge_and_unload() of peft)"
_DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
# Packages whose linear layers compute with something else than their weight, even where that is floating-point.
_QUANTIZERS = ("bitsandbytes.", "transformers.integrations.")
_PACKS = "support_avx512bf16_for_cpu"  # of 4-bit layers of bitsandbytes: whether their first evaluation packs them
# Families of which some layers do not rotate.
_ROTATES: dict[str, Callable[[Any], bool]] = {
    "cohere2": lambda attention: attention.sliding_window is not None,
    "esm": lambda attention: attention.position_embedding_type == "rotary",
    "smollm3": lambda attention: attention.use_rope,
}


@dataclass(frozen=True)
class AttentionLayout:
    """How the projections of an attention class are called and laid out.

    Attributes:
        names: by role, the attribute that projects it; one name for queries, keys and values is a fused projection.
        grouped_by_head: a fused projection's outputs are laid out `[query | key | value]` head by head, instead of all
            queries, all keys, all values.
        norms: attributes that normalize queries or keys.
        rotate: name of the function of the modeling file that rotates `(query, key, cos, sin)`.
        rotates: whether a module of the class rotates at all.
    """

    names: Mapping[str, str] = field(default_factory=dict)
    grouped_by_head: bool = False
    norms: tuple[str, ...] = ("q_norm", "k_norm", "q_layernorm", "k_layernorm", "query_layernorm", "qk_norm")
    rotate: str = "apply_rotary_pos_emb"
    rotates: Callable[[Any], bool] = lambda attention: True

    @property
    def is_fused(self) -> bool:
        """Whether queries, keys and values come out of one projection."""
        return "query" in self.names and self.names["query"] == self.names.get("key")


def register_architecture(model_type: str, layout: AttentionLayout) -> None:
    """Describe the projections of a model family whose names or layout are unusual.

    Raises:
        ValueError: the layout names a role that does not exist.
    """
    unknown = set(layout.names) - {"query", "key", "value", "output"}
    if unknown:
        raise ValueError(f"{', '.join(sorted(unknown))} is no role; roles are query, key, value and output.")
    REGISTERED[model_type] = layout


def layout_of(module: Any) -> AttentionLayout:
    """The layout of an attention module: as registered, or by the usual names."""
    model_type = module.config.model_type
    if model_type in REGISTERED:
        return REGISTERED[model_type]
    names = find_projections(module)
    layout = AttentionLayout(names, grouped_by_head=names.get("query") == "query_key_value")
    return replace(layout, rotates=_ROTATES[model_type]) if model_type in _ROTATES else layout


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


def is_quantized(model: nn.Module) -> bool:
    """Whether a model, or what is in it, was loaded quantized."""
    return any(getattr(module, "is_quantized", False) for module in model.modules())


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
def answers(module: Any, questions: Tensor) -> Tensor:
    """What a projection makes of some inputs (rows, inputs), its bias apart: (rows, outputs) in fp32."""
    inside = base_layer(module)
    numbers = [t for t in (getattr(inside, "weight", None), *inside.parameters(), *inside.buffers()) if t is not None]
    kinds = (number.dtype for number in numbers if number.is_floating_point())
    # bitsandbytes may store its packed bytes in any type, and answers in that of its inputs.
    packed = type(inside).__module__.startswith("bitsandbytes.")
    dtype = torch.float32 if packed else next(kinds, torch.float32)
    questions = nn.functional.pad(questions, (0, 0, 0, 1)).to(numbers[0].device, dtype)  # the last one is zero
    with torch.autocast(numbers[0].device.type, enabled=False), kept_unpacked(inside):
        answer = inside(questions)
    if answer.dim() != 2 or len(answer) != len(questions):
        raise ValueError(
            f"A {type(inside).__name__} is no linear layer, so it has no weight to be read. {MERGE_ADAPTERS}."
        )
    return answer[:-1].float() - answer[-1].float()


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
