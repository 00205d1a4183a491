"""The race: LoRA, growth and a mix of both, trained for a short while on a user's own batches and loss."""

import contextlib
import copy
import gc
import json
import math
import os
import warnings
import weakref
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import send_to_device, set_seed
from torch import nn
from tqdm.auto import tqdm
from transformers import PreTrainedModel, get_cosine_schedule_with_warmup

from ..grow.plan import check_budget, check_loss, list_batches, read_batches
from ..growable.growths import cache_bytes, check_kind, growable_model
from ..growable.models import patch_inside
from ..measure.halves import digest, digests_of
from ..measure.passes import check_loss_value, default_loss
from ..report.comparison import TITLES, RaceResult, Run
from .methods import (
    ALL_WEIGHTS,
    GROWING,
    Method,
    choose_rank,
    hidden_size,
    modules_to_train,
    move_to_device,
    weights_of_rank_one,
)

RUNS = "race.jsonl"
SHORT = 4  # how many times shorter the trainings are that choose a learning rate
RATES = (0.5, 1.5)  # learning rates to try, divided by `hidden_size`: wider models take smaller steps
_SLOWER = 0.1  # the learning rates of all weights, divided by those of a few new ones
_WARMUP = 0.1  # of the steps


def race(
    make_model: Callable[[], nn.Module],
    train_batches: Iterable,
    held_out_batches: Iterable,
    loss: Callable[[Any, Any], torch.Tensor] | None = None,
    *,
    budget: int | float = 0.02,
    steps: int = 100,
    seeds: int = 2,
    modules_to_save: Sequence[str] = (),
    methods: Sequence[str] = ("lora", "growth", "mix"),
    growth_batches: int = 16,
    output: str | Path | None = None,
) -> RaceResult:
    """Train by LoRA on all linear layers, by growth, and by a mix, each for a short while, and compare them.

    All train the same number of weights on the same batches in the same order, each with the best of a few learning
    rates, which warms up for a tenth of the steps and then falls along a cosine; gradients are clipped to a norm of 1.
    Growth or the mix wins if it ends lower than LoRA on the held-out batches, by more than 0.01 and by more than
    two standard errors; otherwise LoRA wins. One process trains, in the precision of the model or of `accelerate`.

    Args:
        make_model: makes the model at each call: one of transformers, or a module with one in it; patched or not.
        train_batches: dicts for `model(**batch)` with labels, or what `loss` takes, in memory at once. A growth reads
            the first ones, so no method sees more. Another seed takes them in another order, and so does another epoch.
        held_out_batches: to compare on, two at least; the error is that over these batches, so more of them tell more.
        loss: what to lower, a function of model and batch, the mean of the batch; by default what the model returns.
        budget: weights to add, as a share of the model's or as a number. It is rounded to a whole rank of LoRA.
        steps: of a training, best until the loss hardly falls; a quarter of them chooses a learning rate.
        seeds: with how many LoRA and its best challenger train, and the rows beyond growth and the mix.
        modules_to_save: names of modules that train whole in every method, outside of the budget.
        methods: names of `Method`. LoRA always trains; "random", "all" and "all_growth" are rows to compare with.
        growth_batches: how many batches a growth reads.
        output: a folder that keeps each run as it ends; the same call continues there.

    Raises:
        ValueError: a number is out of range, or the folder holds another race.
    """
    if isinstance(make_model, nn.Module) or not callable(make_model):
        found = type(make_model).__name__
        raise TypeError(f"make_model must be a function that makes a model at each call, and is a {found}.")
    check_loss(loss)
    check_budget(budget)
    train, held_out = list_batches(train_batches), list_batches(held_out_batches)
    if steps < SHORT or min(seeds, len(train) - 1, len(held_out) - 1) < 1:
        raise ValueError(
            f"A race takes at least {SHORT} steps, 1 seed, 2 batches to train on and 2 held-out ones; got {steps} "
            f"steps, seeds={seeds}, {len(train)} batches to train on, {len(held_out)} held out."
        )
    for name in methods:
        Method(name, modules_to_save=modules_to_save)  # which refuses an unknown one
    names = ["lora", *(name for name in TITLES if name in methods and name != "lora")]
    options = {"modules_to_save": [*modules_to_save], "growth_batches": growth_batches}
    trainings = _Trainings(make_model, train, held_out, loss or default_loss, budget, options)
    result = trainings.begin(steps, Path(output, RUNS) if output else None)
    try:
        with tqdm(desc="race", unit="step") as trainings.bar:
            _compete(result, trainings, names, seeds)
    except KeyboardInterrupt:
        kept = (
            f"the same call continues in {output}, where runs are kept" if output else "without output=, no run is kept"
        )
        raise KeyboardInterrupt(f"{kept}.\n{result.table()}") from None
    result.method = Method(result.winner, learning_rate=result.rates[result.winner], **result.options)
    return result


def _compete(result: RaceResult, trainings: "_Trainings", names: list[str], seeds: int) -> None:
    """Choose learning rates, train every method with the best one, then some with further seeds."""
    steps, short, bar = result.steps, result.steps // SHORT, trainings.bar
    rows = [name for name in names if name not in ("lora", "growth", "mix")]
    bar.total = len(names) * (3 * short + steps) + (seeds - 1) * (2 + len(rows)) * steps

    def run(name: str, rate: float, steps: int, seed: int) -> Run:
        for kept in result.runs:
            if (kept.method, kept.rate, kept.steps, kept.seed) == (name, rate, steps, seed):
                bar.update(steps)
                return kept
        bar.set_postfix_str(TITLES[name])
        result.runs.append(trainings.train(name, rate, steps, seed))
        return result.runs[-1]

    for name in names:
        slower = _SLOWER if name in ALL_WEIGHTS else 1.0
        try:
            tried = [run(name, slower * rate / trainings.width, short, 0) for rate in RATES]
        except ValueError as error:
            if name == "lora":
                raise
            result.missing[name] = str(error).rstrip(".")
            bar.total -= 3 * short + steps
            continue
        best = _best_rate(tried)
        tried.append(run(name, 3 * best if best == tried[-1].rate else best / 3, short, 0))
        run(name, _best_rate(tried), steps, 0)
    finalists = [name for name in ("lora", result.challenger, *rows) if name in result.rates]
    for seed in range(1, seeds) if len(finalists) > 1 else ():
        for name in finalists:
            run(name, result.rates[name], steps, seed)


def _warn_of_seen_rows(train: list, held_out: list) -> None:
    seen, held = ({row for batch in batches for row in digests_of(batch)} for batches in (train, held_out))
    if repeated := seen & held - {digest(())}:
        warnings.warn(
            f"{len(repeated)} of {len(held)} held-out rows are also in the batches to train on, so a method may win by "
            "remembering them. Hold out rows that no method sees.",
            stacklevel=4,
        )


def _best_rate(runs: list[Run]) -> float:
    return min(runs, key=lambda run: run.loss).rate


def order_batches(batches: list, seed: int, steps: int) -> list:
    """The batches of a training with a seed, step by step: the first epoch of seed 0 takes them as they are."""
    count, order = len(batches), []
    for epoch in range(math.ceil(steps / count)):
        generator = torch.Generator().manual_seed(1000 * epoch + seed)
        order += torch.randperm(count, generator=generator).tolist() if epoch + seed else range(count)
    return [batches[number] for number in order[:steps]]


class _Trainings:
    """Trains by any method, always on the same batches in the same order, and keeps each run in a file.

    Attributes:
        width: the `hidden_size` of the model.
        bar: counts the steps of all trainings.
    """

    bar: tqdm

    def __init__(self, make_model: Callable, train: list, held_out: list, loss: Callable, budget, options: dict):
        self.accelerator = Accelerator()
        if self.accelerator.num_processes > 1:
            raise ValueError("A race runs in one process: start it without torchrun, then train by the winner.")
        self.make_model, self.loss = make_model, loss
        self._made: dict[int, weakref.ref] = {}  # the parameters of the model that was made last, by identity
        self._first_weights = ""  # a digest of some weights of the first model
        self._prepared: tuple = ()  # method, seed, model, groups, and what changes as it starts
        self.file: Path | None = None
        model = self._make_model()
        if loss is default_loss and isinstance(model, PreTrainedModel):
            train, held_out = read_batches(train, model), read_batches(held_out, model)
        self.train_batches, self.held_out_batches = train, held_out
        saved = modules_to_train(model, options["modules_to_save"])
        weights = choose_rank(model, budget, saved) * weights_of_rank_one(model, saved)
        self.options: dict[str, Any] = options | {"budget": weights}
        self.saved_weights = sum(p.numel() for p in {p for module in saved.values() for p in module.parameters()})
        seen, held = ([*map(digest, batches)] for batches in (train, held_out))
        if {*seen} & {*held} - {digest(())}:
            raise ValueError("A held-out batch is among those to train on. Hold out batches that no method sees.")
        _warn_of_seen_rows(train, held_out)
        self.width, self.cache, self.losses = hidden_size(model), 0, self.measure(model)
        if not self.losses:
            raise ValueError(
                "The loss of a held-out batch is not finite before training. Leave out batches whose labels are all "
                "-100, inputs that are not finite, and a diverged model."
            )
        self.identity = {"model": digest(model.state_dict()), "train_batches": seen, "held_out_batches": held}
        self.identity |= self.options
        with contextlib.suppress(ValueError):  # the methods that grow say why they cannot
            self.cache = cache_bytes(patch_inside(model))

    def begin(self, steps: int, file: Path | None) -> RaceResult:
        """The race, with the runs that a file keeps of an earlier call, after a check that they are of the same one."""
        start, identity = Run("start", 0.0, 0, 0, self.losses, 0, self.cache), {"steps": steps, **self.identity}
        result, self.file = RaceResult(steps, start, self.options), file
        if file is None:
            return result
        file.parent.mkdir(parents=True, exist_ok=True)
        content = file.read_bytes() if file.exists() else b""
        whole = content[: content.rfind(b"\n") + 1]  # a killed process may leave half a line
        if whole.count(b"\n") < 2:
            file.write_text(json.dumps(identity) + "\n")
            self._keep(start)
            return result
        kept, first, *runs = map(json.loads, whole.splitlines())
        different = [name for name in identity if identity[name] != kept.get(name)]
        if not different and not torch.allclose(torch.tensor(first["losses"]), torch.tensor(self.losses)):
            different = ["loss"]
        if different:
            raise ValueError(
                f"The folder {str(file.parent)!r} holds a race that differs in {', '.join(different)}. Name a new "
                "folder, or go on with the same model, data and options."
            )
        os.truncate(file, len(whole))
        result.runs = [Run(**run) for run in runs]
        return result

    def _keep(self, run: Run) -> Run:
        if self.file:
            with self.file.open("a") as file:
                file.write(json.dumps(vars(run), allow_nan=False) + "\n")
        return run

    def _make_model(self) -> nn.Module:
        set_seed(0)  # a new head begins alike
        model = self.make_model()
        check_kind(model)
        former, self._made = self._made, {id(p): weakref.ref(p) for p in model.parameters()}
        if any(former[number]() is made() for number, made in self._made.items() if number in former):
            raise ValueError("make_model gave the same model twice. Make or load another one at each call.")
        some_weights = digest([parameter.flatten()[:16] for parameter in model.parameters()])
        self._first_weights = self._first_weights or some_weights
        if some_weights != self._first_weights:
            raise ValueError("make_model gave other weights than at its first call. Seed what it draws, or load them.")
        return move_to_device(model, self.accelerator.device)

    def _prepare(self, method: Method, seed: int) -> tuple[Any, list[dict]]:
        """The model as a method starts from it, grown once for all learning rates, with rates of 1."""
        if self._prepared[:2] != (method.name, seed):
            self._prepared = ()
            gc.collect()
            model = self._make_model()
            set_seed(seed)
            batches = order_batches(self.train_batches, seed, method.growth_batches)
            model, groups = method.prepare(model, batches, self.loss)
            changing = [*(p for group in groups for p in group["params"]), *model.buffers()]
            start = [(tensor, tensor.detach().clone()) for tensor in changing]
            self._prepared = method.name, seed, model, groups, start
        *_, model, groups, start = self._prepared
        with torch.no_grad():
            for tensor, value in start:
                tensor.copy_(value)
        return model, groups

    def train(self, name: str, rate: float, steps: int, seed: int) -> Run:
        """Train, measure, and keep the run; a ValueError if the method cannot be had."""
        method, accelerator = Method(name, learning_rate=1.0, **self.options), self.accelerator
        model, groups = self._prepare(method, seed)
        set_seed(seed)
        weights = [p for group in groups for p in group["params"]]
        optimizer = accelerator.prepare(torch.optim.AdamW([group | {"lr": rate * group["lr"]} for group in groups]))
        schedule = get_cosine_schedule_with_warmup(optimizer, math.ceil(_WARMUP * steps), steps)
        model.train()
        for batch in order_batches(self.train_batches, seed, steps):
            with accelerator.autocast():
                loss = self.loss(model, self._on_device(batch))
            accelerator.backward(loss)
            accelerator.clip_grad_norm_(weights, 1.0)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
            self.bar.update()
        accelerator.free_memory()
        cache = cache_bytes(growable_model(model)) if name in GROWING else self.cache
        trained = sum(weight.numel() for weight in weights) - self.saved_weights
        return self._keep(Run(name, rate, steps, seed, self.measure(model), trained, cache))

    @torch.no_grad()
    def measure(self, model: nn.Module) -> list[float]:
        """The loss of each held-out batch; none if one is not finite."""
        model.eval()
        with self.accelerator.autocast():
            losses = [
                float(check_loss_value(self.loss(model, self._on_device(batch)), index))
                for index, batch in enumerate(self.held_out_batches)
            ]
        return losses if all(map(math.isfinite, losses)) else []

    def _on_device(self, batch: Any) -> Any:
        return send_to_device(copy.copy(batch), self.accelerator.device)  # a copy, of which a loss may take labels out
