"""Old weights that move with a growth: `method="refactor"` and `update_existing=True`.

Nothing else in the package writes old weights, and the usual growth does not import this file. It takes plain weights
that train and that can be read head by head: no quantized, sharded or frozen ones, and none that carry adapters. Parts
of former growths stay as they are.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ..growable.attention import GrowableAttention, is_adapted, is_plain, plain, quantization
from ..growable.training_state import all_reduce_sum, broadcast_from_rank0, is_sharded, sum_over_ranks
from ..measure import functional as F
from ..measure.blocks import PATTERNS, Block
from ..measure.gradients import shares
from ..measure.passes import Objective, backward
from ..model.extra import Part
from .plan import GrowthConfig
from .trial import Change, Trial, Write, read_factors, write_factors


def check_old_dims(model: nn.Module, config: GrowthConfig, chosen: list[GrowableAttention]) -> None:
    """Raise a ValueError, with the fix, if old weights cannot move as a config says."""
    setting = "update_existing=True" if config.update_existing else 'method="refactor"'
    if any(map(is_sharded, model.parameters())):
        raise ValueError(f"{setting} rewrites existing weights, which are sharded: grow without it.")
    for attention in chosen:
        for role in (role for kind in config.chosen_kinds for role in kind.roles):
            _check_weight(attention, role, setting)
        way = "rotates" if attention.rotate is not None else "normalizes" if attention.normalizes else None
        if config.method == "refactor" and way and PATTERNS in config.chosen_kinds:
            raise ValueError(
                f"Layer {attention.layer} {way} its queries and keys, so its pattern is not one matrix and has no "
                'factors to replace. Use method="append", or grow messages (v_dims) alone.'
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
        how = quantization(plain(projection)) or "no plain linear layer. Load the model without quantization."
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


def make_trial(config: GrowthConfig, objective: Objective, changes: list[Change], halves: tuple[list, list]) -> Trial:
    """Return changes with the steepest step of the old weights, attached. Call inside `evaluation_mode`."""
    steps = tangent_steps(objective, [change.gradient.block for change in changes], halves)
    for change, step in zip(changes, steps):
        change.old_step = step
    return OldDimsTrial(changes, partial(OldDimsWrite, refactors=config.method == "refactor"))


@dataclass
class OldStep:
    """A step of size 1 of one block's old factors, as far as it holds on unseen batches.

    Attributes:
        stacked, shared: whitened changes, (G, g a, k) and (G, b, k).
        slope: first-order decrease of the loss on the batches it comes from.
        validated: the same on batches that it does not come from.
    """

    stacked: Tensor
    shared: Tensor
    slope: float
    validated: float


def tangent_steps(objective: Objective, blocks: list[Block], halves: tuple[list, list]) -> list[OldStep]:
    """Return the steepest step of each block's old factors.

    Read off the ordinary gradients of the weights in one pass: without rotation they are `T W_K` and `T^T W_Q`. Where
    the old dims rotate, `T` depends on the offset; their true gradients are used, so the step descends, in a metric
    that leaves the rotation out. The step is shortened to the share of its gain that holds when either half of the
    batches judges what the other found. Call inside `evaluation_mode`.
    """
    weights = [p for block in blocks for role in block.kind.roles for p in _parameters(block.attention, role)]
    for parameter in weights:
        parameter.requires_grad_(True)
    read: list[list[tuple[Tensor, Tensor]]] = [[] for _ in blocks]
    for batches in halves:
        backward(objective, batches)
        (count,) = all_reduce_sum(len(batches))
        for block, parts in zip(blocks, read):
            parts.append(_weight_gradients(block, count))
    for parameter in weights:
        parameter.requires_grad_(False)
        parameter.grad = None
    of_halves = shares(halves)
    return [_old_step(block, parts, of_halves) for block, parts in zip(blocks, read)]


def _parameters(attention: GrowableAttention, role: str) -> list[nn.Parameter]:
    return list(plain(attention.projection_of(role)).parameters())


def _old_factors(block: Block) -> tuple[Tensor, Tensor]:
    """Copies of the old factors, (H, a, k) and (G, b, k), in the statistics' precision; former growths do not count."""
    stacked, shared = read_factors(block.attention, block.kind)
    return stacked.to(block.like.dtype, copy=True), shared.to(block.like.dtype, copy=True)


def _weight_gradients(block: Block, batches: float) -> tuple[Tensor, Tensor]:
    """The whitened gradients of the mean loss in the old factors: (G, g a, k) and (G, b, k)."""
    attention = block.attention

    def gradient(role: str) -> Tensor:
        inside: Any = plain(attention.projection_of(role))
        weight, biased = attention.view_of(role, inside.weight.grad), role in attention.shape.biased
        bias = attention.view_of(role, inside.bias.grad) if biased else None
        return F.join_bias(weight, bias).to(block.like.dtype).contiguous() / batches

    stacked, shared = map(gradient, block.kind.roles)
    sum_over_ranks(stacked, shared)
    return block.whitened_gradients(stacked, shared)


def _old_step(block: Block, parts: list[tuple[Tensor, Tensor]], weights: tuple[float, float]) -> OldStep:
    factors = block.whitened(*_old_factors(block))

    def slope(gradients: Iterable[Tensor], changes: Iterable[Tensor]) -> float:
        return -sum((gradient * change).sum().item() for gradient, change in zip(gradients, changes))

    own = [tangent_step(*part, *factors) for part in parts]
    validated = (slope(parts[1], own[0]) + slope(parts[0], own[1])) / 2
    in_sample = (slope(parts[0], own[0]) + slope(parts[1], own[1])) / 2
    strength = min(max(validated / in_sample, 0.0), 1.0) if in_sample > 0 else 0.0
    whole = [weights[0] * first + weights[1] * second for first, second in zip(*parts)]
    stacked, shared = (strength * change for change in tangent_step(whole[0], whole[1], *factors))
    return OldStep(stacked, shared, slope(whole, (stacked, shared)), strength * validated)


def tangent_step(
    stacked_gradient: Tensor, shared_gradient: Tensor, stacked: Tensor, shared: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the steepest step of size 1 of the existing factors `W_a`, (G, g a, k), and `W_b`, (G, b, k), whitened.

    From the gradients `M W_b` and `M^T W_a` in them. The changes move the product by `dW_a W_b^T + W_a dW_b^T = -(P_a M
    + M P_b - P_a M P_b)`, what small changes of the factors can follow. Each takes half of what both could do.

    Source: the tangent space in "What new dims can do" of mathematics.md.
    """

    def half(gradient: Tensor, own: Tensor, other: Tensor) -> Tensor:
        # (W^T W)^+ by way of the singular values of W: the product itself would square its condition.
        _, values, vh = torch.linalg.svd(other, full_matrices=False)
        kept = values > values[..., :1] * max(other.shape[-2:]) * torch.finfo(other.dtype).eps
        inverse = torch.where(kept, values.square().reciprocal(), 0).unsqueeze(-2)
        step = gradient @ (vh.transpose(-1, -2) * inverse) @ vh
        basis = F.column_basis(own)
        return -(step - basis @ (basis.transpose(-1, -2) @ step) / 2)

    return half(stacked_gradient, stacked, shared), half(shared_gradient, shared, stacked)


class OldDimsWrite(Write):
    """The new and the old weights of one block as a function of the step.

    Attributes:
        refactors: the best balanced factors of the whole stepped product are written, not the two steps.
        old: the factors before any step, stacked (H, a, k) and shared (G, b, k).
        stepped: those of the last step that was set.
    """

    def __init__(self, change: Change, refactors: bool):
        super().__init__(change)
        self.refactors = refactors and change.dims > 0
        self.old = self.stepped = _old_factors(self.block)

    def set_step(self, step: float, source: int, part: Part) -> None:
        """Write the new dims for a step into a part, and the old ones into the attention's own weights."""
        if self.refactors:
            width, (stacked, shared) = self.old[0].shape[-1], self._refactored(step, *self.directions[source])
            self.stepped, new = (stacked[..., :width], shared[..., :width]), (stacked[..., width:], shared[..., width:])
        else:
            moved = self.block.unwhitened(self.change.old_step.stacked, self.change.old_step.shared)
            self.stepped = self.old[0] + step * moved[0], self.old[1] + step * moved[1]
            new = self.new_factors(step, source)
        write_factors(part, self.block.kind, *new)
        self.write_old(self.stepped)

    def _refactored(self, step: float, u: Tensor, sigma: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """The best balanced factors of the product after all steps, as wide as old and new dims together."""
        (stacked, shared), old_step = self.block.whitened(*self.old), self.change.old_step
        left = [stacked, -step * u * sigma.unsqueeze(-2), step * old_step.stacked, stacked]
        right = [shared, v, shared, step * old_step.shared]
        rank = stacked.shape[-1] + self.change.dims
        return self.block.unwhitened(*F.balanced_factors(torch.cat(left, -1), torch.cat(right, -1), rank))

    def write_old(self, factors: tuple[Tensor, Tensor]) -> None:
        """Write old factors into the attention's own weights."""
        write_factors(self.block.attention, self.block.kind, *factors)


class OldDimsTrial(Trial):
    """A trial in which old weights move: they go back when it is detached, and `commit` moves them for good."""

    writes: list[OldDimsWrite]

    def detach(self) -> None:
        """Let the model compute without the new dims, and with the old weights."""
        super().detach()
        for write in self.writes:
            write.write_old(write.old)
        # Where a budget bought nothing, old weights moved alone.
        self.parts = {attention: part for attention, part in self.parts.items() if part.qk_dims + part.v_dims}

    def commit(self, optimizers: list[torch.optim.Optimizer]) -> None:
        """Write the last step of old weights for good; refactored ones start with a fresh optimizer state."""
        for write in self.writes:
            broadcast_from_rank0(*write.stepped)
            write.write_old(write.stepped)
            for role in write.block.kind.roles if write.refactors else ():
                for parameter in _parameters(write.block.attention, role):
                    for optimizer in optimizers:
                        optimizer.state.pop(parameter, None)
