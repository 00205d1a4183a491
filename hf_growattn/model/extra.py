"""`ExtraDims`: the new dims of one attention module, and how they join one call of its stock forward.

They lie apart from its own weights, in parts: one for each growth. A part has two small modules. `inside` projects the
attention's input to new queries, keys and values; `outside` projects what the heads read through the new values to a
share of the output. They are used through their `forward` alone, so whatever works with modules works with them:
sharding, hooks, checkpointing.

New queries, keys and values join at the attention function, which all modern families take from
`ALL_ATTENTION_FUNCTIONS`. The cache keeps old and new dims, and the forward sees the old ones of it.

Per head the layout is `[old dims | new dims]`, so the logits are `s (q_old k_old^T + q_new k_new^T)`; rotation, norms
and gates of the family touch the old dims alone. Dims whose query or key weights are zero change nothing, nor do those
whose value or output weights are zero.
"""

import copy
import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import EncoderDecoderCache

ROLES = ("query", "key", "value", "output")
# Implementations that take values of another width than the keys; all others get equal widths by zero padding.
UNEQUAL_WIDTHS = ("eager", "flex_attention")


class HeadShape(NamedTuple):
    """Sizes of an attention module.

    Attributes:
        num_heads: query heads `H`.
        num_key_value_heads: key and value heads `G`.
        qk_head_dim, v_head_dim: stock widths of one head.
        in_features, out_features: sizes of the module's input and output.
        biased: the roles whose projection has a bias; new dims have one there, too.
    """

    num_heads: int
    num_key_value_heads: int
    qk_head_dim: int
    v_head_dim: int
    in_features: int
    out_features: int
    biased: tuple[str, ...] = ()

    def heads_of(self, role: str) -> int:
        """Number of heads of a role."""
        return self.num_key_value_heads if role in ("key", "value") else self.num_heads


class Inside(nn.Module):
    """New queries, keys and values of every head, as one linear map.

    Attributes:
        weight: (rows, in_features): the rows of all query heads, then those of key heads, then those of value heads.
        bias: the same rows of those roles that have a bias, (biased rows,); None without any.
    """

    def __init__(self, shape: HeadShape, qk_dims: int, v_dims: int, **factory):
        super().__init__()
        self.heads = shape.num_heads, shape.num_key_value_heads, shape.num_key_value_heads
        self.dims = qk_dims, qk_dims, v_dims
        self.rows = [heads * dims for heads, dims in zip(self.heads, self.dims)]
        self.biased = [role in shape.biased for role in ROLES[:3]]
        self.weight = nn.Parameter(torch.zeros(sum(self.rows), shape.in_features, **factory))
        biased_rows = sum(rows for rows, biased in zip(self.rows, self.biased) if biased)
        self.bias = nn.Parameter(torch.zeros(biased_rows, **factory)) if biased_rows else None

    def forward(self, hidden_states: Tensor, key_value_states: Tensor | None = None) -> list[Tensor]:
        """Project the input, or for cross-attention both inputs, (batch, tokens, in_features).

        Returns:
            Queries, keys and values, each (batch, its heads, tokens, its new dims).
        """
        inputs, bias = hidden_states.to(self.weight.dtype), self._joined_bias()
        if key_value_states is None:
            projected = nn.functional.linear(inputs, self.weight, bias).split_with_sizes(self.rows, -1)
        else:
            own, others = self.rows[0], self.rows[1:]
            query = nn.functional.linear(inputs, self.weight[:own], None if bias is None else bias[:own])
            source = key_value_states.to(self.weight.dtype)
            both = nn.functional.linear(source, self.weight[own:], None if bias is None else bias[own:])
            projected = (query, *both.split(others, -1))
        return [
            states.view(*states.shape[:-1], heads, dims).transpose(1, 2)
            for states, heads, dims in zip(projected, self.heads, self.dims)
        ]

    def _joined_bias(self) -> Tensor | None:
        """The bias of all rows, with zeros for roles that have none."""
        if self.bias is None or all(self.biased):
            return self.bias
        own = iter(self.bias.split([rows for rows, biased in zip(self.rows, self.biased) if biased]))
        parts = [next(own) if biased else self.bias.new_zeros(rows) for rows, biased in zip(self.rows, self.biased)]
        return torch.cat(parts)


class Outside(nn.Module):
    """What the heads read through new values, as a share of the output; `weight` is (out_features, heads * dims)."""

    def __init__(self, shape: HeadShape, v_dims: int, **factory):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(shape.out_features, shape.num_heads * v_dims, **factory))

    def forward(self, read: Tensor) -> Tensor:
        """(batch, tokens, heads, new dims) -> (batch, tokens, out_features)."""
        return nn.functional.linear(read.flatten(-2).to(self.weight.dtype), self.weight)


class Part(nn.Module):
    """The new dims of one growth or one adapter, zeros at first: `qk_dims` of queries and keys, `v_dims` of values.

    Attributes:
        recomputes: whether a backward pass computes what new dims have read again, instead of keeping it.
    """

    recomputes = False

    def __init__(self, shape: HeadShape, qk_dims: int, v_dims: int, **factory):
        super().__init__()
        self.shape, self.qk_dims, self.v_dims = shape, qk_dims, v_dims
        self.inside = Inside(shape, qk_dims, v_dims, **factory)
        self.outside = Outside(shape, v_dims, **factory) if v_dims else None

    def dims_of(self, role: str) -> int:
        """New dims of one head of a role."""
        return self.qk_dims if role in ("query", "key") else self.v_dims

    def weight_of(self, role: str) -> Tensor:
        """A role's weight, a view of (heads, new dims, features); of a sharded one a copy that all processes gather."""
        if role == "output":
            weight = self.outside.weight if self.outside else self.inside.weight.new_zeros(self.shape.out_features, 0)
            return whole(weight).T.unflatten(0, (self.shape.num_heads, self.v_dims))
        index, inside = ROLES.index(role), self.inside
        return whole(inside.weight).split(inside.rows)[index].unflatten(0, (inside.heads[index], inside.dims[index]))

    def bias_of(self, role: str) -> Tensor | None:
        """A role's bias, (heads, new dims), as its weight; None where it has none."""
        if role == "output" or role not in self.shape.biased or self.inside.bias is None:
            return None
        index, inside = ROLES.index(role), self.inside
        sizes = [rows if biased else 0 for rows, biased in zip(inside.rows, inside.biased)]
        return whole(inside.bias).split(sizes)[index].unflatten(0, (inside.heads[index], inside.dims[index]))


def in_order(parts: dict[str, Any]) -> list[tuple[str, Any]]:
    """Parts by name as growths come: JSON puts "growth_10" before "growth_2", and sums of another order round apart."""
    return sorted(parts.items(), key=lambda part: (len(part[0]), part[0]))


def whole(tensor: Any) -> Tensor:
    """A tensor as it is, or all of a sharded one, gathered from all ranks, which call this together."""
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


class ExtraDims(nn.Module):
    """All new dims of an attention module.

    Attributes:
        parts: those that are kept, by the name of their growth.

    Two more children may be there: `adapters` of a peft model, whose `active_parts` gives those in use, and a `trial`,
    which takes the place of a part while it is measured.
    """

    parts: Any  # an nn.ModuleDict of `Part`

    def __init__(self):
        super().__init__()
        self.parts = nn.ModuleDict()

    def active_parts(self) -> list[Any]:
        """The parts in use, in their order along the heads."""
        parts: list[Any] = [*self._modules["parts"]._modules.values()]  # pyright: ignore[reportOptionalMemberAccess]
        adapters, trial = self._modules.get("adapters"), self._modules.get("trial")
        if adapters is not None:
            parts += adapters.active_parts()  # pyright: ignore[reportCallIssue]
        return parts if trial is None else [*parts, trial]


class Call:
    """One forward call of a module with new dims.

    Attributes:
        parts: the new dims in use.
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

    def __init__(self, parts: list[Any], hidden_states: Tensor, source: Tensor | None):
        self.parts, self.hidden_states, self.source = parts, hidden_states, source

    def project(self) -> Sequence[Tensor]:
        """The new queries, keys and values of all parts, (batch, heads, tokens, new dims) each."""
        if self.new is not None:
            return self.new
        first, *others = [part.inside(self.hidden_states, self.source) for part in self.parts]
        return [torch.cat(states, -1) for states in zip(first, *others)] if others else first

    def gather(self, read: Tensor) -> Tensor | None:
        """Bring back what the heads have read through new values, (batch, tokens, heads, new dims), as the share."""
        share = None
        reads = read.split_with_sizes([part.v_dims for part in self.parts], -1) if len(self.parts) > 1 else [read]
        for part, own in zip(self.parts, reads):
            if part.v_dims:
                added = part.outside(own)
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
        _check_cache(cache, joined[0].shape[-1], *args)
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


def _check_cache(cache: Any, width: int, layer: int = 0, *_) -> None:
    """Raise a ValueError if a layer of a cache holds keys of before the growth, or of an adapter."""
    layers = getattr(cache, "layers", ())
    held = getattr(layers[layer], "keys", None) if layer < len(layers) else None
    if held is not None and held.dim() == 4 and held.shape[-1] < width:
        raise ValueError(
            f"The cache holds keys {held.shape[-1]} wide, and layer {layer} now makes them {width} wide. Begin with an "
            "empty cache. Prefix tuning fills it with stock widths: use LoRA instead."
        )


def _fold(new: Tensor) -> Tensor:
    """New dims of all heads as those of one, (batch, heads, tokens, n) -> (batch, 1, tokens, heads n)."""
    return new.transpose(1, 2).flatten(2).unsqueeze(1)


def _unfold(stored: Tensor, new: Tensor) -> Tensor:
    """New dims as a cache holds them, folded or not, with as many heads and dims as `new`."""
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
    """A cache as one stock forward sees it: what it stores gains the new dims."""

    def __init__(self, cache: Any, call: Call):
        self._cache, self._call = cache, call

    def update(self, key: Tensor, value: Tensor, *args, **kwargs) -> tuple[Tensor, Tensor]:
        return self._call.store(self._cache, key, value, *args, **kwargs)

    def __getattr__(self, name: str):
        return getattr(self._cache, name)


def widened(cache: Any, call: Call) -> Any:
    """A cache that keeps new dims beside those that a stock forward hands over."""
    if isinstance(cache, EncoderDecoderCache):  # forwards ask for its type, and for the caches in it
        wider = copy.copy(cache)
        wider.self_attention_cache = _WiderCache(cache.self_attention_cache, call)  # pyright: ignore
        wider.cross_attention_cache = _WiderCache(cache.cross_attention_cache, call)  # pyright: ignore
        return wider
    return _WiderCache(cache, call)


class AttentionFunctions:
    """Stands for the table of attention functions in the forward of a module with new dims."""

    def __init__(self, table: Any):
        self._table = table

    def get_interface(self, implementation: str, default: Callable) -> Callable:
        """As the table's, with new dims."""
        return functools.partial(_attend, self._table.get_interface(implementation, default))

    def __getitem__(self, implementation: str) -> Callable:
        return functools.partial(_attend, self._table[implementation])

    def __getattr__(self, name: str):
        return getattr(self._table, name)


def _attend(function: Callable, module: Any, query, key, value, *args, **kwargs):
    """Call an attention function with old and new dims, and give back what it reads through the old ones."""
    call: Call = module.call
    if call.attended:
        raise ValueError(f"New dims cannot join {stock_name(module)}: it calls its attention function twice.")
    call.attended = True
    attend = _attend_wide
    if any(part.recomputes for part in call.parts):
        attend = functools.partial(checkpoint, _attend_wide, use_reentrant=False, preserve_rng_state=False)
    old, call.share, weights = attend(function, module, call, query, key, value, *args, **kwargs)
    return old, weights


def _attend_wide(function: Callable, module: Any, call: Call, query, key, value, *args, **kwargs):
    """What is read through the old dims, the share of the new ones, and the attention weights."""
    shape, v_head_dim = module.shape, module.shape.v_head_dim
    new_query, new_key, new_value = call.project()
    # Cross-attention reads a cache that was filled before without `update`.
    is_filled = call.source is not None and value.shape[-1] + key.shape[-1] > shape.qk_head_dim + v_head_dim
    if kwargs.get("scaling") == 1.0:  # the family scales its queries before, by the usual factor if by any
        new_query = new_query * shape.qk_head_dim**-0.5
    if not is_filled:
        _check_shapes(module, query, key, value)
        key, value = call.join(key, new_key, value, new_value)
    output, weights = function(module, append(query, new_query, key.shape[-1]), key, value, *args, **kwargs)
    output = output.reshape(*output.shape[:2], -1, value.shape[-1])
    new = new_value.shape[-1]
    # The backward pass of one split is one `cat`; each slice would fill a tensor of zeros, and add it to the others.
    old, read, _ = output.split_with_sizes((v_head_dim, new, value.shape[-1] - v_head_dim - new), -1)
    return old.contiguous(), call.gather(read), weights


def _check_shapes(module: Any, query: Tensor, key: Tensor, value: Tensor) -> None:
    """Raise a ValueError if old heads are not what the module's attributes say: new dims could not join them."""
    shape = module.shape
    expected = (shape.num_heads, shape.num_key_value_heads, shape.qk_head_dim, shape.v_head_dim)
    found = (query.shape[1], key.shape[1], query.shape[-1], value.shape[-1])
    if found != expected:
        raise ValueError(
            f"New dims cannot join {stock_name(module)}: it hands (query heads, key heads, width, "
            f"value width) = {found} to its attention function, and its attributes say {expected}."
        )


def stock_name(module: nn.Module) -> str:
    """What the class of a module with new dims is called in transformers."""
    return type(module).__bases__[1].__name__
