"""Old weights that move with a growth: `method="refactor"` and `update_existing=True`.

Nothing else in the package writes old weights, and the usual growth does not import this file. It takes plain weights
that train and that can be read head by head: no quantized, sharded or frozen ones, and none that carry adapters. Parts
of former growths stay as they are. "refactor" takes the steepest step of the old weights in any case, and leaves out
the term of the product that is quadratic in it.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ..growable.attention import GrowableAttention
from ..growable.projections import is_adapted, is_plain, quantization
from ..growable.training_state import all_reduce_sum, broadcast_from_rank0, is_sharded, sum_over_ranks
from ..measure import functional as F
from ..measure.bottlenecks import QK, Bottleneck
from ..measure.directions import shares
from ..measure.passes import Objective, backward
from ..model.families import base_layer
from ..model.new_dims import NewDims
from .plan import GrowthConfig
from .trial import Candidate, read_factors, write_factors


def check_old_dims(model: nn.Module, config: GrowthConfig, chosen: list[GrowableAttention]) -> None:
    """Raise a ValueError, with the fix, if old weights cannot move as a config says."""
    setting = "update_existing=True" if config.update_existing else 'method="refactor"'
    if any(map(is_sharded, model.parameters())):
        raise ValueError(f"{setting} rewrites existing weights, which are sharded: grow without it.")
    for attention in chosen:
        for role in (role for kind in config.chosen_kinds for role in kind.roles):
            _check_weight(attention, role, setting)
        way = "rotates" if attention.rotate is not None else "normalizes" if attention.normalizes else None
        if config.method == "refactor" and way and QK in config.chosen_kinds:
            raise ValueError(
                f"Layer {attention.layer} {way} its queries and keys, so its pattern is not one matrix and has no "
                'factors to replace. Use method="append", or grow values (v_dims) alone.'
            )


def _check_weight(attention: GrowableAttention, role: str, setting: str) -> None:
    projection, start = attention.projection_of(role), f"{setting} rewrites existing weights, and "
    if is_adapted(projection):
        raise ValueError(
            f"{start}{attention.name_of(role)} carries adapters that were trained for them. Call merge_and_unload() "
            f"first, or do without {setting}."
        )
    if problem := attention.why_unreadable(role):
        raise ValueError(f"{start}{problem}")
    if not is_plain(projection):
        how = quantization(base_layer(projection)) or "no plain linear layer. Load the model without quantization."
        raise ValueError(f"{start}{attention.name_of(role)} is {how}")
    if not isinstance(getattr(projection, "weight", None), nn.Parameter):
        raise ValueError(
            f"{start}{attention.name_of(role)} computes its weight, by a parametrization or pruning of torch. Make it "
            f"plain by remove_parametrizations or prune.remove, or do without {setting}."
        )
    if not all(parameter.requires_grad for parameter in projection.parameters()):
        raise ValueError(
            f"{start}{attention.name_of(role)} is frozen. Call requires_grad_(True) on it first, or do without "
            f"{setting}: new dims next to frozen ones train alone."
        )


def with_old_steps(
    config: GrowthConfig, objective: Objective, candidates: list[Candidate], halves: tuple[list, list]
) -> list[Candidate]:
    """Return candidates that take the steepest step of the old weights along. Call inside `evaluation_mode`."""
    steps = tangent_steps(objective, [candidate.bottleneck for candidate in candidates], halves)
    refactors = config.method == "refactor"
    return [
        OldDimsCandidate(each.directions, each.dims, each.share_that_holds, step, refactors and each.dims > 0)
        for each, step in zip(candidates, steps)
    ]


@dataclass
class OldStep:
    """A step of size 1 of one bottleneck's old factors, as far as it holds on unseen batches.

    Attributes:
        changes: whitened, stacked (G, g a, k) and shared (G, b, k), from both halves of the batches (0), from the first
            (1) and from the second (2).
        slope: first-order decrease of the loss on the batches it comes from.
        validated: the same on batches that it does not come from.
    """

    changes: tuple[tuple[Tensor, Tensor], ...]
    slope: float
    validated: float


def tangent_steps(objective: Objective, bottlenecks: list[Bottleneck], halves: tuple[list, list]) -> list[OldStep]:
    """Return the steepest step of each bottleneck's old factors.

    Read off the ordinary gradients of the weights in one pass: without rotation they are `T W_K` and `T^T W_Q`. Where
    the old dims rotate, `T` depends on the offset; their true gradients are used, so the step descends, in a metric
    that leaves the rotation out. The step is shortened to the share of its gain that holds when either half of the
    batches judges what the other found. Call inside `evaluation_mode`.
    """
    weights = [
        p
        for bottleneck in bottlenecks
        for role in bottleneck.kind.roles
        for p in _parameters(bottleneck.attention, role)
    ]
    for parameter in weights:
        parameter.requires_grad_(True)
    read: list[list[tuple[Tensor, Tensor]]] = [[] for _ in bottlenecks]
    for batches in halves:
        backward(objective, batches)
        (count,) = all_reduce_sum(len(batches))
        for bottleneck, parts in zip(bottlenecks, read):
            parts.append(_weight_gradients(bottleneck, count))
    for parameter in weights:
        parameter.requires_grad_(False)
        parameter.grad = None
    of_halves = shares(halves)
    return [_old_step(bottleneck, parts, of_halves) for bottleneck, parts in zip(bottlenecks, read)]


def _parameters(attention: GrowableAttention, role: str) -> list[nn.Parameter]:
    """The parameters that a role's factors are made of: the bias of an output belongs to no head."""
    projection: Any = base_layer(attention.projection_of(role))
    return [projection.weight, projection.bias] if role in attention.shape.biased else [projection.weight]


def _old_factors(bottleneck: Bottleneck) -> tuple[Tensor, Tensor]:
    """Copies of the old factors, (H, a, k) and (G, b, k), in the statistics' precision; former growths do not count."""
    stacked, shared = read_factors(bottleneck.attention, bottleneck.kind)
    return stacked.to(bottleneck.like.dtype, copy=True), shared.to(bottleneck.like.dtype, copy=True)


def _weight_gradients(bottleneck: Bottleneck, batches: float) -> tuple[Tensor, Tensor]:
    """The whitened gradients of the mean loss in the old factors: (G, g a, k) and (G, b, k)."""
    attention = bottleneck.attention

    def view_of(role: str, parameter: nn.Parameter) -> Tensor:
        gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad  # a rank without batches
        return attention.view_of(role, gradient)

    def gradient(role: str) -> Tensor:
        inside: Any = base_layer(attention.projection_of(role))
        weight, biased = view_of(role, inside.weight), role in attention.shape.biased
        bias = view_of(role, inside.bias) if biased else None
        return F.join_bias(weight, bias).to(bottleneck.like.dtype).contiguous() / batches

    stacked, shared = map(gradient, bottleneck.kind.roles)
    sum_over_ranks(stacked, shared)
    return bottleneck.whitened_gradients(stacked, shared)


def _old_step(bottleneck: Bottleneck, parts: list[tuple[Tensor, Tensor]], weights: tuple[float, float]) -> OldStep:
    factors = bottleneck.whitened(*_old_factors(bottleneck))

    def slope(gradients: Iterable[Tensor], changes: Iterable[Tensor]) -> float:
        return -sum((gradient * change).sum().item() for gradient, change in zip(gradients, changes))

    own = [tangent_step(*part, *factors) for part in parts]
    validated = (slope(parts[1], own[0]) + slope(parts[0], own[1])) / 2
    in_sample = (slope(parts[0], own[0]) + slope(parts[1], own[1])) / 2
    share_that_holds = min(max(validated / in_sample, 0.0), 1.0) if in_sample > 0 else 0.0
    whole = [weights[0] * first + weights[1] * second for first, second in zip(*parts)]
    changes = []
    for stacked, shared in (tangent_step(whole[0], whole[1], *factors), *own):
        changes.append((share_that_holds * stacked, share_that_holds * shared))
    return OldStep(tuple(changes), slope(whole, changes[0]), share_that_holds * validated)


def tangent_step(
    stacked_gradient: Tensor, shared_gradient: Tensor, stacked: Tensor, shared: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the steepest step of size 1 of the existing factors `W_a`, (G, g a, k), and `W_b`, (G, b, k), whitened.

    From the gradients `M W_b` and `M^T W_a` in them. The changes move the product by `dW_a W_b^T + W_a dW_b^T = -(P_a M
    + M P_b - P_a M P_b)`, what small changes of the factors can follow. Each takes half of what both could do.

    Source: the tangent space in "What new dims can do" of mathematics.md.
    """

    def half(gradient: Tensor, own: Tensor, other: Tensor) -> Tensor:
        whitening = F.column_whitening(other)
        step = (gradient.to(whitening) @ whitening @ whitening.mT).to(gradient)  # times (W^T W)^+ of the other side
        return -(step + F.project_out(step, own, F.column_whitening(own))) / 2

    return half(stacked_gradient, stacked, shared), half(shared_gradient, shared, stacked)


@dataclass(eq=False)
class OldDimsCandidate(Candidate):
    """New dims and a step of the old weights, which go back by `undo`, and move for good by `commit`.

    Half of the batches takes the step that it found itself, so that the other half can judge it.

    Attributes:
        old_step: the step of size 1 of the old weights.
        refactors: the best balanced factors of the whole stepped product are written, not the two steps.
        old: the factors before any step, stacked (H, a, k) and shared (G, b, k).
        stepped: those of the last step that was set.
    """

    old_step: OldStep
    refactors: bool

    def __post_init__(self):
        self.old = self.stepped = _old_factors(self.bottleneck)

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to try: old weights move in any case."""
        return False

    @property
    def changes_model(self) -> bool:
        """Whether the model is another one with it."""
        return self.dims > 0 or self.stepped is not self.old

    @property
    def slope(self) -> float:
        """First-order decrease of the loss per unit of step, on the batches that were measured."""
        return super().slope + self.old_step.slope

    @property
    def gain(self) -> float:
        """The same on batches that the directions were not computed from."""
        return super().gain + self.old_step.validated

    def set_step(self, step: float, source: int, new_dims: NewDims | None) -> None:
        """Write the new dims for a step, and the old ones into the attention's own weights."""
        if step == 0:
            self.stepped, new = self.old, self.new_factors(step, source)
        elif self.refactors:
            width, (stacked, shared) = self.old[0].shape[-1], self._refactored(step, source)
            self.stepped, new = (stacked[..., :width], shared[..., :width]), (stacked[..., width:], shared[..., width:])
        else:
            moved = self.bottleneck.unwhitened(*self.old_step.changes[source])
            self.stepped = self.old[0] + step * moved[0], self.old[1] + step * moved[1]
            new = self.new_factors(step, source)
        if new_dims is not None:
            write_factors(new_dims, self.bottleneck.kind, *new)
        self._write_old(self.stepped)

    def _refactored(self, step: float, source: int) -> tuple[Tensor, Tensor]:
        """The best balanced factors of the product after all steps, as wide as old and new dims together."""
        u, sigma, v = self.scaled_directions(source)
        stacked, shared = self.bottleneck.whitened(*self.old)
        moved = self.old_step.changes[source]
        left = [stacked, -step * u * sigma.to(u).unsqueeze(-2), step * moved[0], stacked]
        right = [shared, v, shared, step * moved[1]]
        rank = stacked.shape[-1] + self.dims
        return self.bottleneck.unwhitened(*F.balanced_factors(torch.cat(left, -1), torch.cat(right, -1), rank))

    def _write_old(self, factors: tuple[Tensor, Tensor]) -> None:
        """Write old factors into the attention's own weights."""
        write_factors(self.bottleneck.attention, self.bottleneck.kind, *factors)

    def undo(self) -> None:
        """Let the attention have its old weights."""
        self._write_old(self.old)

    def commit(self, optimizers: list[torch.optim.Optimizer]) -> None:
        """Write the last step of old weights for good; refactored ones start with a fresh optimizer state."""
        broadcast_from_rank0(*self.stepped)
        self._write_old(self.stepped)
        is_new_pair = self.refactors and self.stepped is not self.old
        for role in self.bottleneck.kind.roles if is_new_pair else ():
            for parameter in _parameters(self.bottleneck.attention, role):
                for optimizer in optimizers:
                    optimizer.state.pop(parameter, None)
