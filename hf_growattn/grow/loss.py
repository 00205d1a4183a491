"""The loss that is lowered: the model's own or the user's, of the model as the user has it, which is left as it was."""

import contextlib
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from torch import nn
from torch.nn.parallel import DistributedDataParallel
from transformers import PreTrainedModel

from ..growable.adapters import is_adapted
from ..growable.models import attentions
from ..growable.optimizers import held
from ..measure import ranks
from ..measure.passes import Objective, evaluation_mode, without_autocast


def unwrapped(model: Any) -> nn.Module:
    """The model inside DistributedDataParallel, DataParallel and torch.compile."""
    while isinstance(model, (DistributedDataParallel, nn.DataParallel)) or hasattr(model, "_orig_mod"):
        model = model._orig_mod if hasattr(model, "_orig_mod") else model.module
    return model


@contextlib.contextmanager
def lowering(loss: Callable | None, model: PreTrainedModel, wrapped: nn.Module) -> Iterator[Objective]:
    """The user's loss, or the model's, of the model as the user wraps it; all else runs without autocast."""
    objective = Objective(model, loss and partial(loss, unwrapped(wrapped)))
    with adapters_stay(model), without_autocast(model):
        yield objective


@contextlib.contextmanager
def preserved_state(wrapped: nn.Module, optimizers: list) -> Iterator[None]:
    """`evaluation_mode` for the wrapped model and for other parameters that its optimizers train."""
    trained = [parameter for optimizer in optimizers for parameter in held(optimizer)]
    with ranks.unsynchronized(wrapped), evaluation_mode(unwrapped(wrapped), trained):
        yield


@contextlib.contextmanager
def adapters_stay(model: PreTrainedModel) -> Iterator[None]:
    """Refuse a loss whose reference is the model itself under other adapters: that would grow too.

    Raises:
        ValueError: from inside such a loss.
    """
    adapted = [module for module in model.modules() if is_adapted(module)]

    def active(module: Any) -> tuple:
        return module.disable_adapters, *module.active_adapters

    before = [active(module) for module in adapted]

    def check(*_) -> None:
        if [active(module) for module in adapted] != before:
            raise ValueError(
                "The loss compares the model with itself under other adapters or none, and growth would change both: "
                "new dims go into the base. Compute the reference before (in TRL precompute_ref_log_probs=True), or "
                "give it a model of its own."
            )

    handle = attentions(model)[0].register_forward_pre_hook(check)
    try:
        yield
    finally:
        handle.remove()
