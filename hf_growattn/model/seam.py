"""`WideAttention`: a stock attention module whose own forward runs as it is, and which new dims join on the way.

They join in the attention function and in the cache, as `extra` says. What is read through new values goes back by
`outside` and is added to the module's output.

Sizes are read from what attention modules note of themselves. Names of projections are those that families commonly
use; without them new dims work all the same, and only what reads old weights does not.
"""

import functools
import inspect
import sys
import types
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from torch import Tensor, nn
from transformers import Cache, PreTrainedModel
from transformers.pytorch_utils import Conv1D

from .compat import is_replica
from .configuration import PREFIX, WideConfigMixin
from .extra import ROLES, UNEQUAL_WIDTHS, AttentionFunctions, Call, ExtraDims, HeadShape, Part, stock_name, widened

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
_TABLE = "ALL_ATTENTION_FUNCTIONS"  # the global that stock forwards take their attention function from
# Keywords of a forward for its cache, the newest first: transformers 5.24 renamed the others.
CACHES = ("cache", "past_key_values", "past_key_value", "layer_past")
_SOURCES = ("key_value_states", "encoder_hidden_states")  # what cross-attention reads


class Given(NamedTuple):
    """What a forward was called with.

    Attributes:
        hidden_states: the input, (batch, tokens, in_features).
        source: what cross-attention reads; None for self-attention.
        arguments: all of it by name, the cache by the newest name that the forward knows.
        cache: the name of the cache; "" where the forward takes none.
    """

    hidden_states: Tensor
    source: Tensor | None
    arguments: dict[str, Any]
    cache: str


def names_taken(cls: type, module: nn.Module) -> set[str]:
    """The names of ours that a stock module has for something else: it cannot have new dims."""
    ours = {name for base in cls.__mro__ if issubclass(base, WideAttention) for name in vars(base)} - {*dir(nn.Module)}
    ours |= {"shape", "layer"}  # of each module, not of the class
    return {name for name in ours if name in vars(module) or name in module._modules or hasattr(type(module), name)}


def reaches_seam(cls: type) -> bool:
    """Whether a module class takes its attention function from transformers' table, in its own forward."""
    forward = inspect.unwrap(cls.forward)
    code = getattr(forward, "__code__", None)
    return code is not None and _TABLE in code.co_names and _TABLE in forward.__globals__


class WideAttention(nn.Module):
    """Mixin for a stock attention class: its forward runs as it is, with new dims where `extra` has any.

    Attributes:
        shape: the stock sizes.
        layer: number of the layer, by which the config knows it.
        call: the forward call under way; None between calls.
        output_sibling: the module that adds the share of new dims, where a sibling holds the output projection.
    """

    shape: HeadShape
    layer: int
    config: Any
    call: Call | None = None
    output_sibling: tuple[Any, ...] = ()  # a tuple keeps it from being a child
    _stock_forward: Callable
    _stock_names: list[str]
    _cache_name: str
    _sources: list[str]

    @classmethod
    @functools.cache
    def mixed_into(cls, stock: type[nn.Module]) -> type["WideAttention"]:
        """Return the subclass of a stock attention class that has this mixin."""
        forward = inspect.unwrap(stock.forward)
        place = f"{__name__}.{stock.__module__.replace('.', '_')}"
        if place not in sys.modules:  # dynamo guards a function's globals through its module
            twin = sys.modules[place] = types.ModuleType(place)
            own = {"__name__": place, _TABLE: AttentionFunctions(forward.__globals__[_TABLE])}
            vars(twin).update(forward.__globals__ | own)
        code = forward.__code__, vars(sys.modules[place]), forward.__name__, forward.__defaults__, forward.__closure__
        same = types.FunctionType(*code)
        same.__kwdefaults__ = forward.__kwdefaults__
        name = f"Growable{stock.__name__}"
        names = list(inspect.signature(forward).parameters)[1:]
        own = {"_stock_forward": staticmethod(same), "_stock_names": names}
        own["_cache_name"] = next((name for name in CACHES if name in names), "")
        own["_sources"] = [name for name in _SOURCES if name in names]
        return type(name, (cls, stock), {"__module__": cls.__module__, **own})

    def __reduce_ex__(self, protocol) -> tuple:
        """Let pickles name the stock class, and make ours of it where they are read."""
        return _without_init, type(self).__bases__, *super().__reduce_ex__(protocol)[2:]

    @property
    def extra(self) -> ExtraDims | None:
        """The new dims; None for a stock module."""
        return self._modules.get("extra")  # pyright: ignore[reportReturnType]

    @property
    def parts(self) -> list[Part]:
        """The kept parts."""
        return list(self.extra.parts.values()) if self.extra is not None else []  # pyright: ignore

    def add_part(self, name: str, qk_dims: int, v_dims: int, **factory) -> Part:
        """Add new dims, zeros, under a name of their own."""
        part = Part(self.shape, qk_dims, v_dims, **factory)
        self.make_extra().parts[name] = part
        return part

    def make_extra(self) -> ExtraDims:
        """The module of new dims, which is made at the first call."""
        return self._modules.setdefault("extra", ExtraDims())  # pyright: ignore[reportReturnType]

    def forward(self, *args, **kwargs) -> Any:
        """Attend, as the stock module does.

        Raises:
            RuntimeError: the stock forward did not call an attention function.
            ValueError: the implementation or its cache keeps one width (continuous batching, vLLM).
        """
        extra = self._modules.get("extra")
        parts = [] if extra is None else extra.active_parts()  # pyright: ignore[reportCallIssue]
        if not parts:
            return super().forward(*args, **kwargs)
        given = self.bind(args, kwargs)
        call = Call(parts, given.hidden_states, given.source)
        implementation = self.config._attn_implementation or ""
        call.one_width = implementation not in UNEQUAL_WIDTHS
        cache = given.arguments.get(given.cache)
        if implementation == "vllm" or not isinstance(cache, (Cache, type(None))):
            raise self.wider_than("vLLM" if cache is None else f"A {type(cache).__name__}")
        if cache is not None:
            given.arguments[given.cache] = widened(cache, call)
        self.call = call
        try:
            output = self._stock_forward(self, **given.arguments)
        finally:
            self.call = None
        if not call.attended:
            raise RuntimeError(f"{type(self).__name__} did not call its attention function, so its new dims are lost.")
        share, call.share = call.share, None  # a backward pass that computes it again keeps the call
        if share is None:
            return output
        if self.output_sibling:
            if is_replica(self):  # whose sibling is that of the original
                raise ValueError("New dims of this family do not work under DataParallel: use DistributedDataParallel.")
            self.output_sibling[0].share = share
            return output
        if isinstance(output, tuple):
            return output[0] + share.view(output[0].shape).to(output[0].dtype), *output[1:]
        return output + share.view(output.shape).to(output.dtype)

    def wider_than(self, what: str) -> ValueError:
        """The error of something that takes heads of one width."""
        return ValueError(
            f"{what} keeps keys and values of one width, and layer {self.layer} grew. Use model.generate instead of "
            "continuous batching; for vLLM write the model by hf_growattn.export_model."
        )

    def bind(self, args: tuple, kwargs: dict[str, Any]) -> Given:
        """Name what the forward was called with.

        Raises:
            ValueError: the input is not (batch, tokens, features).
        """
        arguments, keyword = dict(zip(self._stock_names, args)) | kwargs, self._cache_name
        for name in CACHES if keyword else ():
            if name in arguments:
                arguments[keyword] = arguments.pop(name)
        source = next((arguments[name] for name in self._sources if arguments.get(name) is not None), None)
        hidden_states = arguments[self._stock_names[0]]
        if hidden_states.dim() != 3:
            raise ValueError(
                f"New dims cannot join {stock_name(self)}: its input has the shape {tuple(hidden_states.shape)} "
                "instead of (batch, tokens, features). Leave it out of layers= or parts=."
            )
        return Given(hidden_states, source, arguments, keyword)


def _without_init(mixin: Any, stock: type[nn.Module]) -> nn.Module:
    made = mixin.mixed_into(stock)
    return made.__new__(made)


class WideProjection(nn.Module):
    """Mixin for the module that projects the output of a sibling attention module, as in BERT's family.

    Its forward takes what the heads have read, and the residual stream, to which the share of new dims is added.

    Attributes:
        share: of the sibling's new dims, from its call to this one's.
    """

    share: Tensor | None = None

    @classmethod
    @functools.cache
    def mixed_into(cls, stock: type[nn.Module]) -> type["WideProjection"]:
        """Return the subclass of a stock class that has this mixin."""
        name = f"Growable{stock.__name__}"
        return type(name, (cls, stock), {"__module__": cls.__module__})

    def __reduce_ex__(self, protocol) -> tuple:
        """As `WideAttention`."""
        return _without_init, type(self).__bases__, *super().__reduce_ex__(protocol)[2:]

    def forward(self, hidden_states: Tensor, input_tensor: Tensor) -> Tensor:
        """Project, as the stock module does."""
        share, self.share = self.share, None
        if share is None:
            return super().forward(hidden_states, input_tensor)
        dropout = getattr(self, "dropout", None)
        share = share if dropout is None else dropout(share)
        return super().forward(hidden_states, input_tensor + share.to(input_tensor.dtype))


def find_projections(module: nn.Module) -> dict[str, str]:
    """The names of a module's children that project each role: one for three if fused; none for unusual names."""
    config: Any = getattr(module, "config", None)
    registered = REGISTERED.get(getattr(config, "model_type", "").removeprefix(PREFIX))
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
    first = next(child for child in module.children() if linear_sizes(child) is not None)
    last = getattr(module, names.get("output", ""), None)
    in_features = linear_sizes(first)[0]
    out_features = linear_sizes(last)[1] if last is not None and linear_sizes(last) else in_features
    projections = {role: plain(getattr(module, names.get(role, ""), first)) for role in ROLES[:3]}
    biased = tuple(role for role, inside in projections.items() if getattr(inside, "bias", None) is not None)
    return HeadShape(
        heads, key_heads, width, _first_number(module, ("v_head_dim",)) or width, in_features, out_features, biased
    )


def input_sizes(module: nn.Module) -> dict[str, int]:
    """The input sizes of a module's linear projections, by name."""
    return {name: sizes[0] for name, child in module.named_children() if (sizes := linear_sizes(child)) is not None}


def _first_number(module: nn.Module, names: tuple[str, ...]) -> int | None:
    values = (getattr(module, name, None) for name in names)
    return next((value for value in values if isinstance(value, int)), None)


def linear_sizes(module: Any) -> Any:
    """Sizes of a linear module's inputs and outputs, quantized or under an adapter, too; None for other modules."""
    if isinstance(module, Conv1D):
        return module.nx, module.nf
    sizes = getattr(module, "in_features", None), getattr(module, "out_features", None)
    return sizes if None not in sizes else None


def plain(module: Any) -> Any:
    """The projection itself, inside whatever peft has put around it."""
    while hasattr(module, "base_layer"):
        module = module.base_layer
    return module


def growable_parts(model: nn.Module, names: Sequence[str] | None = None) -> list[nn.Module]:
    """The inner models whose attention may grow: those of these names or that the config names, if any are named.

    Otherwise it is the language model inside, one of another type that keeps a cache. A model around none is its own
    part.

    Raises:
        ValueError: there is no inner model of a name.
    """
    names = names or getattr(getattr(model, "config", None), "growable_parts", None)
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
        raise ValueError(f"{type(model).__name__} has no part {name!r}: choose of {', '.join(inner) or 'none'}.")
    return found[0]


def renumber(model: nn.Module) -> None:
    """Number the attention modules as loading will: layers may have been dropped, repeated or put in another order."""
    modules = (named for part in growable_parts(model) for named in part.named_modules())
    found = [(name, module) for name, module in modules if isinstance(module, WideAttention)]
    for (_, attention), number in zip(found, number_layers([name for name, _ in found])):
        attention.layer = number


def sync_config(model: nn.Module) -> None:
    """Write the new dims of every layer into every config of the model tree."""
    for config in growable_configs(model):
        config.extra_dims = dims_of(model)


def growable_configs(model: nn.Module) -> list[WideConfigMixin]:
    """The distinct growable config objects in a model tree: a task head may hold another one than its base model."""
    configs = (getattr(module, "config", None) for module in model.modules())
    return list({id(config): config for config in configs if isinstance(config, WideConfigMixin)}.values())


def dims_of(model: nn.Module) -> dict[str, dict[str, list[int]]]:
    """The kept new dims of a model by layer, as the config's `extra_dims` names them."""
    outermost = next((m for m in model.modules() if isinstance(getattr(m, "config", None), WideConfigMixin)), None)
    if outermost is not None:
        renumber(outermost)
    grown = (module for module in model.modules() if isinstance(module, WideAttention) and module.parts)
    return {
        str(attention.layer): {name: [part.qk_dims, part.v_dims] for name, part in attention.extra.parts.items()}  # pyright: ignore
        for attention in sorted(grown, key=lambda attention: attention.layer)
    }


def number_layers(names: list[str]) -> list[int]:
    """The number of the layer of each module by its name, where those differ; otherwise their places."""
    numbers = [next((int(part) for part in name.split(".") if part.isdecimal()), None) for name in names]
    is_clear = None not in numbers and len({*numbers}) == len(numbers)
    return numbers if is_clear else list(range(len(numbers)))  # pyright: ignore[reportReturnType]
