"""Let a running training follow new dims: its optimizers, DistributedDataParallel and compiled code.

The parameters of new dims join an existing group of an optimizer, and old ones are never touched.
"""

import gc
import sys
import warnings
import weakref
from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import register_optimizer_step_pre_hook

from .sharding import is_sharded


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
        new = [parameter for parameter in (reference() for reference in self.new) if parameter is not None]
        alive = [id(parameter) for parameter in new if parameter.requires_grad]  # peft may have frozen them since
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


def optimizers_of(model: nn.Module) -> list[torch.optim.Optimizer]:
    """All optimizers in this process that hold a parameter of a model."""
    own = {id(parameter) for parameter in model.parameters()}
    found = {}
    for thing in gc.get_objects():
        if issubclass(type(thing), torch.optim.Optimizer):  # some objects pretend a class, and warn
            bare = getattr(thing, "optimizer", thing)
            if any(id(parameter) in own for parameter in held(bare)):
                found[id(bare)] = bare
    return list(found.values())


def rebuild_ddp(model: nn.Module, wrapped: nn.Module) -> None:
    """Let DistributedDataParallel around a model reduce the parameters that it has now.

    Training loops keep the wrapper in a local variable, so the wrapper itself is mended: at once where it was passed,
    otherwise when it next runs the model. Buckets, settings and communication hooks stay.

    Args:
        model: the model that has new parameters.
        wrapped: the same model as the caller has it, in its wrappers if they are known.
    """
    several = dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1
    if not several or any(map(is_sharded, model.parameters())):
        return
    found = [module for module in wrapped.modules() if isinstance(module, DistributedDataParallel)]
    for ddp in found:
        _rebuild(ddp)
    if found:
        return

    def rebuild_active(module: nn.Module, args: tuple) -> None:
        ddp = DistributedDataParallel._get_active_ddp_module()
        if ddp is not None:
            handle.remove()
            _rebuild(ddp)

    untraced: Any = torch.compiler.disable(rebuild_active)
    handle = model.register_forward_pre_hook(untraced)


def _rebuild(ddp: DistributedDataParallel) -> None:
    static, hooks = ddp.static_graph, ddp._comm_hooks
    ddp._remove_autograd_hooks()
    del ddp.reducer, ddp.logger
    ddp._module_parameters = [p for n, p in ddp.module.named_parameters() if n not in ddp.parameters_to_ignore]
    parameters, sparse = ddp._build_params_for_reducer()
    ddp._ddp_init_helper(parameters, sparse, ddp._build_debug_param_to_name_mapping(parameters), static)
    ddp._has_rebuilt_buckets, ddp._comm_hooks = False, []
    if static:
        ddp.static_graph = False  # it warns of setting it twice
        ddp._set_static_graph()
    for hook, state in hooks:
        ddp.register_comm_hook(state, hook)


def after_change(model: nn.Module, wrapped: nn.Module) -> None:
    """Update whatever outside the model still goes by its former parameters."""
    rebuild_ddp(model, wrapped)
    torch.clear_autocast_cache()
    if "torch._dynamo" in sys.modules:  # compiled code has no place for the new dims; this resets its count, too
        torch._dynamo.reset()
