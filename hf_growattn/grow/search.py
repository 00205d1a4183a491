"""The search for the steps of a growth: ten evaluations of a few batches, however many batches there are."""

import math
from collections.abc import Callable

from ..measure.kinds import Kind
from .plan import worth_of
from .trial import Change, Trial

SMALLEST_FALL = 1e-7  # of the loss: below it, fp32 cannot tell an improvement from rounding
MOST_EVALUATIONS = 10  # of one growth, the pricing of a budget included
_AFTER_PRICING = 5  # of these: one kind alone, the other alone, and the steps of what was bought
_FIRST = 0.1  # the promise to begin with
_FACTOR = 4.0  # from one promise to the next; squared where the first ones are far off
_APART = 3.0  # from one promise of a kind to the next
_TRUSTED_RATIO = 0.1  # second order over first order of a step up to which the linear model is trusted at the start


class StepSearch:
    """Search for the steps with the lowest mean loss, forward passes only.

    A step is counted by its promise: the share of the loss by which it would fall if it went on falling as it begins
    to. So models, losses and kinds compare, and one promise for all kinds is a good start. A bracket by factors and a
    parabola find it; then each kind finds its own. The directions of either half of the batches are tried on the other
    half, so that no step is chosen for fitting what only these batches have.

    Args:
        trial: the changes, in place.
        measure: returns the mean loss of one half of the batches, 0 or 1, for the weights as they are.
        former: a search of the same growth with other numbers of dims. This one begins where that one ended, with what
            it left of the evaluations.

    Attributes:
        left: how many evaluations may still be spent.
        loss_before: the loss without the changes.
        promises: the best ones that were found, by kind; empty if no step lowers the loss.
        tried: the loss at every common promise that was tried, by the step of the first change.
    """

    def __init__(self, trial: Trial, measure: Callable[[int], float], former: "StepSearch | None" = None):
        self.trial, self.measure = trial, measure
        self.left = former.left if former else MOST_EVALUATIONS
        self.loss_before = former.loss_before if former else math.inf
        self.promises: dict[Kind, float] = {}
        self.tried: dict[float, float] = {}
        self._slopes: dict[Kind, float] = {}
        for change in trial.changes:
            kind = change.gradient.block.kind
            self._slopes[kind] = self._slopes.get(kind, 0.0) + change.slope
        self._begin_with: list[dict[Kind, float]] = []
        if former and former.promises:  # of fewer dims, the same step promises less: both are tried
            same = {kind: promise for kind, promise in former.promises.items() if self._slopes.get(kind, 0.0) > 0}
            self._begin_with = [{k: p * self._slopes[k] / former._slopes[k] for k, p in same.items()}, same]

    def run(self, spare: int = 0) -> tuple[list[float], float]:
        """Return the best step of each change and the loss there; steps of 0 and the loss before if none lowers it.

        Args:
            spare: evaluations to leave for others; with any, all kinds keep one promise.
        """
        self.left -= spare
        if math.isinf(self.loss_before):
            self.loss_before = self.loss_at([0.0] * len(self.trial.changes))
        loss = self.loss_before
        for promises in self._begin_with:
            if self.left and (found := self._loss_with(promises)) < loss:
                loss, self.promises = found, promises
        if not self.promises:
            loss = self._together()
        for kind in list(self.promises)[1:] if not spare else ():
            loss = self._apart(kind, loss)
        self.left += spare
        return self.steps_for(self.promises), loss

    def steps_for(self, promises: dict[Kind, float]) -> list[float]:
        """The step of each change for a promise of its kind; 0 for kinds that have none."""
        kinds = [change.gradient.block.kind for change in self.trial.changes]
        return [abs(self.loss_before) * promises[k] / self._slopes[k] if k in promises else 0.0 for k in kinds]

    def gain_alone(self, kind: Kind) -> float:
        """How far the loss falls by the best step of one kind without the others."""
        return self.loss_before - self._loss_with({kind: self.promises[kind]})

    def _together(self) -> float:
        """Find the best promise that all kinds have in common, and return the loss there."""
        losses: dict[float, float] = {}
        kinds = [kind for kind, slope in self._slopes.items() if slope > 0]

        def at(promise: float) -> float:
            if promise not in losses:
                promises = dict.fromkeys(kinds, promise)
                losses[promise] = self.tried[self.steps_for(promises)[0]] = self._loss_with(promises)
            return losses[promise]

        promise, self.promises = self._first(kinds), {}
        while kinds and self.left and promise > SMALLEST_FALL and not at(promise) < self.loss_before:
            promise /= _FACTOR**2
        if not losses.get(promise, math.inf) < self.loss_before:
            if kinds and promise > SMALLEST_FALL:  # out of evaluations: the check on all batches will tell
                self.promises = dict.fromkeys(kinds, promise)
            return self.loss_before
        further = promise * (_FACTOR if promise >= _FIRST else _FACTOR**2)
        while self.left and further not in losses and at(further) < at(promise):
            promise, further = further, further * _FACTOR
        promise = self._lowest(at, losses, promise, _FACTOR)
        self.promises = dict.fromkeys(kinds, promise)
        return losses[promise]

    def _first(self, kinds: list[Kind]) -> float:
        """The promise to begin with, less where old dims move too far for the linear model."""
        steps = self.steps_for(dict.fromkeys(kinds, _FIRST))
        moved = (step * change.quadratic_ratio for step, change in zip(steps, self.trial.changes))
        furthest = max(moved, default=0.0)  # a budget may buy nothing
        return _FIRST * min(1.0, _TRUSTED_RATIO / furthest) if furthest > 0 else _FIRST

    def _apart(self, kind: Kind, loss: float) -> float:
        """Find the best promise of one kind while the others keep theirs, and return the loss there."""
        losses, own = {1.0: loss}, self.promises[kind]

        def at(factor: float) -> float:
            if factor not in losses:
                losses[factor] = self._loss_with({**self.promises, kind: own * factor})
            return losses[factor]

        best = _APART if self.left and at(_APART) < loss else 1.0
        best = self._lowest(at, losses, best, _APART)
        self.promises = {**self.promises, kind: own * best}
        return losses[best]

    def _lowest(self, at: Callable[[float], float], losses: dict[float, float], best: float, factor: float) -> float:
        """Look on both sides of the best value so far, and where a parabola through the three has its lowest point."""
        for beside in (best * factor, best / factor):
            if self.left and at(beside) < losses[best]:
                best = beside
        low, middle, high = (losses.get(best * ratio, math.inf) for ratio in (1 / factor, 1.0, factor))
        bend = low - 2 * middle + high
        if self.left and 0 < bend < math.inf:
            lowest = best * factor ** (0.5 * (low - high) / bend)
            best = lowest if at(lowest) < middle else best
        return best

    def _loss_with(self, promises: dict[Kind, float]) -> float:
        return self.loss_at(self.steps_for(promises))

    def loss_at(self, steps: list[float]) -> float:
        """Return the mean loss with these steps, one for each change; infinity if it is not finite."""
        self.left, total = self.left - 1, 0.0
        for half in (0, 1):
            self.trial.take(steps, half)
            total += self.measure(1 - half) / 2
        return total if math.isfinite(total) else math.inf


def prices_of(changes: list[Change], measure: Callable[[int], float]) -> tuple[list[float], StepSearch]:
    """Return what a unit of worth buys in each change's kind, and the search that found it.

    All candidates are tried together for a moment. What they gain is divided between the kinds by the Shapley value,
    the mean of what a kind adds first and what it adds last, and then among directions by their worth. Call inside
    `undisturbed`.
    """
    kept = [change for change in changes if change.dims]
    trial = Trial(kept)
    try:
        search = StepSearch(trial, measure)
        _, after = search.run(spare=_AFTER_PRICING)
        gains = {kind: search.gain_alone(kind) for kind in search.promises}
    finally:
        trial.undo()
    if len(gains) == 2:
        both, (first, second) = search.loss_before - after, gains.values()
        gains = dict(zip(gains, ((both + first - second) / 2, (both + second - first) / 2)))
    worth = dict.fromkeys(gains, 0.0)
    for change in kept:
        if (kind := change.gradient.block.kind) in worth:
            worth[kind] += worth_of(change.gradient)[: change.dims].sum().item()
    kinds = [change.gradient.block.kind for change in changes]
    return [gains[kind] / worth[kind] if worth.get(kind, 0.0) > 0 else 0.0 for kind in kinds], search
