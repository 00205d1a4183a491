"""Peak memory of this process (Linux), and an environment in which it is that of live tensors."""

import gc
import os
from pathlib import Path

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
