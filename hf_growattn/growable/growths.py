"""The new dims that a living model keeps: which there are, and how they change."""

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from ..model.families import dims_of, growable_configs, sync_config
from ..model.modeling import WideModelMixin
from ..model.new_dims import NewDims, in_order
from .attention import GrowableAttention, attentions
from .training_state import (
    add_new_parameters,
    after_change,
    remove_parameters,
    shard_like,
    warn_if_left_out,
)

Growths = dict[GrowableAttention, dict[str, NewDims]]  # of each attention module by name
Dims = dict[str, dict[str, list[int]]]  # the same as `extra_dims` of a config names them


def call_of_patch(model: nn.Module) -> str:
    """How to call `patch_model` on the outermost transformers model that a module is or holds."""
    names = (name for name, module in model.named_modules() if isinstance(module, PreTrainedModel))
    return f"patch_model({'.'.join(filter(None, ('model', next(names, ''))))})"


def growable_model(model: Any) -> Any:
    """The patched model that a module holds, or is; a ValueError if it holds none, or several."""
    inside = model.modules() if isinstance(model, nn.Module) else ()
    found = [module for module in inside if isinstance(module, WideModelMixin)]
    if not found:
        check_kind(model)
        call = "patch_model(model.get_base_model())" if hasattr(model, "get_base_model") else call_of_patch(model)
        raise ValueError(f"{type(model).__name__} is not growable yet: call {call} first.")
    inside = set(found[0].modules())
    if apart := [module for module in found if module not in inside]:
        raise ValueError(
            f"{type(model).__name__} holds several models that could grow, a {type(found[0]).__name__} and a "
            f"{type(apart[0]).__name__}. Pass the one that shall grow, and the loss as a function of that."
        )
    return found[0]


def name_in_base(model: PreTrainedModel, name: str) -> str:
    """A name in a model, as it is in the base model without a head around it."""
    return name.removeprefix(f"{model.base_model_prefix}.")


def check_kind(model: Any) -> None:
    """Raise a TypeError for what is no model at all, such as its name or its tokenizer."""
    if not isinstance(model, nn.Module):
        raise TypeError(
            f"A transformers model is needed here, not a {type(model).__name__}: load it first, such as by "
            "AutoModelForCausalLM.from_pretrained(name)."
        )


def is_grown(model: nn.Module) -> bool:
    """Whether any attention module has new dims that are kept."""
    return any(attention.growths for attention in attentions(model))


def extra_parameters(model: nn.Module) -> list[nn.Parameter]:
    """The parameters of all kept new dims."""
    return [p for attention in attentions(model) for dims in attention.growths.values() for p in dims.parameters()]


def cache_bytes(model: nn.Module, tried: Mapping[Any, NewDims] | None = None) -> int:
    """Bytes of a token's keys and values as a model's cache keeps them; `tried` are new dims that are not kept yet."""
    numbers = 0
    for attention in (attention for attention in attentions(model) if attention.caches):
        in_use = [] if attention.extra is None else attention.extra.active()  # adapters of peft among them
        numbers += attention.cached_numbers([*in_use, *([tried[attention]] if tried and attention in tried else [])])
    return next(model.parameters()).element_size() * numbers


def growths_of(model: nn.Module) -> Growths:
    """The kept new dims of every attention module."""
    return {attention: attention.growths for attention in attentions(model)}


def name_after(names: Iterable[str]) -> str:
    """The name of the growth that comes after those of these names: "growth_1" for the first."""
    ends = (name.rpartition("_")[2] for name in names)
    return f"growth_{max((int(end) for end in ends if end.isdecimal()), default=0) + 1}"


def swap_growths(growths: Growths) -> Growths:
    """Give attention modules these growths, and return those that they had."""
    former = {}
    for attention, own in growths.items():
        kept = attention.make_extra().growths
        former[attention] = dict(kept.items())
        kept.clear()
        kept.update(in_order(own))
        attention.drop_if_empty()
    return former


def replace_growths(
    wrapped: nn.Module,
    growths: Growths,
    optimizers: list[torch.optim.Optimizer],
    commit: Callable[[], None] = lambda: None,
) -> None:
    """Let attention modules keep these growths and no others; config, optimizers, DDP, FSDP2 and peft follow.

    Modules that are not named keep theirs. New parameters start with a fresh state in the optimizers. After an
    exception model and optimizers are as they were.

    Args:
        wrapped: the patched model, in whatever the user has put around it: what is not given cannot follow.
        growths: those of each module by name.
        optimizers: what trains the model, without wrappers.
        commit: changes what else belongs to it; once it has returned, the change is made.
    """
    model = growable_model(wrapped)
    new: list[nn.Parameter] = []
    with _all_or_nothing(model, growths, optimizers) as former:
        swap_growths(growths)
        for attention, own in growths.items():
            for dims in (dims for dims in own.values() if dims not in former[attention].values()):
                shard_like(dims, attention.module)
                new += dims.parameters()  # sharded ones are others
        sync_config(model)
        add_new_parameters(optimizers, model, [parameter for parameter in new if parameter.requires_grad])
        kept = {*extra_parameters(model)}
        before = [p for own in former.values() for dims in own.values() for p in dims.parameters()]
        gone = [parameter for parameter in before if parameter not in kept]
        remove_parameters(optimizers, gone)
        commit()
    if new and not optimizers:
        warn_if_left_out(model, new)
    if new or gone:
        after_change(wrapped)


@contextlib.contextmanager
def _all_or_nothing(
    model: PreTrainedModel, growths: Growths, optimizers: list[torch.optim.Optimizer]
) -> Iterator[Growths]:
    """Give the former growths of these modules, and after any exception, an interrupt too, take back every change.

    That is of the growths, the config, the names of the checkpoint, and the optimizers' parameters and states.
    """
    former = {attention: attention.growths for attention in growths}
    named = [model, *growable_configs(model)]
    names, origin = [each.name_or_path for each in named], vars(model).get("grown_from")
    groups = [group for optimizer in optimizers for group in optimizer.param_groups]
    listed = [(group[name], [*group[name]]) for group in groups for name in ("params", "param_names") if name in group]
    states = [(optimizer.state, dict(optimizer.state)) for optimizer in optimizers]
    try:
        yield former
    except BaseException:
        swap_growths(former)
        sync_config(model)
        for each, name in zip(named, names):
            each.name_or_path = name
        vars(model).pop("grown_from", None)
        if origin is not None:
            vars(model)["grown_from"] = origin
        for parameters, before in listed:
            parameters[:] = before
        for state, before in states:
            state.clear()
            state.update(before)
        raise


def set_dims(wrapped: nn.Module, extra_dims: Dims, optimizers: Sequence[torch.optim.Optimizer] = ()) -> None:
    """Let a model have these new dims and no others; those of the same name and size stay, others begin as zeros.

    The other arguments are those of `replace_growths`.
    """
    model = growable_model(wrapped)
    if extra_dims == dims_of(model):
        return
    growths: Growths = {}
    for attention, own in growths_of(model).items():
        growths[attention] = {}
        for name, (qk_dims, v_dims) in extra_dims.get(str(attention.layer), {}).items():
            new = own.get(name)
            if new is None or (new.qk_dims, new.v_dims) != (qk_dims, v_dims):
                new = attention.make_new_dims(qk_dims, v_dims)
            growths[attention][name] = new
    replace_growths(wrapped, growths, [*optimizers])


def check_saving(wrapped: nn.Module) -> None:
    """Raise a ValueError if a model of transformers around the patched one would not save new dims."""
    model = growable_model(wrapped)
    for outer in wrapped.modules():
        if isinstance(outer, PreTrainedModel) and not isinstance(outer, WideModelMixin):
            is_around = any(module is model for module in outer.modules())
            if is_around and not any(config is model.config for config in vars(outer.config).values()):
                raise ValueError(
                    f"patch_model was called on the {type(model).__name__} in a {type(outer).__name__}, whose config "
                    "would not know of its new dims. unpatch_model(that), and call patch_model on the whole."
                )


def leave_checkpoint(model: PreTrainedModel) -> None:
    """Take the name of its checkpoint off a model that grew: what would be loaded by it is another model.

    So peft notes no base for its adapters, and TRL asks for a reference. `origin_of` still knows the name.
    """
    vars(model)["grown_from"] = origin_of(model)
    for named in (model, *growable_configs(model)):
        named.name_or_path = ""


def origin_of(model: PreTrainedModel) -> str:
    """Folder or Hub id of the checkpoint that a model came from, whatever it became since; "" without one."""
    return getattr(model, "grown_from", model.config.name_or_path or "")
