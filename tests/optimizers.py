"""Optimizers and schedulers as people build them, by name: lists of optimizers, as one may not take all parameters."""

import torch
from torch.optim import lr_scheduler
from transformers import get_constant_schedule_with_warmup, get_cosine_schedule_with_warmup
from transformers.optimization import Adafactor

LR = 1e-3


def _one(cls, **options):
    return lambda parameters, lr=LR: [cls(parameters, **{"lr": lr, **options})]


def _muon_and_adamw(parameters, lr=LR):
    parameters = list(parameters)
    matrices, rest = ([p for p in parameters if (p.dim() == 2) is two] for two in (True, False))
    return [torch.optim.Muon(matrices, lr=lr, weight_decay=0.0), torch.optim.AdamW(rest, lr=lr, weight_decay=0.0)]


OPTIMIZERS = {
    "adam": _one(torch.optim.Adam),
    "adamw": _one(torch.optim.AdamW, weight_decay=0.0, foreach=False),
    "adamw-foreach": _one(torch.optim.AdamW, weight_decay=0.0, foreach=True),
    "adamw-fused": _one(torch.optim.AdamW, weight_decay=0.0, fused=True),
    "adamw-amsgrad": _one(torch.optim.AdamW, weight_decay=0.0, foreach=False, amsgrad=True),
    "nadam": _one(torch.optim.NAdam),
    "adafactor-torch": _one(torch.optim.Adafactor),
    "adafactor-transformers": _one(Adafactor, relative_step=False),
    "sgd-momentum": _one(torch.optim.SGD, momentum=0.9, nesterov=True),
    "rmsprop": _one(torch.optim.RMSprop, momentum=0.9, centered=True),
    "adagrad": _one(torch.optim.Adagrad),  # whose state is there before a step
    "asgd": _one(torch.optim.ASGD),
} | ({"muon": _muon_and_adamw} if hasattr(torch.optim, "Muon") else {})  # from torch 2.9 on

SCHEDULERS = {
    "cosine": lambda o: get_cosine_schedule_with_warmup(o, 2, 12),
    "constant-warmup": lambda o: get_constant_schedule_with_warmup(o, 5),
    "one-cycle": lambda o: lr_scheduler.OneCycleLR(
        o, max_lr=10 * LR, total_steps=12, cycle_momentum=not o.defaults.keys().isdisjoint(("betas", "momentum"))
    ),
    "plateau": lambda o: lr_scheduler.ReduceLROnPlateau(o, patience=1),
    "annealing": lambda o: lr_scheduler.CosineAnnealingLR(o, 12),
    "sequential": lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.ConstantLR(o, 0.5, 4), lr_scheduler.ExponentialLR(o, 0.8)], milestones=[4]
    ),
}


def step_scheduler(scheduler, loss: float) -> None:
    """Step as its class asks for: some follow the loss."""
    if isinstance(scheduler, lr_scheduler.ReduceLROnPlateau):
        scheduler.step(loss)
    else:
        scheduler.step()
