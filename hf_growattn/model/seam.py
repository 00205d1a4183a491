"""`WideAttention`: a stock attention module whose own forward runs as it is, and which new dims join on the way.

They join in the attention function and in the cache, as `joining` says. What is read through new values goes back by
`outside` and is added to the module's output.
"""

import functools
import inspect
import sys
import types
from collections.abc import Callable
from typing import Any, NamedTuple

from torch import Tensor, nn
from transformers import Cache

from .extra import ExtraDims, HeadShape, Part
from .joining import UNEQUAL_WIDTHS, AttentionFunctions, Call, stock_name, widened

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
            what = "vLLM" if cache is None else f"A {type(cache).__name__}"
            raise ValueError(
                f"{what} keeps keys and values of one width, and layer {self.layer} grew. Use model.generate instead "
                "of continuous batching; for vLLM write the model by hf_growattn.export_model."
            )
        if cache is not None:
            given.arguments[given.cache] = widened(cache, call)
        self.call = call
        try:
            output = self._stock_forward(self, **given.arguments)
        finally:
            self.call = None
        if call.read is None:
            raise RuntimeError(f"{type(self).__name__} did not call its attention function, so its new dims are lost.")
        share = _share(parts, call.read)
        if share is None:
            return output
        if self.output_sibling:
            if getattr(self, "_is_replica", False):  # whose sibling is that of the original
                raise ValueError("New dims of this family do not work under DataParallel: use DistributedDataParallel.")
            self.output_sibling[0].share = share
            return output
        if isinstance(output, tuple):
            return output[0] + share.view(output[0].shape).to(output[0].dtype), *output[1:]
        return output + share.view(output.shape).to(output.dtype)

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


def _share(parts, read: Tensor) -> Tensor | None:
    """What new values add to the output, (batch, tokens, out_features); None without new values."""
    share = None
    reads = read.split_with_sizes([part.v_dims for part in parts], -1) if len(parts) > 1 else [read]
    for part, own in zip(parts, reads):
        if part.v_dims:
            added = part.outside(own)
            share = added if share is None else share + added
    return share


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
