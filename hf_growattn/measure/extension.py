"""Dims that live beside an attention module's projections: probed, tried or adapted, while the weights stay untouched.

`GrowableAttention.extension` holds them. They lengthen queries, keys and values for as long as they are set, and taking
them off again leaves the module as it was, to the bit.
"""

import torch
from torch import Tensor, nn

from ..growable.attention import GrowableAttention
from ..growable.widths import Widening
from .kinds import KINDS


class Extension(nn.Module):
    """What lengthens queries, keys and values, and brings the added value dims back into the output."""

    def added(self, role: str, hidden_states: Tensor) -> Tensor | None:
        """The dims that a role gains: (batch, tokens, d) -> (batch, heads of the role, tokens, n); None for no more."""
        raise NotImplementedError

    def output(self, added: Tensor) -> Tensor:
        """What the added value dims contribute to the output: (batch, tokens, H, n) -> (batch, tokens, d)."""
        raise NotImplementedError

    def forward(self, hidden_states: Tensor, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, ...]:
        """Lengthen queries (batch, H, tokens, d_k), keys (batch, G, tokens, d_k) and values (batch, G, tokens, d_v)."""
        lengthened = []
        for role, states in (("query", query), ("key", key), ("value", value)):
            added = self.added(role, hidden_states)
            lengthened.append(states if added is None else torch.cat((states, added.to(states.dtype)), dim=-1))
        return tuple(lengthened)


class NewDims(Extension):
    """New dims of every head, as a growth tries them.

    Attributes:
        weights: by role, (heads of the role, n, d); the output's in the same layout as the others'.
        biases: by role, (heads, n), for those roles whose projection has a bias.
    """

    def __init__(self):
        super().__init__()
        self.weights: dict[str, Tensor] = {}
        self.biases: dict[str, Tensor | None] = {}

    def added(self, role: str, hidden_states: Tensor) -> Tensor | None:
        """Project the inputs by a role's new weights."""
        if not self.dims(role):
            return None
        return project(hidden_states, self.weights[role], self.biases[role])

    def output(self, added: Tensor) -> Tensor:
        """Bring the values back by the output's new weights."""
        return gather(added, self.weights["output"])

    def dims(self, role: str) -> int:
        """How many dims a role gains."""
        return self.weights[role].shape[1] if role in self.weights else 0

    def tensors(self) -> list[Tensor]:
        """All weights and biases."""
        return [tensor for tensor in (*self.weights.values(), *self.biases.values()) if tensor is not None]

    def keep_in(self, attention: GrowableAttention) -> Widening:
        """Widen an attention module by these dims and write them there; `Widening.undo` reverts both."""
        widening = attention.widen(**{kind.width: self.dims(kind.shared) for kind in KINDS.values()})
        try:
            for role, weight in self.weights.items():
                attention.write(role, attention.width_of(role) - self.dims(role), weight, self.biases[role])
        except BaseException:
            widening.undo()
            raise
        return widening


def project(inputs: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """(batch, tokens, d) by weights (heads, n, d) and biases (heads, n) -> (batch, heads, tokens, n)."""
    bias = None if bias is None else bias.flatten()
    projected = nn.functional.linear(inputs.to(weight.dtype), weight.flatten(0, 1), bias)
    return projected.unflatten(-1, weight.shape[:2]).transpose(1, 2)


def gather(added: Tensor, weight: Tensor) -> Tensor:
    """(batch, tokens, H, n) by weights (H, n, d) -> (batch, tokens, d), in the dtype of what was added."""
    return (added.flatten(-2).to(weight.dtype) @ weight.flatten(0, 1)).to(added.dtype)


def set_extension(attention: GrowableAttention, extension: nn.Module | None) -> None:
    """Set or clear the extension; a module must leave `_modules` before None can take its name."""
    attention._modules.pop("extension", None)
    attention.extension = extension
