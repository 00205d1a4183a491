"""Cut new dims that turned out worthless: `trim_model`."""

import math
from collections.abc import Iterable

import torch
from torch import Tensor, nn
from tqdm.auto import tqdm

from ..growable.attention import GrowableAttention
from ..growable.growths import Parts, attentions, check_saving, parts_of, replace_parts, swap_parts
from ..growable.training_state import (
    bare_optimizers,
    broadcast_from_rank0,
    check_optimizers,
    raise_on_all_ranks,
    rank,
    refuse_sharded,
    warn_without_ddp,
)
from ..measure import functional as F
from ..measure.blocks import KINDS, Block, Kind, measure_moments
from ..measure.passes import Objective, as_dicts, lowering, mean_loss, mean_of, preserved_state
from ..model.extra import Part
from ..report.report import LayerTrim, TrimReport
from .plan import model_to_grow
from .trial import parameters_of_a_dim, read_factors, write_factors

_RIDGE = 0.05  # of the mean eigenvalue, as in growth: directions that these batches hardly show are not free


def trim_model(
    model: nn.Module, batches: Iterable | None = None, max_loss_increase: float = 1e-3, optimizer=None, loss=None
) -> TrimReport:
    """Cut new dims that do nothing, and given batches also those whose loss they do not pay for.

    Old weights stay as they are. A new dim is dead, and always cut, where one side of it is zero: its query or its key,
    its value or its output. That keeps the function, up to rounding. Dims that still wait for training are dead too.

    With batches, the new dims of each layer and kind are turned into the directions of their product that matter most
    to the logits or outputs on these batches, and the last of those are cut, those first that are worth least for a
    weight. Heads of a layer share one width. The new dims of a growth that loses none stay as they are, with their
    optimizer state; what is left of others are new parameters, which start with a fresh state.

    Call it between two training steps; under torch.distributed on all ranks, each with batches of its own. After an
    exception model and optimizer are as they were, to the bit.

    Args:
        model: a patched model, grown or not.
        batches: dicts that `model(**batch).loss` accepts, or tensors of `input_ids`; a dozen of the kind that the model
            shall be good at. None cuts dead dims only.
        max_loss_increase: how much the mean loss of the batches may rise, in the loss's own unit.
        optimizer: the optimizer of the running training, if there is one, or a list of all of them.
        loss: what must not rise, a function of model and batch as for `Grower`; by default what the model returns.

    Raises:
        RuntimeError: under torch.distributed, the trim failed in another process, whose own error says why.
        ValueError: `max_loss_increase` is not a number of at least 0; the model is not patched, or is sharded; the
            batches give no finite loss; the optimizer lacks the model's parameters; or it is called inside
            `torch.inference_mode()`. The message names the fix.

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
    wrapped, model = model, model_to_grow(model)
    refuse_sharded(wrapped, optimizers)
    check_saving(wrapped)
    with raise_on_all_ranks():
        check_optimizers(optimizers, model)
        every = [GrownDims(attention, kind) for attention in attentions(model) for kind in KINDS.values()]
        found = [new for new in every if new.count]
        if batches is not None:
            batches = as_dicts(batches, model) if loss is None else [*batches]
    keep, before, after = {new: new.live for new in found}, None, None
    if batches is not None:
        with (
            tqdm(desc="trimming", total=0, disable=True if rank() > 0 else None, leave=False) as bar,
            lowering(loss, model, wrapped, bar.update) as objective,
            preserved_state(wrapped, optimizers),
        ):
            keep, before, after = _least_needed(objective, found, batches, max_loss_increase, bar)
    parts, kept = cut_parts(keep), parts_of(model)
    new = [part for attention, own in parts.items() for part in own.values() if part not in kept[attention].values()]
    broadcast_from_rank0(*(parameter.detach() for part in new for parameter in part.parameters()))
    warn_without_ddp(wrapped)
    replace_parts(wrapped, parts, optimizers)
    return TrimReport(before, after, max_loss_increase, [dims.trimmed_to(count) for dims, count in keep.items()])


class GrownDims:
    """The new dims of one kind of one layer, those of all growths together, the same number `p` to every head.

    Attributes:
        alive: for each part that has such dims, the ones of each group that do something: (G, n), as many as in the
            group with the most.
        count, live: how many dims there are, and how many stay if only dead ones are cut.
        factors: the new dims refactored, most needed direction first: stacked (H, a, p) and shared (G, b, p).
        errors: (p,) the squared error of the logits or outputs by leaving a direction out, summed over the heads.
        worth: as in `LayerTrim`.
    """

    factors: tuple[Tensor, Tensor]
    errors: Tensor
    worth: float | None = None

    def __init__(self, attention: GrowableAttention, kind: Kind):
        self.attention, self.kind = attention, kind
        self.alive: dict[Part, Tensor] = {}
        for part in (part for part in attention.parts if part.dims_of(kind.shared)):
            stacked, shared = (side.ne(0) for side in read_factors(part, kind))
            works = F.stack_groups(stacked, len(shared)).any(-2) & shared.any(-2)  # (G, its dims)
            order = works.logical_not().to(torch.uint8).argsort(dim=-1, stable=True)
            self.alive[part] = order[:, : int(works.sum(-1).max())]
        self.count = sum(part.dims_of(kind.shared) for part in self.alive)
        self.live = sum(dims.shape[-1] for dims in self.alive.values())

    def refactor(self, block: Block) -> None:
        """Find the directions of `W_a W_b^T` over the new dims, by its SVD in the metric of the logits or outputs."""
        sides = zip(*(read_factors(part, self.kind) for part in self.alive))
        stacked, shared = (torch.cat(side, -1).to(block.like.dtype) for side in sides)
        left, right = F.balanced_factors(*block.whitened(stacked, shared), self.count)
        sigma = left.square().sum(-2)  # (G, p)
        self.errors = sigma.square().sum(0)
        # Where a group has fewer directions than others, both sides zero could never be trained: one stays as it is.
        none = (sigma <= 1e-6 * sigma[..., :1]).unsqueeze(-2)
        left, right = block.unwhitened(left.masked_fill(none, 0), right)
        self.factors = left, torch.where(none, shared, right)

    def columns(self, part: Part, kept: int) -> tuple[Tensor, ...]:
        """What a part holds if `kept` of all new dims stay, stacked (H, a, n) and shared (G, b, n).

        All live ones stay as they are; fewer are the leading `factors`, which fill one part after the other.
        """
        if kept < self.live:
            parts = list(self.alive)
            start = sum(each.dims_of(self.kind.shared) for each in parts[: parts.index(part)])
            stop = min(start + part.dims_of(self.kind.shared), kept)
            return tuple(side[..., start:stop] for side in self.factors)
        alive, chosen = self.alive[part], []
        for side in read_factors(part, self.kind):
            of_heads = alive.repeat_interleave(len(side) // len(alive), 0).unsqueeze(1)
            chosen.append(side.gather(-1, of_heads.expand(-1, side.shape[1], -1)))
        return tuple(chosen)

    def trimmed_to(self, kept: int) -> LayerTrim:
        """The report of this layer and kind if `kept` of its new dims stay."""
        removed = (self.count - kept) * parameters_of_a_dim(self.attention, self.kind)
        stock = self.attention.stock_width_of(self.kind.shared)
        lost = (self.errors[kept:].sum() / self.errors.sum()).item() if kept < self.live else 0.0
        width = (stock + self.count, stock + kept)
        return LayerTrim(self.attention.layer, self.kind.name, width, self.worth, lost, removed)


def cut_parts(keep: dict[GrownDims, int]) -> Parts:
    """The parts of attention modules if these numbers stay; one that loses no dim is the same, none is empty."""
    parts: Parts = {new.attention: {} for new in keep}
    with raise_on_all_ranks():
        for attention, own in parts.items():
            for name, part in attention.make_extra().parts.items():
                inside = {new.kind: new for new in keep if part in new.alive}
                columns = {kind: new.columns(part, keep[new]) for kind, new in inside.items()}
                dims = {"qk_dims": 0, "v_dims": 0}
                dims |= {kind.width: sides[0].shape[-1] for kind, sides in columns.items()}
                same = all(keep[new] == new.live for new in inside.values())
                if same and dims == {"qk_dims": part.qk_dims, "v_dims": part.v_dims}:
                    own[name] = part
                elif any(dims.values()):
                    weight = part.inside.weight
                    own[name] = Part(attention.shape, **dims, dtype=weight.dtype, device=weight.device)
                    own[name].train(part.training).requires_grad_(weight.requires_grad)
                    for kind, sides in columns.items():
                        write_factors(own[name], kind, *sides)
    return parts


def _least_needed(
    objective: Objective, found: list[GrownDims], batches: list, max_loss_increase: float, bar: tqdm
) -> tuple[dict[GrownDims, int], float, float]:
    """Return how many new dims to keep, and the mean loss of the batches before and after.

    Directions are ranked by what each is worth for a weight, and bisection finds how many of them may go.
    """
    bar.total = len(batches)
    involved = list({new.attention: None for new in found})
    blocks, losses = measure_moments(objective, involved, list(KINDS.values()), batches, _RIDGE)
    before = mean_of(losses)
    by_place = {(block.attention, block.kind): block for block in blocks}
    # Of modules that the loss does not run, or only as cross-attention, nothing is known.
    live = [new for new in found if new.live and (new.attention, new.kind) in by_place]
    with raise_on_all_ranks():
        for new in live:
            new.refactor(by_place[new.attention, new.kind])

    def loss_with(keep: dict[GrownDims, int]) -> float:
        bar.total += len(batches)
        former = swap_parts(cut_parts(keep))
        try:
            return mean_loss(objective, batches)
        finally:
            swap_parts(former)

    everything = {new: new.live for new in found}
    nothing = everything | dict.fromkeys(live, 0)
    without = loss_with(nothing)
    if not live or without <= before + max_loss_increase:
        return nothing, before, without
    # What a layer's dims are worth alone says little where others stand in for them, or need them: the mean of cutting
    # them first and last, as growth prices its kinds.
    for new in live:
        first, last = loss_with({**everything, new: 0}) - before, without - loss_with({**nothing, new: new.live})
        new.worth = (first + last) / 2
    ranking = _ranking(live)
    keep, loss = everything, before
    good, bad = 0, len(ranking)  # how many directions may go, and how many are too many
    while bad - good > 1:
        tried = (good + bad) // 2
        fewer = {new: new.live - ranking[:tried].count(index) for index, new in enumerate(live)}
        after = loss_with({**everything, **fewer})
        if after <= before + max_loss_increase:
            good, keep, loss = tried, {**everything, **fewer}, after
        else:
            bad = tried
    return keep, before, loss


def _ranking(live: list[GrownDims]) -> list[int]:
    """Return for each direction, the least worth for a weight first, the index of its new dims in the list."""
    offers = []
    for index, new in enumerate(live):
        total = new.errors.sum().clamp_min(torch.finfo(new.errors.dtype).tiny)
        # Of what its dims are worth, a direction has the share that it has of their squared size.
        shares = new.errors[: new.live] / total / parameters_of_a_dim(new.attention, new.kind)
        offers += [(max(new.worth or 0.0, 0.0) * share, share, -n, index) for n, share in enumerate(shares.tolist())]
    ranking = torch.tensor([offer[-1] for offer in sorted(offers)], device=live[0].errors.device)
    broadcast_from_rank0(ranking)  # comparisons of rounded numbers may differ between machines
    return ranking.tolist()
