"""One harness: train a method on a task, with learning rates swept on a seed of their own.

A `Task` gives a model, batches, a loss and a measure; a `Method` says what is added to the model and what trains. Each
run is a line of JSON in a file, written when the run ends, so the same command goes on after a failure.
"""

import gc
import hashlib
import inspect
import json
import math
import multiprocessing
import os
import statistics
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import methods
import peft
import torch
import torch._dynamo  # here once: the first step of an optimizer imports it, in each of the processes
import transformers
import wide_values
from methods import Method, add_to_model, make_optimizer
from peak_memory import forget_peak, peak_bytes
from safetensors.torch import load_model, save_model
from torch import Tensor, nn
from tqdm.auto import tqdm

import hf_growattn
from hf_growattn.growable.growths import cache_bytes

TUNING_SEED = 100
STEP = 3  # between a learning rate and the next
FURTHER = 3  # learning rates to try at most beyond the first ones
CURVE_POINTS = 8
FORWARD_TURNS = 15
MODELS = Path(__file__).parent / "results" / "pretrained_models"  # which a page sets to a folder of its output


@dataclass(frozen=True)
class Task:
    """What a method trains on; its fields, and the files it reads, are all that its results depend on.

    Attributes:
        steps: batches that every method sees.
        growth_batches: that a growth looks at; training sees the same ones, so no method sees more data.
        warmup: share of the steps in which the learning rate rises.
    """

    steps: int = 40
    growth_batches: int = 8
    warmup: float = 0.05

    metric = "loss"  # what methods are compared by, one of the figures of `measure`
    higher_is_better = False

    @property
    def name(self) -> str:
        """What tables call it."""
        raise NotImplementedError

    def model(self, seed: int, wide: bool = False) -> nn.Module:
        """A patched model; what requires gradients trains where all weights do. `wide` asks for the grown widths."""
        raise NotImplementedError

    def batch(self, seed: int, step: int) -> dict:
        """The batch of a step, the same whenever it is asked for."""
        raise NotImplementedError

    def measure(self, model: nn.Module, seed: int) -> dict[str, float]:
        """Figures on held-out data, the metric among them."""
        raise NotImplementedError

    def budget(self, model: nn.Module) -> int:
        """How many weights a method may train, where not all do."""
        raise NotImplementedError

    def loss(self, model: nn.Module, batch: dict) -> Tensor:
        """What training lowers."""
        return model(**batch).loss

    def files(self) -> list[str]:
        """Files and folders whose content the results depend on."""
        return []

    def without_training(self, seed: int) -> dict[str, float]:
        """Figures of methods that train nothing, such as nearest neighbours, by their names."""
        return {}


@dataclass(frozen=True)
class Job:
    """One run: a method on a task, with a learning rate and a seed."""

    task: Task
    title: str
    method: Method
    rate: float
    seed: int

    def key(self) -> str:
        """A digest of everything that the result depends on."""
        files = [digest_of_files(path) for path in self.task.files()]
        given = {"kind": type(self.task).__name__, "task": asdict(self.task), "files": files}
        given |= {"method": asdict(self.method), "rate": self.rate, "seed": self.seed}
        given |= {"torch": torch.__version__, "transformers": transformers.__version__, "peft": peft.__version__}
        sources = [str(Path(hf_growattn.__file__).parent), __file__, methods.__file__]
        return _digest(
            json.dumps(given, sort_keys=True) + source_of(self.task) + "".join(map(digest_of_files, sources))
        )


def source_of(task: Task) -> str:
    """A digest of the files that define a task and the attention of its model."""
    return "".join(map(digest_of_files, (inspect.getfile(type(task)), wide_values.__file__)))


_FILES: dict[str, str] = {}


def digest_of_files(path: str) -> str:
    """A digest of a file's content, or of all files in a folder; of a name that is no path, the name's."""
    if path not in _FILES:
        place, whole = Path(path or "no file"), hashlib.sha256()  # Path("") is the folder that one is in
        files = sorted(place.rglob("*")) if place.is_dir() else [place]
        for file in files:
            if file.is_file() and "__pycache__" not in file.parts:
                whole.update(file.name.encode())
                whole.update(file.read_bytes())
        _FILES[path] = whole.hexdigest() if place.exists() else _digest(path)
    return _FILES[path]


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def run_job(job: Job) -> dict:
    """Train, and return the row of the run."""
    torch.set_num_threads(1)  # models this small are slower on more
    transformers.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    forget_peak()
    floor, began = peak_bytes(), time.perf_counter()
    processor = time.process_time()
    row = {"key": job.key(), "task": job.task.name, "method": job.title, "rate": job.rate, "seed": job.seed}
    row |= train(job)
    row |= {"seconds": time.perf_counter() - began, "processor": time.process_time() - processor}
    return finite(row | {"peak_bytes": peak_bytes() - floor})


def train(job: Job) -> dict:
    """Train the method on the task, and return its figures."""
    task, method = job.task, job.method
    torch.manual_seed(job.seed)
    model = trained = task.model(job.seed, wide=method.wide)
    figures: dict = {}
    change_at = round(method.at * task.steps)
    optimizer = make_optimizer(model, job.rate) if change_at else None
    steps = task.steps if method.trains else 0
    curve = []
    for step in range(steps + 1):
        if step == change_at:
            batches = [task.batch(job.seed, step + number) for number in range(task.growth_batches)]
            began = time.perf_counter()
            trained, optimizer, found = add_to_model(model, method, task, batches, job.seed, job.rate, optimizer)
            figures |= found | {"change_seconds": time.perf_counter() - began}
            if method.grows:
                figures["at_change"] = measured(task, trained, job.seed)[task.metric]
        if step == steps:
            break
        train_step(trained, optimizer, task, job, step)
        if (step + 1) % max(steps // CURVE_POINTS, 1) == 0 and step + 1 < steps:
            curve.append([step + 1, measured(task, trained, job.seed)[task.metric]])
    figures |= measured(task, trained, job.seed)
    curve.append([steps, figures[task.metric]])
    weights = [weight.numel() for weight in trained.parameters() if weight.requires_grad and method.trains]
    figures |= {"curve": curve, "weights": sum(weights)}
    return figures | serving_cost(job, model, trained)


def train_step(model: nn.Module, optimizer: torch.optim.Optimizer | None, task: Task, job: Job, step: int) -> None:
    """One step of AdamW, on the batch of that step."""
    if optimizer is None:
        return  # a growth that finds nothing leaves nothing to train
    for group in optimizer.param_groups:
        group["lr"] = group["full_rate"] * schedule(task, step)
    model.train()
    task.loss(model, task.batch(job.seed, step)).backward()
    nn.utils.clip_grad_norm_([p for group in optimizer.param_groups for p in group["params"]], 1.0)
    optimizer.step()
    optimizer.zero_grad()


def schedule(task: Task, step: int) -> float:
    """The share of the learning rate at a step: up, then down to zero along a cosine."""
    warm = max(round(task.warmup * task.steps), 1)
    return min((step + 1) / warm, 0.5 + 0.5 * math.cos(math.pi * step / task.steps))


@torch.no_grad()
def measured(task: Task, model: nn.Module, seed: int) -> dict[str, float]:
    """The task's own figures, in evaluation mode."""
    model.eval()
    return task.measure(model, seed)


def serving_cost(job: Job, model: nn.Module, trained: nn.Module) -> dict:
    """The share that the KV cache of a token grew by, and a forward pass's time over that of the model before.

    LoRA is merged first, so alone it costs nothing.
    """
    if not (job.method.grows or job.method.wide):
        return {"cache": 0.0, "forward": 1.0}
    before = job.task.model(job.seed).eval()
    merged = trained.merge_and_unload() if hasattr(trained, "merge_and_unload") else trained
    bytes_before = cache_bytes(before)  # 0 of an encoder
    cache = cache_bytes(merged) / bytes_before - 1 if bytes_before else 0.0
    return {"cache": cache, "forward": forward_ratio(job.task, merged.eval(), before, job.task.batch(job.seed, 0))}


@torch.no_grad()
def forward_ratio(task: Task, model: nn.Module, other: nn.Module, batch: dict) -> float:
    """CPU time of a forward pass with its loss over that of another model, the median of turns."""
    ratios = []
    for turn in range(FORWARD_TURNS):
        times = []
        for each in (model, other):
            began = time.process_time()
            task.loss(each, batch)
            times.append(time.process_time() - began)
        if turn:  # the first one warms up
            ratios.append(times[0] / times[1])
    return statistics.median(ratios)


def pretrained(task: Task, model: nn.Module, name: str, steps: Iterable[dict], rate: float) -> nn.Module:
    """The model, trained on batches by the first that asks for this name; the others read its weights from a file."""
    kept = MODELS / f"{name}-{_digest(json.dumps(asdict(task), sort_keys=True) + source_of(task))}.safetensors"
    if kept.exists():
        load_model(model, kept)
        return model.eval()
    batches = list(steps)
    weights = [weight for weight in model.parameters() if weight.requires_grad]
    optimizer = torch.optim.AdamW(weights, lr=rate, weight_decay=0)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, len(batches))
    for batch in batches:
        task.loss(model, batch).backward()
        nn.utils.clip_grad_norm_(weights, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
    MODELS.mkdir(parents=True, exist_ok=True)
    partial = kept.with_suffix(f".{os.getpid()}")
    save_model(model, str(partial))
    partial.replace(kept)
    return model.eval()


def collect(jobs: list, kept: Path, processes: int = 1, run: Callable[[Any], dict] | None = None) -> list[dict]:
    """The rows of jobs, in their order; those that the file has not yet are run first, and added to it.

    Args:
        jobs: what to run, each in a fresh process, so that the peak of memory is the run's own. A `Job`, or anything
            whose `key()` names all that its result depends on.
        kept: JSON lines; a half-written last line is dropped.
        processes: how many run at once, one thread each.
        run: a function of a module that gives the row of a job, its key among it; `run_job` by default.
    """
    rows = {row["key"]: row for row in read_rows(kept)}
    missing = {job.key(): job for job in jobs if job.key() not in rows}
    gc.freeze()  # what is imported is no garbage, and looking through it takes long
    with multiprocessing.get_context("fork").Pool(processes, maxtasksperchild=1) as pool, kept.open("a") as file:
        for row in tqdm(
            pool.imap_unordered(run or run_job, missing.values()), total=len(missing), desc=kept.stem, disable=None
        ):
            file.write(json.dumps(row, allow_nan=False) + "\n")
            file.flush()
            rows[row["key"]] = row
    return [rows[job.key()] for job in jobs]


def read_rows(kept: Path) -> list[dict]:
    """The whole lines of a file; what a killed process wrote in part is cut off."""
    if not kept.exists():
        return []
    text = kept.read_text()
    whole = text[: text.rfind("\n") + 1]
    if whole != text:
        kept.write_text(whole)
    return [json.loads(line) for line in whole.splitlines()]


def finite(value):
    """The same with None for numbers that JSON has not: those of a diverged run."""
    if isinstance(value, dict):
        return {key: finite(one) for key, one in value.items()}
    if isinstance(value, (list, tuple)):
        return [finite(one) for one in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


@dataclass(frozen=True)
class Cell:
    """A task and the methods that are compared on it, by their titles."""

    task: Task
    methods: dict[str, Method]


def run_cells(cells: list[Cell], seeds: list[int], kept: Path, processes: int = 1, quick: bool = False) -> dict:
    """Sweep the learning rates of each method on each task, then train with the best one and every seed.

    Returns:
        `rows`, the runs with the seeds; `sweep`, those with the tuning seed; `untrained`, what trains nothing.
    """
    chosen = {(place, title): method for place, cell in enumerate(cells) for title, method in cell.methods.items()}
    rates = {where: list(method.rates[:1] if quick else method.rates) for where, method in chosen.items()}
    tried: dict[tuple[int, str], list[dict]] = {}

    def rows_of(wanted: dict[tuple[int, str], list[float]], seed: int) -> list[tuple[tuple[int, str], dict]]:
        each = [(where, rate) for where, several in wanted.items() for rate in several]
        jobs = [Job(cells[where[0]].task, where[1], chosen[where], rate, seed) for where, rate in each]
        return [(where, row) for (where, _), row in zip(each, collect(jobs, kept, processes))]

    wanted = {where: several for where, several in rates.items() if len(several) > 1}
    for _ in range(FURTHER + 1):
        for where, row in rows_of(wanted, TUNING_SEED):
            tried.setdefault(where, []).append(row)
        beyond = {where: rate_beyond(cells[where[0]].task, tried[where]) for where in wanted}
        wanted = {where: [rate] for where, rate in beyond.items() if rate}
    best = {where: [several[0]] for where, several in rates.items()}
    best |= {where: [best_row(cells[where[0]].task, rows)["rate"]] for where, rows in tried.items()}
    return {
        "rows": [row for seed in seeds for _, row in rows_of(best, seed)],
        "sweep": [row for rows in tried.values() for row in rows],
        "untrained": [
            {"task": cell.task.name, "method": title, "seed": seed, cell.task.metric: value}
            for cell in cells
            for seed in seeds
            for title, value in cell.task.without_training(seed).items()
        ],
    }


def best_row(task: Task, rows: list[dict]) -> dict:
    """The row with the best metric; a diverged one is the worst."""
    sign = -1 if task.higher_is_better else 1
    return min(rows, key=lambda row: math.inf if row[task.metric] is None else sign * row[task.metric])


def rate_beyond(task: Task, rows: list[dict]) -> float | None:
    """A learning rate a step beyond the best one, if that is the largest or the smallest tried."""
    best, rates = best_row(task, rows)["rate"], [row["rate"] for row in rows]
    if best == max(rates):
        return readable_rate(best * STEP)
    return readable_rate(best / STEP) if best == min(rates) else None


def readable_rate(rate: float) -> float:
    """A learning rate of two digits."""
    return float(f"{rate:.1e}")
