"""The race: LoRA, growth and both, trained for a short while on a user's own data."""

import copy
import gc
import json
import math
import os
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from datasets.fingerprint import Hasher
from torch import nn
from torch.utils.data import DataLoader
from transformers import PreTrainedModel

from ..growable.growths import cache_bytes
from ..report.report import GrowthReport
from .comparison import SHORT, Race, Run, compete
from .data import Prepared, first_rows, without_training
from .methods import METHODS, RATES, choose_rank, make_sft_loss, make_trainer, move_to_device, prepare_model
from .options import RaceOptions

RUNS = "race.jsonl"
_HELD_OUT = 256  # rows at most


class _Trainings:
    """Trains by any method, always on the same rows in the same order, and keeps each run in a file."""

    def __init__(self, load_model, rows: Prepared, options: RaceOptions):
        training: Any = without_training(rows.training)
        training.save_strategy, training.logging_strategy = "no", "no"
        training.eval_on_start, training.train_sampling_strategy = False, "sequential"
        self.rows = rows._replace(test=first_rows(rows.test, _HELD_OUT, seed=0), training=training)
        self.load_model, self.options = load_model, options
        self._prepared: tuple = ()  # method, seed, model, report, and the weights that train as they start
        model = load_model()
        self.rank = choose_rank(model, options.budget or 0)  # of LoRA with the whole budget
        self.width = model.config.get_text_config().hidden_size
        settings, columns = model.config.to_dict() | {"_name_or_path": ""}, ["input_ids", "labels"]
        identity = training.to_dict() | {
            "output_dir": "",
            "model": _hash([settings, *model.state_dict().values()]),
            "train_dataset": _hash(self.rows.train.with_format("numpy", columns=columns)),
            "eval_dataset": _hash(self.rows.test.with_format("numpy", columns=columns)),
            "budget": self.rank,
            "steps": options.steps,
            "growth_batches": options.growth_batches,
        }
        self.file = Path(rows.training.output_dir or ".", RUNS)
        runs = self._read_runs(json.loads(json.dumps(identity, default=str)))
        if not runs:
            runs = [self._keep(Run("start", 0.0, 0, 0, *measure_rows(model, self.rows), 0, cache_bytes(model)))]
        self.race = Race(options.steps, runs[0], runs[1:], self.rank, self.width)

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
        if report and not report.kept:
            return None
        training = copy.copy(self.rows.training)
        training.learning_rate, training.max_steps, training.seed = rate, steps, seed
        rows_of_a_step = training.per_device_train_batch_size * training.gradient_accumulation_steps
        train = first_rows(self.rows.train, steps * rows_of_a_step, seed)
        rows = self.rows._replace(train=train, test=None, training=training)
        trainer = make_trainer(model, rows, METHODS[method].grown_share(self.width))
        trainer.train()
        with trainer.compute_loss_context_manager():
            nats, counts = measure_rows(model, self.rows)
        cache = report.cache_bytes[1] if report else cache_bytes(model)  # adapters of growth widen it once merged
        weights = model.num_parameters(only_trainable=True)
        run = self._keep(Run(method, rate, steps, seed, nats, counts, weights, cache))
        print(f"{METHODS[method].title}, learning rate {rate:.2g}, {steps} steps, seed {seed}: {run.loss:.4f}")
        return run

    def _prepare(self, method: str, seed: int) -> tuple[Any, GrowthReport | None]:
        """The model as a method starts from it, grown once for all learning rates, and the report of its growth."""
        if self._prepared[:2] != (method, seed):
            self._prepared = ()
            gc.collect()  # a Trainer refers to itself, and holds the last model
            patched: Any = move_to_device(self.load_model(), self.rows.training.device)
            batches = self.rows.draw_batches(self.options.growth_batches, seed)
            loss_of = partial(make_sft_loss, rows=self.rows)
            model, report = prepare_model(patched, METHODS[method], self.rank, batches, seed, loss_of)
            start = {weight: weight.detach().clone() for weight in model.parameters() if weight.requires_grad}
            self._prepared = method, seed, model, report, start
        *_, model, report, start = self._prepared
        with torch.no_grad():
            for weight, value in start.items():
                weight.copy_(value)
        return model, report


def _hash(values: Iterable) -> str:
    """A hash of tensors, rows and settings by their content."""
    hasher = Hasher()
    for value in values:
        hasher.update(value)
    return hasher.hexdigest()


@torch.no_grad()
def measure_rows(model: nn.Module, rows: Prepared) -> tuple[list[float], list[int]]:
    """The summed loss of each held-out row in nats, none if one is not finite, and the number of its tokens.

    Rows that the collator packs into one count as one.
    """
    training = rows.training
    move_to_device(model.eval(), training.device)
    nats: list[float] = []
    counts: list[int] = []
    for batch in DataLoader(rows.test, training.per_device_eval_batch_size, collate_fn=rows.collate):
        inputs = {key: value.to(training.device) for key, value in batch.items() if torch.is_tensor(value)}
        labels = inputs.pop("labels")[:, 1:]
        logits = model(**inputs, use_cache=False).logits[:, :-1]
        predicted = labels != -100
        losses = torch.zeros(labels.shape, device=labels.device)
        losses[predicted] = nn.functional.cross_entropy(logits[predicted].float(), labels[predicted], reduction="none")
        nats += losses.sum(1).tolist()
        counts += predicted.sum(1).tolist()
    return nats if math.isfinite(sum(nats)) else [], counts


def run_race(load_model: Callable[[], PreTrainedModel], rows: Prepared, options: RaceOptions) -> Race:
    """Train LoRA on all linear layers, growth, and both, each for a short while, and compare them.

    All train the same number of weights on the same rows in the same order. Growth, or growth with LoRA, wins if it
    leads by more than 0.01 nats a token and by more than two standard errors; otherwise LoRA wins. Runs are kept in the
    output folder as they end, and the same call continues there.

    Args:
        load_model: gives the patched model anew.
        rows: to train on and to compare on.
        options: budget, steps of the long trainings, and seeds of LoRA's and its best challenger's.

    Raises:
        ValueError: there are too few steps, seeds or rows, or the folder holds another race.
    """
    steps, seeds = options.steps, options.seeds
    if steps < SHORT or seeds < 1:
        raise ValueError(f"A race takes at least {SHORT} steps and 1 seed; got {steps} and {seeds}.")
    if rows.training.world_size > 1:
        raise ValueError("A race runs in one process: start it without torchrun, then train by the winner.")
    trainings = _Trainings(load_model, rows, options)
    race, rates = trainings.race, [rate / trainings.width for rate in RATES]
    methods = [name for name in METHODS if name != "both" or trainings.rank > 1]  # a rank cannot be shared
    total = len(methods) * (3 * (steps // SHORT) + steps) + 2 * (seeds - 1) * steps
    print(f"A race of {', '.join(methods)} takes {total:,} training steps.")
    try:
        compete(race, trainings.train, methods, rates, seeds)
    except KeyboardInterrupt:
        print(race.table())
        kept = f"the same command continues in {rows.training.output_dir}, where runs are kept."
        raise KeyboardInterrupt(kept) from None
    return race
