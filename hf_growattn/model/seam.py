"""`WideAttention`: a stock attention module whose own forward runs as it is, and which new dims join on the way.

New queries, keys and values join where all modern families hand theirs over: at `cache.update`, and at the attention
function that they take from `ALL_ATTENTION_FUNCTIONS`. Per head the layout is `[old dims | new dims]`, so the logits
are `s (q_old k_old^T + q_new k_new^T)`; rotation, norms and gates of the family touch the old dims alone. What is read
through new values goes back by `outside` and is added to the module's output. Dims whose query or key weights are zero
change nothing, nor do those whose value or output weights are zero.
"""

import copy
import functools
import inspect
import sys
import types
from collections.abc import Callable, MutableMapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import Cache, EncoderDecoderCache

from .extra import ExtraDims, HeadShape, Part

_TABLE = "ALL_ATTENTION_FUNCTIONS"  # the global that stock forwards take their attention function from
# Implementations that take values of another width than the keys; all others get equal widths by zero padding.
UNEQUAL_WIDTHS = ("eager", "flex_attention")
# Keywords of a forward for its cache, the newest first: transformers 5.24 renamed the others.
CACHES = ("cache", "past_key_values", "past_key_value", "layer_past")
_SOURCES = ("key_value_states", "encoder_hidden_states")  # what cross-attention reads
# Implementations, by prefix, that keep a cache of one width themselves.
_ONE_WIDTH = {
    "paged|": ("Continuous batching", "Use model.generate instead."),
    "vllm": ("vLLM", "Load what hf_growattn.export_model writes of this model instead."),
}


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


class Call:
    """One forward call of a module with new dims.

    Attributes:
        query, key, value: the new ones, (batch, heads, tokens, new dims).
        one_width: whether keys and values are padded to one width.
        crosses: whether keys and values are of another input than the queries.
        joined: whether the cache has joined old and new keys and values.
        v_head_dim: width of the old values.
        returned: keys and values as the cache returned them, with old and new dims.
        read: what the heads have read through the new values, (batch, tokens, heads, new dims).
    """

    joined = False
    one_width = False
    v_head_dim = 0
    returned: tuple[Tensor, Tensor] | None = None
    read: Tensor | None = None

    def __init__(self, parts, hidden_states: Tensor, source: Tensor | None):
        self.crosses = source is not None
        heads = [part.inside(hidden_states, source) for part in parts]
        self.query, self.key, self.value = (
            states[0] if len(parts) == 1 else torch.cat(states, -1) for states in zip(*heads)
        )

    def join(self, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Append the new keys and values to the old ones, padded to one width where that is wanted."""
        self.joined, self.v_head_dim = True, value.shape[-1]
        key, value = append(key, self.key), append(value, self.value)
        if self.one_width:
            width = common_width(key.shape[-1], value.shape[-1], key.device)
            key, value = pad_to(key, width), pad_to(value, width)
        return key, value


def _hand_on_old_dims(arguments: dict[str, Any], call: Call, k_head_dim: int) -> None:
    """Take new dims off the keys and values that a forward leaves in a mapping for layers without any of their own."""
    if call.returned is None:
        return
    key, value = call.returned
    for shared in (given for given in arguments.values() if isinstance(given, MutableMapping)):
        for name, states in shared.items():
            if isinstance(states, tuple) and any(state is key for state in states):
                shared[name] = key[..., :k_head_dim], value[..., : call.v_head_dim]


def common_width(key: int, value: int, device: torch.device) -> int:
    """The width that keys and values are padded to; kernels of accelerators take multiples of 8."""
    width = max(key, value)
    return width if device.type == "cpu" else width + -width % 8


def append(old: Tensor, new: Tensor) -> Tensor:
    """Old and new dims of (batch, heads, tokens, width), in the precision of the old ones."""
    return torch.cat((old, new.to(old.dtype)), -1) if new.shape[-1] else old


def pad_to(states: Tensor, width: int) -> Tensor:
    """Zero-pad (..., width) to another width."""
    gap = width - states.shape[-1]
    return nn.functional.pad(states, (0, gap)) if gap else states


class _WiderCache:
    """A cache as one stock forward sees it: what it stores gains the new dims."""

    def __init__(self, cache: Any, call: Call):
        self._cache, self._call = cache, call

    def update(self, key: Tensor, value: Tensor, *args, **kwargs) -> tuple[Tensor, Tensor]:
        key, value = self._cache.update(*self._call.join(key, value), *args, **kwargs)
        self._call.returned = key, value
        return key, value

    def __getattr__(self, name: str):
        return getattr(self._cache, name)

    def __bool__(self) -> bool:
        return True


def _widened(cache: Any, call: Call) -> Any:
    if isinstance(cache, EncoderDecoderCache):  # forwards ask for its type, and for the caches in it
        wider = copy.copy(cache)
        wider.self_attention_cache = _WiderCache(cache.self_attention_cache, call)  # pyright: ignore
        wider.cross_attention_cache = _WiderCache(cache.cross_attention_cache, call)  # pyright: ignore
        return wider
    return _WiderCache(cache, call)


class _Functions:
    """Stands for the table of attention functions in the forward of a module with new dims."""

    def __init__(self, table: Any):
        self._table = table

    def get_interface(self, implementation: str, default: Callable) -> Callable:
        return functools.partial(_attend, self._table.get_interface(implementation, default), implementation)

    def __getitem__(self, implementation: str) -> Callable:
        return functools.partial(_attend, self._table[implementation], implementation)

    def __getattr__(self, name: str):
        return getattr(self._table, name)


def _attend(function: Callable, implementation: str, module: Any, query, key, value, *args, **kwargs):
    """Call an attention function with old and new dims, and give back what it reads through the old ones."""
    call: Call = module.call
    if call.read is not None:
        raise ValueError(f"New dims cannot join {_stock_name(module)}: it calls its attention function twice.")
    if call.crosses and value.shape[-1] + key.shape[-1] > module.shape.qk_head_dim + module.shape.v_head_dim:
        call.joined, call.v_head_dim = True, module.shape.v_head_dim  # a filled cache, read without `update`
    if not call.joined:
        _check_shapes(module, query, key, value)
    new_query = call.query
    if kwargs.get("scaling") == 1.0:  # the family scales its queries before, by the usual factor if by any
        new_query = new_query * module.shape.qk_head_dim**-0.5
    if not call.joined:
        key, value = call.join(key, value)
    query = pad_to(append(query, new_query), key.shape[-1])
    output, weights = function(module, query, key, value, *args, **kwargs)
    output = output.reshape(*output.shape[:2], -1, value.shape[-1])
    widths = [call.v_head_dim, call.value.shape[-1]]
    # The backward pass of one split is one `cat`; each slice would fill a tensor of zeros, and add it to the others.
    old, call.read, _ = output.split([*widths, value.shape[-1] - sum(widths)], -1)
    return old.contiguous(), weights


def _check_shapes(module: Any, query: Tensor, key: Tensor, value: Tensor) -> None:
    """Raise a ValueError if old heads are not what the module's attributes say: new dims could not join them."""
    shape = module.shape
    expected = (shape.num_heads, shape.num_key_value_heads, shape.qk_head_dim, shape.v_head_dim)
    found = (query.shape[1], key.shape[1], query.shape[-1], value.shape[-1])
    if found != expected:
        raise ValueError(
            f"New dims cannot join {_stock_name(module)}: it hands (query heads, key heads, width, "
            f"value width) = {found} to its attention function, and its attributes say {expected}."
        )


def _stock_name(module: nn.Module) -> str:
    return type(module).__bases__[1].__name__


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

    @classmethod
    @functools.cache
    def mixed_into(cls, stock: type[nn.Module]) -> type["WideAttention"]:
        """Return the subclass of a stock attention class that has this mixin."""
        forward = inspect.unwrap(stock.forward)
        place = f"{__name__}.{stock.__module__.replace('.', '_')}"
        if place not in sys.modules:  # dynamo guards a function's globals through its module
            twin = sys.modules[place] = types.ModuleType(place)
            own = {"__name__": place, _TABLE: _Functions(forward.__globals__[_TABLE])}
            vars(twin).update(forward.__globals__ | own)
        code = forward.__code__, vars(sys.modules[place]), forward.__name__, forward.__defaults__, forward.__closure__
        same = types.FunctionType(*code)
        same.__kwdefaults__ = forward.__kwdefaults__
        name = f"Growable{stock.__name__}"
        names = list(inspect.signature(forward).parameters)[1:]
        own = {"_stock_forward": staticmethod(same), "_stock_names": names}
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
        self._check_implementation(implementation)
        call.one_width = implementation not in UNEQUAL_WIDTHS
        cache = given.arguments.get(given.cache)
        if cache is not None and not isinstance(cache, Cache):  # paged: newer versions hand it over as any other
            raise ValueError(
                f"A {type(cache).__name__} keeps keys and values of one width, and layer {self.layer} grew. Use "
                "model.generate instead of continuous batching."
            )
        if cache is not None:
            given.arguments[given.cache] = _widened(cache, call)
        self.call = call
        try:
            output = self._stock_forward(self, **given.arguments)
        except RuntimeError as error:
            if call.joined and call.read is None:  # between the cache and the attention function
                raise ValueError(
                    f"New dims cannot join {_stock_name(self)}, whose forward does not take wider keys and values: "
                    f"{error}."
                ) from error
            raise
        finally:
            self.call = None
        _hand_on_old_dims(given.arguments, call, self.shape.qk_head_dim)
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
        """Name what the forward was called with."""
        arguments = dict(zip(self._stock_names, args))
        keyword = next((name for name in CACHES if name in self._stock_names), "")
        for name, value in kwargs.items():
            arguments[keyword if keyword and name in CACHES else name] = value
        source = next((arguments[name] for name in _SOURCES if arguments.get(name) is not None), None)
        return Given(arguments[self._stock_names[0]], source, arguments, keyword)

    def _check_implementation(self, implementation: str) -> None:
        for prefix, (name, instead) in _ONE_WIDTH.items():
            if implementation.startswith(prefix):
                raise ValueError(f"{name} keeps keys and values of one width, and layer {self.layer} grew. {instead}")


def _share(parts, read: Tensor) -> Tensor | None:
    """What new values add to the output, (batch, tokens, out_features); None without new values."""
    share = None
    for part, own in zip(parts, read.split([part.v_dims for part in parts], -1)):
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
