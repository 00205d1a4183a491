"""The new dims that a living model keeps: which there are, how they change, and a small folder of them alone."""

import contextlib
import functools
import json
import sys
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import AutoConfig, PreTrainedConfig, PreTrainedModel

from ..model.configuration import check_extra_dims
from ..model.modeling import WideModelMixin, dims_of, growable_configs, sync_config
from ..model.new_dims import NewDims, full_tensor, in_order
from .attention import GrowableAttention, attentions
from .folders import replacing
from .training_state import (
    add_new_parameters,
    after_change,
    find_living,
    optimizers_of,
    remove_parameters,
    shard_like,
    warn_if_left_out,
)

WEIGHTS, DESCRIPTION = "growth.safetensors", "growth.json"
_DESCRIBED = ("model_type", "extra_dims")
GROWTH = "growth"  # the folder next to the adapters of a peft model: the new dims of its base
_ADAPTER = "adapter_config.json"
_REMINDER = "its base grew: call hf_growattn.load_growth(model, folder + '/growth')"  # peft quotes unknown fields
_UNSAVED = "a model that grew in memory: save it whole, and load its adapters onto that"
_NOWHERE = str(Path(__file__).parent / "grown_in_memory")

Parts = dict[GrowableAttention, dict[str, NewDims]]  # of each attention module by name
Dims = dict[str, dict[str, list[int]]]  # the same as `extra_dims` of a config names them


def growable_model(model: Any) -> Any:
    """The patched model that a module holds, or is; a ValueError if it holds none, or several."""
    inside = model.modules() if isinstance(model, nn.Module) else ()
    found = [module for module in inside if isinstance(module, WideModelMixin)]
    if not found:
        raise ValueError(f"{type(model).__name__} is not growable yet: call patch_model(model) first.")
    parts = set(found[0].modules())
    if apart := [module for module in found if module not in parts]:
        raise ValueError(
            f"{type(model).__name__} holds several models that could grow, a {type(found[0]).__name__} and a "
            f"{type(apart[0]).__name__}. Pass the one that shall grow, and the loss as a function of that."
        )
    return found[0]


def is_grown(model: nn.Module) -> bool:
    """Whether any attention module has new dims that are kept."""
    return any(attention.growths for attention in attentions(model))


def extra_parameters(model: nn.Module) -> list[nn.Parameter]:
    """The parameters of all kept new dims."""
    return [p for attention in attentions(model) for dims in attention.growths.values() for p in dims.parameters()]


def cache_bytes(model: nn.Module, tried: Mapping[Any, NewDims] | None = None) -> int:
    """Bytes of a token's keys and values as a model's cache keeps them; `tried` are parts that are not kept yet."""
    numbers = 0
    for attention in (attention for attention in attentions(model) if attention.caches):
        part = (tried or {}).get(attention)
        parts = [*attention.growths.values()] if part is None else [*attention.growths.values(), part]
        numbers += attention.cached_numbers(parts)
    return next(model.parameters()).element_size() * numbers


def parts_of(model: nn.Module) -> Parts:
    """The kept parts of every attention module."""
    return {attention: attention.growths for attention in attentions(model)}


def next_name(model: nn.Module) -> str:
    """The name of a model's next growth: "growth_1" for the first."""
    return name_after(name for growths in parts_of(model).values() for name in growths)


def name_after(names: Iterable[str]) -> str:
    """The name of the growth that comes after those of these names."""
    ends = (name.rpartition("_")[2] for name in names)
    return f"growth_{max((int(end) for end in ends if end.isdecimal()), default=0) + 1}"


def swap_parts(parts: Parts) -> Parts:
    """Give attention modules these parts, and return those that they had."""
    former = {}
    for attention, own in parts.items():
        kept = attention.make_extra().growths
        former[attention] = dict(kept.items())
        kept.clear()
        kept.update(in_order(own))
        attention.drop_if_empty()
    return former


def replace_parts(model: nn.Module, parts: Parts, optimizers: list[torch.optim.Optimizer]) -> None:
    """Let attention modules keep these parts and no others; config, optimizers, DDP, FSDP2 and peft follow.

    Modules that are not named keep theirs. New parameters start with a fresh state in the optimizers. After an
    exception model and optimizers are as they were.
    """
    former = swap_parts(parts)
    new: list[nn.Parameter] = []
    try:
        for attention, own in parts.items():
            for part in (part for part in own.values() if part not in former[attention].values()):
                shard_like(part, attention.module)
                new += part.parameters()  # sharded ones are others
        sync_config(model)
        add_new_parameters(optimizers, model, [parameter for parameter in new if parameter.requires_grad])
    except BaseException:
        swap_parts(former)
        sync_config(model)
        remove_parameters(optimizers, new)
        raise
    kept = {*extra_parameters(model)}
    before = [p for own in former.values() for part in own.values() for p in part.parameters()]
    gone = [parameter for parameter in before if parameter not in kept]
    remove_parameters(optimizers, gone)
    if new and not optimizers:
        warn_if_left_out(model, new)
    if new or gone:
        after_change(model)
        save_with_adapters(model)


def set_dims(model: nn.Module, extra_dims: Dims) -> None:
    """Let a model have these new dims and no others; parts of the same name and size stay, others begin as zeros."""
    if extra_dims == dims_of(model):
        return
    parts: Parts = {}
    for attention, own in parts_of(model).items():
        parts[attention] = {}
        for name, (qk_dims, v_dims) in extra_dims.get(str(attention.layer), {}).items():
            part = own.get(name)
            if part is None or (part.qk_dims, part.v_dims) != (qk_dims, v_dims):
                part = attention.make_new_dims(qk_dims, v_dims)
            parts[attention][name] = part
    replace_parts(model, parts, optimizers_of(model))


def save_growth(model: nn.Module, folder: str | Path, state_dict: dict[str, torch.Tensor] | None = None) -> None:
    """Save the new dims of a grown model alone, without its base: `growth.safetensors` and `growth.json`.

    Args:
        model: a patched model, or a peft model of one.
        folder: where to.
        state_dict: of `model`, if all ranks of a sharded one have gathered it.

    Raises:
        ValueError: the model is not patched, or it has not grown.
    """
    inner = growable_model(model)
    start = next(name for name, module in model.named_modules() if module is inner)
    state = {name: parameter for name, parameter in inner.named_parameters() if _is_new(name)}
    if state_dict is not None:
        state = {name: state_dict[f"{start}.{name}" if start else name] for name in state}
    state = {name: full_tensor(tensor.detach()).cpu().contiguous() for name, tensor in state.items()}
    if not state:
        raise ValueError("This model has not grown: there are no new dims to save.")
    description = dict(zip(_DESCRIBED, (inner.config.model_type, dims_of(inner))))
    with replacing(Path(folder).resolve()) as partial:
        save_file(state, partial / WEIGHTS, metadata={"format": "pt"})
        (partial / DESCRIPTION).write_text(json.dumps(description, indent=1) + "\n")


def load_growth(model: nn.Module, folder: str | Path) -> None:
    """Give a patched model the new dims that `save_growth` wrote, in place of those that it has.

    Optimizers that train the model take the new parameters.

    Raises:
        ValueError: the model is not patched, or the growth is damaged or of another model.
        FileNotFoundError: the folder holds no growth.
    """
    inner = growable_model(model)
    try:
        description: dict[str, Any] = json.loads((Path(folder) / DESCRIPTION).read_text())
        state = load_file(Path(folder) / WEIGHTS)
        model_type, extra_dims = (description.get(name, {}) for name in _DESCRIBED)
        check_extra_dims(extra_dims)
    except (AttributeError, OSError, RecursionError, SafetensorError, ValueError) as error:
        what = "no growth" if isinstance(error, FileNotFoundError) else "a damaged growth"
        kind = FileNotFoundError if isinstance(error, FileNotFoundError) else ValueError
        raise kind(
            f"{folder} holds {what}: {error}. Name a folder that save_growth wrote, or copy it again."
        ) from error
    if model_type != inner.config.model_type:
        raise ValueError(f"{folder} holds a growth of a {model_type}, and this is a {inner.config.model_type}.")
    sizes = {}
    for attention in attentions(inner):
        for growth, dims in extra_dims.get(str(attention.layer), {}).items():
            new = NewDims(attention.shape, *dims, device="meta")
            place = f"{attention.name}.extra.growths.{growth}."
            sizes |= {place + own: parameter.shape for own, parameter in new.named_parameters()}
    if sizes != {name: tensor.shape for name, tensor in state.items()}:
        raise ValueError(f"{folder} holds a growth of a model of other sizes: load it onto the base that it grew on.")
    set_dims(inner, extra_dims)
    with torch.no_grad():
        for name, parameter in inner.named_parameters():
            if _is_new(name):
                parameter.copy_(state[name])


def _is_new(name: str) -> bool:
    return ".extra.growths." in name


class SavesGrowth:
    """Mixed into the class of a peft model whose base grew under it: peft itself saves the adapters alone."""

    @classmethod
    @functools.cache
    def mixed_into(cls, stock: type[Any]) -> type[Any]:
        """Return the subclass of a class of peft that has this mixin."""
        made = type(f"GrowAttn{stock.__name__}", (cls, stock), {"__module__": __name__})
        setattr(sys.modules[__name__], made.__name__, made)  # so that pickle finds it
        return made

    def save_pretrained(self, save_directory: str, *args, is_main_process: bool = True, **kwargs) -> None:
        """Save the adapters as peft does, and the growth in the folder `growth` next to them, for `load_growth`."""
        model: Any = self
        stock, folder = super(), Path(save_directory)
        stock.save_pretrained(save_directory, *args, is_main_process=is_main_process, **kwargs)  # pyright: ignore
        if is_main_process and save_growth_beside(model, folder, kwargs.get("state_dict")):
            for place in (folder, *(folder / name for name in model.peft_config)):
                if (place / _ADAPTER).is_file():
                    with replacing(place.resolve()) as partial:
                        marked = json.loads((place / _ADAPTER).read_text()) | {_REMINDER: True}
                        (partial / _ADAPTER).write_text(json.dumps(marked, indent=2, sort_keys=True))


def save_growth_beside(model: nn.Module, adapters: Path, state_dict: dict[str, torch.Tensor] | None) -> bool:
    """Save the growth next to adapters if there is one, and otherwise remove that of a former save there."""
    if is_grown(model):
        save_growth(model, adapters / GROWTH, state_dict)
        return True
    for name in (WEIGHTS, DESCRIPTION):
        (adapters / GROWTH / name).unlink(missing_ok=True)
    return False


def save_with_adapters(model: nn.Module) -> None:
    """Let the peft model around a patched model, if there is one, save the new dims with its adapters."""
    if not hasattr(model, "peft_config"):
        return
    for thing in find_living(nn.Module):
        kind = type(thing)
        if hasattr(kind, "get_base_model") and not issubclass(kind, SavesGrowth):
            tuner = thing._modules.get("base_model")
            if tuner is not None and tuner._modules.get("model") is model:
                thing.__class__ = SavesGrowth.mixed_into(kind)


class GrownInMemoryConfig(PreTrainedConfig):
    """What the config in that folder is read as: an error."""

    model_type = "growattn_in_memory"

    @classmethod
    def from_dict(cls, config_dict, **kwargs):
        """Raise a RuntimeError that names the fix; AutoTokenizer would swallow other kinds."""
        raise RuntimeError(
            "This model grew in memory, and no checkpoint holds what it is now, so there is nothing to load a "
            "reference model or a tokenizer from. Pass them, as in DPOTrainer(model, ref_model=copy.deepcopy(model), "
            "processing_class=tokenizer, ...); or save the model and its tokenizer, load them, and train what you "
            "loaded."
        )


AutoConfig.register(GrownInMemoryConfig.model_type, GrownInMemoryConfig, exist_ok=True)


def leave_checkpoint(model: PreTrainedModel) -> None:
    """Note that no checkpoint holds a model any more; `origin_of` still knows the one it came from."""
    vars(model)["grown_from"] = origin_of(model)
    model.name_or_path = _UNSAVED  # which peft notes as the base of its adapters, and quotes
    for config in growable_configs(model):
        config._name_or_path = _NOWHERE


def origin_of(model: PreTrainedModel) -> str:
    """Folder or Hub id of the checkpoint that a model came from, whatever it became since; "" without one."""
    return getattr(model, "grown_from", model.config.name_or_path or "")


@contextlib.contextmanager
def name_kept(model: PreTrainedModel) -> Iterator[None]:
    """Leave the name of its checkpoint to a model that grows inside: for a growth that is part of a longer run."""
    before, name = [(config, config._name_or_path) for config in growable_configs(model)], model.name_or_path
    try:
        yield
    finally:
        model.name_or_path = name
        for config, name in before:
            config._name_or_path = name
