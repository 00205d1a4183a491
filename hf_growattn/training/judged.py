"""Held-out rows one by one, so that two trainings on the same rows can be compared with an error."""

import torch
from datasets import Dataset
from torch import nn
from trl.trainer.sft_trainer import SFTTrainer

from .contest import Run
from .methods import trained_weights
from .recipe import Training


@torch.no_grad()
def losses_of_rows(model: nn.Module, rows: Dataset, collate, training: Training) -> tuple[list[float], list[int]]:
    """Measure a causal LM on every row of some.

    Args:
        model: stays in evaluation mode, on the device of the training.
        rows: as `prepared` makes them.
        collate: makes a batch of some of them.
        training: its batch size of evaluations is used.

    Returns:
        The loss of all tokens of each row, in nats, and how many tokens that is the sum of. Where the collator puts
        several rows into one, they count as one.
    """
    model.eval().to(training.device)
    nats: list[float] = []
    counts: list[int] = []
    size = training.per_device_eval_batch_size
    for at in range(0, len(rows), size):
        batch = collate(list(rows.select(range(at, min(at + size, len(rows))))))
        given = {key: value.to(training.device) for key, value in batch.items() if torch.is_tensor(value)}
        labels = given.pop("labels")[:, 1:]
        logits = model(**given, use_cache=False).logits[:, :-1].float()
        lost = torch.nn.functional.cross_entropy(logits.transpose(1, 2), labels, reduction="none")
        nats += lost.sum(1).tolist()
        counts += (labels != -100).sum(1).tolist()
    return nats, counts


def judged(trainer: SFTTrainer, method: str, rows: Dataset, cache: int) -> Run:
    """What a training that is over gave on held-out rows; `cache` is the bytes of a token's keys and values."""
    with trainer.compute_loss_context_manager():
        nats, counts = losses_of_rows(trainer.model, rows, trainer.data_collator, trainer.args)
    args, steps, weights = trainer.args, trainer.state.max_steps, trained_weights(trainer.model)
    return Run(method, args.learning_rate, steps, args.seed, nats, counts, weights, cache, 0.0)
