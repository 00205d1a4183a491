"""`race`: short matched trainings on a user's own data, which say what is worth training."""

import contextlib
import copy
import gc
import json
import math
import shutil
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
from datasets import Dataset
from torch import nn
from tqdm.auto import tqdm
from transformers import PreTrainedModel, PrinterCallback, TrainerCallback
from trl.trainer.sft_trainer import SFTTrainer

from ..grow.again import Added
from ..growable.models import cache_bytes
from ..growable.patching import patch_model
from .competing import compete, steps_of
from .contest import LONGER, SHORT, TELLING, Contest, Run
from .data import Prepared, Rows, check_tokens, first_rows, make_batches, prepare_rows, split_rows
from .finetuning import check_spends, load, read_all
from .judged import losses_of_rows
from .methods import METHODS, Budget, readable, started, trained_weights
from .quantized import asked_for, is_quantized, move_to_device
from .recipe import Recipe
from .sft import make_sft_loss, make_trainer, save_model

RACE = "race.json"
RUNS = "race.jsonl"
MODEL = "model"
_STEPS = 100  # of a training, unless told otherwise
_HELD_OUT = 256  # rows at most
_FEWEST = 32  # of them at least to judge a short training by
_GROWTH = (3, 12)  # a growth costs as much as 3 training steps a batch, and 12
_FORWARD = 3  # forward passes cost as much as a training step


class _Steps(TrainerCallback):
    """Tells when a step is over."""

    def __init__(self, tick: Callable[[], object]):
        self.tick = tick

    def on_step_end(self, args, state, control, **kwargs):
        """A step is over."""
        self.tick()


def _run(trainer: SFTTrainer, tick: Callable[[], object]) -> None:
    """Train without a word, but for the steps."""
    trainer.remove_callback(PrinterCallback)
    trainer.add_callback(_Steps(tick))
    trainer.train()


def _kept_in(folder: Path) -> list[dict]:
    """What a race has left in its folder: its setting, then its runs."""
    file = folder / RUNS
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


class _Trainings:
    """Trains by any method, always on the same rows in the same order, and keeps what ended in a file.

    Args:
        fresh: gives a patched copy of the model each time.
        tokenizer: its own.
        prepared: the data.
        training: an SFTConfig; the race sets how long to train, on what, and the learning rate.
        budget: what a method may add.
        growth_batches: batches to grow on, the first ones of the training.
        steps: of the long trainings.
        dense: gives the model as it is before quantizing, which `fresh` may do.
    """

    def __init__(self, fresh, tokenizer, prepared: Prepared, training, budget, growth_batches: int, steps: int, dense):
        self.fresh, self.dense, self.tokenizer, self.prepared = fresh, dense, tokenizer, prepared
        self.growth_batches, self.steps = growth_batches, steps
        self.output = output = Path(training.output_dir)
        self.rows, held_out = split_rows(prepared, training)
        self.held_out = held_out.select(range(min(len(held_out), _HELD_OUT)))
        self.short_looks = max(min(len(self.held_out) // _FEWEST, SHORT), 1)  # short trainings: one batch in so many
        self.training = copy.copy(training)
        for name in ("eval_strategy", "save_strategy", "logging_strategy"):
            setattr(self.training, name, "no")
        self.training.eval_on_start, self.training.report_to, self.training.disable_tqdm = False, [], True
        self.training.train_sampling_strategy, self.training.resume_from_checkpoint = "sequential", None
        self.training.num_train_epochs, self.training.push_to_hub = 1, False
        self.bar: Any = None
        model = fresh()
        self.budget, self.quantized = Budget.near(model, budget), is_quantized(model)
        self._ready: tuple | None = None  # what to train by a method with a seed, and how it starts
        self._added: dict[tuple[str, int], Added] = {}  # what growths found, for when a method starts again
        output.mkdir(parents=True, exist_ok=True)
        self.done = self._read(model)
        self.start = self.done.get(("start", 0.0, 0, 0)) or self._keep(
            self._measured(model, "start", 0.0, 0, 0, 0.0, cache_bytes(model), 1.0)
        )

    def _read(self, model: PreTrainedModel) -> dict[tuple, Run]:
        """What an earlier race of the same model and data into the same folder has left."""
        setting = {
            "parameters": model.num_parameters(),
            "budget": vars(self.budget),
            "growth_batches": self.growth_batches,
            "steps": self.steps,
            "held_out": [len(self.held_out), sum(map(sum, self.held_out["input_ids"]))],
            "short_looks": self.short_looks,
            "batch": self.batch_size,
        }
        lines = _kept_in(self.output)
        if lines and lines[0] != setting:
            others = ", ".join(name for name in setting if lines[0].get(name) != setting[name])
            raise ValueError(
                f"{self.output} holds another race, of other data or options ({others}): name a new folder, or what "
                "that race was told."
            )
        if not lines:
            (self.output / RUNS).write_text(json.dumps(setting) + "\n")
        runs = [Run(**line) for line in lines[1:]]
        return {(run.method, run.rate, run.steps, run.seed): run for run in runs}

    def _keep(self, run: Run) -> Run:
        self.done[run.method, run.rate, run.steps, run.seed] = run
        with (self.output / RUNS).open("a") as file:
            file.write(json.dumps(vars(run)) + "\n")
        return run

    def __call__(self, method: str, rate: float, steps: int, seed: int) -> Run | None:
        """Train by a method from the start; None if it has nothing to train. The best long run of seed 0 is saved."""
        if run := self.done.get((method, rate, steps, seed)):
            self.tick(steps)
            return run
        began = time.perf_counter()
        if (started := self._started(method, seed)) is None:
            return None
        model, *costs = started
        trainer = self._trainer(model, method, rate, steps, seed)
        _run(trainer, self.tick)
        with trainer.compute_loss_context_manager():
            run = self._measured(model, method, rate, steps, seed, time.perf_counter() - began, *costs)
        if seed == 0 and steps >= self.steps:
            others = [r for r in self.done.values() if (r.method, r.seed) == (method, 0) and r.steps >= self.steps]
            if all(run.loss < other.loss for other in others):
                save_model(trainer, self.dense)
                if METHODS[method].lora or not METHODS[method].growth:
                    self._ready = None  # merged, or a stock model again
        return self._keep(run)

    def _trainer(self, model: nn.Module, method: str, rate: float, steps: int, seed: int) -> SFTTrainer:
        training = copy.copy(self.training)
        training.learning_rate, training.max_steps, training.seed = rate, steps, seed
        training.output_dir = str(self.output / method)
        rows = self._rows(steps, seed), self.held_out
        return make_trainer(model, self.tokenizer, rows, training, None, method=METHODS.get(method))

    @property
    def batch_size(self) -> int:
        """Rows of a step."""
        return self.training.per_device_train_batch_size * self.training.gradient_accumulation_steps

    def tick(self, steps: int = 1) -> None:
        """Steps are over."""
        if self.bar is not None:
            self.bar.total = max(self.bar.total, self.bar.n + steps)  # learning rates beyond, and near ones, go on
            self.bar.update(steps)

    def _started(self, method: str, seed: int) -> tuple[nn.Module, int, float | None] | None:
        """What to train by a method, as it starts, its `cache` and `forward` as in `Run`; grown once for all rates."""
        if self._ready is None or self._ready[:2] != (method, seed):
            self._ready = None  # makes room
            patched = move_to_device(self.fresh(), self.training.device)
            batches, added = [], self._added.get((method, seed))
            if METHODS[method].growth and not added:
                batches = make_batches(self._rows(self.growth_batches, seed), self.prepared.collate, self.training)
                batches = batches[: max(self.growth_batches, 2)]
            loss_of = partial(make_sft_loss, tokenizer=self.tokenizer, training=self.training)
            model, report = started(patched, METHODS[method], self.budget, batches, seed, loss_of, added)
            if report is not None and not report.applied:
                return None
            if report is not None and not added and seed == 0 and not self.quantized:  # other seeds train once
                self._added[method, seed] = Added.to(patched, report)
            at_start = {p: p.detach().clone() for p in model.parameters() if p.requires_grad}
            cache = report.cache_bytes[1] if report else cache_bytes(model)  # new dims may be beside the weights
            forward = report.forward_ratio if report else 1.0
            self._ready = method, seed, model, cache, forward, at_start
        *_, model, cache, forward, at_start = self._ready
        with torch.no_grad():
            for parameter, value in at_start.items():
                parameter.copy_(value)
        return model, cache, forward

    def _rows(self, steps: int, seed: int) -> Dataset:
        """The rows that so many steps train on, in an order of the seed's."""
        return first_rows(self.rows, steps * self.batch_size, seed)

    def _measured(self, model, method: str, rate: float, steps: int, seed: int, seconds: float, cache, forward) -> Run:
        """Measure a model on every held-out row; on some, where that only chooses a learning rate."""
        every = self.short_looks if 0 < steps < self.steps else 1
        nats, counts = losses_of_rows(model, self.held_out, self.prepared.collate, self.training, every)
        weights = trained_weights(model) if steps else 0
        return Run(method, rate, steps, seed, nats, counts, weights, cache, seconds, forward)

    def seconds_of_a_step(self) -> float:
        """How long a training step takes, from the second and third of three."""
        times: list[float] = []
        model, *_ = cast(tuple, self._started("lora", 0))  # which the first training goes on with, put back
        trainer = self._trainer(model, "", 1e-4, 3, 0)  # a folder of its own would pass for a model
        _run(trainer, lambda: times.append(time.perf_counter()))
        return (times[2] - times[0]) / 2


def race(
    model: PreTrainedModel,
    tokenizer,
    train_dataset: Rows,
    training,
    eval_dataset: Rows | None = None,
    budget: int | float = 0.02,
    steps: int = _STEPS,
    seeds: int = 2,
    full: bool = False,
    growth_batches: int = 16,
) -> Contest:
    """Find out what is worth training: LoRA on all linear layers, growth, or some of both.

    Each trains for a short while, as many weights as the others, on the same rows in the same order; a growth looks at
    the first of these. Two whose order is open after one seed, and matters, train for half as long again; so do two
    if the lead of one falls. A growth that wins after one seed, and not by far, has to win over all of them. Growth
    wins by 0.01 nats a token and a standard error at least. The model itself stays as it is.

    Args:
        model: a causal LM, stock or patched, not quantized.
        tokenizer: its own.
        train_dataset: rows as TRL's SFTTrainer takes them: text, messages, or prompt and completion.
        training: an SFTConfig: batch size, length, packing. The race chooses learning rates itself. Its `output_dir`
            gets every run as soon as it ends, and the winner's model in the end; the same call goes on there.
        eval_dataset: rows to compare on; by default some of the others.
        budget: weights to train, or a share of the model's; rounded to a whole rank of LoRA.
        steps: of the long trainings. Learning rates are tried for a quarter of that and judged by a quarter of the
            held-out rows, 32 at least; larger ones while the largest is best. Those near the best one go on for all.
        seeds: long trainings, with other orders of the rows, of a growth that wins, and of what it has to beat.
        full: train all weights as well, with and without growth.
        growth_batches: batches to grow on.

    Returns:
        The contest: `print(contest)`, `contest.winner`, `contest.rate`, its learning rate, and `contest.finalists`,
        who may end lowest in a longer training.

    Raises:
        ValueError: the family of the model is unknown, it is quantized, there are too few rows, or the folder holds
            another race.
    """
    if is_quantized(model):
        raise ValueError(
            "The model is quantized, and what wins would be saved with dense weights, which it has no more. Race from "
            "the command line, by growattn race --load_in_4bit, which loads both."
        )
    rows = prepare_rows(train_dataset, eval_dataset, tokenizer, training)
    return run_race(
        lambda: patch_model(copy.deepcopy(model)),
        tokenizer,
        rows,
        training,
        budget=budget,
        steps=steps,
        seeds=seeds,
        full=full,
        growth_batches=growth_batches,
    )


def race_of(recipe: Recipe, say: Callable[[str], object] = print) -> Contest:
    """Run the `race` that a recipe tells, into its folder."""
    growth, training = recipe.growth, recipe.training
    check_spends(recipe, "A race")
    if recipe.race.full and (option := asked_for(recipe)):
        raise ValueError(f"{option} leaves weights that cannot train: drop --full.")
    data, config, tokenizer = read_all(recipe)
    rows = prepare_rows(data.train, data.test, tokenizer, training)
    check_tokens(split_rows(rows, training)[1]["input_ids"], config)
    steps, kept = recipe.race.steps, _kept_in(Path(training.output_dir))
    if steps is None and kept:
        steps = kept[0]["steps"]
    elif steps is None:  # a race before a training is not to take longer than that
        follows = growth.method == "auto" and training.max_steps > 0
        steps = min(_STEPS, max(training.max_steps // LONGER, TELLING)) if follows else _STEPS
    return run_race(
        partial(load, recipe, dtype="float32"),
        tokenizer,
        rows,
        training,
        budget=recipe.growth_config(default="2%").budget or 0,
        growth_batches=growth.growth_batches,
        steps=steps,
        seeds=recipe.race.seeds,
        full=recipe.race.full,
        dense=partial(load, recipe, dtype="float32", dense=True),
        say=say,
    )


@contextlib.contextmanager
def _old_objects_uncollected():
    """Spare the garbage collector what is there already: accelerate has it look at everything before each training."""
    if gc.get_freeze_count():  # somebody else's, who would lose it
        yield
        return
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


@_old_objects_uncollected()
def run_race(
    fresh: Callable[[], PreTrainedModel],
    tokenizer,
    rows: Prepared,
    training,
    *,
    budget: int | float,
    steps: int,
    seeds: int,
    full: bool,
    growth_batches: int,
    dense: Callable[[], PreTrainedModel] | None = None,
    say: Callable[[str], object] = print,
    halving: bool = True,
) -> Contest:
    """Run a `race` of what `fresh` gives anew each time, patched, and `say` beforehand what it will cost.

    If that is quantized, growth and LoRA race without the mix of both, and what wins is merged into what `dense` gives.
    Without `halving`, who is behind goes on all the same.
    """
    for name, number in (("steps", steps), ("seeds", seeds), ("growth_batches", growth_batches)):
        if number < 1:
            raise ValueError(f"{name} must be a whole number, at least 1; got {number}.")
    if training.world_size > 1:
        raise ValueError("A race runs in one process: start it without torchrun, then train by what it recommends.")
    output = Path(training.output_dir)
    trains = _Trainings(fresh, tokenizer, rows, training, budget, growth_batches, steps, dense or fresh)
    methods = [name for name, m in METHODS.items() if (full or not m.base) and trains.budget.admits(m)]
    if trains.quantized:
        methods = [name for name in methods if METHODS[name].on_quantized]
    rates = {name: [readable(rate / trains.budget.width) for rate in METHODS[name].rates] for name in methods}
    contest = Contest(steps, trains.start)
    step, total = trains.seconds_of_a_step(), steps_of(methods, steps)
    growths = sum(METHODS[name].growth > 0 for name in methods)
    short_looks = sum(map(len, rates.values()))  # at some of the held-out rows, forward alone; then at all of them
    looks = len(methods) + math.ceil(short_looks / trains.short_looks)
    look = len(trains.held_out) / trains.batch_size / _FORWARD
    cost = step * (total + growths * (_GROWTH[0] * growth_batches + _GROWTH[1]) + looks * look)
    least = "" if "both" in methods or trains.quantized else f"{2 * trains.budget.of_a_rank:,}"
    say(
        f"Racing {', '.join(METHODS[name].title for name in methods)}. About {max(cost / 60, 1):.0f} min: {total:,} "
        f"steps of {step:.2g} s, {growths} x growth, {looks} x all held-out rows; more if growth leads, if larger "
        "learning rates are better, or if two cannot be told apart. "
        f"Each method trains about {trains.budget.weights:,} weights."
        + (least and f" A mix of both needs a budget of {least}.")
        + (f" {kept} trainings ended before, and are not run again." if (kept := len(trains.done) - 1) else "")
    )
    trains.bar = tqdm(total=total, desc="race", unit="step", disable=None)
    with contextlib.closing(trains.bar), _table_so_far(contest, output, say):
        compete(contest, trains, rates, seeds, halving)
        trains.bar.update(max(total - trains.bar.n, 0))  # steps of those that are out
    (output / RACE).write_text(json.dumps(contest.figures(), indent=1))
    if (output / contest.winner).exists():  # not where the same race was over before
        shutil.rmtree(output / MODEL, ignore_errors=True)
        (output / contest.winner).rename(output / MODEL)
    for method in methods:
        shutil.rmtree(output / method, ignore_errors=True)
    return contest


@contextlib.contextmanager
def _table_so_far(contest: Contest, output: Path, say: Callable[[str], object]):
    """Show what there is where somebody interrupts."""
    try:
        yield
    except KeyboardInterrupt:
        if contest.of("lora"):
            say(str(contest))
        raise KeyboardInterrupt(f"the runs that ended are kept; the same command goes on in {output}.") from None
