"""Keep new dims: as parts of the model, of its optimizers, of DistributedDataParallel and of FSDP2."""

import torch
from torch import nn

from ..growable.attention import GrowableAttention, drop_if_empty, set_trial
from ..growable.growths import save_with_adapters
from ..growable.models import GrowableModelMixin, attentions
from ..growable.optimizers import add_new_parameters, after_change, remove_parameters, warn_if_left_out
from ..growable.sharding import shard_like
from ..measure import ranks
from ..model.extra import Part
from .provenance import leave_checkpoint


def next_name(model: nn.Module) -> str:
    """The name of the next growth: "growth_1" for the first."""
    names = {name for a in attentions(model) if a.extra is not None for name in a.extra.parts}
    number = 1
    while f"growth_{number}" in names:
        number += 1
    return f"growth_{number}"


def keep_parts(
    parts: dict[GrowableAttention, Part],
    model: GrowableModelMixin,
    wrapped: nn.Module,
    optimizers: list[torch.optim.Optimizer],
) -> list[nn.Parameter]:
    """Make new dims parts of the model that train, and return their parameters."""
    name, new = next_name(model), []
    try:
        for attention, part in parts.items():
            ranks.broadcast_from_rank0(*(parameter.detach() for parameter in part.parameters()))
            set_trial(attention, None)
            attention.make_extra().parts[name] = part
            part.requires_grad_(True)
            part.train(attention.training)
            shard_like(part, attention)
        new = [p for part in parts.values() for p in part.parameters()]  # sharded ones are others
        model.sync_config()
        add_new_parameters(optimizers, model, new)
        if not optimizers:
            warn_if_left_out(model, new)
        after_change(model, wrapped)
    except BaseException:
        remove_parameters(optimizers, new)
        for attention in parts:
            attention.make_extra().parts._modules.pop(name, None)
            drop_if_empty(attention)
        model.sync_config()
        raise
    leave_checkpoint(model)
    save_with_adapters(model)
    return new
