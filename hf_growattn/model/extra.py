"""`ExtraDims`: the new dims of one attention module, apart from its own weights, in parts: one for each growth.

A part has two small modules. `inside` projects the attention's input to new queries, keys and values; `outside`
projects what the heads read through the new values to a share of the output. They are used through their `forward`
alone, so whatever works with modules works with them: sharding, hooks, checkpointing.

How large they are is read from what attention modules note of themselves. Names of projections are those that families
commonly use; without them new dims work all the same, and only what reads old weights does not.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

ROLES = ("query", "key", "value", "output")
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


def find_projections(module: nn.Module) -> dict[str, str]:
    """The names of a module's children that project each role: one for three if fused; none for unusual names."""
    config: Any = getattr(module, "config", None)
    registered = REGISTERED.get(getattr(config, "model_type", "").removeprefix("growattn_"))
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
    """The new dims of one growth or one adapter, zeros at first: `qk_dims` of queries and keys, `v_dims` of values."""

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
