"""The race: LoRA, growth and both, trained for a short while on a user's own data."""

import contextlib
import copy
import gc
import hashlib
import json
import os
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
from trl.trainer.sft_config import SFTConfig
from trl.trainer.sft_trainer import SFTTrainer

from ..growable.models import cache_bytes
from ..growable.patching import patch_model
from .comparison import SHORT, Race, Run, compete
from .data import Prepared, draw_batches, first_rows, prepare_rows
from .methods import METHODS, Budget, count_trained_weights, prepare_model, round_rate
from .quantized import is_quantized, move_to_device
from .sft import make_sft_loss, make_trainer, save_model

RUNS = "race.jsonl"
FIGURES = "race.json"
MODEL = "model"
_TRAINED = "trained"  # the folder for models until the race is over
_HELD_OUT = 256  # rows at most
_GROWTH = 15  # training steps that a growth costs for each of its batches, at most
# Options that a race sets itself, and those that change no result.
_IGNORED = (
    "output_dir logging log_ report_to run_name project trackio disable_tqdm hub_ push_to_hub save_ eval_strategy "
    "eval_steps eval_delay eval_on_start resume_ learning_rate max_steps num_train_epochs seed do_ train_sampling"
).split()


class _StepCallback(TrainerCallback):
    def __init__(self, step_ended: Callable[[], object]):
        self.step_ended = step_ended

    def on_step_end(self, args, state, control, **kwargs):
        """Report the step."""
        self.step_ended()


class _Trainings:
    """Trains by any method, always on the same rows in the same order, and keeps each run in a file."""

    def __init__(self, load_model, load_dense, tokenizer, prepared: Prepared, training, budget, steps, growth_batches):
        self.load_model, self.load_dense, self.tokenizer = load_model, load_dense, tokenizer
        self.prepared, self.steps, self.growth_batches = prepared, steps, growth_batches
        self.output = Path(training.output_dir)
        self.held_out = prepared.test.select(range(min(len(prepared.test), _HELD_OUT)))
        self.training = copy.copy(training)
        for name in ("eval_strategy", "save_strategy", "logging_strategy"):
            setattr(self.training, name, "no")
        self.training.eval_on_start, self.training.report_to, self.training.disable_tqdm = False, [], True
        self.training.train_sampling_strategy, self.training.resume_from_checkpoint = "sequential", None
        self.training.num_train_epochs, self.training.push_to_hub = 1, False
        self.batch_size = training.per_device_train_batch_size * training.gradient_accumulation_steps
        self.bar: Any = None
        self._prepared: tuple | None = None  # method, seed, model, cache, and the weights that train as they start
        model = load_model()
        self.budget, self.quantized = Budget.near(model, budget), is_quantized(model)
        self.output.mkdir(parents=True, exist_ok=True)
        self.done = self._read_runs(self._identify(model, training))
        if ("start", 0.0, 0, 0) not in self.done:
            nats, counts = measure_rows(model, self.held_out, self.prepared.collate, self.training)
            self._keep(Run("start", 0.0, 0, 0, nats, counts, 0, cache_bytes(model)))
        self.start = self.done["start", 0.0, 0, 0]

    def _identify(self, model: PreTrainedModel, training) -> dict:
        """Everything that changes the result of the race."""
        options = {name: value for name, value in training.to_dict().items() if not name.startswith(tuple(_IGNORED))}
        config = {name: value for name, value in model.config.to_dict().items() if name != "_name_or_path"}
        identity = {
            "model": _hash_model(model),
            "config": config,
            "train_dataset": _hash_rows(self.prepared.train),
            "eval_dataset": _hash_rows(self.held_out),
            "budget": vars(self.budget),
            "steps": self.steps,
            "growth_batches": self.growth_batches,
        }
        return json.loads(json.dumps(identity | options, default=str))

    def _read_runs(self, identity: dict) -> dict[tuple, Run]:
        """The runs of an earlier call, after a check that they are of the same race."""
        file = self.output / RUNS
        text = file.read_text() if file.exists() else ""
        whole = text[: text.rfind("\n") + 1]  # a killed process may leave half a line
        lines = [json.loads(line) for line in whole.splitlines()]
        if not lines:
            whole = json.dumps(identity) + "\n"
            lines = [identity]
        different = [name for name in {**identity, **lines[0]} if identity.get(name) != lines[0].get(name)]
        if different:
            raise ValueError(
                f"{self.output} holds a race with another {', '.join(different)}. Name a new folder, or go on with the "
                "same model, data and options."
            )
        if whole != text:
            rewritten = file.with_suffix(".tmp")
            rewritten.write_text(whole)
            os.replace(rewritten, file)
        runs = [Run.from_dict(line) for line in lines[1:]]
        return {(run.method, run.rate, run.steps, run.seed): run for run in runs}

    def _keep(self, run: Run) -> None:
        self.done[run.method, run.rate, run.steps, run.seed] = run
        with (self.output / RUNS).open("a") as file:
            file.write(json.dumps(run.to_dict(), allow_nan=False) + "\n")

    def __call__(self, method: str, rate: float, steps: int, seed: int) -> Run | None:
        """The run, from the file or trained now; None if nothing grew."""
        run = self.done.get((method, rate, steps, seed))
        if run:
            self._count_steps(steps)
            return run
        return self.train(method, rate, steps, seed)

    def train(self, method: str, rate: float, steps: int, seed: int) -> Run | None:
        """Train and measure; save the model of a long training with the first seed."""
        prepared = self._prepare(method, seed)
        if prepared is None:
            return None
        *_, model, cache, _ = prepared
        trainer = self._make_trainer(model, method, rate, steps, seed)
        self._run(trainer, self._count_steps)
        with trainer.compute_loss_context_manager():
            nats, counts = measure_rows(model, self.held_out, self.prepared.collate, self.training)
        run = Run(method, rate, steps, seed, nats, counts, count_trained_weights(model), cache)
        if seed == 0 and steps == self.steps:
            save_model(trainer, self.load_dense)
            self._prepared = None  # merged, or a stock model again
        self._keep(run)
        return run

    def _prepare(self, method: str, seed: int) -> tuple | None:
        """The model as a method starts from it, grown once for all learning rates; None if nothing grew."""
        if self._prepared is None or self._prepared[:2] != (method, seed):
            self._prepared = None
            gc.collect()  # a Trainer refers to itself, and holds the last model
            patched, batches = move_to_device(self.load_model(), self.training.device), []
            if METHODS[method].growth:
                batches = draw_batches(self.prepared, self.training, self.growth_batches, seed)
            loss_of = partial(make_sft_loss, tokenizer=self.tokenizer, training=self.training)
            model, report = prepare_model(patched, METHODS[method], self.budget, batches, seed, loss_of)
            if report and not report.applied:
                return None
            cache = report.cache_bytes[1] if report else cache_bytes(model)  # adapters of growth widen it once merged
            start = {weight: weight.detach().clone() for weight in model.parameters() if weight.requires_grad}
            self._prepared = method, seed, model, cache, start
        with torch.no_grad():
            for weight, value in self._prepared[-1].items():
                weight.copy_(value)
        return self._prepared

    def _rows_of(self, steps: int, seed: int) -> Dataset:
        """The rows of that number of steps, in the seed's order."""
        return first_rows(self.prepared.train, steps * self.batch_size, seed)

    def _make_trainer(self, model, method: str, rate: float, steps: int, seed: int) -> SFTTrainer:
        training = copy.copy(self.training)
        training.learning_rate, training.max_steps, training.seed = rate, steps, seed
        training.output_dir = str(self.output / _TRAINED / method)
        rows = self._rows_of(steps, seed), None
        return make_trainer(model, self.tokenizer, rows, training, None, method=METHODS[method])

    def _run(self, trainer: SFTTrainer, step_ended: Callable[[], object]) -> None:
        trainer.remove_callback(PrinterCallback)
        trainer.add_callback(_StepCallback(step_ended))
        trainer.train()

    def _count_steps(self, steps: int = 1) -> None:
        if self.bar is not None:
            self.bar.total = max(self.bar.total, self.bar.n + steps)
            self.bar.update(steps)

    def time_a_step(self) -> float:
        """Seconds of a training step of LoRA, from the second and third of three."""
        times: list[float] = []
        *_, model, _, _ = cast(tuple, self._prepare("lora", 0))  # LoRA always has something to train
        trainer = self._make_trainer(model, "lora", 1e-4, 3, 0)
        self._run(trainer, lambda: times.append(time.perf_counter()))
        return (times[2] - times[0]) / 2


def _hash_model(model: PreTrainedModel) -> str:
    digest = hashlib.sha256()
    for name, value in sorted(model.state_dict().items()):
        digest.update(name.encode())
        if torch.is_tensor(value):
            digest.update(value.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def _hash_rows(rows: Dataset) -> str:
    digest = hashlib.sha256()
    row: Any
    for row in rows:
        digest.update(json.dumps([row["input_ids"], row["labels"]]).encode())
    return digest.hexdigest()


@torch.no_grad()
def measure_rows(model: nn.Module, rows: Dataset, collate, training: SFTConfig) -> tuple[list[float], list[int]]:
    """The summed loss of each row in nats, and the number of its tokens.

    Rows that the collator packs into one count as one. The model stays in evaluation mode.
    """
    move_to_device(model.eval(), training.device)
    nats: list[float] = []
    counts: list[int] = []
    size = training.per_device_eval_batch_size
    for start in range(0, len(rows), size):
        batch = collate(list(rows.select(range(start, min(start + size, len(rows))))))
        inputs = {key: value.to(training.device) for key, value in batch.items() if torch.is_tensor(value)}
        labels = inputs.pop("labels")[:, 1:]
        logits = model(**inputs, use_cache=False).logits[:, :-1]
        predicted = labels != -100
        losses = torch.zeros(labels.shape, device=labels.device)
        losses[predicted] = nn.functional.cross_entropy(logits[predicted].float(), labels[predicted], reduction="none")
        nats += losses.sum(1).tolist()
        counts += predicted.sum(1).tolist()
    return nats, counts


def race(
    model: PreTrainedModel,
    tokenizer,
    train_dataset: Dataset,
    training: SFTConfig,
    eval_dataset: Dataset | None = None,
    budget: int | float = 0.02,
    steps: int = 100,
    seeds: int = 2,
    growth_batches: int = 16,
) -> Race:
    """Train LoRA on all linear layers, growth, and both, each for a short while, and compare them.

    All train the same number of weights on the same rows in the same order. Growth, or growth with LoRA, wins if it
    leads by more than 0.01 nats a token and by more than two standard errors; otherwise LoRA wins. The given model
    does not change.

    Args:
        model: a causal LM, stock or patched, not quantized.
        tokenizer: its own.
        train_dataset: rows as TRL's SFTTrainer takes them: text, messages, or prompt and completion.
        training: batch size, length and so on; the race chooses learning rates itself. `output_dir` gets every run as
            it ends, and the winner's model; the same call continues there.
        eval_dataset: rows to compare on; by default a part of `train_dataset`.
        budget: weights to train, or a share of the model's; rounded to a whole rank of LoRA.
        steps: of the long trainings; learning rates are tried for a quarter of them.
        seeds: long trainings of LoRA and its best challenger.
        growth_batches: batches to grow on.

    Returns:
        The race: `print(race)`, `race.winner`, `race.rates`.

    Raises:
        ValueError: the model's family is unknown, it is quantized, there are too few rows, or the folder holds another
            race.
    """
    if is_quantized(model):
        raise ValueError(
            "The model is quantized, and the winner is saved with dense weights. Use the command line, growattn race "
            "--load_in_4bit, which loads both."
        )
    rows = prepare_rows(train_dataset, eval_dataset, tokenizer, training)
    load_model = partial(_copy_patched, model)
    return run_race(
        load_model,
        tokenizer,
        rows,
        training,
        budget=budget,
        steps=steps,
        seeds=seeds,
        growth_batches=growth_batches,
    )


def _copy_patched(model: PreTrainedModel) -> PreTrainedModel:
    return patch_model(copy.deepcopy(model))


def run_race(
    load_model: Callable[[], PreTrainedModel],
    tokenizer,
    rows: Prepared,
    training: SFTConfig,
    *,
    budget: int | float,
    steps: int = 100,
    seeds: int = 2,
    growth_batches: int = 16,
    load_dense: Callable[[], PreTrainedModel] | None = None,
    say: Callable[[str], object] = print,
) -> Race:
    """Run a `race` of the patched model that `load_model` gives; `say` gets the estimated cost first.

    A quantized model races without the mix of both, and the winner is merged into the model of `load_dense`.
    """
    for name, number, least in (("steps", steps, SHORT), ("seeds", seeds, 1), ("growth_batches", growth_batches, 1)):
        if number < least:
            raise ValueError(f"{name} must be a whole number, at least {least}; got {number}.")
    if training.world_size > 1:
        raise ValueError("A race runs in one process: start it without torchrun, then train by the winner's method.")
    load_dense = load_dense or load_model
    trainings = _Trainings(load_model, load_dense, tokenizer, rows, training, budget, steps, growth_batches)
    methods = [name for name in ("lora", "growth", "both") if trainings.budget.suffices_for(METHODS[name])]
    if trainings.quantized:
        methods = [name for name in methods if METHODS[name].on_quantized]
    rates = {name: [round_rate(rate / trainings.budget.width) for rate in METHODS[name].rates] for name in methods}
    race = Race(steps, trainings.start)
    total = len(methods) * (3 * race.short + steps) + 2 * (seeds - 1) * steps
    step = trainings.time_a_step()
    growths = len(methods) - 1 + seeds - 1
    minutes = step * (total + growths * _GROWTH * growth_batches) / 60
    missing = "" if "both" in methods or trainings.quantized else " The budget is too small for a mix of both."
    say(
        f"The race takes about {max(minutes, 1):.0f} min: {total:,} steps of {step:.2g} s and {growths} growths. "
        f"Each method trains about {trainings.budget.weights:,} weights.{missing}"
    )
    trainings.bar = tqdm(total=total, desc="race", unit="step", disable=None)
    try:
        with contextlib.closing(trainings.bar):
            compete(race, trainings, rates, seeds)
    except KeyboardInterrupt:
        say(race.table())
        raise KeyboardInterrupt(
            f"The finished runs are kept; the same command continues in {training.output_dir}."
        ) from None
    _keep_winner(race, trainings)
    return race


def _keep_winner(race: Race, trainings: _Trainings) -> None:
    """Leave the winner's model and the figures in the folder."""
    output, winner = trainings.output, race.winner
    model, figures = output / MODEL, output / FIGURES
    kept = json.loads(figures.read_text())["winner"] if figures.exists() and model.exists() else None
    if kept != winner:
        trained = output / _TRAINED / winner
        if not (trained / "config.json").exists():  # deleted when another method won with fewer seeds
            trainings.train(winner, race.rates[winner], race.steps, 0)
        shutil.rmtree(model, ignore_errors=True)
        trained.rename(model)
    written = figures.with_suffix(".tmp")
    written.write_text(json.dumps(race.figures(), indent=1, allow_nan=False))
    os.replace(written, figures)
    shutil.rmtree(output / _TRAINED, ignore_errors=True)
