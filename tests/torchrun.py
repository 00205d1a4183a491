"""The end of a process that torchrun started."""

import os
import sys

import torch.distributed as dist


def leave() -> None:
    """End this process at once: gloo's threads may hold tensors still, which aborts an interpreter on its way out."""
    dist.barrier()
    dist.destroy_process_group()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)
