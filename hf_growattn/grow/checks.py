"""Checks before a growth: that the model and its optimizers are such that new dims can join."""

from collections.abc import Iterable
from itertools import chain
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from ..growable.attention import GrowableAttention
from ..growable.models import GrowableModelMixin, attentions
from ..growable.sharding import is_sharded, sharded_modules
from .loss import unwrapped
from .plan import GrowthConfig, check_budget

# By the name of the class, so that nothing has to be imported or even installed.
_CLASSES = {
    "FullyShardedDataParallel": "wrapped by FSDP1",
    "ZeroRedundancyOptimizer": "torch's ZeroRedundancyOptimizer",
}
# By what the libraries leave on a parameter; FSDP1 and ZeRO-3 may be met without their wrappers.
_MARKS = {"_fsdp_flattened": "flattened by FSDP1", "ds_id": "partitioned by DeepSpeed ZeRO-3"}
_DISTRIBUTED_TYPES = ("FSDP", "DEEPSPEED", "MEGATRON_LM")


def refuse_sharded(model: nn.Module, optimizers: Iterable, accelerator=None, but_fsdp2: bool = False) -> None:
    """Make sure that neither the model nor its bare optimizers are sharded over processes.

    Raises:
        ValueError: they are, by FSDP, tensor parallelism, DeepSpeed, Megatron or ZeroRedundancyOptimizer. With
            `but_fsdp2`, `fully_shard` is allowed.
    """
    kind = str(getattr(getattr(accelerator, "distributed_type", None), "value", None))
    plugin = getattr(getattr(accelerator, "state", None), "fsdp_plugin", None)
    allowed = but_fsdp2 and kind == "FSDP" and getattr(plugin, "fsdp_version", 1) == 2
    found = f"accelerator.distributed_type is {kind}" if kind in _DISTRIBUTED_TYPES and not allowed else None
    parts = chain(model.named_modules(), model.named_parameters()) if isinstance(model, nn.Module) else ()
    for name, part in chain(((f"the optimizer, {type(o).__name__},", o) for o in optimizers), parts):
        how = _sharding_of(part)
        found = found or (how and f"{name or 'the model'} is {how}")
    by_fsdp2 = bool(sharded_modules(model)) if isinstance(model, nn.Module) else False
    spread = isinstance(model, nn.Module) and any(map(is_sharded, model.parameters()))
    if not found and spread and not (by_fsdp2 and but_fsdp2):
        found = "the model is sharded by FSDP2" if by_fsdp2 else "the model is spread by tensor parallelism"
    if found:
        instead = "Growth goes on in a model that fully_shard of torch has sharded (FSDP2). " if but_fsdp2 else ""
        raise ValueError(
            f"This needs every weight whole, and {found}. {instead}Otherwise do it in one process, with the whole "
            "model, and load its checkpoint into the sharded run."
        )


def _sharding_of(part) -> str | None:
    """What shards a module, a parameter or an optimizer, by its marks and its classes; None if nothing does."""
    for cls in type(part).__mro__:
        if cls.__name__ in _CLASSES:
            return _CLASSES[cls.__name__]
        if cls.__module__.partition(".")[0] == "deepspeed":
            return "DeepSpeed's"
    return next((what for mark, what in _MARKS.items() if hasattr(part, mark)), None)


def growable_model(model: Any) -> GrowableModelMixin:
    """The patched model that a module holds, or is: inside peft, sentence-transformers or whatever wraps it.

    Raises:
        ValueError: it holds no patched model or several; or peft adds prompts.
    """
    outer = unwrapped(model)
    inside: list[Any] = [*outer.modules()] if isinstance(outer, nn.Module) else []
    for name, config in (entry for module in inside for entry in getattr(module, "peft_config", {}).items()):
        if config.is_prompt_learning or config.is_adaption_prompt:
            raise ValueError(
                f"The adapter {name!r} ({type(config).__name__}) adds prompts, which growth cannot see. Grow the model "
                "before get_peft_model, or use LoRA."
            )
    found = [module for module in inside if isinstance(module, GrowableModelMixin)]
    if not found:
        raise ValueError(f"{type(outer).__name__} is not growable yet: call patch_model(model) first.")
    parts = set(found[0].modules())
    if apart := [module for module in found if module not in parts]:
        raise ValueError(
            f"{type(outer).__name__} holds several models that could grow, a {type(found[0]).__name__} and a "
            f"{type(apart[0]).__name__}. Pass the one that shall grow, and the loss as a function of that."
        )
    return found[0]


def layers_of(model: PreTrainedModel, chosen: Iterable[int] | None) -> list[GrowableAttention]:
    """The attention modules of these layers, or of all for None; a ValueError for an unknown layer."""
    by_layer = {attention.layer: attention for attention in attentions(model)}
    layers = by_layer if chosen is None else dict.fromkeys(chosen)
    for layer in layers:
        if layer not in by_layer:
            raise ValueError(f"There is no attention in layer {layer!r}: choose of {', '.join(map(str, by_layer))}.")
    return [by_layer[layer] for layer in layers]


def layers_to_grow(model: PreTrainedModel, config: GrowthConfig) -> list[GrowableAttention]:
    """The attention modules that a config chooses, all of which can grow as it says.

    Raises:
        ValueError: a layer does not exist or cannot grow like that; the message names the fix.
    """
    if torch.is_inference_mode_enabled():
        raise ValueError("Growth needs gradients: call it outside torch.inference_mode().")
    chosen = layers_of(model, config.layers)
    for attention in chosen:
        for name, parameter in attention.named_parameters():
            if parameter.is_meta:
                raise ValueError(
                    f"{name} of layer {attention.layer} is on the meta device: load the weights onto a real device "
                    "first."
                )
            if parameter.is_inference():
                raise ValueError(
                    f"{name} of layer {attention.layer} was made under torch.inference_mode(): load the model outside "
                    "of it."
                )
        _check_room(attention, config)
    if config.moves_old_dims:
        from .old_dims import check_old_dims

        check_old_dims(model, config, chosen)
    check_budget(config, chosen, model.num_parameters())
    return chosen


def _check_room(attention: GrowableAttention, config: GrowthConfig) -> None:
    """Raise a ValueError if fixed widths ask for more than the layer can use."""
    widest = attention.shape.in_features
    for name, dims, limit in (
        ("qk", config.qk_dims, config.max_qk_head_dim),
        ("v", config.v_dims, config.max_v_head_dim),
    ):
        width = attention.width_of("key" if name == "qk" else "value")
        if limit is None and dims and width + dims > widest:
            raise ValueError(
                f"Layer {attention.layer} has {name}_head_dim={width}; {dims} more would exceed "
                f"the input's {widest} features, beyond which a head gains no rank. Choose fewer {name}_dims, set "
                f"max_{name}_head_dim, or choose other layers."
            )
