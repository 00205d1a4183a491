"""Probes: temporary dims whose ordinary gradient is the statistic that growth needs.

Appending dims whose query weights are zero changes no logit, yet the gradient of those weights is `T Omega` if the
matching keys are `X Omega`. The mirror image, zero keys and fixed queries `X Psi`, gives `T^T Psi` in the same pass.
Messages are read the same way: values `X Omega` against output weights of zero, zero values against output weights
`Psi`. No T x T and no d x d matrix per head is formed, and any attention implementation, mask and precision works,
since a probe is nothing but a few more dims.
"""

import torch
from torch import Tensor, nn

from . import functional as F
from .extension import Extension
from .kinds import MESSAGES, PATTERNS


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
        self.zero_shared = nn.Parameter(zero.expand(*shared_probe.shape[:2], rank), requires_grad=rank > 0)

    def stacked(self, inputs: Tensor) -> Tensor:
        """Project inputs by `[zeros | Psi]`: (batch, tokens, d) -> (batch, H, tokens, r + r')."""
        return torch.cat((_by_head(inputs, self.zero_stacked), _by_head(inputs, self.stacked_probe)), dim=-1)

    def shared(self, inputs: Tensor) -> Tensor:
        """Project inputs by `[Omega | zeros]`: (batch, tokens, d) -> (batch, G, tokens, r + r')."""
        return torch.cat((_by_head(inputs, self.shared_probe), _by_head(inputs, self.zero_shared)), dim=-1)

    def gather(self, added: Tensor) -> Tensor:
        """Bring attended values back by `[zeros | Psi]`: (batch, tokens, H, r + r') -> (batch, tokens, a)."""
        rank = self.zero_stacked.shape[-1]
        zero = self.zero_stacked.transpose(-1, -2).flatten(0, 1)  # (H r, a)
        fixed = self.stacked_probe.transpose(-1, -2).flatten(0, 1)
        return (
            _ZeroProjection.apply(added[..., :rank].flatten(-2).detach(), zero) + added[..., rank:].flatten(-2) @ fixed
        )


def _by_head(inputs: Tensor, factors: Tensor) -> Tensor:
    """(batch, tokens, d) times (heads, d or d + 1, r), whose last row is a bias -> (batch, heads, tokens, r)."""
    heads, features, rank = factors.shape
    weight = factors.transpose(0, 1).flatten(1)  # (d or d + 1, heads r)
    if factors.requires_grad:
        biased = F.augment(inputs) if features > inputs.shape[-1] else inputs
        projected = _ZeroProjection.apply(biased, weight)
    else:
        projected = inputs @ weight[: inputs.shape[-1]]
        if features > inputs.shape[-1]:
            projected = projected + weight[-1]
    return projected.unflatten(-1, (heads, rank)).transpose(1, 2)


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
