"""LoRA around a projection, as peft lays it out: which parameters follow the projection's size, and what they add.

peft itself is not imported. It wraps a projection in a layer that holds it as `base_layer`, and keeps for each adapter,
by name, two linears beside it: `lora_A` from the inputs to the rank, `lora_B` from the rank to the outputs.
"""

import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

_LORA = "peft.tuners.lora.layer.Linear"


def plain(module: nn.Module) -> nn.Module:
    """The projection itself, inside whatever peft has put around it."""
    while hasattr(module, "base_layer"):
        module = module.base_layer
    return module


def is_adapted(module: nn.Module) -> bool:
    """Whether peft has put anything around a projection."""
    return hasattr(module, "base_layer")


def hindrance(module: nn.Module) -> str | None:
    """What keeps a projection from being resized, in words; None for a plain one, bare or under plain LoRA."""
    inside = getattr(module, "base_layer", module)
    if not isinstance(inside, (nn.Linear, Conv1D)):
        return f"a {type(inside).__name__}"
    if not is_adapted(module):
        return None
    if f"{type(module).__module__}.{type(module).__qualname__}" != _LORA:
        return f"under an adapter of {type(module).__module__} ({type(module).__name__})"
    variants = {type(variant).__name__ for variant in module.lora_variant.values()}
    return f"under a variant of LoRA ({', '.join(sorted(variants))})" if variants else None


def weight_axis(linear: nn.Module, outputs: bool) -> int:
    """Axis of a weight along which its outputs lie, or its inputs; Conv1D stores its weight transposed."""
    return int(outputs == isinstance(linear, Conv1D))


def parameters_along(module: nn.Module, outputs: bool) -> list[tuple[nn.Module, str, int]]:
    """The parameters that follow the number of a projection's outputs, or of its inputs: module, name and axis.

    Beside the projection's own they are those of every adapter, active or not.
    """
    found = []
    for linear in (plain(module), *_linears(module, "lora_B" if outputs else "lora_A")):
        found.append((linear, "weight", weight_axis(linear, outputs)))
        if outputs and linear.bias is not None:
            found.append((linear, "bias", 0))
    return found


def note_sizes(module: nn.Module) -> None:
    """Keep true what a projection, its adapters and their wrapper note of their sizes: peft and repr read it."""
    for linear in (*_linears(module, "lora_A"), *_linears(module, "lora_B"), plain(module)):
        outputs, inputs = (linear.weight.shape[weight_axis(linear, side)] for side in (True, False))
        if isinstance(linear, Conv1D):
            linear.nf, linear.nx = outputs, inputs
        else:
            linear.out_features, linear.in_features = outputs, inputs
    if is_adapted(module):
        module.out_features, module.in_features = outputs, inputs


def effective(module: nn.Module, name: str, dtype: torch.dtype) -> torch.Tensor | None:
    """A projection's "weight" or "bias" with what its active adapters add to it, in its own layout.

    Adapters that are merged are in the projection's own weights already. A bias that only an adapter has counts as
    none, since new dims could not have one.
    """
    inside = plain(module)
    if getattr(inside, name) is None:
        return None
    total = getattr(inside, name).detach().to(dtype)
    for adapter in _active(module):
        lora_a, lora_b = module.lora_A[adapter], module.lora_B[adapter]
        if name == "weight":
            added = lora_b.weight.detach().to(dtype) @ lora_a.weight.detach().to(dtype)
            total = total + module.scaling[adapter] * (added.T if isinstance(inside, Conv1D) else added)
        elif lora_b.bias is not None:
            total = total + module.scaling[adapter] * lora_b.bias.detach().to(dtype)
    return total


def without_adapters(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """A state dict of a model under LoRA as the model alone would have it: no copy, base weights by their own names."""
    own = {}
    for name, tensor in state.items():
        parts = name.split(".")
        if not any(part.startswith("lora_") or part == "modules_to_save" for part in parts):
            own[".".join(part for part in parts if part not in ("base_layer", "original_module"))] = tensor
    return own


def _linears(module: nn.Module, side: str) -> list[nn.Linear]:
    return list(getattr(module, side).values()) if is_adapted(module) else []


def _active(module: nn.Module) -> list[str]:
    """Names of the adapters that a forward pass adds to the projection's own weights."""
    if not is_adapted(module) or module.disable_adapters or module.merged:
        return []
    return [adapter for adapter in module.active_adapters if adapter in module.lora_A]
