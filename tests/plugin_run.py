"""On two ranks: trainings under accelerate's FSDP2 plugin, next to the same ones under DDP.

Run by torchrun.py. Each rank checks for itself.
"""

import os
import shutil
from pathlib import Path

import accelerate
import torch
import torch.distributed as dist
from accelerate.state import AcceleratorState
from packaging.version import Version
from torchrun import report
from training import honour_fsdp_on_cpus, with_accelerate, with_trainer

RESUMED = 6  # a step between the growths
# accelerate 1.10 resumes another optimizer state out of shards, with growth and without; 1.15 the one that was saved.
EXACT = Version(accelerate.__version__) >= Version("1.15")
CASES = ((with_accelerate, "FULL_STATE_DICT"), (with_trainer, "SHARDED_STATE_DICT"))


def trained(loop, output: Path, kind: str | None, resume: Path | None = None):
    """The losses by step, and the weights, whole."""
    AcceleratorState._reset_state(True)  # each training is one of its own
    os.environ.pop("ACCELERATE_USE_FSDP", None)
    losses, model, _ = loop(output, resume, None, torch.float64, kind)
    assert all(hasattr(p, "placements") == bool(kind) for p in model.parameters())
    whole = {name: (p.full_tensor() if kind else p).detach().clone() for name, p in model.named_parameters()}
    dist.barrier()
    return losses, {name.replace("._checkpoint_wrapped_module", ""): weight for name, weight in whole.items()}


def furthest(one: dict, other: dict) -> float:
    assert one.keys() == other.keys()
    return max((one[name] - other[name]).abs().max().item() for name in one)


def main(folder: Path) -> None:
    """Each loop under DDP, then sharded, then resumed from after the first growth."""
    honour_fsdp_on_cpus()
    for loop, kind in CASES:
        theirs, wanted = trained(loop, folder / "ddp", None)
        assert {"growth_1", "growth_2"} == {name.split(".")[6] for name in wanted if ".extra.growths." in name}
        ours, weights = trained(loop, folder / kind, kind)
        # The loss of a batch is fp32 whatever the weights are, and 12 steps multiply what it was rounded by.
        assert max(abs(ours[step] - theirs[step]) for step in theirs) < 1e-6, loop
        assert furthest(weights, wanted) < 1e-8, (loop, furthest(weights, wanted))
        if kind == "FULL_STATE_DICT" or EXACT:
            again, resumed = trained(loop, folder / "again", kind, folder / kind / f"checkpoint-{RESUMED}")
            assert again[12] == ours[12] and furthest(resumed, weights) == 0, (loop, furthest(resumed, weights))
        report(loop.__name__)
        if dist.get_rank() == 0:
            shutil.rmtree(folder)
        dist.barrier()
