"""Keep what a growth found: wider weights, and all that holds on to the former ones."""

import sys
from collections.abc import Callable

import torch
from torch import nn

from ..growable.attention import GrowableAttention
from ..growable.models import GrowableModelMixin
from ..growable.sharding import is_sharded, note
from ..measure import ranks
from .frozen import train_grown
from .loss import all_undisturbed
from .optimizer import admit, follow_gradients, swap_parameters
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
    """Write a trial's new dims into the weights, and let the optimizers and everything else follow."""
    note(model)
    for new in trial.beside.values():  # shards are not sent to other ranks afterwards
        ranks.follow_first_rank(*new.tensors())
    resizes = trial.keep()
    followed = follow_gradients(optimizers)
    steep = [resize for resize in resizes if resize.old in followed]
    with all_undisturbed(wrapped, optimizers):
        measure_steepness(model, steep, batches, tick)
    model.sync_config()
    swap_parameters(optimizers, resizes)
    admit(optimizers, model, train_grown(model, resizes))
    settle(model, wrapped, list(trial.beside))
    leave_checkpoint(model)


def settle(model: nn.Module, wrapped: nn.Module, resized: list[GrowableAttention]) -> None:
    """Tell everything outside a model that holds on to the former parameters of these modules."""
    parameters = {id(p): p for attention in resized for p in attention.all_parameters().values()}
    ranks.follow_first_rank(*(parameter.detach() for parameter in parameters.values() if not is_sharded(parameter)))
    ranks.rebuild_ddp(model, wrapped)
    torch.clear_autocast_cache()  # the caller's region may hold casts of weights that have moved
    if "torch._dynamo" in sys.modules:  # compiled code goes by the old shapes; its count of recompiles starts anew
        torch._dynamo.reset()
