"""How new dims join an attention module: two forward hooks around its stock forward, which runs live.

The module keeps its class and its forward. Before the forward, a hook projects the input to new queries, keys and
values, and notes the call in the thread. Amid it, the attention function that the forward takes from transformers'
table gets old and new dims side by side, and the cache keeps both, while the forward sees the old ones alone. After it,
a hook adds the share of the new values to the output. Everybody else who asks the table gets the stock function.
"""

import copy
import functools
import threading
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import AttentionInterface, Cache, EncoderDecoderCache

from .new_dims import ExtraDims, HeadShape

# Implementations that take values of another width than the keys; all others get equal widths by zero padding.
UNEQUAL_WIDTHS = ("eager", "flex_attention")
# Keywords of a forward for its cache, the newest first: transformers 5.24 renamed the others.
CACHES = ("cache", "past_key_values", "past_key_value", "layer_past")
_SOURCES = ("key_value_states", "encoder_hidden_states")  # what cross-attention reads

_thread = threading.local()  # its `call` is the innermost call under way of a module with new dims, in this thread


class Arguments(NamedTuple):
    """The parameters of an attention module's forward, in their order."""

    names: tuple[str, ...]

    def find(self, names: Sequence[str], args: tuple, kwargs: dict[str, Any]) -> tuple[str, Any]:
        """The first of these parameters that was given, by its name and value; ("", None) without one."""
        for name in names:
            place = self.names.index(name) if name in self.names else len(args)
            value = args[place] if place < len(args) else kwargs.get(name)
            if value is not None:
                return name, value
        return "", None

    def read_inputs(self, module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> tuple[Tensor, Tensor | None]:
        """The input of the attention, (batch, tokens, in_features), and what cross-attention reads; None for others.

        Raises:
            ValueError: the input has another number of axes.
        """
        hidden_states = args[0] if args else kwargs[self.names[0]]
        if hidden_states.dim() != 3:
            raise ValueError(
                f"New dims cannot join {type(module).__name__}: its input has the shape {tuple(hidden_states.shape)} "
                "instead of (batch, tokens, features). Leave it out of layers= or submodels=."
            )
        return hidden_states, self.find(_SOURCES, args, kwargs)[1]

    def with_value(self, name: str, value: Any, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
        """The same call with another value of a parameter that was given."""
        place = self.names.index(name) if name in self.names else len(args)
        if place < len(args):
            return (*args[:place], value, *args[place + 1 :]), kwargs
        return args, kwargs | {name: value}


_OF_SIBLINGS = Arguments(("hidden_states", "input_tensor"))  # of modules that project a sibling's output


class Call:
    """One forward call of a module with new dims.

    Attributes:
        module: the attention module.
        extra: its new dims when the call began.
        new_dims: those of them that are in use.
        outer: the call that is under way around this one.
        source: what cross-attention reads.
        one_width: whether keys and values are padded to one width.
        new: the new queries, keys and values, where a cache has asked for them.
        stored: keys and values as the cache holds them, old and new dims.
        shown: the old dims of these, which are all that the stock forward sees.
        attended: whether the attention function was called.
        share: what the new values add to the output, (batch, tokens, out_features); None without any.
    """

    one_width = False
    new: Sequence[Tensor] | None = None
    stored: tuple[Tensor, Tensor] | None = None
    shown: tuple[Tensor, Tensor] | None = None
    attended = False
    share: Tensor | None = None

    def __init__(self, module: Any, new_dims: list[Any], hidden_states: Tensor, source: Tensor | None):
        self.module, self.extra, self.new_dims = module, module.extra, new_dims
        self.hidden_states, self.source = hidden_states, source
        self.outer: Call | None = getattr(_thread, "call", None)
        earlier = self.outer
        while earlier is not None and earlier.module is not module:
            earlier = earlier.outer
        if earlier is not None:  # an interrupt, or an error amid an export, left it behind: torch calls no hook then
            self.outer = earlier.outer

    def project(self) -> Sequence[Tensor]:
        """The new queries, keys and values, (batch, heads, tokens, new dims) each."""
        if self.new is not None:
            return self.new
        first, *others = [dims.in_projection(self.hidden_states, self.source) for dims in self.new_dims]
        return [torch.cat(states, -1) for states in zip(first, *others)] if others else first

    def gather(self, read: Tensor) -> Tensor | None:
        """Bring back what the heads have read through new values, (batch, tokens, heads, new dims), as the share."""
        share, several = None, len(self.new_dims) > 1
        reads = read.split_with_sizes([dims.v_dims for dims in self.new_dims], -1) if several else [read]
        for dims, own in zip(self.new_dims, reads):
            if dims.v_dims:
                added = dims.out_projection(own)
                share = added if share is None else share + added
        return share

    def store(self, cache: Any, key: Tensor, value: Tensor, *args, **kwargs) -> tuple[Tensor, Tensor]:
        """Let the cache keep old and new dims, and return the old ones of what it holds."""
        self.new = _, new_key, new_value = self.project()
        is_latent = key.shape[1] != new_key.shape[1]  # one for all heads, as multi-head latent attention keeps it
        if is_latent:
            joined = append(key, _fold(new_key)), append(value, _fold(new_value))
        else:
            joined = self._joined(key, new_key, value, new_value)
        _check_cache(cache, (joined[0].shape[-1], joined[1].shape[-1]), *args)
        self.stored = keys, values = cache.update(*joined, *args, **kwargs)
        self.shown = keys.narrow(-1, 0, key.shape[-1]), values.narrow(-1, 0, value.shape[-1])
        return self.shown

    def join(self, key: Tensor, new_key: Tensor, value: Tensor, new_value: Tensor) -> tuple[Tensor, Tensor]:
        """Append the new keys and values to the old ones that the attention function was called with."""
        if self.stored is None or self.shown is None:
            return self._joined(key, new_key, value, new_value)
        if key is self.shown[0] and value is self.shown[1]:
            return self.stored
        new_key, new_value = (
            _unfold(stored[..., shown.shape[-1] :], like)
            for stored, shown, like in zip(self.stored, self.shown, (new_key, new_value))
        )
        return self._joined(key, new_key, value, new_value)

    def _joined(self, key: Tensor, new_key: Tensor, value: Tensor, new_value: Tensor) -> tuple[Tensor, Tensor]:
        """Old and new keys and values side by side, with zeros after the narrower ones where a kernel wants that."""
        widths = key.shape[-1] + new_key.shape[-1], value.shape[-1] + new_value.shape[-1]
        if self.one_width:
            widths = (common_width(*widths, key.device),) * 2
        return append(key, new_key, widths[0]), append(value, new_value, widths[1])


def _check_cache(cache: Any, widths: tuple[int, int], index: int = 0, *_) -> None:
    """Let an empty layer of a cache take these widths of keys and values; a ValueError for one with other tokens."""
    layers = getattr(cache, "layers", ())
    layer: Any = layers[index] if index < len(layers) else None
    held = getattr(layer, "keys", None), getattr(layer, "values", None)
    found = tuple(states.shape[-1] for states in held if states is not None and states.dim() == 4)
    if found in ((), widths):
        return
    if torch.compiler.is_exporting() or layer.get_seq_length() != 0:
        raise ValueError(
            f"The cache has keys and values {found} wide, and layer {index} makes them {widths} wide: it is from "
            "before new dims came or went, or prefix tuning filled it. Begin with an empty cache. For ExecuTorch, "
            "write a stock model with hf_growattn.export_model."
        )
    layer.is_initialized = False  # it was made early, with the stock widths


def _fold(new: Tensor) -> Tensor:
    """New dims of all heads as those of one, (batch, heads, tokens, n) -> (batch, 1, tokens, heads n)."""
    return new.transpose(1, 2).flatten(2).unsqueeze(1)


def _unfold(stored: Tensor, new: Tensor) -> Tensor:
    """New dims as a cache holds them, folded or not, with the heads and dims of `new`."""
    heads, dims = new.shape[1], new.shape[-1]
    if stored.shape[1] == heads:
        return stored[..., :dims]
    return stored.squeeze(1)[..., : heads * dims].unflatten(-1, (heads, dims)).transpose(1, 2)


def common_width(key: int, value: int, device: torch.device) -> int:
    """The width that keys and values are padded to; kernels of accelerators take multiples of 8."""
    width = max(key, value)
    return width if device.type == "cpu" else width + -width % 8


def append(old: Tensor, new: Tensor, width: int = 0) -> Tensor:
    """Old and new dims of (batch, heads, tokens, width), in the precision of the old ones, and zeros up to a width."""
    sides = [old, new.to(old.dtype)] if new.shape[-1] else [old]
    gap = width - old.shape[-1] - new.shape[-1]
    if gap > 0:
        sides.append(old.new_zeros(*old.shape[:-1], gap))
    return torch.cat(sides, -1) if len(sides) > 1 else old


class _WiderCache:
    """A cache as one stock forward sees it: what it stores gains the new dims in use."""

    def __init__(self, cache: Any, call: Call | None):
        self._cache, self._call = cache, call

    def update(self, key: Tensor, value: Tensor, *args, **kwargs) -> tuple[Tensor, Tensor]:
        if self._call is not None:
            return self._call.store(self._cache, key, value, *args, **kwargs)
        _check_cache(self._cache, (key.shape[-1], value.shape[-1]), *args)
        return self._cache.update(key, value, *args, **kwargs)

    def __getattr__(self, name: str):
        return getattr(self._cache, name)


def _widened(cache: Any, call: Call | None) -> Any:
    """A cache that keeps new dims next to those that a stock forward hands over."""
    if isinstance(cache, EncoderDecoderCache):  # forwards ask for its type, and for the caches in it
        wider = copy.copy(cache)
        wider.self_attention_cache = _WiderCache(cache.self_attention_cache, call)  # pyright: ignore
        wider.cross_attention_cache = _WiderCache(cache.cross_attention_cache, call)  # pyright: ignore
        return wider
    return _WiderCache(cache, call)


def before_forward(module: Any, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]] | None:
    """Begin a call of a module with new dims: the forward pre-hook.

    Raises:
        ValueError: the implementation or its cache keeps one width (continuous batching, vLLM), or the input is not
            (batch, tokens, features).
    """
    extra: ExtraDims = module.extra
    new_dims, call = extra.active(), None
    name, cache = extra.arguments.find(CACHES, args, kwargs)
    if new_dims:
        hidden_states, source = extra.arguments.read_inputs(module, args, kwargs)
        implementation = module.config._attn_implementation or ""
        if implementation == "vllm" or not isinstance(cache, (Cache, type(None))):
            raise one_width_error(module, "vLLM" if cache is None else f"A {type(cache).__name__}")
        _thread.call = call = Call(module, new_dims, hidden_states, source)
        call.one_width = implementation not in UNEQUAL_WIDTHS
    if not isinstance(cache, Cache):
        return None
    return extra.arguments.with_value(name, _widened(cache, call), args, kwargs)  # one that an adapter filled, too


def after_forward(module: Any, args: tuple, kwargs: dict[str, Any], output: Any) -> Any:
    """End a call of a module with new dims: the forward hook, which runs after an exception, too.

    Raises:
        RuntimeError: the stock forward did not call an attention function, or a later pre-hook changed its input.
    """
    call: Call | None = getattr(_thread, "call", None)
    if call is None or call.module is not module:
        return None
    _thread.call = call.outer
    if output is None:  # an exception is under way
        return None
    hidden_states, source = call.extra.arguments.read_inputs(module, args, kwargs)
    if hidden_states is not call.hidden_states or source is not call.source:
        raise RuntimeError("A pre-hook changed the input after new dims had read it: register it with prepend=True.")
    if not call.attended:
        raise RuntimeError(f"{type(module).__name__} did not call its attention function, so its new dims are lost.")
    share, call.share = call.share, None  # a backward pass that computes it again keeps the call
    if share is None:
        return None
    if call.extra.handover is not None:
        call.extra.handover.give(share)
        return None
    if isinstance(output, tuple):
        return output[0] + share.view(output[0].shape).to(output[0].dtype), *output[1:]
    return output + share.view(output.shape).to(output.dtype)


class Handover:
    """Brings the share of an attention's new dims to its sibling that projects the output, as in BERT's family.

    The sibling takes what the heads have read, and the residual stream, to which the share is added.
    """

    def give(self, share: Tensor) -> None:
        """Let a share wait, in this thread, for the sibling's call."""
        _thread.waiting = self, share

    def take(self, module: Any, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]] | None:
        """Add a share that waits for the sibling: its forward pre-hook."""
        owner, share = getattr(_thread, "waiting", None) or (None, None)
        if owner is not self or share is None:
            return None
        _thread.waiting = None
        dropout = getattr(module, "dropout", None)
        share = share if dropout is None else dropout(share)
        _, residual = _OF_SIBLINGS.find(("input_tensor",), args, kwargs)
        return _OF_SIBLINGS.with_value("input_tensor", residual + share.to(residual.dtype), args, kwargs)


def _join_interface() -> None:
    """Let transformers' table give attention functions that new dims join, to a call of a module that has some.

    The class is wrapped, since modeling files may hold tables of their own. A second copy of this file, which came with
    a checkpoint, wraps it once more: each wrapper passes on what is not its own call.
    """

    def wrap(method: Callable) -> Callable:
        @functools.wraps(method)
        def give(self, *args, **kwargs):
            function = method(self, *args, **kwargs)
            # `get_interface` asks `__getitem__`.
            if getattr(_thread, "call", None) is None or getattr(function, "func", None) is _attend:
                return function
            return functools.partial(_attend, function)

        return give

    for name in ("get_interface", "__getitem__"):
        setattr(AttentionInterface, name, wrap(getattr(AttentionInterface, name)))


def _attend(function: Callable, module: Any, query: Tensor, key: Tensor, value: Tensor, *args, **kwargs):
    """Call an attention function with old and new dims, and give back what it reads through the old ones."""
    call: Call | None = getattr(_thread, "call", None)
    # An interrupt may have left a call behind.
    if call is None or call.module is not module or module._modules.get("extra") is not call.extra:
        return function(module, query, key, value, *args, **kwargs)
    if call.attended:
        raise ValueError(f"New dims cannot join {type(module).__name__}: it calls its attention function twice.")
    call.attended = True
    attend = _attend_wide
    if any(dims.recomputes for dims in call.new_dims):
        attend = functools.partial(checkpoint, _attend_wide, use_reentrant=False, preserve_rng_state=False)
    old, call.share, weights = attend(function, call, query, key, value, *args, **kwargs)
    return old, weights


def _attend_wide(function: Callable, call: Call, query: Tensor, key: Tensor, value: Tensor, *args, **kwargs):
    """What is read through the old dims, the share of the new ones, and the attention weights."""
    shape, v_head_dim = call.extra.shape, call.extra.shape.v_head_dim
    new_query, new_key, new_value = call.project()
    # Cross-attention reads a cache that was filled before without `update`.
    is_filled = call.source is not None and value.shape[-1] + key.shape[-1] > shape.qk_head_dim + v_head_dim
    if kwargs.get("scaling") == 1.0:  # the family scales its queries before, by the usual factor if by any
        new_query = new_query * shape.qk_head_dim**-0.5
    if not is_filled:
        _check_shapes(call.module, shape, query, key, value)
        key, value = call.join(key, new_key, value, new_value)
    query = append(query, new_query, key.shape[-1])
    under_way, _thread.call = getattr(_thread, "call", None), None  # the function may ask the table for another one
    try:
        output, weights = function(call.module, query, key, value, *args, **kwargs)
    finally:
        _thread.call = under_way
    output = output.reshape(*output.shape[:2], -1, value.shape[-1])
    new = new_value.shape[-1]
    # The backward pass of one split is one `cat`; each slice would fill a tensor of zeros, and add it to the others.
    old, read, _ = output.split_with_sizes((v_head_dim, new, value.shape[-1] - v_head_dim - new), -1)
    return old.contiguous(), call.gather(read), weights


def _check_shapes(module: Any, shape: HeadShape, query: Tensor, key: Tensor, value: Tensor) -> None:
    """Raise a ValueError if old heads are not what the module's attributes say: new dims could not join them."""
    expected = (shape.num_heads, shape.num_key_value_heads, shape.qk_head_dim, shape.v_head_dim)
    found = (query.shape[1], key.shape[1], query.shape[-1], value.shape[-1])
    if found != expected:
        raise ValueError(
            f"New dims cannot join {type(module).__name__}: it hands (query heads, key heads, width, "
            f"value width) = {found} to its attention function, and its attributes say {expected}."
        )


def one_width_error(module: nn.Module, what: str) -> ValueError:
    """The error of something that takes heads of one width."""
    return ValueError(
        f"{what} keeps keys and values of one width, and a {type(module).__name__} of this model grew. Use "
        "model.generate instead of continuous batching; for vLLM write the model by hf_growattn.export_model."
    )


_join_interface()
