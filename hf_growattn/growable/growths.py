"""The new dims that a living model keeps: which there are, how they change, and a small folder of them alone."""

import contextlib
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import nn
from transformers import PreTrainedModel

from ..model.configuration import check_extra_dims
from ..model.families import dims_of, growable_configs, sync_config
from ..model.modeling import WideModelMixin
from ..model.new_dims import NewDims, full_tensor, in_order
from .attention import GrowableAttention, attentions
from .fingerprint import fingerprint, is_of_another_base
from .folders import replacing
from .registration import register_peft_method
from .training_state import (
    add_new_parameters,
    after_change,
    bare_optimizers,
    remove_parameters,
    shard_like,
    warn_if_left_out,
    warn_without_ddp,
)

GROWTH_FILE = "growth.safetensors"  # its metadata say of which model type it is, and which new dims it holds
GROWTH = "growth"  # the folder next to the adapters of a peft model: the new dims of its base
GROWN_TYPE = "GROWATTN_"  # begins the type of such adapters in their config, so that nobody loads them without

Growths = dict[GrowableAttention, dict[str, NewDims]]  # of each attention module by name
Dims = dict[str, dict[str, list[int]]]  # the same as `extra_dims` of a config names them


def growable_model(model: Any) -> Any:
    """The patched model that a module holds, or is; a ValueError if it holds none, or several."""
    inside = model.modules() if isinstance(model, nn.Module) else ()
    found = [module for module in inside if isinstance(module, WideModelMixin)]
    if not found:
        check_kind(model)
        call = "patch_model(model.get_base_model())" if hasattr(model, "get_base_model") else "patch_model(model)"
        raise ValueError(f"{type(model).__name__} is not growable yet: call {call} first.")
    inside = set(found[0].modules())
    if apart := [module for module in found if module not in inside]:
        raise ValueError(
            f"{type(model).__name__} holds several models that could grow, a {type(found[0]).__name__} and a "
            f"{type(apart[0]).__name__}. Pass the one that shall grow, and the loss as a function of that."
        )
    return found[0]


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
        new = (tried or {}).get(attention)
        numbers += attention.cached_numbers([*attention.growths.values(), *([] if new is None else [new])])
    return next(model.parameters()).element_size() * numbers


def growths_of(model: nn.Module) -> Growths:
    """The kept new dims of every attention module."""
    return {attention: attention.growths for attention in attentions(model)}


def next_name(model: nn.Module) -> str:
    """The name of a model's next growth: "growth_1" for the first."""
    return name_after(name for growths in growths_of(model).values() for name in growths)


def name_after(names: Iterable[str]) -> str:
    """The name of the growth that comes after those of these names."""
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
    register_peft_method()  # which saves new dims along with adapters, and may have been imported since
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


def save_growth(model: nn.Module, folder: str | Path, state_dict: dict[str, torch.Tensor] | None = None) -> None:
    """Save the new dims of a grown model alone, without its base, as one file: `growth.safetensors`.

    Its metadata say which new dims they are, and by which old weights `load_growth` knows the base again.

    Args:
        model: a patched model, or a peft model of one.
        folder: where to.
        state_dict: of `model`, if all ranks of a sharded one have gathered it.

    Raises:
        ValueError: the model is not patched, or it has not grown.
    """
    inner = growable_model(model)
    start = next(name for name, module in model.named_modules() if module is inner)
    start = f"{start}." if start else ""
    named = {name: parameter for name, parameter in inner.named_parameters() if _is_new(name)}
    state: dict[str, Any] = named if state_dict is None else {name: state_dict[f"{start}{name}"] for name in named}
    state = {name: full_tensor(tensor.detach()).cpu().contiguous() for name, tensor in state.items()}
    if not state:
        raise ValueError("This model has not grown: there are no new dims to save.")
    metadata = {"format": "pt", "model_type": inner.config.model_type, "extra_dims": json.dumps(dims_of(inner))}
    metadata |= {"base": origin_of(inner), "old_weights": json.dumps(fingerprint(inner, state_dict, start))}
    metadata["trained"] = json.dumps(sorted({_growth_of(name) for name in state if named[name].requires_grad}))
    with replacing(Path(folder).resolve()) as partial:
        save_file(state, partial / GROWTH_FILE, metadata=metadata)


def load_growth(model: nn.Module, folder: str | Path, optimizer=None, strict: bool = True) -> None:
    """Give a patched model the new dims that `save_growth` wrote, in place of those that it has.

    Args:
        model: a patched model, or a peft model or DistributedDataParallel of one: pass the outermost.
        folder: where they are.
        optimizer: the optimizer that trains the model already, or a list of all of them, to take the new parameters.
        strict: refuse a base with other old weights than the growth was saved with; rounding is no difference.

    Raises:
        ValueError: the model is not patched; or the growth is damaged, of another model, or of another base.
        FileNotFoundError: the folder holds no growth.
    """
    inner = growable_model(model)
    check_saving(model)
    metadata, extra_dims, state = _read_growth(Path(folder))
    if metadata.get("model_type") != inner.config.model_type:
        raise ValueError(
            f"{folder} holds a growth of a {metadata.get('model_type')}, and this is a {inner.config.model_type}."
        )
    sizes = {}
    for attention in attentions(inner):
        for growth, dims in extra_dims.get(str(attention.layer), {}).items():
            new = NewDims(attention.shape, *dims, device="meta")
            place = f"{attention.name}.extra.growths.{growth}."
            sizes |= {place + own: parameter.shape for own, parameter in new.named_parameters()}
    if sizes != {name: tensor.shape for name, tensor in state.items()}:
        raise ValueError(f"{folder} holds a growth of a model of other sizes: load it onto the base that it grew on.")
    if strict and is_of_another_base(fingerprint(inner), json.loads(metadata.get("old_weights", "{}"))):
        raise ValueError(
            f"{folder} holds a growth of a base with other weights, {metadata.get('base') or 'one without a name'}. "
            "Load it onto that base; load_growth(..., strict=False) takes this one all the same."
        )
    if optimizer is not None:
        warn_without_ddp(model)
    set_dims(model, extra_dims, bare_optimizers(optimizer))
    with torch.no_grad():
        for name, parameter in inner.named_parameters():
            if _is_new(name):
                parameter.copy_(state[name])


def _read_growth(folder: Path) -> tuple[dict[str, str], Dims, dict[str, torch.Tensor]]:
    """What a folder says of a growth, its dims, and its weights by name."""
    try:
        with safe_open(folder / GROWTH_FILE, "pt") as file:
            metadata, state = file.metadata() or {}, {name: file.get_tensor(name) for name in file.keys()}
        extra_dims = json.loads(metadata.get("extra_dims", ""))
        check_extra_dims(extra_dims)
    except (OSError, RecursionError, SafetensorError, ValueError) as error:
        if not isinstance(error, FileNotFoundError):
            raise ValueError(f"{folder} holds a damaged growth: {error}. Copy or save it again.") from error
        fix = "name a folder that save_growth wrote"
        if (folder / GROWTH / GROWTH_FILE).is_file():
            fix = f"name the folder {folder / GROWTH}"
        elif (folder / "config.json").is_file():
            fix = "it is a whole checkpoint, which from_pretrained loads"
        raise FileNotFoundError(f"{folder} holds no growth: {fix}.") from error
    return metadata, extra_dims, state


def load_growth_of_adapter(outer: nn.Module, model: nn.Module, folder: Path, is_trainable: bool, alone: bool) -> None:
    """Load the growth that an adapter was trained with into the patched `model` inside `outer`.

    Args:
        outer: the outermost model.
        model: the patched one.
        folder: where the growth is.
        is_trainable: let those new dims train that did when they were saved, and that the model does not have yet.
        alone: there is no other adapter, so new dims may change.

    Raises:
        ValueError: there is another adapter, and the model does not hold the very same new dims. Otherwise as
            `load_growth`.
    """
    metadata, _, state = _read_growth(folder)
    own = {name: parameter for name, parameter in model.named_parameters() if _is_new(name)}
    same = own.keys() == state.keys() and all(torch.equal(own[n].cpu(), state[n].to(own[n].dtype)) for n in own)
    if not (alone or same):
        raise ValueError(
            f"Other adapters of this model were trained without the new dims in {folder}, which would change what they "
            "compute: load this one into a model of its own."
        )
    load_growth(outer, folder)
    trained = json.loads(metadata.get("trained", "[]"))
    for name, parameter in model.named_parameters():
        if _is_new(name) and parameter is not own.get(name):
            parameter.requires_grad_(is_trainable and _growth_of(name) in trained)


def _is_new(name: str) -> bool:
    return ".extra.growths." in name


def _growth_of(name: str) -> str:
    return name.partition(".extra.growths.")[2].partition(".")[0]


def save_growth_beside(model: nn.Module, adapters: Path, state_dict: dict[str, torch.Tensor] | None) -> None:
    """Save a growth next to adapters, whose config then asks for it; otherwise remove that of a former save there."""
    if not is_grown(model):
        (adapters / GROWTH / GROWTH_FILE).unlink(missing_ok=True)
        return
    save_growth(model, adapters / GROWTH, state_dict)
    file = adapters / "adapter_config.json"
    config = json.loads(file.read_text())
    config["peft_type"] = GROWN_TYPE + config["peft_type"]
    config["base_model_name_or_path"] = config["base_model_name_or_path"] or origin_of(growable_model(model)) or None
    file.write_text(json.dumps(config, indent=2, sort_keys=True))


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
