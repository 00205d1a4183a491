"""Sums and broadcasts over ranks, errors on all ranks, and rebuilding DistributedDataParallel in place.

Without torch.distributed, or with one process, everything here does nothing.
"""

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel


def rank() -> int:
    """This process's number, 0 without torch.distributed."""
    return dist.get_rank() if several() else 0


def count() -> int:
    """How many processes take part."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def several() -> bool:
    """Whether more than one process takes part."""
    return count() > 1


def sum_over_ranks(*tensors: Tensor) -> None:
    """Replace each tensor by its sum over the ranks, the same to the bit on all of them."""
    if several():
        for tensor in tensors:
            dist.all_reduce(tensor)


def total(*numbers: float) -> list[float]:
    """Return each number's sum over the ranks."""
    if not several():
        return list(numbers)
    tensor = torch.tensor(numbers, dtype=torch.float64, device=_device())
    dist.all_reduce(tensor)
    return tensor.tolist()


def of_all(thing: Any) -> list[Any]:
    """What each rank brings, in their order."""
    everything: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everything, thing)
    return everything


def broadcast_from_rank0(*tensors: Tensor) -> None:
    """Replace each tensor by that of rank 0: solvers may round differently from machine to machine."""
    if several():
        for tensor in tensors:
            whole = tensor.contiguous()
            dist.broadcast(whole, src=0)
            if whole is not tensor:
                tensor.copy_(whole)


class Rows:
    """A matrix of which each rank keeps some rows if it is `spread`, and all of it otherwise."""

    def __init__(self, matrix: Tensor, spread: bool):
        self.spread = spread
        self._shape = matrix.shape
        if spread:
            first, last = (len(matrix) * number // count() for number in (rank(), rank() + 1))
            self._rows = slice(first, last)
        self._own = matrix[self._rows].clone() if spread else matrix

    @property
    def like(self) -> Tensor:
        """An empty tensor in the matrix's precision and on its device."""
        return self._own.new_empty(0)

    def add(self, matrix: Tensor | None) -> None:
        """Add a matrix to it, that of all ranks where it is spread; they call this together then, with None for zeros.

        The matrix is used up.
        """
        if self.spread:
            matrix = self._own.new_zeros(self._shape) if matrix is None else matrix
            sum_over_ranks(matrix)
        if matrix is not None:
            self._own += matrix[self._rows] if self.spread else matrix

    def whole(self) -> Tensor:
        """All of the matrix; ranks that have some rows call this together, and keep no more than those."""
        if not self.spread:
            return self._own
        matrix = self._own.new_zeros(self._shape)
        matrix[self._rows] = self._own
        sum_over_ranks(matrix)
        return matrix


@contextlib.contextmanager
def raise_on_all_ranks() -> Iterator[None]:
    """Raise an exception on every rank if one rank raises, so that no rank waits for a failed one.

    Raises:
        RuntimeError: another rank failed; its own error says why.
    """
    if not several():
        yield
        return
    error = None
    try:
        yield
    except Exception as raised:
        error = raised
    (failed,) = total(float(error is not None))
    if error is not None:
        raise error
    if failed:
        raise RuntimeError("The growth failed in another process, whose own error says why; nothing was changed here.")


@contextlib.contextmanager
def unsynchronized(wrapped: nn.Module) -> Iterator[None]:
    """Let DistributedDataParallel around a model pass it on as it is: a loss of the user's may call it."""
    with contextlib.ExitStack() as stack:
        for module in wrapped.modules():
            if isinstance(module, DistributedDataParallel):
                stack.enter_context(module.no_sync())
        yield


def _device() -> torch.device:
    """Where the backend takes tensors from."""
    return torch.device("cuda", torch.cuda.current_device()) if dist.get_backend() == "nccl" else torch.device("cpu")
