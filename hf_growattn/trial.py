"""Try a growth on a living model: new dims in place, a search for the step, and the way back."""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from . import functional as F
from .attention import GrowableAttention
from .gradients import ExistingStep, Gradient
from .probe import PATTERNS, backward
from .ranks import sum_over_ranks, together, total
from .widths import Resize, Widening

_MOST_STEPS = 200  # of one direction of the search: more than the exponents of fp32 span
SMALLEST_FALL = 1e-7  # of the loss: below it, fp32 cannot tell an improvement from rounding
STEEPNESS_BATCHES = 4  # the steepest of a few: training's next batches are others
_TRUSTED_RATIO = 0.1  # second order over first order of a step up to which the linear model is trusted at the start


@dataclass
class Change:
    """What to do to one block.

    Attributes:
        gradient: what was measured there.
        dims: how many new dims to append.
        strength: share of each one's gain that held on unseen batches, and with which it is taken, (dims,), 0 to 1;
            with 0 a dim starts without effect.
        existing: the step of the existing factors, or None to leave them.
        refactor: write the best factors of old and new together instead of appending the new ones.
    """

    gradient: Gradient
    dims: int
    strength: Tensor
    existing: ExistingStep | None = None
    refactor: bool = False

    @property
    def slope(self) -> float:
        """First-order decrease of the loss per unit of step, on the batches that were measured."""
        new = (self.gradient.in_sample[: self.dims] * self.strength).sum().item()
        return new + (self.existing.slope if self.existing else 0.0)

    @property
    def quadratic_ratio(self) -> float:
        """`||dS_quad|| / ||dS_lin||` of a step of size 1, in proportion for others; new dims alone are linear."""
        return self.existing.quadratic_ratio if self.existing else 0.0


class _Write:
    """The weights of one block as a function of the step; the live ones are those of the widened module."""

    def __init__(self, change: Change):
        block, gradient = change.gradient.block, change.gradient
        self.change, self.block = change, block
        self.moves_old_dims = change.refactor or change.existing is not None
        self.old = block.old_factors()
        if self.moves_old_dims:  # the live ones may be written over
            self.old = tuple(side.clone() for side in self.old)
        self.whitened = block.whitened_factors() if change.refactor else None
        every = ((gradient.u, gradient.sigma, gradient.v), *gradient.halves)
        # From both halves of the batches together, from the first and from the second.
        self.directions = [self._taken(*directions) for directions in every]
        # Of a step of size 1; for others the factors are only scaled.
        self.new = [] if change.refactor else [self._factors(*directions) for directions in self.directions]

    def _taken(self, u: Tensor, sigma: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        dims = self.change.dims
        return u[..., :dims], sigma[..., :dims] * self.change.strength, v[..., :dims]

    def _factors(self, u: Tensor, sigma: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Even factors, and which pairs are taken; of the others the shared side is a direction."""
        roots, taken = self.block.roots, sigma > 0
        sizes = torch.where(taken, sigma, 1.0)
        stacked, shared = F.step_factors(u, sizes, v, roots.stacked_whitening, roots.shared_whitening, self.block.heads)
        return stacked, shared, taken

    def _split(self, step: float, source: int) -> tuple[Tensor, Tensor]:
        """New columns for a step, evenly split but for shared ones, which are as large as the existing ones at least.

        As in LoRA, one side is never small: where both are, training can move their product only slowly. The stacked
        side of a pair that is not taken is zero.
        """
        stacked, shared, taken = self.new[source]
        size, sizes = self.old[1].square().mean().sqrt(), shared.square().mean(-2).sqrt()
        least = torch.where(sizes > 0, size / sizes, 0.0).clamp_min(torch.finfo(sizes.dtype).tiny)
        scale = torch.maximum(least, taken * step**0.5)
        return stacked * self._per_head(taken * step / scale), shared * scale.unsqueeze(-2)

    def _per_head(self, of_groups: Tensor) -> Tensor:
        """(G, p) to (H, 1, p)."""
        return of_groups.repeat_interleave(self.block.heads // len(of_groups), 0).unsqueeze(-2)

    def at(self, step: float, source: int) -> tuple[Tensor, Tensor]:
        """All columns of the stacked (H, a, k + p) and the shared side (G, b, k + p) for a step `gamma`."""
        if self.change.refactor:
            return self._refactored(step, *self.directions[source])
        old_stacked, old_shared = self.old
        if self.change.existing is not None and step > 0:
            d_stacked, d_shared = self._unwhitened(self.change.existing.stacked, self.change.existing.shared)
            old_stacked, old_shared = old_stacked + step * d_stacked, old_shared + step * d_shared
        new_stacked, new_shared = self._split(step, source)
        return torch.cat((old_stacked, new_stacked), -1), torch.cat((old_shared, new_shared), -1)

    def _refactored(self, step: float, u: Tensor, sigma: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        stacked, shared = self.whitened
        left, right = [stacked, -step * u * sigma.unsqueeze(-2)], [shared, v]
        if self.change.existing is not None:
            left += [step * self.change.existing.stacked, stacked]
            right += [shared, step * self.change.existing.shared]
        rank = stacked.shape[-1] + self.change.dims
        return self._unwhitened(*F.balanced_factors(torch.cat(left, -1), torch.cat(right, -1), rank))

    def _unwhitened(self, stacked: Tensor, shared: Tensor) -> tuple[Tensor, Tensor]:
        roots, heads = self.block.roots, self.block.heads
        return F.apply_root(roots.stacked_whitening, F.unstack_groups(stacked, heads)), roots.shared_whitening @ shared

    def take(self, step: float, source: int) -> None:
        """Write the weights; those of old dims only where they move."""
        kind, attention = self.block.kind, self.block.attention
        touched = slice(0 if self.moves_old_dims else self.old[0].shape[-1], None)
        for role, factors in zip((kind.stacked, kind.shared), self.at(step, source)):
            live = attention.weight_of(role)
            weight, bias = F.split_bias(factors, live.shape[-1])
            live[:, touched] = weight[:, touched].to(live.dtype)
            if bias is not None:
                attention.bias_of(role)[:, touched] = bias[:, touched].to(live.dtype)


class Trial:
    """All changes in place, without effect until `take` writes the steps; `undo` puts the old weights back."""

    def __init__(self, changes: list[Change]):
        self.changes = changes
        self.writes: list[_Write] = []
        self.widenings: list[Widening] = []
        try:
            with together():
                self.writes = [_Write(change) for change in changes]
                by_attention: dict[GrowableAttention, dict[str, int]] = {}
                for change in changes:
                    block = change.gradient.block
                    width = "qk_dims" if block.kind is PATTERNS else "v_dims"
                    by_attention.setdefault(block.attention, {})[width] = change.dims
                for attention, dims in by_attention.items():
                    self.widenings.append(attention.widen(**dims))
        except BaseException:
            self.undo()
            raise

    def take(self, steps: list[float], half: int | None = None) -> None:
        """Write the weights for a step `gamma` of each change; zeros keep the function.

        Args:
            steps: one for each change; 0 leaves it without effect.
            half: take the directions that one half of the batches found by itself, 0 or 1; None takes those of both.
        """
        for write, step in zip(self.writes, steps):
            write.take(step, 0 if half is None else half + 1)

    def undo(self) -> None:
        """Put the very same old parameters back, with the values they had."""
        if len(self.widenings) == len({write.block.attention for write in self.writes}):
            self.take([0.0] * len(self.writes))  # parameters that did not change their size hold their old values
        for widening in self.widenings:
            widening.undo()
        self.widenings = []

    def resizes(self) -> list[Resize]:
        """Every parameter that changed its size; those that were factored anew carry no momentum over."""
        refactored = {write.block.attention for write in self.writes if write.change.refactor}
        return [
            replace(resize, kept=resize.kept[:0], positions=resize.positions[:0])
            if widening.attention in refactored
            else resize
            for widening in self.widenings
            for resize in widening.resizes
        ]

    def added_parameters(self) -> int:
        """Number of weights that the widening added."""
        return sum(resize.new.numel() - resize.old.numel() for resize in self.resizes())


def measure_steepness(
    model: nn.Module, resizes: list[Resize], batches: list[dict], tick: Callable[[], None] = lambda: None
) -> None:
    """Note in each resize how steep the loss is along new entries, compared to old ones, with the weights as they are.

    Only ratios are kept: the optimizer's state knows clipped and accumulated gradients. Batches that the ranks hold at
    the same place count as one, as in training. Call inside `undisturbed`.

    Args:
        model: the grown model.
        resizes: of parameters whose optimizer follows the size of gradients.
        batches: this rank's; the first `STEEPNESS_BATCHES` of them are used.
        tick: called after each batch.
    """
    if not resizes:
        return
    squares: list[list[Tensor]] = [[] for _ in resizes]
    for resize in resizes:
        resize.new.requires_grad_(True)
    for index in range(STEEPNESS_BATCHES):
        if not any(total(index < len(batches))):
            break
        backward(model, batches[index : index + 1], tick)
        for resize, of_batches in zip(resizes, squares):
            new = resize.new
            gradient = torch.zeros_like(new, dtype=torch.float32) if new.grad is None else new.grad.float()
            sum_over_ranks(gradient)
            of_batches.append(gradient.square().transpose(0, resize.axis).reshape(new.shape[resize.axis], -1).sum(1))
    for resize, of_batches in zip(resizes, squares):
        square = torch.stack(of_batches)
        ratio = square.amax(0) / square[:, resize.positions].mean()
        resize.steepness = ratio.nan_to_num(1.0, posinf=1.0)  # no old entry to compare with, or no gradient there


class StepSearch:
    """Geometric search for the steps with the lowest mean loss, forward passes only.

    The directions of either half of the batches are tried on the other half, so that no step is chosen for fitting what
    only these batches have. First one common step for all changes, then one factor for each kind, then, where asked,
    one for each change.

    Args:
        trial: the changes, in place.
        measure: returns the mean loss of one half of the batches, 0 or 1, for the weights as they are.

    Attributes:
        loss_before: the loss without the changes.
        tried: the loss at every common step that was tried, by that of the first change where kinds differ.
    """

    def __init__(self, trial: Trial, measure: Callable[[int], float]):
        self.trial, self.measure = trial, measure
        self.tried: dict[float, float] = {}

    def run(self, refine: bool = False, near: list[float] | None = None) -> tuple[list[float], float]:
        """Return the best step of each change and the loss there; steps of 0 and the loss before if none lowers it.

        Args:
            refine: search a step for each change, after those for each kind.
            near: steps of a similar growth, to start from if they lower the loss.
        """
        changes = self.trial.changes
        self.loss_before = self.loss_at([0.0] * len(changes))
        close = near is not None and (loss := self.loss_at(near)) < self.loss_before
        if close:
            steps, loss = self._scaled(near, loss, [True] * len(changes), (2.0, 2.0**0.5))
        else:
            steps, loss = self._together()
        kinds = list(dict.fromkeys(change.gradient.block.kind for change in changes))
        groups = (
            [[change.gradient.block.kind is kind for change in changes] for kind in kinds] if len(kinds) > 1 else []
        )
        if refine:
            groups += [[change is other for change in changes] for other in changes]
        for group in groups if any(steps) else []:
            steps, loss = self._scaled(steps, loss, group, (2.0,) if close and not refine else (4.0, 2.0))
        return steps, loss

    def _together(self) -> tuple[list[float], float]:
        """The best step that all changes have in common, and the loss there."""
        changes = self.trial.changes
        slope = sum(change.slope for change in changes)
        none = [0.0] * len(changes), self.loss_before
        if not slope > 0:
            return none
        step = 0.01 * abs(self.loss_before) / slope  # promises 1 % of the loss
        ratio = max(change.quadratic_ratio for change in changes)
        if step * ratio > _TRUSTED_RATIO:
            step = _TRUSTED_RATIO / ratio
        while not self._common(step) < self.loss_before:
            step /= 4
            if step * slope < SMALLEST_FALL * abs(self.loss_before):
                return none
        step = _descend(self._common, step, (4.0, 2.0, 2.0**0.5))
        return [step] * len(changes), self.tried[step]

    def _common(self, step: float) -> float:
        if step not in self.tried:
            self.tried[step] = self.loss_at([step] * len(self.trial.changes))
        return self.tried[step]

    def _scaled(
        self, steps: list[float], loss: float, group: list[bool], factors: tuple[float, ...]
    ) -> tuple[list[float], float]:
        """Multiply the steps of a group of changes by the factor that lowers the loss most."""
        losses = {1.0: loss}

        def scaled(factor: float) -> list[float]:
            return [step * factor if inside else step for step, inside in zip(steps, group)]

        def scaled_loss(factor: float) -> float:
            if factor not in losses:
                losses[factor] = self.loss_at(scaled(factor))
                if all(group):
                    self.tried[steps[0] * factor] = losses[factor]
            return losses[factor]

        best = _descend(scaled_loss, 1.0, factors)
        return scaled(best), losses[best]

    def loss_at(self, steps: list[float]) -> float:
        """Return the mean loss with these steps, one for each change; infinity if it is not finite."""
        total = 0.0
        for half in (0, 1):
            self.trial.take(steps, half)
            total += self.measure(1 - half) / 2
        return total if math.isfinite(total) else math.inf


def _descend(loss_at: Callable[[float], float], step: float, factors: tuple[float, ...]) -> float:
    """Multiply the step by each factor, then divide it, for as long as that lowers the loss; no grid ends."""
    for factor in factors:
        for ratio in (factor, 1 / factor):
            for _ in range(_MOST_STEPS):
                if not loss_at(step * ratio) < loss_at(step):
                    break
                step *= ratio
    return step
