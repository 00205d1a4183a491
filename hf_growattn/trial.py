"""Try a growth on a living model: new dims in place, a search for the step, and the way back."""

import math

from torch import nn
from tqdm.auto import tqdm

from . import functional as F
from .attention import GrowableAttention, Resize, Widening
from .probe import PatternGradient, mean_loss

_MOST_STEPS = 200  # of one direction of the search: more than the exponents of fp32 span
_SMALLEST_PROMISE = 1e-7  # of the loss: below it, fp32 cannot tell an improvement from rounding


class Trial:
    """New dims in place, with zero weights until `take` writes a step; `undo` puts the old parameters back."""

    def __init__(self, chosen: list[GrowableAttention], gradients: list[PatternGradient]):
        self.chosen = chosen
        self.widenings: list[Widening] = []
        try:
            for attention, gradient in zip(chosen, gradients):
                self.widenings.append(attention.widen(qk_dims=gradient.sigma.shape[-1]))
            # Both sides scale with the square root of the step, so the factors are made once.
            self.factors = [g.factors(a.heads("query")) for a, g in zip(chosen, gradients)]
        except BaseException:
            self.undo()
            raise
        self.slope = sum(gradient.gain for gradient in gradients)

    def take(self, step: float) -> None:
        """Write the new weights for a step `gamma`; 0 makes them zero, which keeps the function."""
        for attention, factors in zip(self.chosen, self.factors):
            for role, new in zip(("query", "key"), factors):
                live = attention.weight(role)
                weight, bias = F.split_bias(new * step**0.5, live.shape[-1])
                live[:, -weight.shape[1] :] = weight
                if bias is not None:
                    attention.bias(role)[:, -bias.shape[1] :] = bias

    def undo(self) -> None:
        """Put the very same old parameters back."""
        for widening in self.widenings:
            widening.undo()

    def resizes(self) -> list[Resize]:
        """Every parameter that changed its size."""
        return [resize for widening in self.widenings for resize in widening.resizes]

    def added_parameters(self) -> int:
        """Number of weights that the widening added."""
        return sum(resize.new.numel() - resize.old.numel() for resize in self.resizes())


class StepSearch:
    """Geometric search for the step with the lowest mean loss, all layers at once, forward passes only.

    Attributes:
        tried: the loss at every step that was tried.
    """

    def __init__(self, trial: Trial, model: nn.Module, batches: list[dict], loss_before: float, bar: tqdm):
        self.trial, self.model, self.batches, self.bar = trial, model, batches, bar
        self.loss_before = loss_before
        self.tried: dict[float, float] = {}

    def run(self) -> tuple[float, float]:
        """Return the best step and its loss; step 0 and the loss before if no step lowers it."""
        if not self.trial.slope > 0:
            return 0.0, self.loss_before
        step = 0.01 * abs(self.loss_before) / self.trial.slope  # promises 1 % of the loss
        while not self._loss(step) < self.loss_before:
            step /= 4
            if step * self.trial.slope < _SMALLEST_PROMISE * abs(self.loss_before):
                return 0.0, self.loss_before
        for factor in (4.0, 2.0, 2.0**0.5):
            step = self._improve(step, factor)
        return step, self.tried[step]

    def _improve(self, step: float, factor: float) -> float:
        """Multiply the step by the factor, then divide it, for as long as that lowers the loss; no grid ends."""
        for ratio in (factor, 1 / factor):
            for _ in range(_MOST_STEPS):
                if not self._loss(step * ratio) < self._loss(step):
                    break
                step *= ratio
        return step

    def _loss(self, step: float) -> float:
        if step not in self.tried:
            self.trial.take(step)
            self.bar.total += len(self.batches)
            loss = mean_loss(self.model, self.batches, self.bar.update)
            self.tried[step] = loss if math.isfinite(loss) else math.inf
        return self.tried[step]
