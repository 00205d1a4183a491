"""AdamW on batches: for models that learn a task before a race, and for what `Method.prepare` returns after one."""

import math
from collections.abc import Callable, Iterable

import torch
from torch import nn
from transformers import get_cosine_schedule_with_warmup


def fit(
    model: nn.Module, groups: list[dict], batches: Iterable, loss: Callable, steps: int, warmup: float = 0.1
) -> None:
    """Train as a race does.

    Args:
        model: to train.
        groups: its parameters with their learning rates, as `Method.prepare` returns them.
        batches: as many as there are steps.
        loss: a function of model and batch.
        steps: of the schedule, a cosine down to zero.
        warmup: share of the steps in which the learning rate rises.
    """
    weights = [parameter for group in groups for parameter in group["params"]]
    optimizer = torch.optim.AdamW(groups, weight_decay=0)
    schedule = get_cosine_schedule_with_warmup(optimizer, math.ceil(warmup * steps), steps)
    model.train()
    for batch in batches:
        loss(model, batch).backward()
        nn.utils.clip_grad_norm_(weights, 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
    model.eval()
