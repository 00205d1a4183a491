"""The batches that a growth or a trim is given: read once, and split in two halves that judge each other."""

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from transformers import PreTrainedModel

from ..measure import ranks


def as_dicts(batches: Iterable, model: PreTrainedModel) -> list[dict]:
    """Read the batches once: tensors of input_ids become causal LM batches.

    Raises:
        ValueError: the list is empty, or this model cannot read a batch; the message names it and the fix.
    """
    listed = []
    for index, batch in enumerate(batches):
        if torch.is_tensor(batch):
            batch = {"input_ids": batch, "labels": batch}
        if not hasattr(batch, "keys"):
            raise ValueError(
                f"Batch {index} is a {type(batch).__name__}; growth takes dicts for model(**batch), or tensors of "
                "input_ids."
            )
        _check_tokens(index, batch, model)
        listed.append(dict(batch))
    if not listed and not ranks.several():
        raise ValueError("There are no batches; pass a few dozen of your training batches.")
    return listed


def _check_tokens(index: int, batch: Mapping, model: PreTrainedModel) -> None:
    """Refuse tokens that a model does not know: it would fail by an index, or on a GPU lose all that is in memory."""
    head = model.get_output_embeddings()  # only where there is one are labels tokens
    tokens = getattr(model.get_input_embeddings(), "weight", None)  # images have patches, and no such weight
    counts = {"input_ids": None if tokens is None else len(tokens), "labels": getattr(head, "out_features", None)}
    for name, known in counts.items():
        ids: Any = batch.get(name)
        if known is None or not torch.is_tensor(ids) or ids.is_floating_point() or not ids.numel():
            continue
        lowest, highest = int(ids.min()), int(ids.max())
        if highest >= known or (lowest < 0 and name == "input_ids"):  # a negative label is one to ignore
            raise ValueError(
                f"Batch {index} has {name} from {lowest} to {highest}, and the tokens of this model go from 0 to "
                f"{known - 1}: tokenize with its own tokenizer, or resize_token_embeddings first."
            )


def halves_of(batches: list, whole: bool = False) -> tuple[list, list]:
    """Split the batches in two, every other one; a single batch, unless `whole`, by its rows, if it has several."""
    if len(batches) != 1:
        return batches[0::2], batches[1::2]
    batch, rows = batches[0], 0
    if not whole:
        rows = max((len(value) for value in batch.values() if torch.is_tensor(value) and value.dim()), default=0)
    if rows < 2:
        return (batches, []) if ranks.rank() % 2 == 0 else ([], batches)

    def part(start: int, stop: int) -> dict:
        return {
            key: value[start:stop] if torch.is_tensor(value) and value.dim() and len(value) == rows else value
            for key, value in batch.items()
        }

    return [part(0, rows // 2)], [part(rows // 2, rows)]
