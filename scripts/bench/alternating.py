"""Two actions that take turns in one process, and the ratio of their times with its spread."""

import contextlib
import gc
import statistics
import time
from collections.abc import Callable


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
