"""Try new dims on a live model, and search for the steps that lower the loss most: ten evaluations of a few batches."""

import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..growable.attention import GrowableAttention, set_trial
from ..growable.training_state import raise_on_all_ranks
from ..measure import functional as F
from ..measure.blocks import Kind
from ..measure.gradients import Gradient
from ..model.hooks import CACHES
from ..model.new_dims import NewDims, full_tensor

SMALLEST_FALL = 1e-7  # of the loss: below it, fp32 rounding hides an improvement
MOST_EVALUATIONS = 10  # of one growth, the pricing of a budget included
AFTER_PRICING = 4  # of these: one kind alone, the other alone, and the steps of what was bought
_FIRST = 0.3  # the promise to begin with
_FACTOR = 3.0  # from one promise to the next; squared while none lowers the loss
_TURNS = 16  # of timing one more token
_TILT = 1.4  # by which one kind's promise grows as the other's falls


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


@torch.no_grad()
def write_factors(dims: NewDims | GrowableAttention, kind: Kind, stacked: Tensor, shared: Tensor) -> None:
    """Write both sides of a kind, (H, a, k) and (G, b, k), into a part, or into readable, unsharded old weights."""
    for role, factors in zip(kind.roles, (stacked, shared)):
        into = dims.weight_of(role)
        weight, bias = F.split_bias(factors, into.shape[-1])
        into.copy_(weight)
        into_bias = dims.bias_of(role)
        if bias is not None and into_bias is not None:
            into_bias.copy_(bias)


def read_factors(dims: NewDims | GrowableAttention, kind: Kind) -> tuple[Tensor, Tensor]:
    """The same of these dims as they are: stacked (H, a, k) and shared (G, b, k), with biases."""
    with torch.no_grad():
        stacked, shared = (F.join_bias(dims.weight_of(role), dims.bias_of(role)) for role in kind.roles)
    return stacked, shared


class Write:
    """The new weights of one block as a function of the step."""

    def __init__(self, change: Change):
        gradient, dims = change.gradient, change.dims
        self.change, self.block = change, gradient.block
        self.size = self._usual_size()
        # From both halves of the batches together, from the first and from the second.
        every = ((gradient.u, gradient.sigma, gradient.v), *gradient.halves)
        self.directions = [(u[..., :dims], sigma[..., :dims] * change.strength, v[..., :dims]) for u, sigma, v in every]
        roots = self.block.roots
        whitening = full_tensor(roots.stacked_whitening), full_tensor(roots.shared_whitening)
        self.new = []  # even factors of a step of size 1, which others only scale, and which pairs are taken
        for u, sigma, v in self.directions:
            taken = sigma > 0
            sizes = torch.where(taken, sigma, 1.0)  # of a pair that is not taken, the shared side is a direction
            self.new.append((*F.step_factors(u, sizes, v, *whitening, self.block.heads), taken))

    def _usual_size(self) -> Tensor:
        """The root mean square of the shared side's old weights; without them, of a usual start."""
        if self.block.is_known:
            return self.block.old_factors()[1].square().mean().sqrt()
        return self.block.like.new_tensor(self.block.shared_shape[1] ** -0.5)

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
        of_heads = (taken * step / scale).repeat_interleave(self.block.heads // self.block.groups, 0)
        return stacked * of_heads.unsqueeze(-2), shared * scale.unsqueeze(-2)

    def set_step(self, step: float, source: int, part: NewDims) -> None:
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
        self.parts: dict[GrowableAttention, NewDims] = {}
        dims: dict[GrowableAttention, dict[str, int]] = {}
        for change in changes:
            block = change.gradient.block
            dims.setdefault(block.attention, {"qk_dims": 0, "v_dims": 0})[block.kind.width] = change.dims
        with raise_on_all_ranks():
            self.writes = [writer(change) for change in changes]
            self.parts = {layer: layer.make_new_dims(**widths).requires_grad_(False) for layer, widths in dims.items()}
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

    @torch.no_grad()
    def time_decoding(self, model: Any, ids: Tensor) -> tuple[float, float, int]:
        """How many times as long one more token after `ids`, (1, tokens), takes with the new dims as without.

        Returns:
            The median of turns, its two standard errors, and the number of tokens. The new dims end detached.
        """
        caches: dict[Callable, dict] = {}

        def seconds(switch: Callable) -> float:
            switch()
            began, given = time.perf_counter(), ids[:, -1:] if switch in caches else ids
            output = model(input_ids=given, use_cache=True, **caches.get(switch, {}))
            output.logits[..., -1, 0].tolist()  # waits for the device
            name = next(name for name in CACHES if name in output)
            caches[switch] = {name: output[name]}
            return time.perf_counter() - began

        ratios = [seconds(self.attach) / seconds(self.detach) for _ in range(_TURNS + 2)]
        low, middle, high = statistics.quantiles(ratios[2:], n=4)  # the first fill the caches, and are slow
        return middle, 1.8 * (high - low) / _TURNS**0.5, ids.shape[1]

    def commit(self, optimizers: list[torch.optim.Optimizer]) -> None:
        """Write what does not live in the new dims; a plain trial has nothing such."""

    def drop(self) -> None:
        """Take everything back."""
        self.detach()
        self.writes = []


def parameters_of_a_dim(attention: GrowableAttention, kind: Kind) -> int:
    """Weights that one more dim of every head adds."""
    return sum(attention.shape.heads_of(role) * attention.features_of(role) for role in kind.roles)


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
        loss_before: the loss without the changes.
        widen: called where the first step does not lower the loss; lets `measure` read more batches from then on, since
            noise may hide it on few, and returns the loss without the changes on those. None leaves them as they are.
        former: a search of the same growth with other numbers of dims. This one begins where that one ended, with what
            it left of the evaluations.

    Attributes:
        left: how many evaluations may still be spent.
        promises: the best ones that were found, by kind; empty if no step lowers the loss.
    """

    def __init__(
        self,
        trial: Trial,
        measure: Callable[[int], float],
        loss_before: float,
        widen: Callable[[], float] | None = None,
        former: "StepSearch | None" = None,
    ):
        self.trial, self.measure = trial, measure
        self._widen = former._widen if former else widen
        self.left = former.left if former else MOST_EVALUATIONS
        self.loss_before = loss_before
        self.promises: dict[Kind, float] = {}
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
        loss = self.loss_before
        if self._begin_with and self.left and (found := self._loss_with(self._begin_with)) < loss:
            loss, self.promises = found, self._begin_with
        else:
            loss = self._together()
            for kind in list(self.promises)[1:]:
                loss = self._apart(kind, loss, try_lowest=not spare)
        self.left += spare
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
        power, losses = 0, {}

        def promise(power: int) -> float:
            return _FIRST * _FACTOR**power

        def at(power: int) -> float:
            if power not in losses:
                losses[power] = self._loss_with(self._alike(promise(power)))
            return losses[power]

        self.promises = {}
        tempting = bool(self._alike(_FIRST))
        if tempting and self.left and self._widen is not None and not at(power) < self.loss_before:
            self.loss_before, self._widen, losses = self._widen(), None, {}
        while tempting and self.left and not at(power) < self.loss_before:
            power -= 2
            tempting = promise(power) > SMALLEST_FALL
        if not losses.get(power, math.inf) < self.loss_before:
            if tempting:  # out of evaluations: the check on all batches decides
                self.promises = self._alike(promise(power))
            return self.loss_before
        while (power + 1 in losses or self.left) and at(power + 1) < losses[power]:
            power += 1
        low = promise(power - 1) if power - 1 in losses else 0.0
        roots = [math.sqrt(each) for each in (low, promise(power), promise(power + 1))]
        three = losses.get(power - 1, self.loss_before), losses[power], losses.get(power + 1, math.inf)
        best, loss, lowest = promise(power), losses[power], _lowest(roots, three) ** 2
        if self.left and not math.isclose(lowest, best) and (found := self._loss_with(self._alike(lowest))) < loss:
            best, loss = lowest, found
        self.promises = self._aim = self._alike(best)
        return loss

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


def _lowest(places: Sequence[float], losses: Sequence[float]) -> float:
    """Where a parabola through three points is lowest; the middle one's place if it has no such point."""
    (low, middle, high), (first, second, third) = places, losses
    down, up = (second - first) / (middle - low), (third - second) / (high - middle)
    bend = (up - down) / (high - low)
    return (low + middle - down / bend) / 2 if 0 < bend < math.inf else middle
