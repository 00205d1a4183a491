"""The runs of a benchmark: each in a fresh process, each kept in a file as soon as it ends, none made twice."""

import json
import multiprocessing
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch._dynamo  # here once: the first step of an optimizer imports it, in each of the processes
import transformers
from memory import forget_peak, peak
from tqdm.auto import tqdm


def collect(measure: Callable[..., dict], jobs: list[dict], kept: Path, processes: int = 1) -> list[dict]:
    """Run `measure(**job)` for each job that `kept` does not hold yet.

    Args:
        measure: a function of a module, which returns what it measured.
        jobs: its arguments, for JSON; a job is known by all of them.
        kept: JSON lines, one for each run, appended as soon as a run ends. A start after a failure goes on from there.
        processes: how many run at once, one thread each.

    Returns:
        A dict for each job, in the order of the jobs: the job, what it measured, `seconds` of wall-clock time and
        `peak_bytes` of memory over that of the imported libraries.
    """
    runs = [json.loads(line) for line in kept.read_text().splitlines()] if kept.exists() else []
    missing = [(measure, job) for job in jobs if not any(job.items() <= run.items() for run in runs)]
    # A fresh process for each, so that the peak of memory is the run's own.
    with multiprocessing.get_context("fork").Pool(processes, maxtasksperchild=1) as pool, kept.open("a") as file:
        for run in tqdm(pool.imap_unordered(_run, missing), total=len(missing), desc=kept.stem, disable=None):
            file.write(json.dumps(run) + "\n")
            file.flush()
            runs.append(run)
    return [next(run for run in runs if job.items() <= run.items()) for job in jobs]


def _run(task: tuple[Callable[..., dict], dict]) -> dict:
    measure, job = task
    torch.set_num_threads(1)  # models this small are slower on more
    transformers.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    forget_peak()
    before, start = peak(), time.perf_counter()
    measured = measure(**job)
    return job | measured | {"seconds": time.perf_counter() - start, "peak_bytes": peak() - before}


def spread(values: list[float], digits: int = 3) -> str:
    """Median and range; the value alone where there is one."""
    if not values:
        return ""
    middle, *ends = (f"{value:.{digits}f}" for value in (statistics.median(values), min(values), max(values)))
    return middle if len(values) == 1 else f"{middle} ({ends[0]} to {ends[1]})"
