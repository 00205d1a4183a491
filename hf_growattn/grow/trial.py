"""Try new dims on a live model as extensions, then write them into the weights or drop them."""

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from transformers import PreTrainedModel

from ..growable.attention import GrowableAttention, Widening
from ..growable.resize import Resize
from ..growable.sharding import is_sharded, whole
from ..measure import functional as F
from ..measure.extension import ExtraDims, set_extension
from ..measure.gradients import ExistingStep, Gradient
from ..measure.kinds import Kind
from ..measure.passes import backward
from ..measure.ranks import raise_on_all_ranks, sum_over_ranks, total

STEEPNESS_BATCHES = 4  # the steepest of a few: training's next batches are others


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
    """The weights of one block as a function of the step: extra dims, and old ones where those move."""

    def __init__(self, change: Change):
        block, gradient = change.gradient.block, change.gradient
        self.change, self.block = change, block
        self.moves_old_dims = change.refactor or change.existing is not None
        stacked, shared = block.old_factors()
        self.size = shared.square().mean().sqrt()
        if self.moves_old_dims:  # the live ones may be written over
            self.old = stacked.clone(), shared.clone()
        if change.refactor:
            self.whitened = block.whitened_factors()
        every = ((gradient.u, gradient.sigma, gradient.v), *gradient.halves)
        # From both halves of the batches together, from the first and from the second.
        self.directions = [self._taken(*directions) for directions in every]
        # Of a step of size 1; for others the factors are only scaled.
        self.new = []
        if not change.refactor:
            whitening = block.roots.stacked_whitening, block.roots.shared_whitening
            self.new = [self._factors(*directions, *whitening) for directions in self.directions]

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

    def _split(self, step: float, source: int) -> tuple[Tensor, Tensor]:
        """New columns for a step, evenly split but for shared ones, which are as large as the existing ones at least.

        As in LoRA, one side is never small: where both are, training can move their product only slowly. The stacked
        side of a pair that is not taken is zero.
        """
        stacked, shared, taken = self.new[source]
        sizes = shared.square().mean(-2).sqrt()
        least = torch.where(sizes > 0, self.size / sizes, 0.0).clamp_min(torch.finfo(sizes.dtype).tiny)
        scale = torch.maximum(least, taken * step**0.5)
        return stacked * self._per_head(taken * step / scale), shared * scale.unsqueeze(-2)

    def _per_head(self, of_groups: Tensor) -> Tensor:
        """(G, p) to (H, 1, p)."""
        return of_groups.repeat_interleave(self.block.heads // len(of_groups), 0).unsqueeze(-2)

    def at(self, step: float, source: int) -> tuple[tuple[Tensor, Tensor] | None, tuple[Tensor, Tensor]]:
        """Old and new columns of the stacked (H, a, k or p) and the shared side (G, b, k or p) for a step `gamma`.

        There are no old ones where those stay.
        """
        if not self.moves_old_dims:
            return None, self._split(step, source)
        if self.change.refactor:
            width = self.old[0].shape[-1]
            stacked, shared = self._refactored(step, *self.directions[source])
            return (stacked[..., :width], shared[..., :width]), (stacked[..., width:], shared[..., width:])
        old_stacked, old_shared = self.old
        if self.change.existing is not None and step > 0:
            d_stacked, d_shared = self._unwhitened(self.change.existing.stacked, self.change.existing.shared)
            old_stacked, old_shared = old_stacked + step * d_stacked, old_shared + step * d_shared
        return (old_stacked, old_shared), self._split(step, source)

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

    def set_step(self, step: float, source: int, extension: ExtraDims) -> None:
        """Set the new dims for a step; write old dims only where they move."""
        (old, new), attention = self.at(step, source), self.block.attention
        for role, factors in zip(self.block.kind.roles, new):
            dtype = attention.empty_like(role).dtype
            weight, bias = F.split_bias(factors, attention.config.hidden_size)
            extension.weights[role] = weight.to(dtype).contiguous()
            extension.biases[role] = None if bias is None else bias.to(dtype).contiguous()
        if old is not None:
            self._write(old)

    def _write(self, old: tuple[Tensor, Tensor]) -> None:
        """Write the old dims, which are the first ones of the live weights."""
        attention = self.block.attention
        for role, factors in zip(self.block.kind.roles, old):
            attention.write(role, 0, *F.split_bias(factors, attention.config.hidden_size))

    def undo(self) -> None:
        """Write the values that old dims had, if they moved."""
        if self.moves_old_dims:
            self._write(self.old)


class Trial:
    """All changes attached to the model as extensions, without effect until `set_steps`.

    `commit` writes them into the weights, the only step that resizes a parameter; `undo` takes everything back. Old
    dims are written only for `method="refactor"` and `update_existing`, which need plain weights for that.

    Attributes:
        extensions: the new dims of each attention module that gains some.
    """

    def __init__(self, changes: list[Change]):
        self.changes = changes
        self.writes: list[_Write] = []
        self.widenings: list[Widening] = []
        self.extensions: dict[GrowableAttention, ExtraDims] = {}
        with raise_on_all_ranks():
            self.writes = [_Write(change) for change in changes]
            for change in changes:
                attention = change.gradient.block.attention
                self.extensions.setdefault(attention, ExtraDims(attention.heads_mesh))
        try:
            self.set_steps([0.0] * len(changes))
            for attention, extension in self.extensions.items():
                set_extension(attention, extension)
        except BaseException:
            self.undo()
            raise

    def set_steps(self, steps: list[float], half: int | None = None) -> None:
        """Set the new dims for a step `gamma` of each change; zeros keep the function.

        `half` takes the directions that one half of the batches found by itself, 0 or 1; None takes those of both.
        """
        for write, step in zip(self.writes, steps):
            write.set_step(step, 0 if half is None else half + 1, self.extensions[write.block.attention])

    def commit(self) -> list[Resize]:
        """Write the new dims into the weights, and return every parameter that changed its size.

        Refactored weights start with zero momentum.
        """
        with raise_on_all_ranks():
            for attention, extension in self.extensions.items():
                self.widenings.append(extension.write_into(attention))
                set_extension(attention, None)
        refactored = {write.block.attention for write in self.writes if write.change.refactor}
        # Statistics as large as the weights hang on the others, and nothing needs them any more.
        self.writes, self.changes = [write for write in self.writes if write.moves_old_dims], []
        return [
            replace(resize, kept=resize.kept[:0], positions=resize.positions[:0])
            if widening.attention in refactored
            else resize
            for widening in self.widenings
            for resize in widening.resizes
        ]

    def undo(self) -> None:
        """Drop the new dims and put the very same old parameters back, with the values they had."""
        for widening in self.widenings:
            widening.undo()
        self.widenings = []
        for write in self.writes:
            write.undo()
        self.writes = []
        for attention in self.extensions:
            set_extension(attention, None)

    def added_parameters(self) -> int:
        """Number of weights that keeping adds."""
        blocks = ((change.gradient.block, change.dims) for change in self.changes)
        return sum(dims * parameters_of_a_dim(block.attention, block.kind) for block, dims in blocks)

    def added_to_cache(self) -> int:
        """By how many numbers keeping widens the keys and values of a token."""
        blocks = ((change.gradient.block, change.dims) for change in self.changes)
        return sum(dims * block.groups for block, dims in blocks if block.attention.caches)


def parameters_of_a_dim(attention: GrowableAttention, kind: Kind) -> int:
    """Weights that one more dim of every head adds, those of adapters included, which quantized weights do not have."""
    count = 0
    for role in kind.roles:
        features = 0
        if not attention.is_plain(role):
            features = attention.config.hidden_size + (attention.bias_of(role) is not None)
        for module, name, axis in attention.parameters_along(role) if not features else ():
            parameter = getattr(module, name)
            features += parameter.numel() // parameter.shape[axis]
        count += attention.heads_of(role) * features
    return count


def measure_steepness(
    model: PreTrainedModel, resizes: list[Resize], batches: list[dict], tick: Callable[[], object] = lambda: None
) -> None:
    """Note in each resize how steep the loss is along new entries, compared to old ones, with the weights as they are.

    Only ratios are kept: the optimizer's state knows clipped and accumulated gradients. Of the first few batches, those
    that the ranks hold at the same place count as one, as in training. Call inside `evaluation_mode`.
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
            gradient = torch.zeros(new.shape, device=new.device) if new.grad is None else whole(new.grad)
            gradient = gradient.to(torch.promote_types(new.dtype, torch.float32))
            if not is_sharded(new):  # FSDP2 has taken the mean over the ranks
                sum_over_ranks(gradient)
            of_batches.append(gradient.square().transpose(0, resize.axis).reshape(new.shape[resize.axis], -1).sum(1))
    for resize, of_batches in zip(resizes, squares):
        square = torch.stack(of_batches)
        known = torch.isin(resize.positions, resize.trained(resize.new))
        ratio = square.amax(0) / square[:, resize.positions[known]].mean()
        resize.steepness = ratio.nan_to_num(1.0, posinf=1.0)  # no old entry to compare with, or no gradient there
