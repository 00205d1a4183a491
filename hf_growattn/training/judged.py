"""Held-out rows one by one, so that two trainings on the same rows can be compared with an error."""

from typing import Any

import torch
from datasets import Dataset
from torch import nn
from transformers import TrainingArguments
from trl.trainer.sft_trainer import SFTTrainer

from .contest import Run
from .methods import trained_weights
from .quantized import move_to_device


@torch.no_grad()
def losses_of_rows(
    model: nn.Module, rows: Dataset, collate, args: TrainingArguments, every: int = 1
) -> tuple[list[float], list[int]]:
    """Measure a causal LM row by row.

    Args:
        model: stays in evaluation mode, on the device of the training.
        rows: as `prepare_rows` makes them.
        collate: makes a batch of some of them.
        args: of the training; rows are read as its evaluations read them.
        every: measures one batch in so many, from the first on.

    Returns:
        The loss of all tokens of each row, in nats, and how many tokens that is the sum of; no tokens where it was not
        measured. Where the collator puts several rows into one, they count as one.
    """
    move_to_device(model.eval(), args.device)
    nats: list[float] = []
    counts: list[int] = []
    size = args.per_device_eval_batch_size
    for number, at in enumerate(range(0, len(rows), size)):
        batch = collate(list(rows.select(range(at, min(at + size, len(rows))))))
        if number % every:
            unseen = len(batch["labels"]) * [0]
            nats, counts = nats + unseen, counts + unseen
            continue
        given = {key: value.to(args.device) for key, value in batch.items() if torch.is_tensor(value)}
        labels = given.pop("labels")[:, 1:]
        logits, told = model(**given, use_cache=False).logits[:, :-1], labels != -100
        lost = torch.zeros(labels.shape, device=labels.device)
        lost[told] = torch.nn.functional.cross_entropy(logits[told].float(), labels[told], reduction="none")
        nats += lost.sum(1).tolist()
        counts += told.sum(1).tolist()
    return nats, counts


def judged(trainer: SFTTrainer, method: str, rows: Dataset, cache: int) -> Run:
    """What a training that is over gave on held-out rows; `cache` is the bytes of a token's keys and values."""
    model: Any = trainer.model
    args, steps, weights = trainer.args, trainer.state.max_steps, trained_weights(model)
    with trainer.compute_loss_context_manager():
        nats, counts = losses_of_rows(model, rows, trainer.data_collator, args)
    return Run(method, args.learning_rate, steps, args.seed, nats, counts, weights, cache, 0.0)
