"""Try new dims on a live model, then keep them as they are or drop them."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..growable.attention import GrowableAttention, set_trial
from ..measure import functional as F
from ..measure.gradients import Gradient
from ..measure.kinds import Kind
from ..measure.ranks import raise_on_all_ranks
from ..model.extra import Part


@dataclass
class Change:
    """What to do to one block.

    Attributes:
        gradient: what was measured there.
        dims: how many new dims to append.
        strength: share of each one's gain that held on unseen batches, and with which it is taken, (dims,), 0 to 1;
            with 0 a dim starts without effect.
        old_step: a step that old weights take along, see `old_dims.py`; None leaves them as they are.
    """

    gradient: Gradient
    dims: int
    strength: Tensor
    old_step: Any = None

    @property
    def slope(self) -> float:
        """First-order decrease of the loss per unit of step, on the batches that were measured."""
        new = (self.gradient.in_sample[: self.dims] * self.strength).sum().item()
        return new + (self.old_step.slope if self.old_step else 0.0)

    @property
    def quadratic_ratio(self) -> float:
        """`||dS_quad|| / ||dS_lin||` of a step of size 1, in proportion for others; new dims alone are linear."""
        return self.old_step.quadratic_ratio if self.old_step else 0.0


@torch.no_grad()
def write_factors(dims: Part | GrowableAttention, kind: Kind, stacked: Tensor, shared: Tensor) -> None:
    """Write both sides of a kind, (H, a, k) and (G, b, k), into a part, or into the old weights of an attention module.

    Old weights must be readable, and not sharded.
    """
    for role, factors in zip(kind.roles, (stacked, shared)):
        into = dims.weight_of(role)
        weight, bias = F.split_bias(factors, into.shape[-1])
        into.copy_(weight)
        into_bias = dims.bias_of(role)
        if bias is not None and into_bias is not None:
            into_bias.copy_(bias)


def read_factors(dims: Part | GrowableAttention, kind: Kind) -> tuple[Tensor, Tensor]:
    """The same of these dims as they are: stacked (H, a, k) and shared (G, b, k), with biases."""
    with torch.no_grad():
        stacked, shared = (F.join_bias(dims.weight_of(role), dims.bias_of(role)) for role in kind.roles)
    return stacked, shared


class Write:
    """The new weights of one block as a function of the step."""

    def __init__(self, change: Change):
        block, gradient = change.gradient.block, change.gradient
        self.change, self.block = change, block
        self.size = self._usual_size()
        every = ((gradient.u, gradient.sigma, gradient.v), *gradient.halves)
        # From both halves of the batches together, from the first and from the second.
        self.directions = [self._taken(*directions) for directions in every]
        # Of a step of size 1; for others the factors are only scaled.
        whitening = block.roots.stacked_whitening, block.roots.shared_whitening
        self.new = [self._factors(*directions, *whitening) for directions in self.directions]

    def _usual_size(self) -> Tensor:
        """The root mean square of the shared side's old weights; without them, of a usual start."""
        block = self.block
        if block.is_known:
            return block.old_factors()[1].square().mean().sqrt()
        return block.roots.like.new_tensor(block.shared_shape[1] ** -0.5)

    def _taken(self, u: Tensor, sigma: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        dims = self.change.dims
        return u[..., :dims], sigma[..., :dims] * self.change.strength, v[..., :dims]

    def _factors(
        self, u: Tensor, sigma: Tensor, v: Tensor, stacked_whitening: Tensor, shared_whitening: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Even factors, and which pairs are taken; of the others the shared side is a direction."""
        taken = sigma > 0
        sizes = torch.where(taken, sigma, 1.0)
        stacked, shared = F.step_factors(u, sizes, v, stacked_whitening, shared_whitening, self.block.heads)
        return stacked, shared, taken

    def new_factors(self, step: float, source: int) -> tuple[Tensor, Tensor]:
        """New columns of the stacked (H, a, p) and the shared side (G, b, p) for a step `gamma`.

        They are evenly split but for shared ones, which are as large as the old ones at least: as in LoRA, one side is
        never small, since where both are, training can move their product only slowly. The stacked side of a pair that
        is not taken is zero.
        """
        stacked, shared, taken = self.new[source]
        sizes = shared.square().mean(-2).sqrt()
        least = torch.where(sizes > 0, self.size / sizes, 0.0).clamp_min(torch.finfo(sizes.dtype).tiny)
        scale = torch.maximum(least, taken * step**0.5)
        return stacked * self._per_head(taken * step / scale), shared * scale.unsqueeze(-2)

    def _per_head(self, of_groups: Tensor) -> Tensor:
        """(G, p) to (H, 1, p)."""
        return of_groups.repeat_interleave(self.block.heads // len(of_groups), 0).unsqueeze(-2)

    def set_step(self, step: float, source: int, part: Part) -> None:
        """Write the new dims for a step into a part."""
        write_factors(part, self.block.kind, *self.new_factors(step, source))


class Trial:
    """All changes attached to the model as parts, without effect until `set_steps`.

    Attributes:
        parts: the new dims of each attention module that gains some.
    """

    def __init__(self, changes: list[Change], writer: Callable[[Change], Write] = Write):
        self.changes = changes
        self.writes: list[Write] = []
        self.parts: dict[GrowableAttention, Part] = {}
        dims: dict[GrowableAttention, dict[str, int]] = {}
        for change in changes:
            block = change.gradient.block
            dims.setdefault(block.attention, {})[block.kind.width] = change.dims
        with raise_on_all_ranks():
            self.writes = [writer(change) for change in changes]
            for attention, widths in dims.items():
                self.parts[attention] = attention.new_part(widths.get("qk_dims", 0), widths.get("v_dims", 0))
        for part in self.parts.values():
            part.requires_grad_(False)
        try:
            self.set_steps([0.0] * len(changes))
            self.attach()
        except BaseException:
            self.drop()
            raise

    def set_steps(self, steps: list[float], half: int | None = None) -> None:
        """Set the new dims for a step `gamma` of each change; zeros keep the function.

        `half` takes the directions that one half of the batches found by itself, 0 or 1; None takes those of both.
        """
        for write, step in zip(self.writes, steps):
            write.set_step(step, 0 if half is None else half + 1, self.parts[write.block.attention])

    def attach(self) -> None:
        """Let the model compute with the new dims."""
        for attention, part in self.parts.items():
            set_trial(attention, part)

    def detach(self) -> None:
        """Let the model compute without them."""
        for attention in self.parts:
            set_trial(attention, None)

    def commit(self, optimizers: list[torch.optim.Optimizer]) -> None:
        """Write what does not live in the new dims; a plain trial has nothing such."""

    def drop(self) -> None:
        """Take everything back."""
        self.detach()
        self.writes = []

    def added_parameters(self) -> int:
        """Number of weights that keeping adds."""
        return sum(parameter.numel() for part in self.parts.values() for parameter in part.parameters())


def parameters_of_a_dim(attention: GrowableAttention, kind: Kind) -> int:
    """Weights that one more dim of every head adds."""
    return sum(attention.heads_of(role) * attention.features_of(role) for role in kind.roles)
