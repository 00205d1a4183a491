"""Batches in two halves: each judges what the other has found, by rows that are not among its own."""

import functools
import hashlib
import math
from collections.abc import Mapping
from itertools import zip_longest
from typing import Any

import torch
from accelerate.utils import recursively_apply
from torch import Tensor

from ..growable.training_state import all_reduce_sum, rank
from .passes import Objective, compute_losses, mean_over_ranks

FEWEST_JUDGES = 8  # measurements that an error of their mean needs at least


class HalvedBatches:
    """This rank's batches in two halves that judge each other, and their losses before anything was tried.

    Attributes:
        halves: the batches of either half.
        whole: that batches are of a form that cannot be split, as `loss=` may take.
        loss_before: the mean loss of all batches over all ranks, once `note_losses` was called.
    """

    def __init__(self, batches: list, whole: bool = False):
        self.halves, self.whole = halves_of(batches, whole), whole
        self.loss_before = math.nan
        self._losses: dict[int, float] = {}  # by the identity of a batch

    @property
    def every(self) -> list:
        """The batches of both halves, one half after the other."""
        return self.halves[0] + self.halves[1]

    @property
    def as_given(self) -> list:
        """The batches in the order they were given in: an error names one by its number."""
        return [batch for pair in zip_longest(*self.halves) for batch in pair if batch is not None]

    def few(self, count: int) -> list[list]:
        """At most `count` batches of each half, evenly spaced."""
        return [half[:: max(-(-len(half) // count), 1)] for half in self.halves]

    @functools.cached_property
    def judges(self) -> tuple[list, list]:
        """What a step is judged on, of either half: its batches, or their rows where all ranks have few batches."""
        if self.whole:
            return self.halves
        first, second = ([row for batch in half for row in rows_of(batch)] for half in self.halves)
        batches, rows = all_reduce_sum(len(self.every), len(first) + len(second))
        return (first, second) if rows > batches and batches < FEWEST_JUDGES else self.halves

    @functools.cached_property
    def unseen(self) -> tuple[list, list]:
        """The judges of either half of which no row is in the other half, too, as in epochs over few data."""
        ours, theirs = self.judges
        our_rows, their_rows = ([digests_of(judge) for judge in half] for half in self.judges)
        our_seen, their_seen = set().union(*our_rows), set().union(*their_rows)
        return (
            [judge for judge, rows in zip(ours, our_rows) if rows.isdisjoint(their_seen)],
            [judge for judge, rows in zip(theirs, their_rows) if rows.isdisjoint(our_seen)],
        )

    def note_losses(self, losses: list[float]) -> None:
        """Keep the losses of the batches `as_given`, which the model has before anything is tried."""
        self._losses = dict(zip(map(id, self.as_given), losses))
        self.loss_before = mean_over_ranks(losses)

    def losses_before(self, objective: Objective, judges: list) -> list[float]:
        """The losses of a half's judges without new dims: those noted, or computed where rows judge."""
        if self.judges is not self.halves:
            return compute_losses(objective, judges)
        return [self._losses[id(batch)] for batch in judges]

    def few_loss_before(self, count: int) -> float:
        """The mean over both halves of the noted loss of their `few` batches, over all ranks."""
        noted = [[self._losses[id(batch)] for batch in few] for few in self.few(count)]
        return sum(map(mean_over_ranks, noted)) / 2


def halves_of(batches: list, whole: bool = False) -> tuple[list, list]:
    """Split the batches in two, every other one; a single batch, unless `whole`, by its rows, if it has several."""
    if len(batches) != 1:
        return batches[0::2], batches[1::2]
    (batch,) = batches
    rows = 1 if whole else count_rows(batch)
    if rows < 2:
        return (batches, []) if rank() % 2 == 0 else ([], batches)
    return [take_rows(batch, 0, rows // 2)], [take_rows(batch, rows // 2, rows)]


def count_rows(batch: dict) -> int:
    """How many rows a batch can be split into: 1 where images of all rows may lie in one tensor."""
    lengths = {len(value) for value in batch.values() if torch.is_tensor(value) and value.dim()}
    return max(*lengths, 1) if len(lengths) == 1 else 1


def take_rows(batch: dict, start: int, stop: int) -> dict:
    """Some of the rows of a batch; what is no tensor with rows goes with all of them."""
    has_rows = {key: torch.is_tensor(value) and value.dim() for key, value in batch.items()}
    return {key: value[start:stop] if has_rows[key] else value for key, value in batch.items()}


def digest(values: Any) -> str:
    """A digest of all tensors in a container, by their content."""
    found = hashlib.sha256()

    def add(tensor: Tensor) -> None:
        found.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())

    recursively_apply(add, values)
    return found.hexdigest()[:16]


def digests_of(batch: Any) -> set[str]:
    """A digest of each row of a batch, without its padding; of the whole where it has no rows."""
    if not isinstance(batch, Mapping):
        return {digest(batch)}
    return {digest(_without_padding(row)) for row in rows_of(dict(batch))}


def _without_padding(row: dict) -> dict:
    mask = row.get("attention_mask")
    if not torch.is_tensor(mask):
        return row
    of_tokens = {key: torch.is_tensor(value) and value.shape == mask.shape for key, value in row.items()}
    return {key: value[mask.bool()] if of_tokens[key] else value for key, value in row.items()}


def rows_of(batch: dict) -> list[dict]:
    """The rows of a batch, as batches of one row; the batch itself where it cannot be split."""
    count = count_rows(batch)
    return [take_rows(batch, row, row + 1) for row in range(count)] if count > 1 else [batch]
