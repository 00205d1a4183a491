"""Let optimizers train new dims: their parameters join an existing group, and old ones are never touched."""

import warnings
import weakref
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook


def bare_optimizers(optimizer) -> list[torch.optim.Optimizer]:
    """The optimizers in one optimizer, a list or tuple of them, or None, each without accelerate's wrapper."""
    if optimizer is None:
        return []
    listed = optimizer if isinstance(optimizer, (list, tuple)) else [optimizer]
    return [getattr(wrapped, "optimizer", wrapped) for wrapped in listed]


def held(optimizer: torch.optim.Optimizer) -> Iterable[nn.Parameter]:
    """All parameters of an optimizer."""
    return (parameter for group in optimizer.param_groups for parameter in group["params"])


def check_optimizers(optimizers: list[torch.optim.Optimizer], model: nn.Module) -> None:
    """Make sure that the optimizers train this model, where it trains at all.

    Raises:
        ValueError: none of them holds any of the model's trainable parameters.
    """
    trained = {id(parameter) for parameter in model.parameters() if parameter.requires_grad}
    known = {id(parameter) for optimizer in optimizers for parameter in held(optimizer)}
    if optimizers and trained and not trained & known:
        raise ValueError(
            "The optimizer holds none of this model's parameters. Build it from them, after loading and moving the "
            "model, and pass all optimizers if there are several."
        )


def add_new_parameters(
    optimizers: list[torch.optim.Optimizer], model: nn.Module, parameters: Iterable[nn.Parameter]
) -> None:
    """Add parameters to the optimizers, in the order of the model, with a fresh state.

    Each goes into a group whose parameters have the same number of axes, or into an empty one; among several, into the
    first without weight decay. No group is added, since schedulers expect the number that they started with. Parameters
    that an optimizer holds already stay where they are.
    """
    order = {id(parameter): place for place, parameter in enumerate(model.parameters())}
    groups = [group for optimizer in optimizers for group in optimizer.param_groups]
    known = {id(parameter) for group in groups for parameter in group["params"]}
    for new in (parameter for parameter in parameters if groups and id(parameter) not in known):

        def choose_group(group: dict, axes: int = new.dim()) -> tuple[bool, ...]:
            alike = any(parameter.dim() == axes for parameter in group["params"])
            return not alike, bool(group["params"]), bool(group.get("weight_decay"))

        inside = min(groups, key=choose_group)["params"]
        later = (place for place, p in enumerate(inside) if order.get(id(p), -1) > order[id(new)])
        inside.insert(next(later, len(inside)), new)


def remove_parameters(optimizers: list[torch.optim.Optimizer], gone: Iterable[nn.Parameter]) -> None:
    """Take parameters out of the optimizers, with their state."""
    unwanted = {id(parameter) for parameter in gone}
    for optimizer in optimizers:
        for group in optimizer.param_groups:  # the list itself stays: LBFGS holds on to it
            group["params"][:] = [parameter for parameter in group["params"] if id(parameter) not in unwanted]
        for parameter in [parameter for parameter in optimizer.state if id(parameter) in unwanted]:
            del optimizer.state[parameter]


class _LeftOut:
    """Looks at each optimizer that steps, until one trains the model: with the new dims, or without, which it says."""

    def __init__(self, model: nn.Module, new: list[nn.Parameter]):
        self.model, self.new = weakref.ref(model), [weakref.ref(parameter) for parameter in new]
        self.done = False  # hooks cannot be removed while they run

    def __call__(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        model = self.model()
        if self.done or model is None:
            return
        own = {id(parameter) for parameter in held(optimizer)}
        alive = [id(reference()) for reference in self.new if reference() is not None]
        trained = [parameter for parameter in model.parameters() if id(parameter) in own]
        self.done = bool(trained)
        if trained and alive and own.isdisjoint(alive):
            warnings.warn(
                f"{type(optimizer).__name__} steps without the new dims, which therefore do not train. Pass it: "
                "Grower(model, config, optimizer=optimizer); or make it after the growth.",
                stacklevel=2,
            )


def warn_if_left_out(model: nn.Module, new: list[nn.Parameter]) -> None:
    """Warn once, at the next step of an optimizer that trains the model but not the new dims."""
    register_optimizer_step_pre_hook(_LeftOut(model, new))
