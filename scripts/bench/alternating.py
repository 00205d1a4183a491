"""Two actions that take turns in one process, the ratio of their times with its spread, and what methods cost so."""

import contextlib
import gc
import statistics
import time
from collections.abc import Callable
from functools import partial

import torch
from torch import nn

from hf_growattn import Method
from hf_growattn.growable.attention import attentions
from hf_growattn.growable.growths import growable_model

TURNS = 14  # of passes whose time is compared


@contextlib.contextmanager
def no_collection():
    """Python's garbage collector must not fall into one model's turn."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def measure(action: Callable) -> tuple[float, float]:
    """CPU seconds of this process and seconds by the clock of one call."""
    wall, cpu = time.perf_counter(), time.process_time()
    action()
    return time.process_time() - cpu, time.perf_counter() - wall


def turns(ours: Callable, stock: Callable, seconds: float, least: int) -> dict:
    """Let two actions take turns, the first one changing, for some seconds; all figures of all turns."""
    ours(), stock()  # warm
    spent = {"ours": [], "stock": []}
    end = time.perf_counter() + seconds
    with no_collection():
        while len(spent["ours"]) < least or time.perf_counter() < end:
            order = [("ours", ours), ("stock", stock)]
            for name, action in order if len(spent["ours"]) % 2 else order[::-1]:
                spent[name].append(measure(action))
    figures = {"turns": len(spent["ours"])}
    for clock, place in (("cpu", 0), ("wall", 1)):
        a, b = ([values[place] for values in spent[name]] for name in ("ours", "stock"))
        ratios = [x / y for x, y in zip(a, b)]
        low, middle, high = statistics.quantiles(ratios, n=4)
        figures[clock] = {"ratio": middle, "quartiles": [low, high], "stock_seconds": statistics.median(b)}
    return figures


def error(value: dict, turns: int) -> float:
    """About two standard errors of a median, from its quartiles."""
    low, high = value["quartiles"]
    return 1.8 * (high - low) / turns**0.5


def format_spread(value: dict) -> str:
    """A median and its quartiles."""
    return "{:.3f} ({:.3f} to {:.3f})".format(value["ratio"], *value["quartiles"])


def serving_cost(make: Callable[[], nn.Module], method: Method, train: list, loss: Callable) -> dict[str, float]:
    """The share by which keys and values of a token grew, and the CPU time of a pass over that before, LoRA merged."""
    model, _ = method.prepare(make(), train, loss)
    merged = model.merge_and_unload() if hasattr(model, "merge_and_unload") else model
    found = attentions(growable_model(merged))
    before = sum(each.cached_numbers([]) for each in found)
    kept = sum(each.cached_numbers([*each.growths.values()]) for each in found) / before - 1
    passes = [partial(loss, each.eval(), train[0]) for each in (merged, make())]
    with torch.no_grad():
        return {"kept": kept, "forward": turns(*passes, seconds=0.0, least=TURNS)["cpu"]["ratio"]}
