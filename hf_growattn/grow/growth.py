"""Find new dims that lower the loss, try them, and keep or drop them: `Grower` and `Growth`."""

import contextlib
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

import torch
from torch import nn
from tqdm.auto import tqdm

from ..growable.attention import GrowableAttention
from ..growable.growths import check_saving, growable_model, growths_of, leave_checkpoint, name_after, replace_growths
from ..growable.training_state import (
    all_reduce_sum,
    bare_optimizers,
    broadcast_from_rank0,
    check_optimizers,
    raise_on_all_ranks,
    rank,
    refuse_sharded,
    reshard,
    warn_without_ddp,
)
from ..measure import functional as F
from ..measure.bottlenecks import Kind, compute_moments
from ..measure.directions import Directions, passes_over, sketched_directions
from ..measure.guards import HeldInterrupts, adapters_stay
from ..measure.halves import HalvedBatches
from ..measure.passes import (
    ROUNDING,
    Objective,
    compute_losses,
    default_loss,
    is_called_by_another,
    lowering,
    mean_loss,
    preserved_state,
)
from ..model.new_dims import NewDims
from ..report.report import GrowthReport
from .plan import (
    GrowthConfig,
    all_candidates,
    check_loss,
    dims_worth_a_look,
    growth_report,
    layers_to_grow,
    list_batches,
    model_to_grow,
    read_batches,
    spend,
)
from .trial import FEW, MOST_EVALUATIONS, Candidate, StepSearch, Trial, price_kinds


@dataclass(frozen=True)
class Session:
    """What one growth works with, while the model is in evaluation mode.

    Attributes:
        objective: the loss that is lowered.
        layers: the attention modules that may grow.
        old_dims_train: of each layer and kind whether training moves its old dims.
        batches: in two halves that judge each other, with the losses before.
        search: for the steps; it counts what the whole growth spends.
        bar: shows the progress.
    """

    objective: Objective
    layers: list[GrowableAttention]
    old_dims_train: dict[tuple[GrowableAttention, Kind], bool]
    batches: HalvedBatches
    search: StepSearch
    bar: tqdm


class Growth:
    """New dims that `Grower.find` has found. The model is unchanged until `keep`.

    Attributes:
        report: what was measured; prints as a table. `report.holds` says whether the new dims lower the loss of batches
            that they were not computed from.
    """

    def __init__(self, wrapped: nn.Module, optimizers: list[torch.optim.Optimizer], trial: Trial, report: GrowthReport):
        self._wrapped, self._optimizers, self.report = wrapped, optimizers, report
        self._trial: Trial | None = trial  # None at the end: it holds as much as the gradients of all layers
        self._end = ""

    @property
    def new_dims(self) -> dict[GrowableAttention, NewDims]:
        """The new dims by attention module; empty once they are kept or dropped."""
        return self._trial.new_dims if self._trial is not None else {}

    def keep(self) -> GrowthReport:
        """Make the new dims a part of the model that trains, in the optimizer's groups, too; returns the report.

        They need not hold; where no step lowers the loss, they change nothing yet. After an exception model and
        optimizers are as they were. Ctrl-C waits until all is done.

        Raises:
            RuntimeError: the growth was kept or dropped before.
        """
        with HeldInterrupts():
            return self._keep()

    def _keep(self) -> GrowthReport:
        trial, model = self._open_trial(), growable_model(self._wrapped)
        if not any(candidate.changes_model for candidate in trial.candidates):  # a budget may have bought nothing
            self._finish("kept, with nothing in it")
            return self.report
        check_saving(self._wrapped)
        warn_without_ddp(self._wrapped)
        reshard(model)
        kept = growths_of(model)
        name = name_after(name for growths in kept.values() for name in growths)
        for attention, new in trial.new_dims.items():
            new.to(attention.empty_like())  # the model may have moved, or changed its precision, since
            broadcast_from_rank0(*(parameter.detach() for parameter in new.parameters()))
            new.requires_grad_(True).train(attention.module.training)
        grown = {attention: kept[attention] | {name: new} for attention, new in trial.new_dims.items()}

        def commit() -> None:
            for candidate in trial.candidates:
                candidate.commit(self._optimizers)
            leave_checkpoint(model)
            self._finish("kept")

        try:
            replace_growths(self._wrapped, grown, self._optimizers, commit)
        except BaseException:
            if not self._end:
                for candidate in trial.candidates:
                    candidate.undo()
            raise
        self.report = replace(self.report, kept=True)
        return self.report

    def drop(self) -> GrowthReport:
        """Forget the new dims; returns the report.

        Raises:
            RuntimeError: the growth was kept or dropped before.
        """
        self._open_trial()
        self._finish("dropped")
        return self.report

    def _open_trial(self) -> Trial:
        if self._trial is None:
            raise RuntimeError(f"This growth was {self._end}, which ends it. Find another one by Grower.find.")
        return self._trial

    def _finish(self, end: str) -> None:
        self._trial, self._end = None, end


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
            any form, which gives a tensor of one number, the batch's mean; by default the loss that `model(**batch)`
            returns, of a module around the model that module's.

    Where torch.distributed runs, all ranks grow together, each on batches of its own: statistics and losses are summed
    over the ranks, so all of them take the same step, and DistributedDataParallel around the model is mended in place.
    Under FSDP2 (`fully_shard`, or accelerate's plugin with `fsdp_version=2`) new dims are sharded likewise; ranks with
    fewer batches repeat one without weight. An error in one rank's forward pass or loss is raised on all of them; under
    FSDP2, where the ranks run the model together, only a loss that is not finite is.

    Raises:
        ValueError: the model is not patched, model or optimizer are sharded in other ways, or adapters add prompts.
    """

    def __init__(self, model: nn.Module, config: GrowthConfig, optimizer=None, loss=None):
        if not isinstance(config, GrowthConfig):
            given = type(config).__name__
            raise TypeError(f"Grower needs a GrowthConfig, such as GrowthConfig(budget=0.02), and was given a {given}.")
        check_loss(loss)
        self.optimizers = bare_optimizers(optimizer)
        self.model, self.wrapped = model_to_grow(model), model
        is_inside = loss is None and is_called_by_another(self.model, model)
        self.loss = default_loss if is_inside else loss
        refuse_sharded(model, self.optimizers, but_fsdp2=True)
        self.config = config

    def find(self, batches: Iterable) -> Growth:
        """Find the best new dims that hold on unseen batches, and the steps that lower the loss most.

        Nothing changes: model, optimizer, gradients, training modes, `requires_grad` flags and the random state are as
        they were, after an exception, too. Ctrl-C waits for the end of a batch.

        Args:
            batches: dicts that `model(**batch).loss` accepts, or tensors of `input_ids` (batch, tokens), which are
                their own labels; with `loss=`, what that takes. They are read once, and kept for the passes over them.
                Each half of them judges what the other found, so there must be two sequences at least, or two batches
                with `loss=`; a few dozen batches are better, and such as the model has not trained on, since rows that
                it knows by heart say little of others. A batch with a row of the other half does not judge.

        Returns:
            The growth, with its report; `keep` makes its new dims a part of the model, whether they hold or not.

        Raises:
            RuntimeError: under torch.distributed, the search failed in another process, whose own error says why.
            ValueError: no batches or a single sequence, a loss or gradients that are not finite, weights on the meta
                device or made under `inference_mode`, an optimizer without the model's parameters, an LBFGS that has
                stepped, tokens that the model does not know, a budget that buys nothing, or a layer that does not exist
                or is as wide as it can be. The message names the fix.
        """
        with self._session(batches) as session:
            directions = self._measure_directions(session)
            candidates = self._choose_candidates(session, directions)
            candidates, trial, steps = self._try_candidates(session, candidates)
            return self._judge_steps(session, candidates, trial, steps)

    def grow(self, batches: Iterable) -> GrowthReport:
        """Find new dims, and keep them if they hold; otherwise nothing changes. Arguments and errors as for `find`.

        They hold if they lower the loss of batches that they were not computed from, by more than the error at 95 %:
        `report.kept` says whether the model has them.

        A model that grew no longer names the checkpoint that it came from as its own: what others would load from
        there, such as TRL a reference model, has to be passed.
        """
        check_saving(self.wrapped)
        growth = self.find(batches)
        return growth.keep() if growth.report.holds else growth.drop()

    def measure(self, batches: Iterable) -> GrowthReport:
        """Find new dims, and drop them: the report of what `grow` would do, with `kept=False`."""
        return self.find(batches).drop()

    def check(self, batches: Iterable) -> float:
        """Check what `find` checks before it begins, with the same errors, and return the mean loss of the batches."""
        with self._session(batches) as session:
            return mean_loss(session.objective, session.batches.every)

    @contextlib.contextmanager
    def _session(self, batches: Iterable) -> Iterator[Session]:
        """Check what can be checked before anything is measured, read the batches, and enter evaluation mode."""
        with raise_on_all_ranks():
            reshard(self.model)
            layers = layers_to_grow(self.model, self.config)
            if self.config.moves_old_dims:
                from .old_dims import check_old_dims

                check_old_dims(self.model, self.config, layers)
            check_optimizers(self.optimizers, self.model)
            read = read_batches(batches, self.model) if self.loss is None else list_batches(batches)
            halved = HalvedBatches(read, whole=self.loss is not None)
        if not all(all_reduce_sum(*map(len, halved.halves))):
            raise ValueError(
                "There are too few batches to grow on: a growth needs two sequences at least, two batches with loss=, "
                "so that one can judge what the other found. Pass a few dozen of your training batches."
            )
        old_dims_train = self._old_dims_train(layers)
        with (
            HeldInterrupts() as interrupts,
            tqdm(desc="growth: measuring", disable=rank() > 0, leave=False) as bar,
            lowering(self.loss, self.model, self.wrapped, lambda n: (bar.update(n), interrupts.check())) as objective,
            adapters_stay(self.model),
            preserved_state(self.wrapped, self.optimizers),
        ):
            bar.total = self._most_passes(halved)
            yield Session(objective, layers, old_dims_train, halved, StepSearch(objective, halved), bar)

    def _old_dims_train(self, layers: list[GrowableAttention]) -> dict[tuple[GrowableAttention, Kind], bool]:
        """Of each layer and kind whether training moves its old dims: what the config says, or `requires_grad`."""
        kinds, setting = self.config.chosen_kinds, self.config.old_dims_train
        trains = {(layer, kind): layer.trains(*kind.roles) for layer in layers for kind in kinds}
        return trains if setting is None else dict.fromkeys(trains, setting)

    def _most_passes(self, batches: HalvedBatches) -> int:
        """How long the search will take at most, in batches that go through the model once."""
        passes = passes_over(batches.halves) + [batches.halves] * self.config.moves_old_dims
        back = sum(len(half) for halves in passes for half in halves)
        judging = sum(map(len, batches.judges)) * (1 if batches.judges is batches.halves else 2)
        return len(batches.every) + judging + 3 * back + MOST_EVALUATIONS * sum(map(len, batches.few(FEW)))

    def _measure_directions(self, session: Session) -> list[Directions]:
        """Note the losses of the batches, and return the best directions of every bottleneck that the loss runs."""
        config, batches = self.config, session.batches
        bottlenecks, losses = compute_moments(session.objective, session.layers, config.chosen_kinds, batches.as_given)
        batches.note_losses(losses)
        if not bottlenecks:
            raise ValueError("The loss runs none of the attention modules that shall grow: choose other layers.")
        for bottleneck in bottlenecks:
            bottleneck.old_dims_train = session.old_dims_train[bottleneck.attention, bottleneck.kind]
        dims = max(config.most_dims(bottleneck.attention, bottleneck.kind) for bottleneck in bottlenecks)
        if config.budget is not None:
            layers = {bottleneck.attention for bottleneck in bottlenecks}
            dims = min(dims, dims_worth_a_look(config, layers, self.model.num_parameters()))
        directions = sketched_directions(session.objective, bottlenecks, batches.halves, dims, config.seed)
        for each in directions:
            each.leave_rounding_out(batches.loss_before)
        return directions

    def _choose_candidates(self, session: Session, directions: list[Directions]) -> list[Candidate]:
        """Choose the dims of each bottleneck: those of the config, or what a budget buys at the prices of a trial."""
        candidates = all_candidates(self.config, directions)
        if self.config.budget is not None:
            prices = price_kinds(session.search, candidates)
            candidates = spend(self.config, candidates, prices, self.model.num_parameters())
        candidates = [_as_on_rank0(candidate) for candidate in candidates]
        if not self.config.moves_old_dims:
            return candidates
        from .old_dims import with_old_steps

        return with_old_steps(self.config, session.objective, candidates, session.batches.halves)

    def _try_candidates(
        self, session: Session, candidates: list[Candidate]
    ) -> tuple[list[Candidate], Trial, list[float]]:
        """Search the steps that lower the loss of a few batches most; zeros if none does.

        Candidates without a step end without dims where others have one, so that only what lowers the loss is added.
        """
        session.bar.set_description("growth: searching the step")
        trial = Trial([candidate for candidate in candidates if not candidate.is_empty])
        with trial.attached():
            steps, _ = session.search.run(trial)
        taken = {candidate: step for candidate, step in zip(trial.candidates, steps) if step}
        if not taken:
            return candidates, trial, steps
        without = {"dims": 0, "share_that_holds": candidates[0].share_that_holds[:0]}
        candidates = [each if each in taken else replace(each, **without) for each in candidates]
        return candidates, Trial([*taken]), [*taken.values()]

    def _judge_steps(self, session: Session, candidates: list[Candidate], trial: Trial, steps: list[float]) -> Growth:
        """Judge the steps, and return the growth, with the steps set."""
        fall, error = _measure_fall(session, trial, steps) if any(steps) else (0.0, 0.0)
        with trial.attached():
            trial.set_steps(steps)
        before = session.batches.loss_before
        verdict = {"fall": fall, "error": error, "holds": fall > max(error, ROUNDING * abs(before))}
        kinds = self.config.chosen_kinds
        verdict["has_room"] = any(self.config.most_dims(layer, kind) for layer in session.layers for kind in kinds)
        report = growth_report(self.model, candidates, trial, steps, loss_before=before, **verdict)
        return Growth(self.wrapped, self.optimizers, trial, report)


def _measure_fall(session: Session, trial: Trial, steps: list[float]) -> tuple[float, float]:
    """Return the mean fall of the loss by these steps, and its error at 95 %.

    Either half of the batches takes the directions that it found by itself, and the other half judges them: each of
    its batches, or rows, is compared with itself without the new dims. Both halves together are as uncertain as one of
    them: to first order they measure the same number, the inner product of their gradients. What has a row of
    the other half does not judge; both figures are 0 where nothing is left that could.
    """
    halves, falls = session.batches.unseen, []
    before = [session.batches.losses_before(session.objective, half) for half in halves]
    with trial.attached():
        for half, (judges, losses_before) in enumerate(zip(halves, before)):
            trial.set_steps(steps, 1 - half)
            losses = compute_losses(session.objective, judges)
            falls += [former - loss for former, loss in zip(losses_before, losses) if math.isfinite(former)]
    count, total, squares = all_reduce_sum(len(falls), sum(falls), sum(each * each for each in falls))
    if count < 2:
        return 0.0, 0.0
    mean = total / count
    variance = max(squares - count * mean * mean, 0.0) / (count - 1)
    return mean, F.student_quantile(int(count) - 1) * math.sqrt(variance / (count / 2))


def _as_on_rank0(candidate: Candidate) -> Candidate:
    """Return the candidate with the dims and shares of rank 0: rounding may differ between machines."""
    share = candidate.share_that_holds
    dims = torch.tensor([candidate.dims], device=share.device)
    share = nn.functional.pad(share, (0, len(candidate.directions.validated) - candidate.dims))
    broadcast_from_rank0(dims, share)
    return replace(candidate, dims=dims.item(), share_that_holds=share[: dims.item()])
