"""Extra dims of an attention module, kept apart from its weights: probes, trials and adapters.

`GrowableAttention.extension` holds them. They lengthen queries, keys and values for as long as they are set, and taking
them off again leaves the module as it was, to the bit.
"""

from typing import Any

import torch
from torch import Tensor, nn

from ..growable.attention import GrowableAttention, Widening
from ..growable.sharding import sum_of_parts
from . import functional as F
from .kinds import KINDS, MESSAGES, PATTERNS


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


class ExtraDims(Extension):
    """New dims of every head, as a growth tries them.

    Args:
        mesh: the processes that heads are spread over, see `GrowableAttention.heads_mesh`. Each holds all new dims.

    Attributes:
        weights: by role, (heads of the role, n, d); the output's in the same layout as the others'.
        biases: by role, (heads, n), for those roles whose projection has a bias.
    """

    def __init__(self, mesh: Any = None):
        super().__init__()
        self.mesh = mesh
        self.weights: dict[str, Tensor] = {}
        self.biases: dict[str, Tensor | None] = {}

    def added(self, role: str, hidden_states: Tensor) -> Tensor | None:
        """Project the inputs by a role's new weights."""
        if not self.dims(role):
            return None
        weight, bias = own_heads(self.weights[role], self.mesh), self.biases[role]
        return project(hidden_states, weight, None if bias is None else own_heads(bias, self.mesh))

    def output(self, added: Tensor) -> Tensor:
        """Bring the values back by the output's new weights."""
        return sum_of_parts(gather(added, own_heads(self.weights["output"], self.mesh)), self.mesh)

    def dims(self, role: str) -> int:
        """How many dims a role gains."""
        return self.weights[role].shape[1] if role in self.weights else 0

    def tensors(self) -> list[Tensor]:
        """All weights and biases."""
        return [tensor for tensor in (*self.weights.values(), *self.biases.values()) if tensor is not None]

    def write_into(self, attention: GrowableAttention) -> Widening:
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


class _OwnHeads(torch.autograd.Function):
    """Some of the heads, and on the way back zeros for the others.

    Sums over all processes count each batch once for each of them, so each head's gradient counts that often, too.
    """

    @staticmethod
    def forward(ctx, of_heads: Tensor, part: int, parts: int) -> Tensor:
        ctx.shape, ctx.parts = of_heads.shape, parts
        ctx.own = slice(part * len(of_heads) // parts, (part + 1) * len(of_heads) // parts)
        return of_heads[ctx.own]

    @staticmethod
    def backward(ctx, gradient: Tensor):
        every = gradient.new_zeros(ctx.shape)
        every[ctx.own] = ctx.parts * gradient
        return every, None, None


def own_heads(of_heads: Tensor, mesh: Any) -> Tensor:
    """What is there for each head, (heads, ...), for those that this process of a mesh computes; all without one."""
    return of_heads if mesh is None else _OwnHeads.apply(of_heads, mesh.get_local_rank(), mesh.size())


def set_extension(attention: GrowableAttention, extension: nn.Module | None) -> None:
    """Set or clear the extension; a module must leave `_modules` before None can take its name."""
    attention._modules.pop("extension", None)
    attention.extension = extension


# Probes: temporary dims whose ordinary gradient is the statistic that growth needs.
#
# Appending dims whose query weights are zero changes no logit, yet the gradient of those weights is `T Omega` if the
# matching keys are `X Omega`. The mirror image, zero keys and fixed queries `X Psi`, gives `T^T Psi` in the same pass.
# Messages are read the same way: values `X Omega` against output weights of zero, zero values against output weights
# `Psi`. No T x T and no d x d matrix per head is formed, and any attention implementation, mask and precision works,
# since a probe is nothing but a few more dims.


class _ZeroProjection(torch.autograd.Function):
    """`inputs @ weight` for a weight of zeros: nothing to compute forward, and the gradient of the weight backward."""

    @staticmethod
    def forward(ctx, inputs: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(inputs)
        return inputs.new_zeros(()).expand(*inputs.shape[:-1], weight.shape[-1])

    @staticmethod
    def backward(ctx, gradient: Tensor):
        (inputs,) = ctx.saved_tensors
        return None, inputs.flatten(0, -2).T @ gradient.flatten(0, -2)


class KindProbe(nn.Module):
    """The fixed and the zero weights that probe one kind of bottleneck of one attention module.

    Args:
        shared_probe: `Omega`, (G, b, r).
        stacked_probe: `Psi`, (H, a, r'); None probes one side only.
        heads, stacked_features: `H` and `a`, the shape of the zero weights of the stacked side.
        mesh: the processes that heads are spread over, as for `ExtraDims`.

    Attributes:
        zero_stacked: (H, a, r); after a backward pass its gradient is `T Omega`.
        zero_shared: (G, b, r'); its gradient is `T^T Psi`, summed over the heads of each group.
    """

    def __init__(
        self,
        shared_probe: Tensor,
        stacked_probe: Tensor | None,
        heads: int,
        stacked_features: int,
        mesh: Any = None,
    ):
        super().__init__()
        self.mesh = mesh
        self.shared_probe = shared_probe
        self.stacked_probe = (
            shared_probe.new_zeros(heads, stacked_features, 0) if stacked_probe is None else stacked_probe
        )
        zero = shared_probe.new_zeros(())  # one number in memory stands for all; the gradients have their full size
        self.zero_stacked = nn.Parameter(zero.expand(heads, stacked_features, shared_probe.shape[-1]))
        rank = self.stacked_probe.shape[-1]
        self.zero_shared = nn.Parameter(zero.expand(*shared_probe.shape[:2], rank), requires_grad=rank > 0)

    def stacked(self, inputs: Tensor) -> Tensor:
        """Project inputs by `[zeros | Psi]`: (batch, tokens, d) -> (batch, H, tokens, r + r')."""
        zero, probe = (own_heads(weight, self.mesh) for weight in (self.zero_stacked, self.stacked_probe))
        return torch.cat((_nothing(inputs, zero), _projected(inputs, probe)), dim=-1)

    def shared(self, inputs: Tensor) -> Tensor:
        """Project inputs by `[Omega | zeros]`: (batch, tokens, d) -> (batch, G, tokens, r + r')."""
        probe, zero = (own_heads(weight, self.mesh) for weight in (self.shared_probe, self.zero_shared))
        return torch.cat((_projected(inputs, probe), _nothing(inputs, zero)), dim=-1)

    def gather(self, added: Tensor) -> Tensor:
        """Bring attended values back by `[zeros | Psi]`: (batch, tokens, H, r + r') -> (batch, tokens, a)."""
        rank = self.zero_stacked.shape[-1]
        zero, probe = (own_heads(weight, self.mesh).mT for weight in (self.zero_stacked, self.stacked_probe))
        nothing = _ZeroProjection.apply(added[..., :rank].flatten(-2).detach(), zero.flatten(0, 1))  # (H r, a)
        return nothing + gather(added[..., rank:], probe)


def _projected(inputs: Tensor, factors: Tensor) -> Tensor:
    """(batch, tokens, d) times (heads, d or d + 1, r), whose last row is a bias -> (batch, heads, tokens, r)."""
    return project(inputs, *F.split_bias(factors, inputs.shape[-1]))


def _nothing(inputs: Tensor, zeros: Tensor) -> Tensor:
    """The same times zeros, of which the backward pass wants the gradient."""
    biased = F.augment(inputs) if zeros.shape[1] > inputs.shape[-1] else inputs
    projected = _ZeroProjection.apply(biased, zeros.transpose(0, 1).flatten(1))
    return projected.unflatten(-1, zeros.shape[::2]).transpose(1, 2)


class Probe(Extension):
    """A probe of an attention module's patterns, of its messages, or of both."""

    def __init__(self, patterns: KindProbe | None = None, messages: KindProbe | None = None):
        super().__init__()
        self.patterns, self.messages = patterns, messages

    def forward(self, hidden_states: Tensor, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, ...]:
        """Lengthen queries, keys and values by what probes them, in the statistics' precision."""
        with torch.autocast(hidden_states.device.type, enabled=False):
            inputs = hidden_states.detach().to(next(self.parameters()).dtype)
            return super().forward(inputs, query, key, value)

    def added(self, role: str, hidden_states: Tensor) -> Tensor | None:
        """Project the inputs by what probes a role."""
        probe = self.messages if role == MESSAGES.shared else self.patterns
        if probe is None:
            return None
        return probe.stacked(hidden_states) if role == PATTERNS.stacked else probe.shared(hidden_states)

    def output(self, added: Tensor) -> Tensor:
        """What the added value dims contribute, all of it zero: (batch, tokens, H, n) -> (batch, tokens, d)."""
        assert self.messages is not None  # nothing else adds value dims
        with torch.autocast(added.device.type, enabled=False):
            return self.messages.gather(added.to(self.messages.shared_probe.dtype)).to(added.dtype)
