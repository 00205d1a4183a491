"""The race: LoRA, growth and both, trained for a short while on a user's own data."""

import copy
import gc
import hashlib
import json
import math
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from torch import nn
from torch.utils.data import DataLoader
from tqdm.auto import tqdm
from transformers import PreTrainedModel, PrinterCallback, TrainerCallback
from trl.trainer.sft_config import SFTConfig

from ..growable.growths import cache_bytes
from ..growable.models import patch_model
from ..report.report import GrowthReport
from .comparison import SHORT, Race, Run, compete
from .data import Prepared, draw_batches, first_rows, prepare_rows, without_training
from .methods import METHODS, Budget, count_trained_weights, prepare_model, round_rate
from .quantized import move_to_device
from .sft import make_sft_loss, make_trainer

RUNS = "race.jsonl"
_HELD_OUT = 256  # rows at most
# How the names of options begin that a race sets itself, or that change no result.
_IGNORED = (
    "output_dir logging log_ report_to run_name project trackio disable_tqdm hub_ push_to_hub save_ eval_strategy "
    "eval_steps eval_delay eval_on_start resume_ learning_rate max_steps num_train_epochs seed do_ train_sampling"
).split()


class _Progress(TrainerCallback):
    def __init__(self, bar: Any):
        self.bar = bar

    def on_step_end(self, args, state, control, **kwargs):
        """Count the step."""
        self.bar.update()


class _Trainings:
    """Trains by any method, always on the same rows in the same order, and keeps each run in a file.

    Attributes:
        race: the runs of earlier calls.
        bar: gets the steps that are trained.
    """

    def __init__(self, load_model, tokenizer, prepared: Prepared, training: SFTConfig, budget, steps, growth_batches):
        self.load_model, self.tokenizer, self.rows = load_model, tokenizer, prepared
        self.held_out = prepared.test.select(range(min(len(prepared.test), _HELD_OUT)))
        self.training = without_training(training)
        self.training.save_strategy, self.training.logging_strategy = "no", "no"
        self.training.eval_on_start, self.training.disable_tqdm = False, True
        self.training.train_sampling_strategy = "sequential"
        self.growth_batches = growth_batches
        self.rows_of_a_step = training.per_device_train_batch_size * training.gradient_accumulation_steps
        self.bar: Any = None
        self._prepared: tuple = ()  # method, seed, model, report, and the weights that train as they start
        model = load_model()
        self.budget = Budget.near(model, budget)
        identity = {
            "model": _hash_model(model),
            "config": {name: value for name, value in model.config.to_dict().items() if name != "_name_or_path"},
            "train_dataset": _hash_rows(prepared.train),
            "eval_dataset": _hash_rows(self.held_out),
            "budget": vars(self.budget),
            "steps": steps,
            "growth_batches": growth_batches,
        }
        options = training.to_dict()
        identity |= {name: value for name, value in options.items() if not name.startswith(tuple(_IGNORED))}
        self.file = Path(training.output_dir or ".", RUNS)
        runs = self._read_runs(json.loads(json.dumps(identity, default=str)))
        if not runs:
            runs = [self._keep(Run("start", 0.0, 0, 0, *self._measure(model), 0, cache_bytes(model)))]
        self.race = Race(steps, runs[0], runs[1:])

    def _read_runs(self, identity: dict) -> list[Run]:
        """The runs of an earlier call, after a check that they are of the same race."""
        self.file.parent.mkdir(parents=True, exist_ok=True)
        content = self.file.read_bytes() if self.file.exists() else b""
        whole = content[: content.rfind(b"\n") + 1]  # a killed process may leave half a line
        if not whole:
            self.file.write_text(json.dumps(identity) + "\n")
            return []
        kept, *runs = map(json.loads, whole.splitlines())
        different = [name for name in identity | kept if identity.get(name) != kept.get(name)]
        if different:
            raise ValueError(
                f"{self.file.parent} holds a race with another {', '.join(different)}. Name a new folder, or go on "
                "with the same model, data and options."
            )
        os.truncate(self.file, len(whole))
        return [Run(**run) for run in runs]

    def _keep(self, run: Run) -> Run:
        with self.file.open("a") as file:
            file.write(json.dumps(vars(run), allow_nan=False) + "\n")
        return run

    def train(self, method: str, rate: float, steps: int, seed: int) -> Run | None:
        """Train, measure, and keep the run; None if nothing grew."""
        model, report = self._prepare(method, seed)
        if report and not report.applied:
            return None
        training = copy.copy(self.training)
        training.learning_rate, training.max_steps, training.seed = rate, steps, seed
        rows = first_rows(self.rows.train, steps * self.rows_of_a_step, seed), None
        trainer = make_trainer(model, self.tokenizer, rows, training, None, method=METHODS[method])
        trainer.remove_callback(PrinterCallback)
        trainer.add_callback(_Progress(self.bar))
        trainer.train()
        with trainer.compute_loss_context_manager():
            nats, counts = self._measure(model)
        cache = report.cache_bytes[1] if report else cache_bytes(model)  # adapters of growth widen it once merged
        return self._keep(Run(method, rate, steps, seed, nats, counts, count_trained_weights(model), cache))

    def _prepare(self, method: str, seed: int) -> tuple[nn.Module, GrowthReport | None]:
        """The model as a method starts from it, grown once for all learning rates, and the report of its growth."""
        if self._prepared[:2] != (method, seed):
            self._prepared = ()
            gc.collect()  # a Trainer refers to itself, and holds the last model
            patched = move_to_device(self.load_model(), self.training.device)
            batches = draw_batches(self.rows, self.training, self.growth_batches, seed)
            loss_of = partial(make_sft_loss, tokenizer=self.tokenizer, training=self.training)
            model, report = prepare_model(patched, METHODS[method], self.budget, batches, seed, loss_of)
            start = {weight: weight.detach().clone() for weight in model.parameters() if weight.requires_grad}
            self._prepared = method, seed, model, report, start
        *_, model, report, start = self._prepared
        with torch.no_grad():
            for weight, value in start.items():
                weight.copy_(value)
        return model, report

    def _measure(self, model: nn.Module) -> tuple[list[float], list[int]]:
        """The loss and number of tokens of each held-out row, without losses if one is not finite."""
        nats, counts = measure_rows(model, self.held_out, self.rows.collate, self.training)
        return nats if math.isfinite(sum(nats)) else [], counts


def _hash_model(model: PreTrainedModel) -> str:
    digest = hashlib.sha256()
    for name, value in sorted(model.state_dict().items()):
        digest.update(name.encode())
        if torch.is_tensor(value):
            content: Any = value.detach().cpu().contiguous().flatten().view(torch.uint8).numpy()
            digest.update(content)
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
    dataset: Any = rows
    for batch in DataLoader(dataset, training.per_device_eval_batch_size, collate_fn=collate):
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
        model: a causal LM, stock or patched.
        tokenizer: its own.
        train_dataset: rows as TRL's SFTTrainer takes them: text, messages, or prompt and completion.
        training: batch size, length and so on; the race chooses learning rates itself. `output_dir` gets every run as
            it ends; the same call continues there.
        eval_dataset: rows to compare on; by default a part of `train_dataset`.
        budget: weights to train, or a share of the model's; rounded to a whole rank of LoRA.
        steps: of the long trainings; learning rates are tried for a quarter of them.
        seeds: long trainings of LoRA and its best challenger.
        growth_batches: batches to grow on.

    Returns:
        The race: `print(race)`, `race.winner`, `race.rates`.

    Raises:
        ValueError: the model's family is unknown, there are too few rows, or the folder holds another race.
    """
    rows = prepare_rows(train_dataset, eval_dataset, tokenizer, training)

    def load_model() -> PreTrainedModel:
        return patch_model(copy.deepcopy(model))

    return run_race(
        load_model, tokenizer, rows, training, budget=budget, steps=steps, seeds=seeds, growth_batches=growth_batches
    )


def run_race(
    load_model: Callable[[], PreTrainedModel],
    tokenizer,
    rows: Prepared,
    training: SFTConfig,
    *,
    budget: int | float,
    steps: int,
    seeds: int,
    growth_batches: int,
    say: Callable[[str], object] = print,
) -> Race:
    """Run a `race` of the patched model that `load_model` gives; `say` gets the number of steps first."""
    for name, number, least in (("steps", steps, SHORT), ("seeds", seeds, 1), ("growth_batches", growth_batches, 1)):
        if number < least:
            raise ValueError(f"{name} must be a whole number, at least {least}; got {number}.")
    if training.world_size > 1:
        raise ValueError("A race runs in one process: start it without torchrun, then train by the winner's method.")
    trainings = _Trainings(load_model, tokenizer, rows, training, budget, steps, growth_batches)
    methods = ["lora", "growth", "both"]
    if trainings.budget.rank == 1:
        methods.remove("both")
    rates = {name: [round_rate(rate / trainings.budget.width) for rate in METHODS[name].rates] for name in methods}
    race = trainings.race
    total = len(methods) * (3 * (steps // SHORT) + steps) + 2 * (seeds - 1) * steps
    too_small = " The budget is too small for a mix of both." if trainings.budget.rank == 1 else ""
    weights = trainings.budget.weights
    say(f"The race takes {total:,} training steps. Each method trains about {weights:,} weights.{too_small}")
    try:
        done = sum(run.steps for run in race.runs)
        with tqdm(total=total, initial=done, desc="race", unit="step", disable=None) as trainings.bar:
            compete(race, trainings.train, rates, seeds)
    except KeyboardInterrupt:
        say(race.table())
        raise KeyboardInterrupt(
            f"The finished runs are kept; the same command continues in {training.output_dir}."
        ) from None
    return race
