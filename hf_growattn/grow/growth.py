"""Find new dims that lower the loss, try them, and keep or drop them: `Grower` and `Growth`."""

import contextlib
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from itertools import zip_longest
from typing import Any

import torch
from torch import nn
from tqdm.auto import tqdm

from ..growable.attention import GrowableAttention
from ..growable.growths import attentions, check_saving, leave_checkpoint, next_name, parts_of, replace_parts
from ..growable.training_state import (
    all_reduce_sum,
    bare_optimizers,
    broadcast_from_rank0,
    check_optimizers,
    is_distributed,
    raise_on_all_ranks,
    rank,
    refuse_sharded,
    reshard,
    warn_without_ddp,
)
from ..measure.blocks import Block, measure_moments
from ..measure.gradients import Gradient, exact_gradients, passes_over, sketched_gradients
from ..measure.passes import Objective, as_dicts, halves_of, losses_of, lowering, mean_loss, preserved_state, read_once
from ..model.extra import Part
from ..report.report import GrowthReport
from .plan import (
    GrowthConfig,
    candidates,
    check_room,
    dims_worth_a_look,
    growth_report,
    layers_to_grow,
    model_to_grow,
    prices_of,
    spend,
)
from .trial import MOST_EVALUATIONS, SMALLEST_FALL, Change, StepSearch, Trial

_FEW = 2  # batches of each half that a step is judged on, and that it is searched on where one does not fall at once
_LONG = 64  # tokens, after which the time of the next one says something about a generation
_SMALLER = (1.0, 1 / 4, 1 / 16)  # parts of the steps found, tried in turn on all batches


@dataclass
class _Run:
    """One search for new dims: its layers, its batches in two halves that judge each other, and the losses before."""

    objective: Objective
    chosen: list[GrowableAttention]
    halves: tuple[list, list]
    bar: tqdm
    losses: dict[int, float] = field(default_factory=dict)  # of each of this rank's batches, by identity
    loss: float = math.nan  # the mean of all batches
    searched: int = 1  # batches of each half that the step is searched on; what it gains is then measured on all

    @property
    def batches(self) -> list:
        return self.halves[0] + self.halves[1]

    def few_batches(self, count: int) -> list[list]:
        """At most `count` batches of each half, evenly spaced."""
        return [half[:: max(-(-len(half) // count), 1)] for half in self.halves]

    def loss_before(self, batches: list) -> float:
        """The mean loss of some of the batches, over all ranks, before anything was tried."""
        loss, count = all_reduce_sum(sum(self.losses[id(batch)] for batch in batches), len(batches))
        return loss / count

    def measure(self, half: int) -> float:
        """The mean loss of the batches of one half that the step is searched on."""
        return mean_loss(self.objective, self.few_batches(self.searched)[half])

    def few_before(self, count: int) -> float:
        """The mean over both halves of the loss of their `few_batches`, before anything was tried."""
        return sum(map(self.loss_before, self.few_batches(count))) / 2

    def search_loss(self) -> float:
        """The mean of both halves' `measure` before anything was tried."""
        return self.few_before(self.searched)

    def search_wider(self) -> float:
        """Let `measure` read more batches from now on, and return their `search_loss`."""
        self.searched = _FEW
        return self.search_loss()


class Growth:
    """New dims that `Grower.find` has found. The model is unchanged until `keep`.

    Attributes:
        report: what was measured; prints as a table. `report.applied` says whether any step lowers the loss.
    """

    def __init__(self, grower: "Grower", trial: Trial | None, report: GrowthReport):
        self._grower, self._trial, self.report = grower, trial, report

    @property
    def parts(self) -> dict[GrowableAttention, Part]:
        """The new dims by attention module; empty where no step lowers the loss, and once they are dropped."""
        return self._trial.parts if self._trial is not None else {}

    def keep(self) -> GrowthReport:
        """Make the new dims parts of the model that train, in the optimizer's groups, too; returns the report.

        Where no step lowers the loss, nothing changes.
        """
        grower = self._grower
        if self._trial is not None:
            check_saving(grower.wrapped)
            warn_without_ddp(grower.wrapped)
            reshard(grower.model)
            name, kept = next_name(grower.model), parts_of(grower.model)
            for attention, part in self.parts.items():
                broadcast_from_rank0(*(parameter.detach() for parameter in part.parameters()))
                part.requires_grad_(True).train(attention.training)
            grown = {attention: kept[attention] | {name: part} for attention, part in self.parts.items()}
            replace_parts(grower.wrapped, grown, grower.optimizers)
            leave_checkpoint(grower.model)
            self._trial.commit(grower.optimizers)
        self.drop()
        return replace(self.report, kept=True)

    def drop(self) -> GrowthReport:
        """Forget the new dims; returns the report."""
        self._trial = None
        return replace(self.report, kept=False)


class Grower:
    """Grows the attention of a patched model on batches of the user's own data, as `mathematics.md` derives it.

    Args:
        model: a model that `patch_model` has seen, or one loaded from a grown checkpoint; also a peft model of one,
            or any other module with one such model in it.
        config: what to grow.
        optimizer: the optimizer of the running training, if there is one, or a list of all of them. New dims join one
            of its groups with a fresh state; nothing else of it changes. Make lists of parameters (for clipping) and
            copies of the model (`AveragedModel`) again after a growth.
        loss: what to lower, a function of `model` (without DistributedDataParallel) in evaluation mode and a batch of
            any form, which gives a tensor of one number, the batch's mean; by default what the model returns as loss.

    Where torch.distributed runs, all ranks grow together, each on batches of its own: statistics and losses are summed
    over the ranks, so all of them take the same step, and DistributedDataParallel around the model is mended in place.
    Under FSDP2 (`fully_shard`, or accelerate's plugin with `fsdp_version=2`) new dims are sharded likewise; ranks with
    fewer batches repeat one without weight. An error in one rank's forward pass or loss is raised on all of them; under
    FSDP2, where the ranks run the model together, only a loss that is not finite is.

    Raises:
        ValueError: the model is not patched, model or optimizer are sharded in other ways, adapters add prompts, or no
            layer is as narrow as the config's limits.
    """

    def __init__(self, model: nn.Module, config: GrowthConfig, optimizer=None, loss=None):
        if not isinstance(config, GrowthConfig):
            raise TypeError(
                f"Grower needs a GrowthConfig, such as GrowthConfig(budget=0.02), and was given {config!r}."
            )
        if not (loss is None or callable(loss)):
            raise TypeError(f"loss must be a function of model and batch, and is {loss!r}.")
        self.optimizers = bare_optimizers(optimizer)
        self.model, self.wrapped, self.loss = model_to_grow(model), model, loss
        refuse_sharded(model, self.optimizers, but_fsdp2=True)
        check_room(config, attentions(self.model))
        self.config = config

    def find(self, batches: Iterable) -> Growth:
        """Find the best new dims that hold on unseen batches, and the steps that lower the loss most.

        Nothing changes: model, optimizer, gradients, training modes, `requires_grad` flags and the random state are as
        they were, after an exception, too.

        Args:
            batches: dicts that `model(**batch).loss` accepts, or tensors of `input_ids` (batch, tokens), which are
                their own labels; with `loss=`, what that takes. They are read once, and kept for the passes over them.
                Each half of them judges what the other found, so there must be two sequences at least, or two batches
                with `loss=`; a few dozen batches are better.

        Returns:
            The growth, with its report; `keep` makes its new dims a part of the model.

        Raises:
            RuntimeError: under torch.distributed, the search failed in another process, whose own error says why.
            ValueError: no batches or a single sequence, a loss or gradients that are not finite, weights on the meta
                device or made under `inference_mode`, an optimizer without the model's parameters, an LBFGS that has
                stepped, tokens that the model does not know, a budget that buys nothing, or a layer that does not exist
                or is as wide as it can be. The message names the fix.
        """
        with self._run(batches) as run:
            changes, pricing = self._plan(run, self._measure(run))
            return self._try(run, changes, pricing)

    def grow(self, batches: Iterable) -> GrowthReport:
        """Find new dims, and keep them if they lower the loss; arguments and errors are those of `find`.

        A model that grew no longer names the checkpoint that it came from as its own: what others would load from
        there, such as TRL a reference model, has to be passed.
        """
        check_saving(self.wrapped)
        return self.find(batches).keep()

    def measure(self, batches: Iterable) -> GrowthReport:
        """Find new dims, and drop them: the report of what `grow` would do, with `kept=False`."""
        return self.find(batches).drop()

    def check(self, batches: Iterable) -> float:
        """Check what `find` checks before it begins, with the same errors, and return the mean loss of the batches."""
        with self._run(batches) as run, preserved_state(self.wrapped, self.optimizers):
            return mean_loss(run.objective, run.batches)

    @contextlib.contextmanager
    def _run(self, batches: Iterable) -> Iterator[_Run]:
        """Check all that can be checked before anything is measured, and read the batches."""
        with raise_on_all_ranks():
            reshard(self.model)
            chosen = layers_to_grow(self.model, self.config)
            if self.config.moves_old_dims:
                from .old_dims import check_old_dims

                check_old_dims(self.model, self.config, chosen)
            check_optimizers(self.optimizers, self.model)
            read = as_dicts(batches, self.model) if self.loss is None else read_once(batches)
            halves = halves_of(read, whole=self.loss is not None)
        if not all(all_reduce_sum(*map(len, halves))):
            raise ValueError(
                "There are too few batches to grow on: a growth needs two sequences at least, two batches with loss=, "
                "so that one can judge what the other found. Pass a few dozen of your training batches."
            )
        with (
            tqdm(desc="growth: measuring", disable=True if rank() > 0 else None, leave=False) as bar,
            lowering(self.loss, self.model, self.wrapped, bar.update) as objective,
        ):
            run = _Run(objective, chosen, halves, bar)
            bar.total = self._length(run)
            yield run

    def _dims_to_sketch(self, chosen: list[GrowableAttention]) -> tuple[int, bool]:
        """How many dims to look for, in every layer alike, and whether to sketch them.

        That is not done where the whole gradient is cheaper than a sketch of both sides, and no larger.
        """
        dims = max(self.config.most_dims(layer, kind) for layer in chosen for kind in self.config.chosen_kinds)
        features = min(attention.shape.in_features for attention in chosen)
        return dims, dims > 0 and 2 * (dims + self.config.oversampling) < features

    def _length(self, run: _Run) -> int:
        """How long the search will take at most, in batches that go through the model once."""
        passes = passes_over(run.halves) if self._dims_to_sketch(run.chosen)[1] else [run.halves]
        passes += [run.halves] * self.config.moves_old_dims
        back = sum(len(half) for halves in passes for half in halves)
        return 2 * len(run.batches) + 3 * back + (MOST_EVALUATIONS + 1) * sum(map(len, run.few_batches(_FEW)))

    def _measure(self, run: _Run) -> list[Gradient]:
        """Measure the mean losses, and return every block's best directions."""
        config = self.config
        trained = {(layer, kind): layer.trains(*kind.roles) for layer in run.chosen for kind in config.chosen_kinds}
        with preserved_state(self.wrapped, self.optimizers):
            # In the order they were given in: an error names a batch by its number.
            given = [batch for pair in zip_longest(*run.halves) for batch in pair if batch is not None]
            blocks, losses = measure_moments(run.objective, run.chosen, config.chosen_kinds, given, config.ridge)
            run.losses = dict(zip(map(id, given), losses))
            run.loss = run.loss_before(given)
            if not blocks:
                raise ValueError("The loss runs none of the attention modules that shall grow: choose other layers.")
            for block in blocks:
                setting = config.old_dims_train
                block.old_dims_train = trained[block.attention, block.kind] if setting is None else setting
            return self.directions(run.objective, blocks, run.halves)

    def _plan(self, run: _Run, gradients: list[Gradient]) -> tuple[list[Change], StepSearch | None]:
        """Choose the dims of each block, those of the config or what a budget buys by the prices of a search."""
        changes, pricing = candidates(self.config, gradients), None
        if self.config.budget is not None:
            with preserved_state(self.wrapped, self.optimizers):
                prices, pricing = prices_of(changes, run.measure, run.search_loss(), run.search_wider)
            changes = spend(self.config, changes, prices, self.model.num_parameters())
        return [_as_on_rank0(change) for change in changes], pricing

    def _try(self, run: _Run, changes: list[Change], pricing: StepSearch | None) -> Growth:
        """Attach the new dims for a while, and search the steps that lower the loss most."""
        run.bar.set_description("growth: searching the step")
        trial = self._make_trial(run, changes)
        try:
            search = StepSearch(trial, run.measure, run.search_loss(), run.search_wider, pricing)
            with preserved_state(self.wrapped, self.optimizers):
                steps, loss = self.steps(run, search)
                validated = _validated_loss(run, trial, steps)
                decoding = self._time_decoding(run, trial) if any(steps) else None
            trial.set_steps(steps)
            trial.detach()
            losses = {"loss_before": run.loss, "loss_after": loss, "validated_loss": validated}
            report = growth_report(self.model, changes, trial, steps, **losses, decoding=decoding)
        except BaseException:
            trial.drop()
            raise
        return Growth(self, trial if any(steps) else None, report)

    def _make_trial(self, run: _Run, changes: list[Change]) -> Trial:
        """Attach the changes; where old weights take steps along, by what `old_dims.py` does."""
        if not self.config.moves_old_dims:
            return Trial([change for change in changes if change.dims])
        from .old_dims import make_trial

        with preserved_state(self.wrapped, self.optimizers):  # which takes off on leaving what was attached inside
            trial = make_trial(self.config, run.objective, changes, run.halves)
        trial.attach()
        return trial

    def _time_decoding(self, run: _Run, trial: Trial) -> tuple[float, float, int] | None:
        """`Trial.time_decoding` after the first row of a batch of text; None for others, and short ones."""
        model: Any = self.model
        batch: Any = next(iter(run.batches), None)
        is_text = isinstance(batch, dict) and {"input_ids", "attention_mask", "labels"}.issuperset(batch)
        decodes = model.can_generate() and not model.config.is_encoder_decoder and not is_distributed()
        if not (is_text and decodes and batch["input_ids"].shape[-1] >= _LONG):
            return None
        return trial.time_decoding(model, batch["input_ids"][:1].to(run.objective.device))

    def steps(self, run: _Run, search: StepSearch) -> tuple[list[float], float]:
        """Find steps on a few batches and set the part that lowers the loss of all batches; zeros if none does."""
        steps, _ = search.run()
        parts = _SMALLER if sum(steps) > 0 else ()
        for part in parts:
            smaller = [step * part for step in steps]
            search.trial.set_steps(smaller)
            loss_after = mean_loss(run.objective, run.batches)
            if run.loss - loss_after > SMALLEST_FALL * abs(run.loss):
                return smaller, loss_after
        return [0.0] * len(steps), run.loss

    def directions(self, objective: Objective, blocks: list[Block], halves: tuple[list, list]) -> list[Gradient]:
        """Find every block's best directions; a subclass may find others."""
        config, layers = self.config, [block.attention for block in blocks]
        dims, sketches = self._dims_to_sketch(layers)
        if not sketches:
            return exact_gradients(objective, blocks, halves, dims)
        if config.budget is not None:
            dims = min(dims, dims_worth_a_look(config, layers, self.model.num_parameters()))
        return sketched_gradients(objective, blocks, halves, dims, config.oversampling, config.seed)


def _validated_loss(run: _Run, trial: Trial, steps: list[float]) -> tuple[float, float, float] | None:
    """The mean loss of a few batches before and at these steps, each half along directions that the other found.

    The third number is two standard errors of the fall. None without a step, and where old dims move: along directions
    of both halves.
    """
    if not any(steps) or any(change.old_step for change in trial.changes):
        return None
    falls: list[float] = []
    for half, batches in zip((1, 0), run.few_batches(_FEW)):
        trial.set_steps(steps, half)
        losses = losses_of(run.objective, batches)
        falls += [run.losses[id(batch)] - loss for batch, loss in zip(batches, losses)]
    count, fall, squares = all_reduce_sum(len(falls), sum(falls), sum(each * each for each in falls))
    variance = max(squares / count - (fall / count) ** 2, 0.0) / (count - 1)
    before = run.few_before(_FEW)
    return before, before - fall / count, 2 * math.sqrt(variance)


def _as_on_rank0(change: Change) -> Change:
    """Return the change with the dims and strengths of rank 0: rounding may differ between machines."""
    dims = torch.tensor([change.dims], device=change.strength.device)
    strength = torch.nn.functional.pad(change.strength, (0, len(change.gradient.validated) - change.dims))
    broadcast_from_rank0(dims, strength)
    return replace(change, dims=dims.item(), strength=strength[: dims.item()])
