"""Write new dims into the weights, and update optimizers, DDP and compiled code."""

import sys
from collections.abc import Callable

import torch
from torch import nn

from ..growable.attention import GrowableAttention
from ..growable.models import GrowableModelMixin
from ..growable.sharding import is_sharded, note
from ..measure import ranks
from .frozen import train_grown
from .loss import preserved_state
from .optimizer import add_new_parameters, follow_gradients, swap_parameters
from .provenance import leave_checkpoint
from .trial import Trial, measure_steepness


def write(
    trial: Trial,
    model: GrowableModelMixin,
    wrapped: nn.Module,
    optimizers: list[torch.optim.Optimizer],
    batches: list,
    tick: Callable[[], object],
) -> None:
    """Write a trial's new dims into the weights, and update the optimizers and the config."""
    note(model)
    for new in trial.extensions.values():  # shards are not sent to other ranks afterwards
        ranks.broadcast_from_rank0(*new.tensors())
    resizes = trial.commit()
    followed = follow_gradients(optimizers)
    steep = [resize for resize in resizes if resize.old in followed]
    with preserved_state(wrapped, optimizers):
        measure_steepness(model, steep, batches, tick)
    model.sync_config()
    swap_parameters(optimizers, resizes)
    add_new_parameters(optimizers, model, train_grown(model, resizes))
    after_resize(model, wrapped, list(trial.extensions))
    leave_checkpoint(model)


def after_resize(model: nn.Module, wrapped: nn.Module, resized: list[GrowableAttention]) -> None:
    """Update whatever outside the model still uses the old parameters of these modules."""
    parameters = {id(p): p for attention in resized for p in attention.all_parameters().values()}
    ranks.broadcast_from_rank0(*(parameter.detach() for parameter in parameters.values() if not is_sharded(parameter)))
    ranks.rebuild_ddp(model, wrapped)
    torch.clear_autocast_cache()  # the caller's region may hold casts of weights that have moved
    if "torch._dynamo" in sys.modules:  # compiled code has the old shapes; this resets the recompile count too
        torch._dynamo.reset()
