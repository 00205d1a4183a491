"""Try new dims on a live model, and search for the steps that lower the loss most: ten evaluations of a few batches."""

import contextlib
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from ..growable.attention import GrowableAttention, set_trial
from ..growable.training_state import raise_on_all_ranks
from ..measure import functional as F
from ..measure.bottlenecks import Bottleneck, Kind
from ..measure.directions import Directions
from ..measure.halves import HalvedBatches
from ..measure.passes import ROUNDING, Objective, mean_loss
from ..model.new_dims import NewDims, full_tensor

MOST_EVALUATIONS = 10  # of one growth, the pricing of a budget included
AFTER_PRICING = 4  # of these: one kind alone, the other alone, and the steps of what was bought
FEW = 4  # batches of each half that a step is judged on, and that it is searched on where one does not fall at once
_FIRST = 0.3  # the relative step to begin with
_FACTOR = 3.0  # from one relative step to the next; squared while none lowers the loss
_TILT = 1.4  # by which one kind's relative step grows as the other's falls


@dataclass(eq=False)
class Candidate:
    """New dims that a bottleneck may get, and their weights as a function of the step.

    Attributes:
        directions: what was measured there.
        dims: how many new dims to append.
        share_that_holds: share of each one's gain that held on unseen batches, and with which it is taken, (dims,), 0
            to 1; with 0 a dim starts without effect.
    """

    directions: Directions
    dims: int
    share_that_holds: Tensor

    @property
    def bottleneck(self) -> Bottleneck:
        """Where the new dims would be."""
        return self.directions.bottleneck

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to try."""
        return self.dims == 0

    @property
    def changes_model(self) -> bool:
        """Whether the model is another one with it, new dims without effect included."""
        return self.dims > 0

    @property
    def slope(self) -> float:
        """First-order decrease of the loss per unit of step, on the batches that were measured."""
        return (self.directions.in_sample[: self.dims] * self.share_that_holds).sum().item()

    @property
    def gain(self) -> float:
        """The same on batches that the directions were not computed from; one direction's own is mostly noise."""
        return (F.decreasing(self.directions.validated)[: self.dims] * self.share_that_holds).sum().item()

    def scaled_directions(self, source: int) -> tuple[Tensor, Tensor, Tensor]:
        """The directions as they are taken: from both halves of the batches (0), from the first (1) or second (2)."""
        found = self.directions
        u, sigma, v = ((found.u, found.sigma, found.v), *found.halves)[source]
        return u[..., : self.dims], sigma[..., : self.dims] * self.share_that_holds, v[..., : self.dims]

    @cached_property
    def _unit_factors(self) -> list[tuple[Tensor, Tensor, Tensor]]:
        """For each source the even factors of a step of size 1, which others only scale, and which dims are taken."""
        roots, factors = self.bottleneck.roots, []
        whitening = full_tensor(roots.stacked_whitening), full_tensor(roots.shared_whitening)
        for u, sigma, v in map(self.scaled_directions, range(3)):
            sigma = sigma.to(u)
            taken = sigma > 0
            sizes = torch.where(taken, sigma, 1.0)  # of a dim that is not taken, the shared side is a direction
            factors.append((*F.step_factors(u, sizes, v, *whitening, self.bottleneck.heads), taken))
        return factors

    @cached_property
    def _usual_size(self) -> Tensor:
        """The root mean square of the shared side's old weights; without them, of a usual start."""
        bottleneck = self.bottleneck
        if bottleneck.is_known:
            old = bottleneck.attention.factors_of(bottleneck.kind.shared, bottleneck.like.dtype)
            return old.square().mean().sqrt()
        return bottleneck.like.new_tensor(bottleneck.shared_shape[1] ** -0.5)

    def new_factors(self, step: float, source: int) -> tuple[Tensor, Tensor]:
        """New dims of the stacked (H, a, p) and the shared side (G, b, p) for a step `gamma`.

        They are evenly split but for shared ones, which are as large as the old ones at least: as in LoRA, one side is
        never small, since where both are, training can move their product only slowly. The stacked side of a dim that
        is not taken is zero.
        """
        stacked, shared, taken = self._unit_factors[source]
        sizes = shared.square().mean(-2).sqrt()
        least = torch.where(sizes > 0, self._usual_size / sizes, 0.0).clamp_min(torch.finfo(sizes.dtype).tiny)
        scale = torch.maximum(least, taken * step**0.5)
        of_heads = (taken * step / scale).repeat_interleave(self.bottleneck.heads // self.bottleneck.groups, 0)
        return stacked * of_heads.unsqueeze(-2), shared * scale.unsqueeze(-2)

    def set_step(self, step: float, source: int, new_dims: NewDims | None) -> None:
        """Write the new dims for a step."""
        if new_dims is not None:
            write_factors(new_dims, self.bottleneck.kind, *self.new_factors(step, source))

    def undo(self) -> None:
        """Take back what a step wrote outside of the new dims: nothing here."""

    def commit(self, optimizers: list[torch.optim.Optimizer]) -> None:
        """Write what the last step moves outside of the new dims for good: nothing here."""


@torch.no_grad()
def write_factors(dims: NewDims | GrowableAttention, kind: Kind, stacked: Tensor, shared: Tensor) -> None:
    """Write both sides of a kind, (H, a, k) and (G, b, k), into new dims, or into readable, unsharded old weights."""
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


class Trial:
    """Candidates as new dims of a live model, which computes with them while they are `attached`.

    Attributes:
        candidates: what is tried.
        new_dims: those of each attention module that gains some.
    """

    def __init__(self, candidates: list[Candidate]):
        self.candidates = candidates
        widths: dict[GrowableAttention, dict[str, int]] = {}
        for candidate in candidates:
            bottleneck = candidate.bottleneck
            if candidate.dims:
                own = widths.setdefault(bottleneck.attention, {"qk_dims": 0, "v_dims": 0})
                own[bottleneck.kind.width] = candidate.dims
        with raise_on_all_ranks():
            self.new_dims = {layer: layer.make_new_dims(**own).requires_grad_(False) for layer, own in widths.items()}

    @contextlib.contextmanager
    def attached(self) -> Iterator[None]:
        """Let the model compute with the new dims for a while, without effect until `set_steps`."""
        try:
            with raise_on_all_ranks():
                self.set_steps([0.0] * len(self.candidates))
            for attention, new in self.new_dims.items():
                set_trial(attention, new)
            yield
        finally:
            for attention in self.new_dims:
                set_trial(attention, None)
            for candidate in self.candidates:
                candidate.undo()

    def set_steps(self, steps: list[float], half: int | None = None) -> None:
        """Set the new dims for a step `gamma` of each candidate; zeros keep the function.

        `half` takes the directions that one half of the batches found by itself, 0 or 1; None takes those of both.
        """
        source = 0 if half is None else half + 1
        for candidate, step in zip(self.candidates, steps):
            candidate.set_step(step, source, self.new_dims.get(candidate.bottleneck.attention))


def parameters_of_a_dim(attention: GrowableAttention, kind: Kind) -> int:
    """Weights that one more dim of every head adds."""
    return sum(attention.shape.heads_of(role) * attention.features_of(role) for role in kind.roles)


class StepSearch:
    """Search for the steps with the lowest mean loss, forward passes only.

    A step is counted relatively: by the share of the loss by which it would fall if it went on falling as it begins to.
    So models, losses and kinds compare, and one relative step for all kinds is a good start. A bracket by factors and a
    parabola find it; another one finds how much more of one kind, and less of the other, is better. The directions of
    either half of the batches are tried on the other half, so that no step is chosen for fitting what only these
    batches have.

    One search lives for a growth: once it has priced what a budget may buy, it goes on with what was bought, from the
    best point that it can guess and with what it has left of the evaluations. It reads one batch of each half, and more
    as soon as a first step does not lower the loss, since noise may hide a fall on few.

    Args:
        objective: the loss that is lowered.
        batches: in two halves, with the losses before.

    Attributes:
        left: how many evaluations may still be spent.
        few: batches of each half that are read.
        loss_before: the loss of these without new dims.
        relative_steps: the best ones that were found, by kind; empty if no step lowers the loss.
    """

    def __init__(self, objective: Objective, batches: HalvedBatches):
        self.objective, self.batches = objective, batches
        self.left, self.few = MOST_EVALUATIONS, 1
        self.loss_before = math.nan
        self.relative_steps: dict[Kind, float] = {}
        self._slopes: dict[Kind, float] = {}
        self._lowest_point: dict[Kind, float] = {}  # of the last parabola

    def run(self, trial: Trial, spare: int = 0) -> tuple[list[float], float]:
        """Return the best step of each candidate and the loss there; steps of 0 and the loss before if none lowers it.

        Args:
            trial: the candidates, attached.
            spare: evaluations to leave for a later run with fewer dims.
        """
        self._trial, self._slopes = trial, {}
        for candidate in trial.candidates:
            kind = candidate.bottleneck.kind
            self._slopes[kind] = self._slopes.get(kind, 0.0) + candidate.slope
        self.left -= spare
        self.loss_before = loss = self.batches.few_loss_before(self.few)
        self.relative_steps = {}
        guess = {kind: step for kind, step in self._lowest_point.items() if self._slopes.get(kind, 0.0) > 0}
        loss_there = self._loss_with(guess) if guess and self.left else math.inf
        if loss_there < loss:
            loss, self.relative_steps = loss_there, guess
        else:
            loss = self._search_common_step()
            for kind in list(self.relative_steps)[1:]:
                loss = self._search_balance(kind, loss, try_lowest=not spare)
        self.left += spare
        return self.steps_for(self.relative_steps), loss

    def steps_for(self, relative_steps: dict[Kind, float]) -> list[float]:
        """The step of each candidate for a relative step of its kind; 0 for kinds that have none."""
        unit = {kind: abs(self.loss_before) * step / self._slopes[kind] for kind, step in relative_steps.items()}
        return [unit.get(candidate.bottleneck.kind, 0.0) for candidate in self._trial.candidates]

    def gain_alone(self, kind: Kind) -> float:
        """How far the loss falls by the best step of one kind without the others."""
        return self.loss_before - self._loss_with({kind: self.relative_steps[kind]})

    def _alike(self, relative_step: float) -> dict[Kind, float]:
        """One relative step for all kinds that lower the loss to first order."""
        return dict.fromkeys((kind for kind, slope in self._slopes.items() if slope > 0), relative_step)

    def _search_common_step(self) -> float:
        """Find the best relative step that all kinds have in common, and return the loss there."""
        power, losses = 0, {}

        def step_at(power: int) -> float:
            return _FIRST * _FACTOR**power

        def loss_at(power: int) -> float:
            if power not in losses:
                losses[power] = self._loss_with(self._alike(step_at(power)))
            return losses[power]

        def falls_at(power: int) -> bool:
            return loss_at(power) < self.loss_before - ROUNDING * abs(self.loss_before)

        tempting = bool(self._alike(_FIRST))
        if tempting and self.left and self.few < FEW and not falls_at(power):
            self.few, losses = FEW, {}
            self.loss_before = self.batches.few_loss_before(FEW)
        while tempting and self.left and not falls_at(power):
            power -= 2
            tempting = step_at(power) > ROUNDING
        if power not in losses or not falls_at(power):
            return self.loss_before
        while (power + 1 in losses or self.left) and loss_at(power + 1) < losses[power]:
            power += 1
        low = step_at(power - 1) if power - 1 in losses else 0.0
        roots = [math.sqrt(each) for each in (low, step_at(power), step_at(power + 1))]
        three = losses.get(power - 1, self.loss_before), losses[power], losses.get(power + 1, math.inf)
        best, loss, lowest = step_at(power), losses[power], _lowest(roots, three) ** 2
        if self.left and not math.isclose(lowest, best):
            loss_there = self._loss_with(self._alike(lowest))
            if loss_there < loss:
                best, loss = lowest, loss_there
        self.relative_steps = self._lowest_point = self._alike(best)
        return loss

    def _search_balance(self, kind: Kind, loss: float, try_lowest: bool) -> float:
        """Find by which factor one kind's step should fall as the others' grow, and return the loss there.

        Without `try_lowest` the lowest point of the parabola is noted for a later run, and not tried.
        """
        found, losses = self.relative_steps, {1.0: loss}

        def tilted(factor: float) -> dict[Kind, float]:
            return {each: step / factor if each is kind else step * factor for each, step in found.items()}

        def loss_at(factor: float) -> float:
            if factor not in losses:
                losses[factor] = self._loss_with(tilted(factor))
            return losses[factor]

        best, ratio = 1.0, _TILT
        if self.left and not loss_at(ratio) < loss:
            ratio = 1 / ratio
        while (best * ratio in losses or self.left) and loss_at(best * ratio) < losses[best]:
            best *= ratio
        three = best / ratio, best, best * ratio
        lowest = math.exp(_lowest([math.log(f) for f in three], [losses.get(f, math.inf) for f in three]))
        self._lowest_point = tilted(lowest)
        if try_lowest and self.left and loss_at(lowest) < losses[best]:
            best = lowest
        self.relative_steps = tilted(best)
        return losses[best]

    def _loss_with(self, relative_steps: dict[Kind, float]) -> float:
        return self.loss_at(self.steps_for(relative_steps))

    def loss_at(self, steps: list[float]) -> float:
        """Return the mean loss with these steps, one for each candidate; infinity if it is not finite."""
        self.left, loss = self.left - 1, 0.0
        for half in (0, 1):
            self._trial.set_steps(steps, half)
            loss += self.loss_of_half(1 - half) / 2
        return loss if math.isfinite(loss) else math.inf

    def loss_of_half(self, half: int) -> float:
        """The mean loss of the few batches of one half, 0 or 1, for the weights as they are."""
        return mean_loss(self.objective, self.batches.few(self.few)[half])


def price_kinds(search: StepSearch, candidates: list[Candidate]) -> dict[Kind, float]:
    """Return what a unit of worth buys in each kind, found by trying all candidates together for a moment.

    What they gain is divided between the kinds by the Shapley value, the mean of what a kind adds first and what it
    adds last, and then among directions by their worth. Call inside `evaluation_mode`.
    """
    tried = [candidate for candidate in candidates if candidate.dims]
    trial = Trial(tried)
    with trial.attached():
        _, after = search.run(trial, spare=AFTER_PRICING)
        gains = {kind: search.gain_alone(kind) for kind in search.relative_steps}
    if len(gains) == 2:
        both, (first, second) = search.loss_before - after, gains.values()
        gains = dict(zip(gains, ((both + first - second) / 2, (both + second - first) / 2)))
    worth = dict.fromkeys(gains, 0.0)
    for candidate in tried:
        if candidate.bottleneck.kind in worth:
            worth[candidate.bottleneck.kind] += candidate.directions.worth[: candidate.dims].sum().item()
    return {kind: gains[kind] / worth[kind] for kind in gains if worth[kind] > 0}


def _lowest(places: Sequence[float], losses: Sequence[float]) -> float:
    """Where a parabola through three points is lowest; the middle one's place if it has no such point."""
    (low, middle, high), (first, second, third) = places, losses
    down, up = (second - first) / (middle - low), (third - second) / (high - middle)
    bend = (up - down) / (high - low)
    return (low + middle - down / bend) / 2 if 0 < bend < math.inf else middle
