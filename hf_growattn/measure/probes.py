"""Probes: a part of new dims whose ordinary gradient is the statistic that growth needs.

Appending dims whose query weights are zero changes no logit, yet the gradient of those weights is `T Omega` if the
matching keys are `X Omega`. The mirror image, zero keys and fixed queries `X Psi`, gives `T^T Psi` in the same pass.
Messages are read the same way: values `X Omega` against output weights of zero, zero values against output weights
`Psi`. No T x T and no d x d matrix per head is formed, and any attention implementation, mask and precision works,
since a probe is nothing but a few more dims.
"""

import torch
from torch import Tensor, nn

from ..model.extra import HeadShape
from . import functional as F


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

    Attributes:
        zero_stacked: (H, a, r); after a backward pass its gradient is `T Omega`.
        zero_shared: (G, b, r'); its gradient is `T^T Psi`, summed over the heads of each group.
    """

    def __init__(self, shared_probe: Tensor, stacked_probe: Tensor | None, heads: int, stacked_features: int):
        super().__init__()
        self.shared_probe = shared_probe
        self.stacked_probe = (
            shared_probe.new_zeros(heads, stacked_features, 0) if stacked_probe is None else stacked_probe
        )
        zero = shared_probe.new_zeros(())  # one number in memory stands for all; the gradients have their full size
        self.zero_stacked = nn.Parameter(zero.expand(heads, stacked_features, shared_probe.shape[-1]))
        rank = self.stacked_probe.shape[-1]
        self.dims = shared_probe.shape[-1] + rank
        self.zero_shared = nn.Parameter(zero.expand(*shared_probe.shape[:2], rank), requires_grad=rank > 0)

    def stacked(self, inputs: Tensor) -> Tensor:
        """Project inputs by `[zeros | Psi]`: (batch, tokens, d) -> (batch, H, tokens, r + r')."""
        return torch.cat((_nothing(inputs, self.zero_stacked), _projected(inputs, self.stacked_probe)), dim=-1)

    def shared(self, inputs: Tensor) -> Tensor:
        """Project inputs by `[Omega | zeros]`: (batch, tokens, d) -> (batch, G, tokens, r + r')."""
        return torch.cat((_projected(inputs, self.shared_probe), _nothing(inputs, self.zero_shared)), dim=-1)

    def gather(self, added: Tensor) -> Tensor:
        """Bring attended values back by `[zeros | Psi]`: (batch, tokens, H, r + r') -> (batch, tokens, a)."""
        rank = self.zero_stacked.shape[-1]
        zero, probe = self.zero_stacked.mT, self.stacked_probe.mT
        nothing = _ZeroProjection.apply(added[..., :rank].flatten(-2).detach(), zero.flatten(0, 1))  # (H r, a)
        return nothing + added[..., rank:].flatten(-2) @ probe.flatten(0, 1)


def _projected(inputs: Tensor, factors: Tensor) -> Tensor:
    """(batch, tokens, d) times (heads, d or d + 1, r), whose last row is a bias -> (batch, heads, tokens, r)."""
    weight, bias = F.split_bias(factors, inputs.shape[-1])
    projected = nn.functional.linear(inputs, weight.flatten(0, 1), None if bias is None else bias.flatten())
    return projected.unflatten(-1, weight.shape[:2]).transpose(1, 2)


def _nothing(inputs: Tensor, zeros: Tensor) -> Tensor:
    """The same times zeros, of which the backward pass wants the gradient."""
    biased = F.augment(inputs) if zeros.shape[1] > inputs.shape[-1] else inputs
    projected = _ZeroProjection.apply(biased, zeros.transpose(0, 1).flatten(1))
    return projected.unflatten(-1, zeros.shape[::2]).transpose(1, 2)


class Probe(nn.Module):
    """A part that probes an attention module's patterns, its messages, or both, in the statistics' precision."""

    def __init__(self, shape: HeadShape, patterns: KindProbe | None = None, messages: KindProbe | None = None):
        super().__init__()
        self.shape, self.patterns, self.messages = shape, patterns, messages
        self.qk_dims = patterns.dims if patterns else 0
        self.v_dims = messages.dims if messages else 0

    def inside(self, hidden_states: Tensor, key_value_states: Tensor | None = None) -> tuple[Tensor, ...]:
        """Queries, keys and values that probe: (batch, tokens, d) -> (batch, heads, tokens, dims) each."""
        with torch.autocast(hidden_states.device.type, enabled=False):
            inputs = hidden_states.detach().to(next(self.parameters()).dtype)
            query = key = None
            if self.patterns is not None:
                query, key = self.patterns.stacked(inputs), self.patterns.shared(inputs)
            value = None if self.messages is None else self.messages.shared(inputs)

            def none(heads: int) -> Tensor:
                return inputs.new_zeros(len(inputs), heads, inputs.shape[1], 0)

            groups = self.shape.num_key_value_heads
            return (
                none(self.shape.num_heads) if query is None else query,
                none(groups) if key is None else key,
                none(groups) if value is None else value,
            )

    def outside(self, read: Tensor) -> Tensor:
        """What the probing values add, all of it zero: (batch, tokens, H, n) -> (batch, tokens, d)."""
        assert self.messages is not None  # nothing else adds value dims
        with torch.autocast(read.device.type, enabled=False):
            return self.messages.gather(read.to(self.messages.shared_probe.dtype))
