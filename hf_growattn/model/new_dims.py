"""`NewDims`: what one growth adds to an attention module, and `ExtraDims`: all that is added to it.

New dims lie apart from the old weights, in two small modules. `in_projection` projects the attention's input to new
queries, keys and values; `out_projection` projects what the heads read through the new values to a share of the output.
No family calls a projection so, and no name ends in "_proj": adapters go by how names end. Both modules are used
through their `forward` alone, so whatever works with modules works with them: sharding, hooks, checkpointing.

Per head the layout is `[old dims | new dims]`, so the logits are `s (q_old k_old^T + q_new k_new^T)`; rotation, norms
and gates of the family touch the old dims alone. Dims whose query or key weights are zero change nothing, nor do those
whose value or output weights are zero.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

ROLES = ("query", "key", "value", "output")


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


class InProjection(nn.Module):
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
        given = [next(own) if biased else self.bias.new_zeros(rows) for rows, biased in zip(self.rows, self.biased)]
        return torch.cat(given)


class OutProjection(nn.Module):
    """What the heads read through new values, as a share of the output; `weight` is (out_features, heads * dims)."""

    def __init__(self, shape: HeadShape, v_dims: int, **factory):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(shape.out_features, shape.num_heads * v_dims, **factory))

    def forward(self, read: Tensor) -> Tensor:
        """(batch, tokens, heads, new dims) -> (batch, tokens, out_features)."""
        return nn.functional.linear(read.flatten(-2).to(self.weight.dtype), self.weight)


class NewDims(nn.Module):
    """The new dims of one growth or one adapter, zeros at first: `qk_dims` of queries and keys, `v_dims` of values.

    Attributes:
        recomputes: whether a backward pass computes what new dims have read again, instead of keeping it.
    """

    recomputes = False

    def __init__(self, shape: HeadShape, qk_dims: int, v_dims: int, **factory):
        super().__init__()
        self.shape, self.qk_dims, self.v_dims = shape, qk_dims, v_dims
        self.in_projection = InProjection(shape, qk_dims, v_dims, **factory)
        self.out_projection = OutProjection(shape, v_dims, **factory) if v_dims else None

    def dims_of(self, role: str) -> int:
        """New dims of one head of a role."""
        return self.qk_dims if role in ("query", "key") else self.v_dims

    def weight_of(self, role: str) -> Tensor:
        """A role's weight, a view of (heads, new dims, features); of a sharded one a copy that all processes gather."""
        if role == "output":
            inside, features = self.out_projection, self.shape.out_features
            weight = inside.weight if inside else self.in_projection.weight.new_zeros(features, 0)
            return full_tensor(weight).T.unflatten(0, (self.shape.num_heads, self.v_dims))
        index, inside = ROLES.index(role), self.in_projection
        weight = full_tensor(inside.weight).split(inside.rows)[index]
        return weight.unflatten(0, (inside.heads[index], inside.dims[index]))

    def bias_of(self, role: str) -> Tensor | None:
        """A role's bias, (heads, new dims), as its weight; None where it has none."""
        if role == "output" or role not in self.shape.biased or self.in_projection.bias is None:
            return None
        index, inside = ROLES.index(role), self.in_projection
        sizes = [rows if biased else 0 for rows, biased in zip(inside.rows, inside.biased)]
        bias = full_tensor(inside.bias).split(sizes)[index]
        return bias.unflatten(0, (inside.heads[index], inside.dims[index]))


def in_order(growths: dict[str, Any]) -> list[tuple[str, Any]]:
    """Growths by name as they came: JSON puts "growth_10" before "growth_2", and sums of another order round apart."""
    return sorted(growths.items(), key=lambda growth: (len(growth[0]), growth[0]))


def full_tensor(tensor: Any) -> Tensor:
    """A tensor as it is, or all of a sharded one, gathered from all ranks, which call this together."""
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


class ExtraDims(nn.Module):
    """All new dims of an attention module; its child `extra`, which it has only while there are some.

    Attributes:
        shape: the stock sizes of the attention module.
        arguments: how its forward calls what it is given.
        handover: brings the share of new values to the sibling that projects the output; None without such a sibling.
        hooks: the handles of the hooks by which new dims join, which follow a copy and a pickle of the module.
        growths: the new dims that are kept, by the name of their growth.

    Two more children may be there: `adapters` of a peft model, whose `active` gives those in use, and a `trial`, new
    dims that are measured.
    """

    growths: Any  # an nn.ModuleDict of `NewDims`
    handover: Any = None

    def __init__(self, shape: HeadShape, arguments: Any):
        super().__init__()
        self.shape, self.arguments = shape, arguments
        self.hooks: list[RemovableHandle] = []
        self.growths = nn.ModuleDict()

    @property
    def is_empty(self) -> bool:
        """Whether it holds nothing."""
        return not len(self.growths) and {*self._modules} == {"growths"}

    def active(self) -> list[Any]:
        """The new dims in use, in their order along the heads."""
        dims: list[Any] = [*self._modules["growths"]._modules.values()]  # pyright: ignore[reportOptionalMemberAccess]
        adapters, trial = self._modules.get("adapters"), self._modules.get("trial")
        if adapters is not None:
            dims += adapters.active()  # pyright: ignore[reportCallIssue]
        return dims if trial is None else [*dims, trial]
