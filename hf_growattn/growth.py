"""Measure, widen, try, and keep or roll back: `Grower`."""

import contextlib
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from itertools import zip_longest

import torch
from torch import nn
from tqdm.auto import tqdm
from transformers import PreTrainedModel

from . import ranks
from .attention import GrowableAttention
from .batches import as_dicts, halves_of
from .blocks import measure_moments
from .estimators import compared_gradients
from .gradients import (
    SKETCH_PASSES,
    ExistingStep,
    Gradient,
    exact_gradients,
    sketched_gradients,
    tangent_steps,
)
from .modeling import GrowableModelMixin, attentions
from .optimizer import bare_optimizers, check_optimizers, follow_gradients, follow_resized, swap_parameters
from .plan import GrowthConfig, candidates, spend, worth_of
from .probe import PATTERNS, Kind, autocast_in_the_model_only, mean_loss, undisturbed
from .report import GrowthReport, LayerGrowth
from .sharding import refuse_sharded
from .trainable import check_no_adapters, inside_peft, trainable_parameters
from .trial import SMALLEST_FALL, STEEPNESS_BATCHES, Change, StepSearch, Trial, measure_steepness
from .widths import Resize

_SEARCH_BATCHES = 8  # enough to find a step on; what it gains is then measured on all batches
_SMALLER = (1.0, 1 / 4, 1 / 16)  # parts of the steps found, tried in turn on all batches


class Grower:
    """Grows the attention of a patched model on batches of the user's own data, as `mathematics.md` derives it.

    Args:
        model: a model that `patch_model` has seen, or one loaded from a grown checkpoint; also a peft model of one
            with LoRA, whose adapters grow along.
        config: what to grow.
        optimizer: the optimizer of the running training, if there is one, or a list of all of them: they keep their
            groups, order and state.
        accelerator: the `accelerate.Accelerator` of the training, if there is one.

    Where torch.distributed runs, all ranks grow together, each on batches of its own: statistics and losses are summed
    over the ranks, so all of them take the same step, and DistributedDataParallel around the model is mended in place.
    A state loaded into the model and then into the optimizer may have other widths: both follow it.

    Raises:
        ValueError: the model is not patched, model or optimizer are sharded, adapters add prompts or new dims of their
            own, or an estimator for comparison is to run in several processes.
    """

    def __init__(self, model: PreTrainedModel, config: GrowthConfig, optimizer=None, accelerator=None):
        self.optimizers = bare_optimizers(optimizer)
        refuse_sharded(model, self.optimizers, accelerator)
        self.model = growable_model(model)
        if config.estimator != "whitened" and ranks.several():
            raise ValueError(f'The estimator {config.estimator!r} is for comparison in one process; use "whitened".')
        self.config = config
        for bare in self.optimizers:
            bare.register_load_state_dict_pre_hook(lambda *_: self.follow_loaded())

    def follow_loaded(self) -> None:
        """Let optimizers and DistributedDataParallel follow a model that took other widths with a loaded state.

        An optimizer calls this by itself before its own state is loaded.
        """
        if follow_resized(self.optimizers):
            ranks.rebuild_ddp(self.model)

    def grow(self, batches: Iterable) -> GrowthReport:
        """Widen along the best directions that hold on unseen batches, by the steps that lower the loss most.

        If nothing holds or no step lowers the loss, and also after an exception, model and optimizer are as they were,
        to the bit. Gradients, training modes, `requires_grad` flags and the random state stay as they were in any case.

        Args:
            batches: dicts that `model(**batch).loss` accepts, or tensors of `input_ids` (batch, tokens), which are
                their own labels. They are read once, and kept for the passes over them. Each half of them judges what
                the other found, so there must be two sequences at least; a few dozen batches are better.

        Returns:
            What was measured and done; prints as a table.

        Raises:
            RuntimeError: under torch.distributed, the growth failed in another process, whose own error says why.
            ValueError: no batches or a single sequence, a loss or gradients that are not finite, weights that cannot be
                trained (frozen, quantized, on the meta device, inference tensors) or resized (other than plain LoRA),
                an optimizer without the model's parameters or with a state that cannot be widened, or a layer that does
                not exist or is as wide as it can be. The message names the fix.
        """
        return self._tried(batches, keep=True)

    def measure(self, batches: Iterable) -> GrowthReport:
        """Try what `grow` would do, and take it back: model and optimizer stay as they are, to the bit.

        The report is the one that `grow` would return, with `kept=False`. Arguments and errors are those of `grow`.
        """
        return self._tried(batches, keep=False)

    def _tried(self, batches: Iterable, keep: bool) -> GrowthReport:
        with ranks.together():
            chosen = self._chosen_layers()
            check_optimizers(self.optimizers, self._parameters(chosen))
            halves = halves_of(as_dicts(batches))
        batches = halves[0] + halves[1]
        if not all(ranks.total(*map(len, halves))):
            raise ValueError(
                "There are too few batches to grow on: a growth needs two sequences at least, so that one can judge "
                "what the other found. Pass a few dozen of your training batches."
            )
        seconds: dict[str, float] = {}
        hidden = True if ranks.rank() > 0 else None
        with (
            autocast_in_the_model_only(self.model),
            tqdm(desc="growth: measuring", total=0, disable=hidden, leave=False) as bar,
        ):
            loss_before, changes, near = self._measure(chosen, halves, bar, seconds)
            bar.set_description("growth: searching the step")
            kept = [change for change in changes if change.dims or change.existing]
            with _timed(seconds, "solving"):
                trial = Trial(kept)
            search = StepSearch(trial, self._few(halves, bar))
            try:
                with _timed(seconds, "line search"), undisturbed(self.model):
                    steps, loss_after = self._steps(search, near, batches, loss_before, bar)
                    resizes = trial.resizes() if keep and any(steps) else []
                    self._measure_steepness(resizes, batches, bar)
                if not any(steps):
                    trial.undo()
                taken = dict(zip(map(id, kept), steps))
                report = GrowthReport(
                    loss_before=loss_before,
                    loss_after=loss_after,
                    layers=[_layer_growth(change, taken.get(id(change), 0.0)) for change in changes],
                    added_parameters=trial.added_parameters(),
                    line_search=search.tried,
                    seconds=seconds,
                    kept=keep,
                )
                if not keep:
                    trial.undo()
                elif any(steps):
                    self.model.sync_config()
                    swap_parameters(self.optimizers, resizes)
            except BaseException:
                trial.undo()
                self.model.sync_config()
                raise
        if report.applied:
            settle(self.model, chosen)
        return report

    def _few(self, halves: tuple[list[dict], ...], bar: tqdm) -> Callable[[int], float]:
        """Return what measures the mean loss of a few of the batches of one half, from all over them."""
        few = [half[:: max(-(-2 * len(half) // _SEARCH_BATCHES), 1)] for half in halves]

        def measure(half: int) -> float:
            bar.total += len(few[half])
            return mean_loss(self.model, few[half], bar.update)

        return measure

    def _steps(
        self, search: StepSearch, near: dict[Kind, float], batches: list[dict], loss_before: float, bar: tqdm
    ) -> tuple[list[float], float]:
        """Find steps on a few batches and write the part that lowers the loss of all batches; zeros if none does."""
        nothing = [0.0] * len(search.trial.changes), loss_before
        if self.config.estimator == "random":  # no direction to search along: the dims wait for training
            steps = [1.0] * len(search.trial.changes)
            search.trial.take(steps)
            return steps, loss_before
        found = [near.get(change.gradient.block.kind, 0.0) for change in search.trial.changes]
        steps, _ = search.run(self.config.refine, found if any(found) else None)
        if not any(steps):
            return nothing
        for part in _SMALLER:
            smaller = [step * part for step in steps]
            search.trial.take(smaller)
            bar.total += len(batches)
            loss_after = mean_loss(self.model, batches, bar.update)
            if loss_before - loss_after > SMALLEST_FALL * abs(loss_before):
                return smaller, loss_after
        return nothing

    def _measure_steepness(self, resizes: list[Resize], batches: list[dict], bar: tqdm) -> None:
        """Let optimizers that divide by the size of past gradients know that of new entries."""
        followed = follow_gradients(self.optimizers)
        resizes = [resize for resize in resizes if resize.old in followed]
        bar.total += len(batches[:STEEPNESS_BATCHES]) if resizes else 0
        measure_steepness(self.model, resizes, batches, bar.update)

    def _measure(
        self,
        chosen: list[GrowableAttention],
        halves: tuple[list[dict], list[dict]],
        bar: tqdm,
        seconds: dict[str, float],
    ) -> tuple[float, list[Change], dict[Kind, float]]:
        """Return the mean loss of the batches, what to do to each block of the chosen layers, steps to try first."""
        config, batches = self.config, halves[0] + halves[1]
        bar.total = len(batches)
        with undisturbed(self.model):
            with _timed(seconds, "moments"):
                # In the order they were given in: what is wrong with a batch is said here, by its number.
                given = [batch for pair in zip_longest(*halves) for batch in pair if batch is not None]
                blocks, loss = measure_moments(self.model, chosen, config.chosen_kinds, given, config.ridge, bar.update)
            with _timed(seconds, "probe"):
                gradients = self._gradients(blocks, halves, bar)
                existing: list[ExistingStep | None] = [None] * len(blocks)
                if config.update_existing or config.method == "refactor":
                    bar.total += len(batches)
                    existing = tangent_steps(self.model, blocks, halves, bar.update)
        changes, near = candidates(config, gradients), {}
        if config.budget is not None:
            with _timed(seconds, "pricing"):
                prices, near = self._prices(changes, self._few(halves, bar))
            changes = spend(config, changes, prices, self.model.num_parameters())
        changes = [_as_first_rank(change) for change in changes]
        for change, step in zip(changes, existing):
            change.existing, change.refactor = step, config.method == "refactor" and change.dims > 0
        return loss, changes, near

    def _prices(self, changes: list[Change], measure: Callable[[int], float]) -> tuple[list[float], dict[Kind, float]]:
        """What a unit of worth buys in each change's kind, its share of what all candidates gain at once; their steps.

        All candidates are grown together for a moment. Their gain is divided between the kinds by the Shapley value,
        the mean of what a kind adds first and what it adds last, and then among directions by their worth.
        """
        kept = [change for change in changes if change.dims]
        trial = Trial(kept)
        try:
            with undisturbed(self.model):
                search = StepSearch(trial, measure)
                steps, after = search.run()
                gains = {}
                for kind in self.config.chosen_kinds if any(steps) else ():
                    alone = [step if change.gradient.block.kind is kind else 0.0 for step, change in zip(steps, kept)]
                    gains[kind] = search.loss_before - search.loss_at(alone)
        finally:
            trial.undo()
        if len(gains) == 2:
            both, (first, second) = search.loss_before - after, gains.values()
            gains = dict(zip(gains, ((both + first - second) / 2, (both + second - first) / 2)))
        worth = {
            kind: sum(worth_of(c.gradient)[: c.dims].sum().item() for c in kept if c.gradient.block.kind is kind)
            for kind in gains
        }
        kinds = [change.gradient.block.kind for change in changes]
        prices = [gains[kind] / worth[kind] if worth.get(kind, 0.0) > 0 else 0.0 for kind in kinds]
        return prices, {change.gradient.block.kind: step for step, change in zip(steps, kept)}

    def _gradients(self, blocks, halves: tuple[list[dict], list[dict]], bar: tqdm) -> list[Gradient]:
        config = self.config
        dims = max(config.most_dims(block) for block in blocks)
        # A sketch probes both sides, in three passes: from there on the whole gradient is cheaper, and no larger.
        sketched = 2 * (dims + config.oversampling) < self.model.config.hidden_size
        passes = SKETCH_PASSES if sketched and config.estimator == "whitened" else 1
        bar.total += passes * (len(halves[0]) + len(halves[1]))
        if config.estimator != "whitened":
            arguments = (self.model, blocks, halves, dims, config.ridge, config.seed, bar.update)
            return compared_gradients(config.estimator, *arguments)
        if sketched:
            sketch = dims, config.oversampling, config.seed
            return sketched_gradients(self.model, blocks, halves, *sketch, bar.update, config.old_dims_train)
        return exact_gradients(self.model, blocks, halves, dims, bar.update, config.old_dims_train)

    def _chosen_layers(self) -> list[GrowableAttention]:
        config = self.config
        by_layer = {attention.layer_idx: attention for attention in attentions(self.model)}
        layers = list(by_layer) if config.layers is None else list(dict.fromkeys(config.layers))
        for layer in layers:
            if layer not in by_layer:
                raise ValueError(f"There is no layer {layer!r}: this model has the layers 0 to {max(by_layer)}.")
        chosen = [by_layer[layer] for layer in layers]
        if torch.is_inference_mode_enabled():
            raise ValueError("Growth needs gradients: call it outside torch.inference_mode().")
        self._parameters(chosen)
        for attention in chosen:
            for setting, rewrites in (
                ("update_existing=True", config.update_existing),
                ('method="refactor"', config.method == "refactor"),
            ):
                if rewrites:
                    check_no_adapters(attention, config.chosen_kinds, setting)
            way = "rotates" if attention.rotate is not None else "normalises" if attention.normalises else None
            if config.method == "refactor" and way and PATTERNS in config.chosen_kinds:
                raise ValueError(
                    f"Layer {attention.layer_idx} {way} its queries and keys, so its pattern is no one matrix and has "
                    'no factors to replace. Use method="append", or grow messages (v_dims) alone.'
                )
            self._check_room(attention)
        return chosen

    def _check_room(self, attention: GrowableAttention) -> None:
        """Raise a ValueError if fixed widths ask for more than the layer can use."""
        config, widest = self.config, self.model.config.hidden_size
        for name, dims, limit in (
            ("qk", config.qk_dims, config.max_qk_head_dim),
            ("v", config.v_dims, config.max_v_head_dim),
        ):
            width = getattr(attention, f"{name}_head_dim")
            if limit is None and dims and width + dims > widest:
                raise ValueError(
                    f"Layer {attention.layer_idx} has {name}_head_dim={width}; {dims} more would exceed "
                    f"hidden_size={widest}, beyond which a head gains no rank. Choose fewer {name}_dims, set "
                    f"max_{name}_head_dim, or choose other layers."
                )

    def _parameters(self, chosen: list[GrowableAttention]) -> dict[str, nn.Parameter]:
        """The parameters that growth resizes and that train, by name; raises a ValueError where it cannot."""
        return trainable_parameters(chosen, self.config.chosen_kinds)


def growable_model(model: nn.Module) -> nn.Module:
    """The patched model inside DistributedDataParallel, DataParallel, torch.compile and peft's wrappers.

    Raises:
        ValueError: there is none, or peft adds prompts or new dims of its own.
    """
    while not isinstance(model, GrowableModelMixin):
        inner = getattr(model, "_orig_mod", None) or getattr(model, "module", None)
        if not isinstance(inner, nn.Module):
            model = inside_peft(model)
            break
        model = inner
    if not isinstance(model, GrowableModelMixin):
        raise ValueError(f"{type(model).__name__} is not growable yet: call patch_model(model) first.")
    if any(attention.extension is not None for attention in attentions(model)):
        raise ValueError(
            "The model carries adapters of GrowAttnConfig, which growth would not see. Call merge_and_unload() first, "
            "or start an adapter where growth would: initialize_growattn_weights(peft_model, batches)."
        )
    return model


def settle(model: nn.Module, resized: list[GrowableAttention]) -> None:
    """Tell everything outside a model that holds on to the former parameters of these modules."""
    parameters = {id(p): p for attention in resized for p in attention.parameters()}
    ranks.follow_first_rank(*(parameter.detach() for parameter in parameters.values()))
    ranks.rebuild_ddp(model)
    torch.clear_autocast_cache()  # the caller's region may hold casts of weights that have moved
    if "torch._dynamo" in sys.modules:  # compiled code goes by the old shapes; its count of recompiles starts anew
        torch._dynamo.reset()


def _as_first_rank(change: Change) -> Change:
    """Take over how much rank 0 would grow: comparisons of rounded numbers may differ between machines."""
    dims = torch.tensor([change.dims], device=change.strength.device)
    strength = torch.nn.functional.pad(change.strength, (0, len(change.gradient.validated) - change.dims))
    ranks.follow_first_rank(dims, strength)
    return replace(change, dims=dims.item(), strength=strength[: dims.item()])


def _layer_growth(change: Change, step: float) -> LayerGrowth:
    gradient, block = change.gradient, change.gradient.block
    width = block.attention.width_of(block.kind.shared)
    strength = change.strength.tolist() + [0.0] * (len(gradient.validated) - change.dims)
    return LayerGrowth(
        layer=block.attention.layer_idx,
        kind=block.kind.name,
        width=(width - (change.dims if step > 0 else 0), width),
        step_size=step,
        in_sample=tuple(gradient.in_sample.tolist()),
        validated=tuple(gradient.validated.tolist()),
        strength=tuple(strength),
        starvation=gradient.starvation,
        existing_slope=change.existing.slope if change.existing else 0.0,
        existing_validated=change.existing.validated if change.existing else 0.0,
        quadratic_ratio=step * change.quadratic_ratio,
    )


@contextlib.contextmanager
def _timed(seconds: dict[str, float], phase: str):
    start = time.perf_counter()
    yield
    seconds[phase] = time.perf_counter() - start
