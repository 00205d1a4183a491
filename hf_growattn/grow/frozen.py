"""Weights whose old entries stay frozen while their new ones train, whatever the optimizer and its weight decay.

Such a parameter carries `frozen_entries` (`Resize.mark_frozen`). A hook on its gradient zeroes theirs, so that norms,
clipping and momentum know the new entries alone; hooks around every optimizer's step put their values back, to the bit.
"""

from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.optim.optimizer import (
    Optimizer,
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)
from transformers import PreTrainedModel

from ..growable.adapters import is_adapted
from ..growable.attention import GrowableAttention
from ..growable.models import attentions
from ..growable.resize import Resize

_before: WeakKeyDictionary[Optimizer, list[tuple[nn.Parameter, Tensor]]] = WeakKeyDictionary()
_watched: list = []  # handles of the hooks on all optimizers, once there is a parameter to watch


def old_dims_train(attention: GrowableAttention, roles: tuple[str, ...]) -> bool:
    """Whether training moves the old dims of any of these roles: their weights, or adapters on them."""
    parameters = [getattr(module, name) for role in roles for module, name, _ in attention.parameters_along(role)]
    return any(parameter.requires_grad and not hasattr(parameter, "frozen_entries") for parameter in parameters)


def freeze_old_dims(model: PreTrainedModel, frozen: bool = True) -> None:
    """Let the dims that growth has added train alone, or all of the attention's projections again.

    Growing a frozen model does this by itself. Call it on a grown model that was loaded, or that `get_peft_model` has
    frozen; make the optimizer after that. Values of old entries stay to the bit, whatever the weight decay. Weights
    outside of the projections, and projections that have not grown, are left as they are. `copy.deepcopy` loses what
    is frozen so, for torch copies no marks and hooks of parameters: call it again on a copy that is to be trained.

    Args:
        model: a patched model.
        frozen: False lets the old entries train along again.

    Raises:
        ValueError: a projection cannot be resized, so growth has added nothing there.
    """
    for attention in attentions(model):
        for parameter, old in attention.old_entries().items():
            if frozen:
                vars(parameter)["frozen_entries"] = old
                train_new_entries(parameter)
            else:
                vars(parameter).pop("frozen_entries", None)
            parameter.requires_grad_(True)


def under_peft(model: nn.Module) -> bool:
    """Whether any module carries adapters: those train then, and what is frozen stays so."""
    return any(map(is_adapted, model.modules()))


def train_grown(model: PreTrainedModel, resizes: list[Resize]) -> list[nn.Parameter]:
    """Let the new entries of frozen parameters that have grown train alone; return those parameters."""
    for resize in resizes:
        resize.mark_frozen()
    return train_marked(model)


def train_marked(model: PreTrainedModel) -> list[nn.Parameter]:
    """Let those frozen parameters train that are marked, by a growth or by a state of other widths; return them."""
    marked = [p for p in model.parameters() if hasattr(p, "frozen_entries") and not p.requires_grad]
    if under_peft(model):
        return []
    for parameter in marked:
        train_new_entries(parameter)
    return marked


def train_new_entries(parameter: nn.Parameter) -> None:
    """Let a parameter train, but for its `frozen_entries`."""
    parameter.requires_grad_(True)
    hooks = parameter._post_accumulate_grad_hooks or {}
    if _zero_frozen not in hooks.values():  # with DDP it runs before the gradients are summed over the processes
        parameter.register_post_accumulate_grad_hook(_zero_frozen)
    if not _watched:
        _watched.extend((register_optimizer_step_pre_hook(_note), register_optimizer_step_post_hook(_put_back)))


def _zero_frozen(parameter: nn.Parameter) -> None:
    frozen = getattr(parameter, "frozen_entries", None)
    if frozen is not None and parameter.grad is not None:
        parameter.grad.masked_fill_(frozen.to(parameter.device), 0)


def _note(optimizer: Optimizer, args, kwargs) -> None:
    """Remember the values of parameters with frozen entries before a step."""
    held = (parameter for group in optimizer.param_groups for parameter in group["params"])
    noted = [(p, p.detach().clone()) for p in held if hasattr(p, "frozen_entries") and p.grad is not None]
    if noted:
        _before[optimizer] = noted


def _put_back(optimizer: Optimizer, args, kwargs) -> None:
    """Undo what a step did to frozen entries: weight decay, for one, asks for no gradient."""
    with torch.no_grad():
        for parameter, before in _before.pop(optimizer, ()):
            parameter.copy_(torch.where(vars(parameter)["frozen_entries"].to(parameter.device), before, parameter))
