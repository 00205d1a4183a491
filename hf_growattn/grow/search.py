"""The search for the steps of a growth: ten evaluations of a few batches, however many batches there are."""

import math
from collections.abc import Callable

from ..measure.kinds import Kind
from .plan import worth_of
from .trial import Change, Trial

SMALLEST_FALL = 1e-7  # of the loss: below it, fp32 rounding hides an improvement
MOST_EVALUATIONS = 10  # of one growth, the pricing of a budget included
_AFTER_PRICING = 4  # of these: one kind alone, the other alone, and the steps of what was bought
_FIRST = 0.3  # the promise to begin with
_FACTOR = 3.0  # from one promise to the next; squared while none lowers the loss
_TILT = 1.4  # by which one kind's promise grows as the other's falls
_TRUSTED_RATIO = 0.1  # second order over first order of a step up to which the linear model is trusted at the start


class StepSearch:
    """Search for the steps with the lowest mean loss, forward passes only.

    A step is counted by its promise: the share of the loss by which it would fall if it went on falling as it begins
    to. So models, losses and kinds compare, and one promise for all kinds is a good start. A bracket by factors and a
    parabola find it; another one finds how much more of one kind, and less of the other, is better. The directions of
    either half of the batches are tried on the other half, so that no step is chosen for fitting what only these
    batches have.

    Args:
        trial: the changes, in place.
        measure: returns the mean loss of one half of the batches, 0 or 1, for the weights as they are.
        former: a search of the same growth with other numbers of dims. This one begins where that one ended, with what
            it left of the evaluations.
        loss_before: the loss without the changes, where it is known.

    Attributes:
        left: how many evaluations may still be spent.
        loss_before: the loss without the changes.
        promises: the best ones that were found, by kind; empty if no step lowers the loss.
        lowest: the loss at the best steps that were found; before a search, the loss without the changes.
        tried: the loss at every common promise that was tried, by the step of the first change.
    """

    def __init__(
        self,
        trial: Trial,
        measure: Callable[[int], float],
        former: "StepSearch | None" = None,
        loss_before: float = math.inf,
    ):
        self.trial, self.measure = trial, measure
        self.left = former.left if former else MOST_EVALUATIONS
        self.loss_before = former.loss_before if former else loss_before
        self.lowest = self.loss_before
        self.promises: dict[Kind, float] = {}
        self.tried: dict[float, float] = {}
        self._slopes: dict[Kind, float] = {}
        for change in trial.changes:
            kind = change.gradient.block.kind
            self._slopes[kind] = self._slopes.get(kind, 0.0) + change.slope
        self._aim: dict[Kind, float] = {}  # where the last parabola has its lowest point
        self._begin_with = {k: p for k, p in former._aim.items() if self._slopes.get(k, 0.0) > 0} if former else {}

    def run(self, spare: int = 0) -> tuple[list[float], float]:
        """Return the best step of each change and the loss there; steps of 0 and the loss before if none lowers it.

        Args:
            spare: evaluations to leave for a later search of fewer dims, which then begins at the best point that can
                be guessed.
        """
        self.left -= spare
        if math.isinf(self.loss_before):
            self.loss_before = self.loss_at([0.0] * len(self.trial.changes))
        loss = self.loss_before
        if self._begin_with and self.left and (found := self._loss_with(self._begin_with)) < loss:
            loss, self.promises = found, self._begin_with
        else:
            loss = self._together()
            for kind in list(self.promises)[1:]:
                loss = self._apart(kind, loss, try_lowest=not spare)
        self.left, self.lowest = self.left + spare, loss
        return self.steps_for(self.promises), loss

    def steps_for(self, promises: dict[Kind, float]) -> list[float]:
        """The step of each change for a promise of its kind; 0 for kinds that have none."""
        kinds = [change.gradient.block.kind for change in self.trial.changes]
        return [abs(self.loss_before) * promises[k] / self._slopes[k] if k in promises else 0.0 for k in kinds]

    def gain_alone(self, kind: Kind) -> float:
        """How far the loss falls by the best step of one kind without the others."""
        return self.loss_before - self._loss_with({kind: self.promises[kind]})

    def _alike(self, promise: float) -> dict[Kind, float]:
        """One promise for all kinds that promise anything."""
        return dict.fromkeys((kind for kind, slope in self._slopes.items() if slope > 0), promise)

    def _together(self) -> float:
        """Find the best promise that all kinds have in common, and return the loss there."""
        losses = {0.0: self.loss_before}

        def at(promise: float) -> float:
            if promise not in losses:
                promises = self._alike(promise)
                losses[promise] = self.tried[self.steps_for(promises)[0]] = self._loss_with(promises)
            return losses[promise]

        promise, self.promises = self._first(), {}
        tempting = promise > SMALLEST_FALL and any(self._alike(promise))
        while tempting and self.left and not at(promise) < self.loss_before:
            promise /= _FACTOR**2
            tempting = promise > SMALLEST_FALL
        if not losses.get(promise, math.inf) < self.loss_before:
            if tempting:  # out of evaluations: the check on all batches decides
                self.promises = self._alike(promise)
            return self.loss_before
        while (promise * _FACTOR in losses or self.left) and at(promise * _FACTOR) < losses[promise]:
            promise *= _FACTOR
        low = promise / _FACTOR if promise / _FACTOR in losses else 0.0
        three = low, promise, promise * _FACTOR
        lowest = _lowest([math.sqrt(p) for p in three], [losses.get(p, math.inf) for p in three]) ** 2
        if self.left and at(lowest) < losses[promise]:
            promise = lowest
        self.promises = self._aim = self._alike(promise)
        return losses[promise]

    def _first(self) -> float:
        """The promise to begin with, less where old dims move too far for the linear model."""
        steps = self.steps_for(self._alike(_FIRST))
        moved = (step * change.quadratic_ratio for step, change in zip(steps, self.trial.changes))
        furthest = max(moved, default=0.0)  # a budget may buy nothing
        return _FIRST * min(1.0, _TRUSTED_RATIO / furthest) if furthest > 0 else _FIRST

    def _apart(self, kind: Kind, loss: float, try_lowest: bool) -> float:
        """Find by which factor one kind's promise should fall as the others' grow, and return the loss there.

        Without `try_lowest` the lowest point of the parabola is noted for a later search, and not tried.
        """
        found, losses = self.promises, {1.0: loss}

        def tilted(factor: float) -> dict[Kind, float]:
            return {each: promise / factor if each is kind else promise * factor for each, promise in found.items()}

        def at(factor: float) -> float:
            if factor not in losses:
                losses[factor] = self._loss_with(tilted(factor))
            return losses[factor]

        best, ratio = 1.0, _TILT
        if self.left and not at(ratio) < loss:
            ratio = 1 / ratio
        while (best * ratio in losses or self.left) and at(best * ratio) < losses[best]:
            best *= ratio
        three = best / ratio, best, best * ratio
        lowest = math.exp(_lowest([math.log(f) for f in three], [losses.get(f, math.inf) for f in three]))
        self._aim = tilted(lowest)
        if try_lowest and self.left and at(lowest) < losses[best]:
            best = lowest
        self.promises = tilted(best)
        return losses[best]

    def _loss_with(self, promises: dict[Kind, float]) -> float:
        return self.loss_at(self.steps_for(promises))

    def loss_at(self, steps: list[float]) -> float:
        """Return the mean loss with these steps, one for each change; infinity if it is not finite."""
        self.left, total = self.left - 1, 0.0
        for half in (0, 1):
            self.trial.set_steps(steps, half)
            total += self.measure(1 - half) / 2
        return total if math.isfinite(total) else math.inf


def _lowest(places: list[float], losses: list[float]) -> float:
    """Where a parabola through three points is lowest; the middle one's place if it has no such point."""
    (low, middle, high), (first, second, third) = places, losses
    down, up = (second - first) / (middle - low), (third - second) / (high - middle)
    bend = (up - down) / (high - low)
    return (low + middle - down / bend) / 2 if 0 < bend < math.inf else middle


def prices_of(
    changes: list[Change], measure: Callable[[int], float], loss_before: float = math.inf
) -> tuple[list[float], StepSearch]:
    """Return what a unit of worth buys in each change's kind, and the search that found it.

    All candidates are tried together for a moment. What they gain is divided between the kinds by the Shapley value,
    the mean of what a kind adds first and what it adds last, and then among directions by their worth. Call inside
    `evaluation_mode`.
    """
    kept = [change for change in changes if change.dims]
    trial = Trial(kept)
    try:
        search = StepSearch(trial, measure, loss_before=loss_before)
        _, after = search.run(spare=_AFTER_PRICING)
        gains = {kind: search.gain_alone(kind) for kind in search.promises}
    finally:
        trial.drop()
    if len(gains) == 2:
        both, (first, second) = search.loss_before - after, gains.values()
        gains = dict(zip(gains, ((both + first - second) / 2, (both + second - first) / 2)))
    worth = dict.fromkeys(gains, 0.0)
    for change in kept:
        if (kind := change.gradient.block.kind) in worth:
            worth[kind] += worth_of(change.gradient)[: change.dims].sum().item()
    kinds = [change.gradient.block.kind for change in changes]
    return [gains[kind] / worth[kind] if worth.get(kind, 0.0) > 0 else 0.0 for kind in kinds], search
