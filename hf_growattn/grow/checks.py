"""Checks before a growth: which layers and parameters it resizes, and whether training can go on."""

from collections.abc import Iterable
from itertools import chain
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from ..growable.adapters import is_adapted
from ..growable.attention import GrowableAttention
from ..growable.models import GrowableModelMixin, attentions
from ..growable.sharding import held_by_fsdp, is_sharded, sharded_modules
from ..measure import ranks
from ..measure.kinds import PATTERNS, Kind
from ..model.attention import ROLES
from .frozen import old_dims_train, under_peft
from .loss import unwrapped
from .plan import GrowthConfig, check_budget

# By package and class ("" is any class of the package), so that nothing has to be imported or even installed.
_CLASSES = {
    ("torch.distributed", "DTensor"): "a DTensor, of FSDP2 or tensor parallelism",
    ("torch.distributed", "FSDPModule"): "sharded by FSDP2",
    ("torch.distributed", "FullyShardedDataParallel"): "wrapped by FSDP1",
    ("torch.distributed", "ZeroRedundancyOptimizer"): "torch's ZeroRedundancyOptimizer",
    ("deepspeed", ""): "DeepSpeed's",
}
# By what the libraries leave on a parameter; FSDP1 and ZeRO-3 may be met without their wrappers.
_MARKS = {"_fsdp_flattened": "flattened by FSDP1", "ds_id": "partitioned by DeepSpeed ZeRO-3"}
_DISTRIBUTED_TYPES = ("FSDP", "DEEPSPEED", "MEGATRON_LM")


def refuse_sharded(model: nn.Module, optimizers: Iterable, accelerator=None, but_in_place: bool = False) -> None:
    """Make sure that neither the model nor its bare optimizers are sharded over processes.

    Raises:
        ValueError: they are, by FSDP, tensor parallelism, DeepSpeed, Megatron or ZeroRedundancyOptimizer. With
            `but_in_place`, `fully_shard` and tensor parallelism over whole heads are allowed.
    """
    known: set[int] = set()
    if but_in_place and isinstance(model, nn.Module):
        known = {*map(id, sharded_modules(model)), *held_by_fsdp(model)}
        known |= _spread_by_heads(model, known)
    kind = str(getattr(getattr(accelerator, "distributed_type", None), "value", None))
    plugin = getattr(getattr(accelerator, "state", None), "fsdp_plugin", None)
    fsdp2 = but_in_place and kind == "FSDP" and getattr(plugin, "fsdp_version", 1) == 2
    found = f"accelerator.distributed_type is {kind}" if kind in _DISTRIBUTED_TYPES and not fsdp2 else None
    parts = chain(model.named_modules(), model.named_parameters()) if isinstance(model, nn.Module) else ()
    for name, part in chain(((f"the optimizer, {type(o).__name__},", o) for o in optimizers), parts):
        how = None if id(part) in known else _sharding_of(part)
        found = found or (how and f"{name or 'the model'} is {how}")
    if found:
        raise ValueError(
            f"This needs every weight and its optimizer state whole, and {found}. Growth goes on in a model that "
            "fully_shard of torch has sharded (FSDP2), or from_pretrained with a tp_size; all else is to be done in "
            "one process, with the whole model, whose checkpoint is then loaded into the sharded run."
        )


def _spread_by_heads(model: nn.Module, others: set[int]) -> set[int]:
    """The ids of all parameters that tensor parallelism spreads over the processes, whole heads to each.

    Raises:
        ValueError: it spreads them in another way, or it is combined with FSDP2 or data parallelism.
    """
    spread: dict[str, Any] = {name: p for name, p in model.named_parameters() if is_sharded(p) and id(p) not in others}
    growable = [attention for attention in attentions(model) if attention.heads_mesh is not None]
    if not spread or not growable:
        return set()
    size = ranks.count()
    for name, parameter in spread.items():
        if others or parameter.device_mesh.ndim > 1 or parameter.device_mesh.size() != size:
            raise ValueError(
                f"{name} is spread by tensor parallelism over only some of the {size} processes. Growth needs all of "
                "them: set tp_size to the number of processes, without FSDP or data parallelism."
            )
    plans = (getattr(module, "_tp_plan", None) or {} for module in model.modules())
    sequence = any("sequence_parallel" in plan.values() for plan in plans)
    for attention in growable:
        for role in ROLES:
            projection, along = attention.projection_of(role), 1 if role == "output" else 0
            if is_adapted(projection):
                raise ValueError(
                    f"{attention.name_of(role)} is spread by tensor parallelism and carries adapters, which growth "
                    "cannot widen there. Call merge_and_unload() first, or grow in one process."
                )
            (placement,) = getattr(projection.weight, "placements", (None,))
            by_heads = placement is not None and placement.is_shard(along) and not attention.architecture.fused
            if sequence or not by_heads:
                raise ValueError(
                    f"{attention.name_of(role)} is not spread by heads, as growth under tensor parallelism wants it: "
                    "queries, keys and values by a colwise plan, the output by a rowwise one, no sequence_parallel. "
                    "Grow in one process, and load the grown checkpoint with the plan."
                )
        heads, key_heads = attention.heads_of("query"), attention.heads_of("key")
        if heads % size or key_heads % size:
            raise ValueError(
                f"Layer {attention.layer_idx} has {heads} heads and {key_heads} key/value heads, which {size} "
                "processes cannot share evenly. Use a tp_size that divides both, or grow in one process and load the "
                "grown checkpoint."
            )
    return set(map(id, spread.values()))


def _sharding_of(part) -> str | None:
    """What shards a module, a parameter or an optimizer, by its marks and its classes; None if nothing does."""
    known = [what for mark, what in _MARKS.items() if hasattr(part, mark)]
    for cls in type(part).__mro__:
        known += [
            what
            for (package, name), what in _CLASSES.items()
            if f"{cls.__module__}.".startswith(f"{package}.") and name in ("", cls.__name__)
        ]
    return next(iter(known), None)


def growable_model(model: Any) -> GrowableModelMixin:
    """The patched model that a module holds, or is: inside peft, sentence-transformers or whatever wraps it.

    Raises:
        ValueError: it holds no patched model or several; or peft adds prompts or new dims of its own.
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
    if any(attention.extension is not None for attention in attentions(found[0])):
        raise ValueError(
            "The model carries adapters of GrowAttnConfig, which growth would not see. Call merge_and_unload() first, "
            "or start an adapter where growth would: initialize_growattn_weights(peft_model, batches)."
        )
    return found[0]


def layers_of(model: PreTrainedModel, chosen: Iterable[int] | None) -> list[GrowableAttention]:
    """The attention modules of these layers, or of all for None; a ValueError for an unknown layer."""
    by_layer = {attention.layer_idx: attention for attention in attentions(model)}
    layers = by_layer if chosen is None else dict.fromkeys(chosen)
    for layer in layers:
        if layer not in by_layer:
            raise ValueError(f"There is no layer {layer!r}: this model has the layers 0 to {max(by_layer)}.")
    return [by_layer[layer] for layer in layers]


def layers_to_grow(model: PreTrainedModel, config: GrowthConfig, as_extension: bool = False) -> list[GrowableAttention]:
    """The attention modules that a config chooses, all of which can grow as it says; see `trainable_parameters`.

    Raises:
        ValueError: a layer does not exist or cannot grow like that; the message names the fix.
    """
    chosen = layers_of(model, config.layers)
    if torch.is_inference_mode_enabled():
        raise ValueError("Growth needs gradients: call it outside torch.inference_mode().")
    trainable_parameters(model, chosen, config.chosen_kinds, as_extension=as_extension)
    rewriting = ["update_existing=True"] if config.update_existing else []
    rewriting += ['method="refactor"'] if config.method == "refactor" else []
    for attention in chosen:
        if rewriting and any(map(is_sharded, model.parameters())):
            raise ValueError(f"{rewriting[0]} rewrites existing weights, which are sharded: grow without it.")
        for setting in rewriting:
            check_rewritable(attention, config.chosen_kinds, setting)
        way = "rotates" if attention.rotate is not None else "normalises" if attention.normalises else None
        if config.method == "refactor" and way and PATTERNS in config.chosen_kinds:
            raise ValueError(
                f"Layer {attention.layer_idx} {way} its queries and keys, so its pattern is not one matrix and has "
                'no factors to replace. Use method="append", or grow messages (v_dims) alone.'
            )
        _check_room(attention, config)
    check_budget(config, chosen, model.num_parameters())
    return chosen


def _check_room(attention: GrowableAttention, config: GrowthConfig) -> None:
    """Raise a ValueError if fixed widths ask for more than the layer can use."""
    widest = attention.config.hidden_size
    for name, dims, limit in (
        ("qk", config.qk_dims, config.max_qk_head_dim),
        ("v", config.v_dims, config.max_v_head_dim),
    ):
        width = getattr(attention, f"{name}_head_dim")
        if limit is None and dims and width + dims > widest:
            raise ValueError(
                f"Layer {attention.layer_idx} has {name}_head_dim={width}; {dims} more would exceed "
                f"hidden_size={widest}, beyond which a head gains no rank. Choose fewer {name}_dims, set "
                f"max_{name}_head_dim, or choose other layers."
            )


def trainable_parameters(
    model: nn.Module,
    chosen: list[GrowableAttention],
    kinds: list[Kind],
    frozen: bool = False,
    as_extension: bool = False,
) -> dict[str, nn.Parameter]:
    """Return those parameters that growing these kinds resizes and that train, by name.

    Frozen ones train their new entries once they have grown. Under peft they stay frozen: where a pattern or a message
    carries an adapter on either side, growth writes its base weights, and training moves the adapter's new entries.

    With `frozen` all of them may be frozen, as for cutting. With `as_extension` quantized ones are skipped: their new
    dims stay in a module of their own.

    Raises:
        ValueError: a projection cannot be resized, or a parameter cannot be trained. The message names the fix.
    """
    trainable, peft = {}, under_peft(model)
    for attention in chosen:
        names = {parameter: name for name, parameter in attention.all_parameters().items()}
        for kind in kinds:
            adapted = any(is_adapted(attention.projection_of(role)) for role in kind.roles)
            resized = [role for role in kind.roles if not as_extension or attention.is_plain(role)]
            for module, part, _ in (entry for role in resized for entry in attention.parameters_along(role)):
                parameter = getattr(module, part)
                if is_sharded(parameter) and not parameter.requires_grad and not as_extension:
                    raise ValueError(
                        f"{names[parameter]} of layer {attention.layer_idx} is frozen and sharded, where its new "
                        "entries could not train alone. Call requires_grad_(True) on it, or grow before sharding."
                    )
                name = f"{names[parameter]} of layer {attention.layer_idx}"
                if parameter.is_meta:
                    raise ValueError(f"{name} is on the meta device: load the weights onto a real device first.")
                if parameter.is_inference():
                    raise ValueError(f"{name} was made under torch.inference_mode(): load the model outside of it.")
                if parameter.requires_grad:
                    trainable[name] = parameter
                elif peft and not (adapted or frozen):
                    raise ValueError(
                        f"{name} is frozen, and under peft new dims would be frozen too: call requires_grad_(True) on "
                        "it first, or let LoRA target it."
                    )
    return trainable


def check_rewritable(attention: GrowableAttention, kinds: list[Kind], setting: str, frozen: bool = False) -> None:
    """Raise a ValueError if what rewrites old weights meets adapters, or frozen weights where that is not allowed."""
    for role in (role for kind in kinds for role in kind.roles):
        start = f"{setting} rewrites existing weights, and {attention.name_of(role)}"
        if is_adapted(attention.projection_of(role)):
            raise ValueError(
                f"{start} carries adapters that were trained for them. Call merge_and_unload() first, or do without "
                f"{setting}."
            )
        if not frozen and not old_dims_train(attention, (role,)):
            raise ValueError(
                f"{start} is frozen. Call requires_grad_(True) on it first, or do without {setting}: new dims "
                "next to frozen ones train alone."
            )
