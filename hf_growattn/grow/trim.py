"""Cut dims that growth added and that turned out worthless: `trim_model`."""

import math
from collections.abc import Iterable
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from tqdm.auto import tqdm
from transformers import PreTrainedModel

from ..growable.attention import GrowableAttention, Widening
from ..growable.models import attentions
from ..growable.optimizers import bare_optimizers, check_optimizers, swap_parameters
from ..growable.resize import Resize
from ..measure import functional as F
from ..measure import ranks
from ..measure.blocks import Block, measure_moments
from ..measure.kinds import KINDS, Kind
from ..measure.passes import mean_loss, mean_of
from ..model.attention import ROLES
from ..report.report import LayerTrim, TrimReport
from .batches import as_dicts
from .checks import check_rewritable, growable_model, refuse_sharded, trainable_parameters
from .keeping import after_resize
from .loss import lowering, preserved_state
from .plan import parameters_of_a_dim

_RIDGE = 0.05  # of the mean eigenvalue, as in growth: directions that these batches hardly show are not free


def trim_model(
    model: nn.Module, batches: Iterable | None = None, max_loss_increase: float = 1e-3, optimizer=None, loss=None
) -> TrimReport:
    """Cut new dims that do nothing, and given batches also those whose loss they do not pay for.

    Only dims that growth added are cut; a layer that loses all of them has its stock width again. A dim is dead, and
    always cut, where one side of it is zero: its query or its key, its value or its output. That keeps the function, up
    to the rounding of sums that have lost their zeros. Dims that still wait for training are dead too.

    With batches, the new dims of each layer and kind are turned into the directions of their product that matter most
    to the logits or outputs on these batches, and the last of those are cut: the more of them the less the loss rises
    for each weight, as long as the measured loss of all batches rises by no more than `max_loss_increase`. Heads of a
    layer share one width. What is not cut stays as it is, to the bit, with its optimizer state; directions that were
    refactored start with zero momentum and with the mean of the old squared gradients, and lose their gradient.

    Call it between two training steps; under torch.distributed on all ranks, each with batches of its own. After an
    exception model and optimizer are as they were, to the bit.

    Args:
        model: a patched model, grown or not.
        batches: dicts that `model(**batch).loss` accepts, or tensors of `input_ids`; a dozen of the kind that the model
            is to be good at. None cuts dead dims only.
        max_loss_increase: how much the mean loss of the batches may rise, in the loss's own unit.
        optimizer: the optimizer of the running training, if there is one, or a list of all of them.
        loss: what must not rise, a function of model and batch as for `Grower`; by default what the model returns.

    Returns:
        What was cut; prints as a table.

    Raises:
        RuntimeError: under torch.distributed, the trim failed in another process, whose own error says why.
        ValueError: `max_loss_increase` is not a number of at least 0; the model is not patched, is sharded, or carries
            adapters or is quantized where it has grown; the batches give no finite loss; the optimizer lacks the
            model's parameters; or it is called inside `torch.inference_mode()`. The message names the fix.

    Source: the best product of a smaller rank, whitened; "Joint refactoring" in mathematics.md.
    """
    if not (isinstance(max_loss_increase, (int, float)) and 0 <= max_loss_increase < math.inf):
        raise ValueError(
            f"max_loss_increase must be a number, at least 0, such as 0.001; got {max_loss_increase!r}. It is in the "
            "loss's own unit."
        )
    if torch.is_inference_mode_enabled():
        raise ValueError("What is cut here could not be trained on: call trim_model outside torch.inference_mode().")
    optimizers = bare_optimizers(optimizer)
    refuse_sharded(model, optimizers)
    wrapped, model = model, growable_model(model)
    with ranks.raise_on_all_ranks():
        found = _new_dims(model, optimizers)
        if batches is not None:
            batches = as_dicts(batches, model) if loss is None else [*batches]
    keep, before, after = {new: new.live for new in found}, None, None
    if batches is not None:
        with (
            lowering(loss, model, wrapped),
            preserved_state(wrapped, optimizers),
            tqdm(desc="trimming", total=0, disable=True if ranks.rank() > 0 else None, leave=False) as bar,
        ):
            keep, before, after = _least_needed(model, found, batches, max_loss_increase, bar)
    layers = [new.trimmed_to(keep[new]) for new in found]
    cuts = Cuts(keep)
    try:
        model.sync_config()
        swap_parameters(optimizers, cuts.resizes)
    except BaseException:
        cuts.undo()
        model.sync_config()
        raise
    if cuts.resizes:
        after_resize(model, wrapped, list({new.attention: None for new in found}))
    return TrimReport(before, after, max_loss_increase, layers)


@dataclass(eq=False)
class GrownDims:
    """The dims that growth added to one kind of one layer, the same number `p` to every head.

    Attributes:
        order: (G, p) for each group its new dims, those that do something first.
        live: how many do something, in the group with the most.
        factors: the new dims refactored, most needed direction first: stacked (H, a, p) and shared (G, b, p).
        errors: (p,) the squared error of the logits or outputs by leaving a direction out, summed over the heads.
        worth: what the loss rises by without any of them, as `LayerTrim` has it.
    """

    attention: GrowableAttention
    kind: Kind
    order: Tensor
    live: int
    factors: tuple[Tensor, Tensor] = field(init=False)
    errors: Tensor = field(init=False)
    worth: float | None = None

    @classmethod
    def of(cls, attention: GrowableAttention, kind: Kind) -> "GrownDims":
        """Look at the weights of one layer: which new dims are dead."""
        stock, groups = attention.head_dim, attention.heads_of("key")
        sides = (F.join_bias(attention.weight_of(role), attention.bias_of(role)) for role in kind.roles)
        stacked, shared = (F.stack_groups(side[..., stock:], groups).ne(0).any(-2) for side in sides)
        alive = stacked & shared  # (G, p)
        order = alive.logical_not().to(torch.uint8).argsort(dim=-1, stable=True)
        return cls(attention, kind, order, int(alive.sum(-1).max()))

    @property
    def stock(self) -> int:
        """The width before any growth."""
        return self.attention.head_dim

    @property
    def count(self) -> int:
        """How many new dims `p` a head had when this was measured."""
        return self.order.shape[-1]

    def refactor(self, block: Block) -> None:
        """Find the directions of the product of the new dims, whitened by the block's moments.

        `W_a W_b^T` over the new dims, by its SVD in the metric of the logits or outputs: whatever number of leading
        columns is kept, no other choice of that many dims has a smaller error there.
        """
        roots, heads = block.roots, block.heads
        stacked, shared = (side[..., self.stock :] for side in block.whitened_factors())
        left, right = F.balanced_factors(stacked, shared, self.count)
        sigma = left.square().sum(-2)  # (G, p)
        self.errors = sigma.square().sum(0)
        # Where a group has fewer directions than others, both sides zero could never be trained: one stays as it is.
        none = (sigma <= 1e-6 * sigma[..., :1]).unsqueeze(-2)
        raw = block.old_factors()[1][..., self.stock :]
        left, right = left.masked_fill(none, 0), torch.where(none, raw, roots.shared_whitening @ right)
        self.factors = F.apply_root(roots.stacked_whitening, F.unstack_groups(left, heads)), right

    def write(self, count: int) -> None:
        """Write the first `count` directions into the new dims of the weights as they are now."""
        for role, factors in zip(self.kind.roles, self.factors):
            new = F.split_bias(factors[..., :count], self.attention.config.hidden_size)
            self.attention.write(role, self.stock, *new)

    def error(self, kept: int) -> float:
        """Share of the squared size of what the new dims compute that is lost if only `kept` of them stay."""
        return (self.errors[kept:].sum() / self.errors.sum()).item() if kept < self.live else 0.0

    def trimmed_to(self, kept: int) -> LayerTrim:
        """The report of this layer and kind if `kept` of its new dims stay."""
        removed = (self.count - kept) * parameters_of_a_dim(self.attention, self.kind)
        width = (self.stock + self.count, self.stock + kept)
        return LayerTrim(self.attention.layer_idx, self.kind.name, width, self.worth, self.error(kept), removed)


class Cuts:
    """New dims cut in place; `undo` puts the very same old parameters back.

    Args:
        keep: how many of them stay, in every head. All live ones are kept as they are; fewer are the leading ones of
            `factors`.

    Attributes:
        resizes: every parameter that changed its size, for optimizers.
    """

    def __init__(self, keep: dict[GrownDims, int]):
        self.widenings: list[Widening] = []
        self.resizes: list[Resize] = []
        by_attention: dict[GrowableAttention, dict[GrownDims, int]] = {}
        for new, kept in keep.items():
            if kept < new.count:
                by_attention.setdefault(new.attention, {})[new] = kept
        try:
            with ranks.raise_on_all_ranks():
                for attention, chosen in by_attention.items():
                    self._cut(attention, chosen)
        except BaseException:
            self.undo()
            raise

    def _cut(self, attention: GrowableAttention, keep: dict[GrownDims, int]) -> None:
        """Cut in one layer; dims that stay as they are take their values, gradients and optimizer state along."""
        kept = {role: _places(attention, role) for role in ROLES}
        widening = attention.widen(**{new.kind.width: count - new.count for new, count in keep.items()})
        self.widenings.append(widening)
        positions = {role: _places(attention, role) for role in ROLES}
        for new, count in keep.items():
            for role in new.kind.roles:
                if count < new.live:  # the others are written below
                    kept[role], positions[role] = (x[:, : new.stock] for x in (kept[role], positions[role]))
                    continue
                order = new.order.repeat_interleave(attention.heads_of(role) // len(new.order), 0)[:, :count]
                kept[role] = torch.cat((kept[role][:, : new.stock], kept[role].gather(1, new.stock + order)), 1)
        for resize in widening.resizes:
            inside = [role for role in ROLES if attention.projection_of(role) is resize.module]
            resize.kept = torch.cat([kept[role].flatten() for role in inside])
            resize.positions = torch.cat([positions[role].flatten() for role in inside])
            resize.fill()
        self.resizes += widening.resizes
        for new, count in keep.items():
            if count < new.live:
                new.write(count)

    def undo(self) -> None:
        """Put the old parameters back, with the values they had."""
        for widening in self.widenings:
            widening.undo()
        self.widenings, self.resizes = [], []


def _new_dims(model: nn.Module, optimizers: list) -> list[GrownDims]:
    """The new dims of each layer and kind that has grown; raises a ValueError where they cannot be cut."""
    grown = [
        (attention, kind)
        for attention in attentions(model)
        for kind in KINDS.values()
        if attention.width_of(kind.shared) > attention.head_dim
    ]
    trained = {}
    for attention, kind in grown:
        check_rewritable(attention, [kind], "trim_model", frozen=True)
        trained |= trainable_parameters(model, [attention], [kind], frozen=True)
    check_optimizers(optimizers, trained)
    return [GrownDims.of(attention, kind) for attention, kind in grown]


def _least_needed(
    model: PreTrainedModel, found: list[GrownDims], batches: list, max_loss_increase: float, bar: tqdm
) -> tuple[dict[GrownDims, int], float, float]:
    """Return how many new dims to keep, and the mean loss of the batches before and after.

    All are cut if the loss allows it. Otherwise directions are ranked by what each is worth for a weight, and bisection
    finds how many of them may go.
    """
    bar.total = len(batches)
    involved = list({new.attention: None for new in found})
    blocks, losses = measure_moments(model, involved, list(KINDS.values()), batches, _RIDGE, bar.update)
    before = mean_of(losses)
    by_place = {(block.attention, block.kind): block for block in blocks}
    live = [new for new in found if new.live]
    with ranks.raise_on_all_ranks():
        for new in live:
            new.refactor(by_place[new.attention, new.kind])

    def loss_with(keep: dict[GrownDims, int]) -> float:
        bar.total += len(batches)
        cuts = Cuts(keep)
        try:
            return mean_loss(model, batches, bar.update)
        finally:
            cuts.undo()

    keep, loss, nothing = {new: new.live for new in found}, before, dict.fromkeys(found, 0)
    if not live:
        return keep, before, loss
    without = loss_with(nothing)
    if without <= before + max_loss_increase:
        return nothing, before, without
    # What a layer's dims are worth alone says little where others stand in for them, or need them: the mean of cutting
    # them first and last, as growth prices its kinds.
    for new in live:
        first, last = loss_with({**keep, new: 0}) - before, without - loss_with({**nothing, new: new.live})
        new.worth = (first + last) / 2
    ranking = _ranking(live, model.device)
    good, bad = 0, len(ranking)  # how many directions may go, and how many are too many
    while bad - good > 1:
        tried = (good + bad) // 2
        fewer = {new: new.live - ranking[:tried].count(index) for index, new in enumerate(live)}
        after = loss_with({**nothing, **fewer})
        if after <= before + max_loss_increase:
            good, keep, loss = tried, {**nothing, **fewer}, after
        else:
            bad = tried
    return keep, before, loss


def _ranking(live: list[GrownDims], device: torch.device) -> list[int]:
    """Return for each direction, the least worth for a weight first, the index of its new dims in the list.

    Of what its dims are worth, a direction has the share that it has of their squared size.
    """
    offers = []
    for index, new in enumerate(live):
        total = new.errors.sum().clamp_min(torch.finfo(new.errors.dtype).tiny)
        shares = new.errors[: new.live] / total / parameters_of_a_dim(new.attention, new.kind)
        offers += [(max(new.worth or 0.0, 0.0) * share, share, -n, index) for n, share in enumerate(shares.tolist())]
    ranking = torch.tensor([offer[-1] for offer in sorted(offers)], device=device)
    ranks.broadcast_from_rank0(ranking)  # comparisons of rounded numbers may differ between machines
    return ranking.tolist()


def _places(attention: GrowableAttention, role: str) -> Tensor:
    """Where each dim of each head lies along the axis of its projection that follows the width, (heads, width)."""
    weight, axis = attention.projection_of(role).weight, attention._axis(role)
    along = torch.arange(weight.shape[axis], device=weight.device).unsqueeze(1 - axis)
    return attention.view_of(role, along.expand(weight.shape))[..., 0]
