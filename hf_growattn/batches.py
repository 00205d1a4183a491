"""The batches that a growth or a trim is given: read once, and split in two halves that judge each other."""

from collections.abc import Iterable

import torch

from . import ranks


def as_dicts(batches: Iterable) -> list[dict]:
    """Read the batches once: tensors of input_ids become causal LM batches."""
    listed = []
    for index, batch in enumerate(batches):
        if torch.is_tensor(batch):
            batch = {"input_ids": batch, "labels": batch}
        if not hasattr(batch, "keys"):
            raise ValueError(
                f"Batch {index} is a {type(batch).__name__}; growth takes dicts for model(**batch), or tensors of "
                "input_ids."
            )
        listed.append(dict(batch))
    if not listed and not ranks.several():
        raise ValueError("There are no batches; pass a few dozen of your training batches.")
    return listed


def halves_of(batches: list[dict]) -> tuple[list[dict], list[dict]]:
    """Split the batches in two, every other one; a single batch is split by its rows, if it has several."""
    if len(batches) != 1:
        return batches[0::2], batches[1::2]
    batch = batches[0]
    rows = max((len(value) for value in batch.values() if torch.is_tensor(value) and value.dim()), default=0)
    if rows < 2:
        return (batches, []) if ranks.rank() % 2 == 0 else ([], batches)

    def part(start: int, stop: int) -> dict:
        return {
            key: value[start:stop] if torch.is_tensor(value) and value.dim() and len(value) == rows else value
            for key, value in batch.items()
        }

    return [part(0, rows // 2)], [part(rows // 2, rows)]
