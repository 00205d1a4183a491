"""Weights of which each process holds a part, by FSDP2 (`fully_shard`).

Old ones are read whole, one at a time; new dims are sharded by `fully_shard` like the rest.
"""

import sys
from typing import Any

from torch import Tensor, nn


def is_sharded(tensor: Any) -> bool:
    """Whether a tensor is a DTensor, of which each process holds a part."""
    return hasattr(tensor, "placements")


def whole(tensor: Tensor) -> Tensor:
    """A tensor as it is, or all of a sharded one, gathered from all ranks, which call this together."""
    return tensor.full_tensor() if is_sharded(tensor) else tensor  # pyright: ignore[reportAttributeAccessIssue]


def own_part(tensor: Any) -> Tensor:
    """A tensor as it is, or this rank's part of a sharded one, as a view."""
    return tensor.to_local() if is_sharded(tensor) else tensor


def shard_like(part: nn.Module, attention: nn.Module) -> None:
    """Shard the modules of new dims over the processes that shard an attention module, if any do."""
    mesh = next((p.device_mesh for p in attention.parameters() if is_sharded(p)), None)  # pyright: ignore
    if mesh is None:
        return
    from torch.distributed.fsdp import fully_shard

    for module in (child for child in part.children() if any(True for _ in child.parameters())):
        fully_shard(module, mesh=mesh)


def sharded_modules(model: nn.Module) -> list[Any]:
    """The modules that `fully_shard` was called on."""
    if "torch.distributed.fsdp" not in sys.modules:
        return []
    from torch.distributed.fsdp import FSDPModule

    return [module for module in model.modules() if isinstance(module, FSDPModule)]


def reshard(model: nn.Module) -> None:
    """Let all modules hold their sharded parameters: after a forward pass the outermost ones are whole."""
    for module in sharded_modules(model):
        module.reshard()
