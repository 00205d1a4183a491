"""What is read off a model: which attention modules new dims can join, their sizes, projections and layers.

Sizes are read from what attention modules note of themselves. Names of projections are those that families commonly
use; without them new dims work all the same, and only what reads old weights does not.
"""

import contextlib
import functools
import inspect
import itertools
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from torch import nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from .configuration import WideConfigMixin
from .hooks import CACHES, Arguments, Handover, after_forward, before_forward
from .new_dims import ROLES, ExtraDims, HeadShape

_NAMES = {
    "query": ("q_proj", "query", "q_lin", "q"),
    "key": ("k_proj", "key", "k_lin", "k"),
    "value": ("v_proj", "value", "v_lin", "v"),
    "output": ("o_proj", "out_proj", "c_proj", "dense", "out_lin", "Wo", "wo", "o", "proj", "projection_layer"),
}
REGISTERED: dict[str, Any] = {}  # by model type, what says by its `names` that a family has others
_FUSED = ("qkv_proj", "c_attn", "query_key_value", "Wqkv", "qkv")
_HEADS = ("num_heads", "num_attention_heads", "n_heads", "num_attention_heads_per_partition")
_WIDTHS = ("qk_head_dim", "head_dim", "attention_head_size", "head_size")
_TABLE = "ALL_ATTENTION_FUNCTIONS"  # what modeling files call transformers' table of attention functions
_INNER_NORMS = ("layernorm", "layer_norm")  # children of an attention module that norms its own output


class FoundAttention(NamedTuple):
    """A stock attention module in a model.

    Attributes:
        name: its path in the model.
        module: the module.
        layer: the number of its layer, by which the config knows it.
        sibling: the module that projects its output, as in BERT's family; None where the module does so itself.
    """

    name: str
    module: Any
    layer: int
    sibling: Any


def find_attentions(model: nn.Module, submodels: Sequence[str] | None = None) -> list[FoundAttention]:
    """The attention modules of a model that new dims can join, or have joined, in the order of the model.

    Their number is that of the layer where their names have one, each another; otherwise their place in the model.

    Raises:
        ValueError: the model has no inner model of such a name.
    """
    names = {module: name for name, module in model.named_modules()}
    found: list[tuple[str, Any, Any]] = []
    for submodel in growable_submodels(model, submodels):
        for name, module in submodel.named_modules():
            if interface_caller(module) is None:
                continue
            sibling = submodel.get_submodule(name.rpartition(".")[0])._modules.get("output")
            if not find_obstacle(module, sibling):
                found.append((name, module, None if "output" in find_projections(module) else sibling))
    numbers = number_layers([name for name, *_ in found])
    return [
        FoundAttention(names[module], module, layer, sibling) for (_, module, sibling), layer in zip(found, numbers)
    ]


def add_extra(found: FoundAttention) -> ExtraDims:
    """Give an attention module an `extra` without new dims and the hooks by which they join, or return its own."""
    module = found.module
    if (extra := module._modules.get("extra")) is not None:
        return extra
    module.extra = extra = ExtraDims(read_shape(module), Arguments(tuple(parameter_names(module))))
    extra.hooks.append(module.register_forward_pre_hook(before_forward, with_kwargs=True))
    # The first of all hooks: others see the output with the share of new dims.
    after = module.register_forward_hook(after_forward, prepend=True, with_kwargs=True, always_call=True)
    extra.hooks.append(after)
    if found.sibling is not None:
        extra.handover = handover = Handover()
        extra.hooks.append(found.sibling.register_forward_pre_hook(handover.take, with_kwargs=True))
    return extra


def remove_extra(module: Any) -> None:
    """Take new dims and their hooks off an attention module, which is a stock one then."""
    extra = module._modules.pop("extra", None)
    for hook in extra.hooks if extra is not None else ():
        hook.remove()


def interface_caller(module: nn.Module) -> Callable | None:
    """The function in a module's forward that takes its attention function from transformers' table; None without one.

    Others may have wrapped the forward, so what it wraps, binds or closes over is looked at, too.
    """
    forward = getattr(module, "forward", None)
    own = getattr(forward, "__func__", None)  # the class's, which many modules share
    return _find_caller(forward) if own is None else _find_caller_of_class(own)


def _find_caller(function: Any) -> Callable | None:
    return next((each for each in _functions_in(function, set()) if _TABLE in each.__code__.co_names), None)


_find_caller_of_class = functools.lru_cache(maxsize=None)(_find_caller)


def _functions_in(function: Any, seen: set[int]) -> Iterator[Any]:
    """A function and those that it wraps: bound, partial, decorated, or in the closure of another one."""
    if id(function) in seen or not callable(function):
        return
    seen.add(id(function))
    if inspect.isfunction(function):
        yield function
        for cell in function.__closure__ or ():
            with contextlib.suppress(ValueError):  # not filled yet
                inside = cell.cell_contents
                # A method that calls super() closes over its class.
                within = getattr(super(inside, inside), "forward", None) if isinstance(inside, type) else inside
                yield from _functions_in(within, seen)
    for name in ("__wrapped__", "__func__", "func"):
        if not isinstance(function, (type, nn.Module)):
            yield from _functions_in(getattr(function, name, None), seen)


def parameter_names(module: nn.Module) -> list[str]:
    """The parameters of an attention module's forward, without `self`."""
    return [*inspect.signature(interface_caller(module) or module.forward).parameters][1:]


def find_obstacle(module: nn.Module, sibling: nn.Module | None = None) -> str:
    """What keeps new dims from joining a module, which it "..."; "" for an attention module that they can join."""
    if interface_caller(module) is None or not hasattr(module, "config"):
        return "takes no attention function from transformers' table ALL_ATTENTION_FUNCTIONS"
    names = find_projections(module)
    inputs = {name: sizes[0] for name, child in module.named_children() if (sizes := linear_sizes(child))}
    query, key = (inputs.get(names.get(role, "")) for role in ("query", "key"))
    if any(name.lower() in _INNER_NORMS for name, _ in module.named_children()):
        return "normalizes its output together with the residual stream"
    if "output" not in names and not hasattr(sibling, "dense"):
        return "has no output projection, nor has a sibling called output"
    if not inputs:
        return "has no linear projection, by which the size of its input would be known"
    if None not in (query, key) and query != key:
        return "reads keys of an input of another size"
    if query is not None and key is None and not inputs.keys() - {*names.values()}:
        return "reads keys of another layer"
    return ""


def find_projections(module: nn.Module) -> dict[str, str]:
    """The names of a module's children that project each role: one for three if fused; none for unusual names."""
    config: Any = getattr(module, "config", None)
    registered = REGISTERED.get(getattr(config, "model_type", ""))
    if registered is not None:
        return dict(registered.names)
    children = dict(module.named_children())
    found = {role: name for role in ROLES for name in reversed(_NAMES[role]) if name in children}
    fused = next((name for name in _FUSED if name in children), None)
    if fused is not None and "query" not in found:
        found |= dict.fromkeys(ROLES[:3], fused)
    return found


def read_shape(module: Any) -> HeadShape:
    """The sizes of a stock attention module that has a linear projection."""
    config, names = module.config, find_projections(module)
    heads = _first_number(module, _HEADS) or config.num_attention_heads
    groups = getattr(module, "num_key_value_groups", None)
    key_heads = heads // groups if groups else _first_number(module, ("num_key_value_heads",)) or heads
    width = _first_number(module, _WIDTHS) or getattr(config, "head_dim", None) or config.hidden_size // heads
    first = first_linear(module)
    last = getattr(module, names.get("output", ""), None)
    in_features = linear_sizes(first)[0]
    out_features = linear_sizes(last)[1] if last is not None and linear_sizes(last) else in_features
    projections = {role: base_layer(getattr(module, names.get(role, ""), first)) for role in ROLES[:3]}
    biased = tuple(role for role, projection in projections.items() if getattr(projection, "bias", None) is not None)
    return HeadShape(
        heads, key_heads, width, _first_number(module, ("v_head_dim",)) or width, in_features, out_features, biased
    )


def first_linear(module: nn.Module) -> Any:
    """The first linear projection among a module's children."""
    return next(child for child in module.children() if linear_sizes(child) is not None)


def _first_number(module: nn.Module, names: tuple[str, ...]) -> int | None:
    values = (getattr(module, name, None) for name in names)
    return next((value for value in values if isinstance(value, int)), None)


def linear_sizes(module: Any) -> Any:
    """Sizes of a linear module's inputs and outputs, quantized or under an adapter, too; None for other modules."""
    if isinstance(module, Conv1D):
        return module.nx, module.nf
    sizes = getattr(module, "in_features", None), getattr(module, "out_features", None)
    return sizes if None not in sizes else None


def base_layer(module: Any) -> Any:
    """The projection itself, inside whatever peft has put around it."""
    while hasattr(module, "base_layer"):
        module = module.base_layer
    return module


def growable_submodels(model: nn.Module, names: Sequence[str] | None = None) -> list[nn.Module]:
    """The inner models whose attention may grow: those whose names are given, by the caller or the config.

    Otherwise it is the language model inside, one of another type that keeps a cache. A model around none is
    its own submodel.

    Raises:
        ValueError: the model has no inner model of a name.
    """
    names = names or getattr(getattr(model, "config", None), "growable_submodels", None)
    if names:
        return [_inner_model(model, name) for name in names]
    if isinstance(model, PreTrainedModel):
        decoder: Any = model.get_decoder()
        is_other = type(getattr(decoder, "config", model.config)) is not type(model.config)
        if is_other and {*CACHES} & {*inspect.signature(decoder.forward).parameters}:  # the text side of CLIP has none
            return [decoder]
    return [model]


def _inner_model(model: nn.Module, name: str) -> nn.Module:
    inner = {path: module for path, module in model.named_modules() if isinstance(module, PreTrainedModel) and path}
    found = [module for path, module in inner.items() if f".{path}".endswith(f".{name}")]
    if not found:
        raise ValueError(f"{type(model).__name__} has no inner model {name!r}: choose of {', '.join(inner) or 'none'}.")
    return found[0]


def number_layers(names: list[str]) -> list[int]:
    """Number attention modules by their names: as their layers where those numbers differ, otherwise in their order.

    A second one of a layer, cross-attention, comes after all first ones: they have the same numbers without it.
    """
    layers = [found[0] if (found := re.match(r"(.*?\.)?\d+(?=\.|$)", name)) else name for name in names]
    firsts = [*dict.fromkeys(layers)]
    numbers = [layer.rpartition(".")[2] for layer in firsts]
    is_clear = all(map(str.isdecimal, numbers)) and len({*numbers}) == len(numbers)
    number_of = dict(zip(firsts, map(int, numbers) if is_clear else range(len(firsts))))
    following = itertools.count(max(number_of.values(), default=0) + 1)
    return [number_of.pop(layer) if layer in number_of else next(following) for layer in layers]


def sync_config(model: nn.Module) -> None:
    """Write the new dims of every layer into the configs of the model tree.

    Those of another class are of grown models that became a part of this one, and go by their own layers.
    """
    own, extra_dims = getattr(model, "config", None), dims_of(model)
    for module in model.modules():
        config = getattr(module, "config", None)
        if isinstance(module, PreTrainedModel) and isinstance(config, WideConfigMixin):
            is_own = type(config) is type(own)
            config.extra_dims = extra_dims if is_own else dims_of(module)
            config.attention_count = len(find_attentions(model if is_own else module)) if config.extra_dims else None


def growable_configs(model: nn.Module) -> list[WideConfigMixin]:
    """The distinct growable config objects in a model tree: a task head may hold another one than its base model."""
    configs = (getattr(module, "config", None) for module in model.modules())
    return list({id(config): config for config in configs if isinstance(config, WideConfigMixin)}.values())


def dims_of(model: nn.Module) -> dict[str, dict[str, list[int]]]:
    """The kept new dims of a patched model by layer, as the config's `extra_dims` names them."""
    found = (attention for attention in find_attentions(model) if "extra" in attention.module._modules)
    return {
        str(attention.layer): {name: [d.qk_dims, d.v_dims] for name, d in attention.module.extra.growths.items()}
        for attention in sorted(found, key=lambda attention: attention.layer)
        if len(attention.module.extra.growths)
    }
