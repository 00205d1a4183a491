"""Peak memory of this process (Linux), an environment where it is that of live tensors, and that of tensors alone."""

import gc
import os
from collections.abc import Callable
from pathlib import Path

from torch.profiler import ProfilerActivity, profile

# Freed tensors leave the process, so the mark is theirs.
TIDY = os.environ | {"MALLOC_MMAP_THRESHOLD_": "131072"}


def peak() -> int:
    """The process's own high-water mark in bytes since the last `forget_peak`."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM"))
    return int(line.split()[1]) * 1024


def forget_peak() -> None:
    """Lower the high-water mark to what is in memory now."""
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")


def peak_of_tensors(action: Callable) -> int:
    """The most bytes of tensors that one call holds at a time, beside those from before it."""
    gc.collect()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        action()
    events = [e for e in profiler.profiler.kineto_results.events() if e.name() == "[memory]"]
    held = most = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        held += event.nbytes()
        most = max(most, held)
    return most
