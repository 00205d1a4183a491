"""The most memory that one call holds at a time."""

import gc
from collections.abc import Callable

import torch
from torch.profiler import ProfilerActivity, profile


def peak_of_tensors(action: Callable) -> int:
    """The most bytes of tensors that one call holds at a time, on top of those from before it."""
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        action()
        return torch.cuda.max_memory_allocated() - before
    gc.collect()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        action()
    events = [e for e in profiler.profiler.kineto_results.events() if e.name() == "[memory]"]
    held = most = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        held += event.nbytes()
        most = max(most, held)
    return most
