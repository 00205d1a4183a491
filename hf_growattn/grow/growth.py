"""Measure, widen, try, and keep or roll back: `Grower`."""

import contextlib
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from itertools import zip_longest

import torch
from torch import nn
from tqdm.auto import tqdm
from transformers import PreTrainedModel

from ..growable.attention import GrowableAttention
from ..growable.models import attentions
from ..growable.sharding import note
from ..measure import ranks
from ..measure.blocks import Block, measure_moments
from ..measure.extension import ExtraDims
from ..measure.gradients import (
    SKETCH_PASSES,
    ExistingStep,
    Gradient,
    exact_gradients,
    sketched_gradients,
    tangent_steps,
)
from ..measure.passes import mean_loss, mean_of
from ..report.report import GrowthReport
from .batches import as_dicts, check_shared, halves_of
from .checks import growable_model, layers_to_grow, refuse_sharded, trainable_parameters
from .findings import growth_report
from .frozen import old_dims_train, train_marked
from .keeping import write
from .loss import lowering, preserved_state
from .optimizer import add_new_parameters, bare_optimizers, check_optimizers, follow_resized
from .plan import GrowthConfig, candidates, check_limits, dims_worth_a_look, spend
from .search import MOST_EVALUATIONS, SMALLEST_FALL, StepSearch, prices_of
from .trial import STEEPNESS_BATCHES, Change, Trial

_SEARCH_BATCHES = 4  # enough to find a step on; what it gains is then measured on all batches
_INSTEAD = "Or keep the new dims in an adapter: GrowAttnConfig of peft, and initialize_growattn_weights."
_SMALLER = (1.0, 1 / 4, 1 / 16)  # parts of the steps found, tried in turn on all batches


@dataclass
class _Run:
    """One growth under way: its layers, its batches in two halves that judge each other, its progress and times."""

    model: PreTrainedModel
    chosen: list[GrowableAttention]
    halves: tuple[list, list]
    bar: tqdm
    seconds: dict[str, float] = field(default_factory=dict)

    @property
    def batches(self) -> list:
        return self.halves[0] + self.halves[1]

    @contextlib.contextmanager
    def timed(self, phase: str) -> Iterator[None]:
        start = time.perf_counter()
        yield
        self.seconds[phase] = time.perf_counter() - start

    @property
    def search_batches(self) -> list[list]:
        """A few batches of each half, evenly spaced, to search the step on."""
        return [half[:: max(-(-2 * len(half) // _SEARCH_BATCHES), 1)] for half in self.halves]

    def search_loss(self, half: int) -> float:
        """The mean loss of the search batches of one half."""
        return mean_loss(self.model, self.search_batches[half], self.count_forward)

    def count_forward(self) -> None:
        """Advance the progress bar by one forward pass of a batch."""
        self.bar.update(1)

    def count_training_step(self) -> None:
        """Advance the progress bar by a forward and a backward pass, which take about three times as long."""
        self.bar.update(3)


@dataclass
class _Measured:
    """What is known before anything is tried: losses, directions, and the search that priced them."""

    loss: float
    search_loss: float
    gradients: list[Gradient]
    existing: list[ExistingStep | None]
    search: StepSearch | None = None


@dataclass
class _Found:
    """A trial in place at the steps that were found, and the report of it."""

    trial: Trial
    report: GrowthReport


class Grower:
    """Grows the attention of a patched model on batches of the user's own data, as `mathematics.md` derives it.

    Args:
        model: a model that `patch_model` has seen, or one loaded from a grown checkpoint; also a peft model of one
            with LoRA, whose adapters grow along, or any other module with one such model in it.
        config: what to grow.
        optimizer: the optimizer of the running training, if there is one, or a list of all of them: they keep their
            groups, order and state.
        accelerator: the `accelerate.Accelerator` of the training, if there is one.
        loss: what to lower, a function of `model` (without DistributedDataParallel) in evaluation mode and a batch of
            any form, which gives a tensor of one number, the batch's mean; by default what the model returns as loss.
        take_over: a function that receives the new dims of each attention module when a step lowers the loss. They
            are then not written into the weights, which may be quantized.

    Where torch.distributed runs, all ranks grow together, each on batches of its own: statistics and losses are summed
    over the ranks, so all of them take the same step, and DistributedDataParallel around the model is mended in place.
    Under FSDP2 (`fully_shard`, called before the optimizer is made, or accelerate's plugin with `fsdp_version=2`) each
    projection is replaced in place, one of them whole at a time; ranks with fewer batches repeat one without weight.
    Under tensor parallelism (`tp_size` of transformers, over all processes) each process has the same batches, computes
    some of the heads, and ends as one process would. Shards load only into a model of their widths: save `model.config`
    with them, and build from it to resume. Elsewhere a state loaded into the model and then into the optimizer may
    have other widths: both follow it. An error in one rank's forward pass or loss is raised on all of them (under FSDP2
    where the loss runs the model once).

    Raises:
        ValueError: the model is not patched, model or optimizer are sharded in other ways, projections to be
            resized are quantized or under other adapters than plain LoRA, adapters add prompts or new dims of their
            own, or no layer is as narrow as the config's limits.
    """

    def __init__(
        self,
        model: nn.Module,
        config: GrowthConfig,
        optimizer=None,
        accelerator=None,
        loss=None,
        take_over: Callable[[dict[GrowableAttention, ExtraDims]], None] | None = None,
    ):
        self.take_over, self.optimizers = take_over, bare_optimizers(optimizer)
        refuse_sharded(model, self.optimizers, accelerator, but_in_place=True)
        self.model, self.wrapped, self.loss = growable_model(model), model, loss
        check_limits(config, attentions(self.model))
        self.config = config
        for attention in attentions(self.model) if take_over is None else ():
            if config.layers is None or attention.layer_idx in config.layers:
                for role in (role for kind in config.chosen_kinds for role in kind.roles):
                    attention.parameters_along(
                        role, _INSTEAD
                    )  # what can never be resized is refused before any training
        for bare in self.optimizers:
            bare.register_load_state_dict_pre_hook(lambda *_: self.follow_loaded())

    def follow_loaded(self) -> None:
        """Let optimizers and DistributedDataParallel follow a model that took other widths with a loaded state.

        An optimizer calls this by itself before its own state is loaded.
        """
        stale, opened = follow_resized(self.optimizers), train_marked(self.model)
        add_new_parameters(self.optimizers, self.model, opened)
        if stale or opened:
            ranks.rebuild_ddp(self.model, self.wrapped)

    def grow(self, batches: Iterable, keep: bool = True) -> GrowthReport:
        """Widen along the best directions that hold on unseen batches, by the steps that lower the loss most.

        If nothing holds or no step lowers the loss, and also after an exception, model and optimizer are as they were,
        to the bit. Gradients, training modes, `requires_grad` flags and the random state stay as they were in any case.

        Args:
            batches: dicts that `model(**batch).loss` accepts, or tensors of `input_ids` (batch, tokens), which are
                their own labels; with `loss=`, what that takes. They are read once, and kept for the passes over them.
                Each half of them judges what the other found, so there must be two sequences at least, or two batches
                with `loss=`; a few dozen batches are better.
            keep: False takes all of it back, as `measure`.

        Returns:
            What was measured and done; prints as a table. A model that grew no longer names the checkpoint that it
            came from as its own: what others would load from there, such as TRL a reference model, has to be passed.

        Raises:
            RuntimeError: under torch.distributed, the growth failed in another process, whose own error says why.
            ValueError: no batches or a single sequence, a loss or gradients that are not finite, weights that cannot be
                trained (frozen, quantized, on the meta device, inference tensors) or resized (other than plain LoRA),
                an optimizer without the model's parameters or with a state that cannot be widened, tokens that the
                model does not know, a budget that buys nothing, or a layer that does not exist or is as wide as it can
                be. The message names the fix.
        """
        with self._run(batches) as run:
            measured = self._measure(run)
            changes = self._plan(run, measured)
            found = self._try(run, measured, changes)
            del measured, changes  # of the weights' size, and the training's next step needs that memory
            return self._keep(run, found, keep)

    def measure(self, batches: Iterable) -> GrowthReport:
        """Try what `grow` would do, and take it back: model and optimizer stay as they are, to the bit.

        The report is the one that `grow` would return, with `kept=False`. Arguments and errors are those of `grow`.
        """
        return self.grow(batches, keep=False)

    def check(self, batches: Iterable) -> float:
        """Check what `grow` checks before it begins, with the same errors, and return the mean loss of the batches."""
        with self._run(batches) as run, self._preserved_state():
            return mean_loss(self.model, run.batches)

    @contextlib.contextmanager
    def _run(self, batches: Iterable) -> Iterator[_Run]:
        """Check all that can be checked before anything is measured, and read the batches."""
        kinds = self.config.chosen_kinds
        with ranks.raise_on_all_ranks():
            note(self.model)  # also what it raises comes before anything is measured
            as_extension = self.take_over is not None
            chosen = layers_to_grow(self.model, self.config, as_extension)
            check_optimizers(
                self.optimizers, trainable_parameters(self.model, chosen, kinds, as_extension=as_extension)
            )
            read = as_dicts(batches, self.model) if self.loss is None else [*batches]
            check_shared(read, chosen)
            halves = halves_of(read, whole=self.loss is not None)
        if not all(ranks.total(*map(len, halves))):
            raise ValueError(
                "There are too few batches to grow on: a growth needs two sequences at least, two batches with loss=, "
                "so that one can judge what the other found. Pass a few dozen of your training batches."
            )
        hidden = True if ranks.rank() > 0 else None
        with (
            lowering(self.loss, self.model, self.wrapped),
            tqdm(desc="growth: measuring", disable=hidden, leave=False) as bar,
        ):
            run = _Run(self.model, chosen, halves, bar)
            bar.total = self._length(run)
            yield run

    def _preserved_state(self):
        return preserved_state(self.wrapped, self.optimizers)

    def _most_dims(self, chosen: list[GrowableAttention]) -> int:
        """How many dims to look for, in every layer alike."""
        return max(self.config.most_dims(layer, kind) for layer in chosen for kind in self.config.chosen_kinds)

    def _sketches(self, dims: int) -> bool:
        """Whether to sketch: not where the whole gradient is cheaper than a sketch of both sides, and no larger."""
        return dims > 0 and 2 * (dims + self.config.oversampling) < self.model.config.hidden_size

    def _length(self, run: _Run) -> int:
        """How long the growth will take at most, in batches that go through the model once."""
        passes = sum(SKETCH_PASSES) if self._sketches(self._most_dims(run.chosen)) else 1
        passes += self.config.moves_old_dims
        back = round(passes * len(run.batches)) + (STEEPNESS_BATCHES if self.optimizers else 0)
        return 2 * len(run.batches) + 3 * back + MOST_EVALUATIONS * sum(map(len, run.search_batches))

    def _measure(self, run: _Run) -> _Measured:
        """Measure the mean loss, and every block's best directions; nothing has changed then."""
        config = self.config
        setting = config.old_dims_train
        trains = [
            old_dims_train(layer, kind.roles) if setting is None else setting
            for layer in run.chosen
            for kind in config.chosen_kinds
        ]
        with self._preserved_state():
            with run.timed("moments"):
                # In the order they were given in: an error names a batch by its number.
                given = [batch for pair in zip_longest(*run.halves) for batch in pair if batch is not None]
                blocks, losses = measure_moments(
                    self.model, run.chosen, config.chosen_kinds, given, config.ridge, run.count_forward
                )
                loss_of = dict(zip(map(id, given), losses))
                search_loss = sum(mean_of([loss_of[id(batch)] for batch in half]) for half in run.search_batches) / 2
            for block, known in zip(blocks, trains):
                block.old_dims_train = known
            with run.timed("probe"):
                gradients = self.directions(blocks, run.halves, run.count_training_step)
                existing: list[ExistingStep | None] = [None] * len(blocks)
                if config.moves_old_dims:
                    existing = [*tangent_steps(self.model, blocks, run.halves, run.count_training_step)]
        return _Measured(mean_of(losses), search_loss, gradients, existing)

    def _plan(self, run: _Run, measured: _Measured) -> list[Change]:
        """Choose the dims of each block: those of the config, or those that a budget buys."""
        changes = candidates(self.config, measured.gradients)
        if self.config.budget is not None:
            with run.timed("pricing"), self._preserved_state():
                prices, measured.search = prices_of(changes, run.search_loss, measured.search_loss)
            changes = spend(self.config, changes, prices, self.model.num_parameters())
        changes = [_as_on_rank0(change) for change in changes]
        for change, step in zip(changes, measured.existing):
            change.existing, change.refactor = step, self.config.method == "refactor" and change.dims > 0
        return changes

    def _try(self, run: _Run, measured: _Measured, changes: list[Change]) -> _Found:
        """Attach the new dims as extensions, and search the steps that lower the loss most."""
        run.bar.set_description("growth: searching the step")
        with run.timed("solving"):
            trial = Trial([change for change in changes if change.dims or change.existing])
        with self._undone_on_failure(trial):
            search = StepSearch(trial, run.search_loss, measured.search, measured.search_loss)
            with run.timed("line search"), self._preserved_state():
                steps, loss = self.steps(search, run.batches, measured.loss, run.count_forward)
            tried = (measured.search or search).tried
            losses = {"loss_before": measured.loss, "loss_after": loss, "line_search": tried}
            losses["validated_loss"] = _validated_loss(search, steps)
            report = growth_report(self.config, self.model, changes, trial, steps, seconds=run.seconds, **losses)
        return _Found(trial, report)

    def _keep(self, run: _Run, found: _Found, keep: bool) -> GrowthReport:
        """Write new dims that lower the loss, or pass them to `take_over`."""
        trial, report = found.trial, replace(found.report, kept=keep)
        with self._undone_on_failure(trial):
            if report.applied and self.take_over is None:
                write(trial, self.model, self.wrapped, self.optimizers, run.batches, run.count_training_step)
                return report
            if report.applied and self.take_over is not None:
                for new in trial.extensions.values():
                    ranks.broadcast_from_rank0(*new.tensors())
                self.take_over(trial.extensions)
            trial.undo()
        return report

    @contextlib.contextmanager
    def _undone_on_failure(self, trial: Trial) -> Iterator[None]:
        try:
            yield
        except BaseException:
            trial.undo()
            self.model.sync_config()
            raise

    def steps(
        self, search: StepSearch, batches: list, loss_before: float, tick: Callable[[], None]
    ) -> tuple[list[float], float]:
        """Find steps on a few batches and write the part that lowers the loss of all batches; zeros if none does."""
        nothing = [0.0] * len(search.trial.changes), loss_before
        steps, _ = search.run()
        parts = _SMALLER if sum(steps) > 0 else ()
        for part in parts:
            smaller = [step * part for step in steps]
            search.trial.set_steps(smaller)
            loss_after = mean_loss(self.model, batches, tick)
            if loss_before - loss_after > SMALLEST_FALL * abs(loss_before):
                return smaller, loss_after
        return nothing

    def directions(self, blocks: list[Block], halves: tuple[list, list], tick: Callable[[], None]) -> list[Gradient]:
        """Find every block's best directions; a subclass may find others."""
        config, dims = self.config, self._most_dims(layers := [block.attention for block in blocks])
        if not self._sketches(dims):
            return exact_gradients(self.model, blocks, halves, dims, tick)
        if config.budget is not None:
            dims = min(dims, dims_worth_a_look(config, layers, self.model.num_parameters()))
        return sketched_gradients(self.model, blocks, halves, dims, config.oversampling, config.seed, tick)


def _validated_loss(search: StepSearch, steps: list[float]) -> tuple[float, float] | None:
    """The search's loss before and at these steps; None where no half is unseen, or no such loss was measured."""
    if not any(steps):
        return search.loss_before, search.loss_before
    if any(change.existing for change in search.trial.changes):  # old dims move along directions of both halves
        return None
    if steps != search.steps_for(search.promises) or search.lowest >= search.loss_before:
        return None
    return search.loss_before, search.lowest


def _as_on_rank0(change: Change) -> Change:
    """Return the change with the dims and strengths of rank 0: rounding may differ between machines."""
    dims = torch.tensor([change.dims], device=change.strength.device)
    strength = torch.nn.functional.pad(change.strength, (0, len(change.gradient.validated) - change.dims))
    ranks.broadcast_from_rank0(dims, strength)
    return replace(change, dims=dims.item(), strength=strength[: dims.item()])
