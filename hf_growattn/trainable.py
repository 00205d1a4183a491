"""Which parameters a growth resizes, and whether training can go on with them."""

import torch
from torch import nn

from .adapters import is_adapted
from .attention import GrowableAttention
from .probe import Kind

_DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


def inside_peft(model: nn.Module) -> nn.Module:
    """The transformers model inside a peft model; any other model as it is.

    Raises:
        ValueError: peft adds prompts, without which the loss would be another one.
    """
    if not hasattr(model, "get_base_model"):
        return model
    for name, config in model.peft_config.items():
        if config.is_prompt_learning or config.is_adaption_prompt:
            raise ValueError(
                f"The adapter {name!r} ({type(config).__name__}) adds prompts, which growth cannot see. Grow the model "
                "before get_peft_model, or use LoRA."
            )
    return model.get_base_model()


def trainable_parameters(
    chosen: list[GrowableAttention], kinds: list[Kind], frozen: bool = False
) -> dict[str, nn.Parameter]:
    """Return those parameters that growing these kinds resizes and that train, by name.

    Where a pattern or a message carries an adapter on either side, its base weights may be frozen, as LoRA leaves them:
    growth writes them, and training moves the adapter's new entries.

    Args:
        chosen: the attention modules to resize.
        kinds: patterns, messages or both.
        frozen: let all of them be frozen, as cutting does.

    Raises:
        ValueError: a projection cannot be resized, or a parameter cannot be trained. The message names the fix.
    """
    trainable = {}
    for attention in chosen:
        names = {parameter: name for name, parameter in attention.named_parameters()}
        for kind in kinds:
            roles = (kind.stacked, kind.shared)
            adapted = any(is_adapted(attention.projection_of(role)) for role in roles)
            for module, part, _ in (entry for role in roles for entry in attention.parameters_along(role)):
                parameter = getattr(module, part)
                name = f"{names[parameter]} of layer {attention.layer_idx}"
                _check(name, parameter, adapted or frozen)
                if parameter.requires_grad:
                    trainable[name] = parameter
    return trainable


def check_no_adapters(attention: GrowableAttention, kinds: list[Kind], setting: str) -> None:
    """Raise a ValueError if a setting that rewrites old weights meets adapters, which were trained for those."""
    for role in (role for kind in kinds for role in (kind.stacked, kind.shared)):
        if is_adapted(attention.projection_of(role)):
            raise ValueError(
                f"{setting} rewrites existing weights, and {getattr(attention.architecture, role)} of layer "
                f"{attention.layer_idx} carries adapters that were trained for them. Call merge_and_unload() first, or "
                f"do without {setting}."
            )


def _check(name: str, parameter: nn.Parameter, may_be_frozen: bool) -> None:
    """Raise a ValueError that names the fix if a parameter cannot be grown and trained."""
    if parameter.is_meta:
        raise ValueError(f"{name} is on the meta device: load the weights onto a real device before growing.")
    if parameter.is_inference():
        raise ValueError(f"{name} was made under torch.inference_mode(): load the model outside of it.")
    if parameter.dtype not in _DTYPES:
        raise ValueError(f"{name} has dtype {parameter.dtype}, so the model is quantized: load it in bf16 or fp32.")
    if not parameter.requires_grad and not may_be_frozen:
        raise ValueError(
            f"{name} is frozen, so new dims could not be trained: call requires_grad_(True) on it first, or let LoRA "
            "target it."
        )
