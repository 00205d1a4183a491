"""What a running training has besides the model, and how it follows new dims: optimizers, ranks, DDP and FSDP2.

Old weights that FSDP2 (`fully_shard`) holds in shards are read whole, one at a time, and new dims are sharded like the
rest. Without torch.distributed, or with one process, what is here for ranks does nothing.
"""

import contextlib
import functools
import sys
import warnings
import weakref
from collections.abc import Iterable, Iterator
from itertools import chain, compress, takewhile
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import register_optimizer_step_pre_hook

from ..model.compat import SHARDING_MARKS, rebuild_ddp

# Optimizers that step from now on: a growth can then warn at once that it leaves one out.
_stepped: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()
register_optimizer_step_pre_hook(lambda optimizer, args, kwargs: _stepped.add(optimizer))


def bare_optimizers(optimizer) -> list[torch.optim.Optimizer]:
    """The optimizers in one optimizer, a list or tuple of them, or None, each without accelerate's wrapper.

    Raises:
        TypeError: there is something else.
    """
    if optimizer is None:
        return []
    listed = optimizer if isinstance(optimizer, (list, tuple)) else [optimizer]
    bare = [getattr(wrapped, "optimizer", wrapped) for wrapped in listed]
    for each in bare:
        if not hasattr(each, "param_groups"):
            raise TypeError(f"optimizer must be one of torch's, and is a {type(each).__name__}. Pass a loss as loss=.")
    return bare


def parameters_of(optimizer: torch.optim.Optimizer) -> Iterable[nn.Parameter]:
    """All parameters of an optimizer."""
    return (parameter for group in optimizer.param_groups for parameter in group["params"])


def check_optimizers(optimizers: list[torch.optim.Optimizer], model: nn.Module) -> None:
    """Make sure that the optimizers train this model, where it trains at all, and can take new parameters.

    Raises:
        ValueError: they hold nothing of the model, or one is an LBFGS that has stepped.
    """
    _check_state(optimizers)
    trained = {id(parameter) for parameter in model.parameters() if parameter.requires_grad}
    known = {id(parameter) for optimizer in optimizers for parameter in parameters_of(optimizer)}
    if optimizers and trained and not trained & known:
        raise ValueError(
            "The optimizer holds none of this model's parameters. Build it from them, after loading and moving the "
            "model, and pass all optimizers if there are several."
        )


def _check_state(optimizers: list[torch.optim.Optimizer]) -> None:
    """Raise a ValueError if an optimizer's state cannot take new parameters."""
    if any(isinstance(each, torch.optim.LBFGS) and each.state for each in optimizers):
        raise ValueError(
            "LBFGS has stepped, and keeps what it knows of all parameters together, where new ones have no place. "
            "Drop it, leave optimizer= out, and make a new LBFGS afterwards."
        )


def add_new_parameters(
    optimizers: list[torch.optim.Optimizer], model: nn.Module, parameters: Iterable[nn.Parameter]
) -> None:
    """Add parameters that no optimizer holds yet, in the order of the model, with a fresh state.

    Each goes into the group that trains what is nearest to it in the model, among parameters of equally many axes, or
    into an empty one; among several, into the first without weight decay. No group is added, since schedulers expect
    the number that they started with.

    Raises:
        ValueError: one is an LBFGS that has stepped.
    """
    parameters = list(parameters)
    if parameters:
        _check_state(optimizers)
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    order = {parameter: place for place, parameter in enumerate(names)}
    groups = [group for optimizer in optimizers for group in optimizer.param_groups]
    known = {id(parameter) for group in groups for parameter in group["params"]}
    for new in (parameter for parameter in parameters if groups and id(parameter) not in known):

        def choose_group(group: dict, name: str = names[id(new)], axes: int = new.dim()) -> tuple:
            alike = [names.get(id(each), "") for each in group["params"] if each.dim() == axes]
            nearest = max((_count_modules_around(name, other) for other in alike), default=0)
            return -nearest, not alike, bool(group["params"]), bool(group.get("weight_decay"))

        group = min(groups, key=choose_group)
        later = (place for place, p in enumerate(group["params"]) if order.get(id(p), -1) > order[id(new)])
        place = next(later, len(group["params"]))
        group["params"].insert(place, new)
        if "param_names" in group:
            group["param_names"].insert(place, names[id(new)])


def _count_modules_around(one: str, other: str) -> int:
    """How many modules two parameters have around both, by their names."""
    return len([*takewhile(lambda pair: pair[0] == pair[1], zip(one.split("."), other.split(".")))])


def remove_parameters(optimizers: list[torch.optim.Optimizer], gone: Iterable[nn.Parameter]) -> None:
    """Take parameters out of the optimizers, with their state."""
    unwanted = {id(parameter) for parameter in gone}
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            stays = [id(parameter) not in unwanted for parameter in group["params"]]
            for listed in ("params", "param_names") if "param_names" in group else ("params",):
                group[listed][:] = compress(group[listed], stays)  # the list itself stays: LBFGS holds on to it
        for parameter in [parameter for parameter in optimizer.state if id(parameter) in unwanted]:
            del optimizer.state[parameter]


def warn_if_left_out(model: nn.Module, new: list[nn.Parameter]) -> None:
    """Warn that an optimizer trains the model without its new dims: now if it has stepped, otherwise when it steps."""
    watched, references, done = weakref.ref(model), [weakref.ref(parameter) for parameter in new], False

    def look(optimizer: torch.optim.Optimizer, args: Any = None, kwargs: Any = None) -> None:
        nonlocal done  # hooks cannot be removed while they run
        model = watched()
        if done or model is None:
            return
        own = {id(parameter) for parameter in parameters_of(optimizer)}
        alive = [reference() for reference in references]
        new = [id(p) for p in alive if p is not None and p.requires_grad]  # peft may have frozen them since
        done = any(id(parameter) in own for parameter in model.parameters())
        if done and new and own.isdisjoint(new):
            warnings.warn(
                f"{type(optimizer).__name__} steps without the new dims, which therefore do not train. Pass it: "
                "Grower(model, config, optimizer=optimizer); or make it after the growth. Where a state dict brought "
                "them, make it after the model is loaded, and load its own state last.",
                stacklevel=2,
            )

    for optimizer in list(_stepped):
        look(optimizer)
    if not done:
        register_optimizer_step_pre_hook(look)


def rank() -> int:
    """This process's number, 0 without torch.distributed."""
    return dist.get_rank() if is_distributed() else 0


def world_size() -> int:
    """How many processes take part."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def is_distributed() -> bool:
    """Whether more than one process takes part."""
    return world_size() > 1


def sum_over_ranks(*tensors: Tensor) -> None:
    """Replace each tensor by its sum over the ranks, the same to the bit on all of them."""
    if is_distributed():
        for tensor in tensors:
            dist.all_reduce(tensor)


def all_reduce_sum(*numbers: float) -> list[float]:
    """Return each number's sum over the ranks."""
    if not is_distributed():
        return list(numbers)
    tensor = torch.tensor(numbers, dtype=torch.float64, device=_device())
    dist.all_reduce(tensor)
    return tensor.tolist()


def all_gather(thing: Any) -> list[Any]:
    """What each rank brings, in their order."""
    everything: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everything, thing)
    return everything


def broadcast_from_rank0(*tensors: Tensor) -> None:
    """Replace each tensor by that of rank 0: solvers may round differently from machine to machine."""
    if is_distributed():
        for tensor in tensors:
            whole = tensor.to(_device()).contiguous()  # NCCL knows no tensors on the CPU, where small ones are
            dist.broadcast(whole, src=0)
            tensor.copy_(whole)


@contextlib.contextmanager
def raise_on_all_ranks() -> Iterator[None]:
    """Raise an exception on every rank if one rank raises, so that no rank waits for a failed one."""
    if not is_distributed():
        yield
        return
    error = None
    try:
        yield
    except Exception as raised:
        error = raised
    (failed,) = all_reduce_sum(float(error is not None))
    if error is not None:
        raise error
    if failed:
        raise RuntimeError("The growth failed in another process, whose own error says why; nothing was changed here.")


@contextlib.contextmanager
def unsynchronized(wrapped: nn.Module) -> Iterator[None]:
    """Let DistributedDataParallel around a model pass it on as it is: a loss of the user's may call it."""
    with contextlib.ExitStack() as stack:
        for module in wrapped.modules():
            if isinstance(module, DistributedDataParallel):
                stack.enter_context(module.no_sync())
        yield


def _device() -> torch.device:
    """Where the backend takes tensors from."""
    return torch.device("cuda", torch.cuda.current_device()) if dist.get_backend() == "nccl" else torch.device("cpu")


def is_sharded(tensor: Any) -> bool:
    """Whether a tensor is a DTensor, of which each process holds a part."""
    return hasattr(tensor, "placements")


def own_part(tensor: Any) -> Tensor:
    """A tensor as it is, or this rank's part of a sharded one, as a view."""
    return tensor.to_local() if is_sharded(tensor) else tensor


def shard_like(new_dims: nn.Module, attention: nn.Module) -> None:
    """Shard the modules of new dims over the processes that hold shards of an attention module."""
    mesh = next((p.device_mesh for p in attention.parameters() if is_sharded(p)), None)  # pyright: ignore
    if mesh is None:
        return
    from torch.distributed.fsdp import fully_shard

    for module in new_dims.children():
        fully_shard(module, mesh=mesh)


def sharded_modules(model: nn.Module) -> list[Any]:
    """The modules that `fully_shard` was called on."""
    if "torch.distributed.fsdp" not in sys.modules:
        return []
    from torch.distributed.fsdp import FSDPModule

    return [module for module in model.modules() if isinstance(module, FSDPModule)]


def reshard(model: nn.Module) -> None:
    """Let all modules hold their sharded parameters: after a forward pass the outermost ones are whole."""
    for module in sharded_modules(model):
        module.reshard()


def refuse_sharded(model: nn.Module, optimizers: Iterable, but_fsdp2: bool = False) -> None:
    """Raise a ValueError if the model or its bare optimizers are sharded; with `but_fsdp2`, not for `fully_shard`."""
    found = None
    named = ((f"the optimizer, {type(optimizer).__name__},", optimizer) for optimizer in optimizers)
    for name, part in chain(named, model.named_modules(), model.named_parameters()):
        how = _sharding_of(part)
        found = found or (how and f"{name or 'the model'} is {how}")
    by_fsdp2 = bool(sharded_modules(model))
    spread = any(map(is_sharded, model.parameters()))
    if not found and spread and not (by_fsdp2 and but_fsdp2):
        found = "the model is sharded by FSDP2" if by_fsdp2 else "the model is spread by tensor parallelism"
    if found:
        instead = "Growth goes on in a model that fully_shard of torch has sharded (FSDP2). " if but_fsdp2 else ""
        raise ValueError(
            f"This needs every weight whole, and {found}. {instead}Otherwise do it in one process, with the whole "
            "model, and load its checkpoint into the sharded run."
        )


def refuse_meta(named: Iterable[tuple[str, Tensor]]) -> None:
    """Raise a ValueError if one of these weights is on the meta device, where it has no numbers."""
    name = next((name for name, tensor in named if tensor.is_meta), None)
    if name is not None:
        raise ValueError(
            f"{name} is on the meta device, where offloading leaves it: load the model into memory, without offloading."
        )


def _sharding_of(part) -> str | None:
    """What shards a module, a parameter or an optimizer, by its marks and its classes; None if nothing does."""
    for cls in type(part).__mro__:
        if cls.__name__ == "ZeroRedundancyOptimizer":
            return "torch's"
        if cls.__module__.partition(".")[0] == "deepspeed":
            return "DeepSpeed's"
    return next((what for mark, what in SHARDING_MARKS.items() if hasattr(part, mark)), None)


def after_change(wrapped: nn.Module) -> None:
    """Update whatever outside a model goes by its former parameters; `wrapped` is the model as the user wraps it."""
    if _is_replicated(wrapped):
        for ddp in _ddp_wrappers(wrapped):
            rebuild_ddp(ddp)
    torch.clear_autocast_cache()
    if "torch._dynamo" in sys.modules:  # compiled code has no place for the new dims; this resets its count, too
        torch.compiler.reset()


def warn_without_ddp(wrapped: nn.Module) -> None:
    """Warn if several ranks train a model, and no DistributedDataParallel was given that could average gradients."""
    if _is_replicated(wrapped) and not _ddp_wrappers(wrapped):
        warnings.warn(
            f"{world_size()} processes run, and no DistributedDataParallel is around the {type(wrapped).__name__} "
            "that was passed. If one is around it, pass that instead, or make it again: it does not know the new dims. "
            "Without one, it is up to you to average their gradients.",
            stacklevel=3,
        )


def _is_replicated(wrapped: nn.Module) -> bool:
    """Whether each of several ranks holds all weights of a model."""
    return is_distributed() and not any(map(is_sharded, wrapped.parameters()))


def _ddp_wrappers(wrapped: nn.Module) -> list[Any]:
    return [module for module in wrapped.modules() if isinstance(module, DistributedDataParallel)]


def _watch_distributed_checkpoints() -> None:
    """Let torch's distributed checkpoints raise a ValueError where new dims that they hold would be left out.

    They read what a state dict asks for, and a model that has not grown asks for none.
    """
    from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner

    stock = DefaultLoadPlanner.set_up_planner

    @functools.wraps(stock)
    def set_up_planner(self, state_dict, metadata=None, is_coordinator=False) -> None:
        stock(self, state_dict, metadata, is_coordinator)
        for name in metadata.state_dict_metadata if metadata is not None else ():
            attention, mark, _ = name.partition(".extra.growths.")
            if mark and name not in self.state_dict and any(other.startswith(attention) for other in self.state_dict):
                raise ValueError(
                    f"The checkpoint holds {name}, and the model that reads it lacks these new dims. Build it by "
                    "from_config with the config of the grown model, or call load_growth, before its state is read."
                )

    DefaultLoadPlanner.set_up_planner = set_up_planner


if dist.is_available():
    _watch_distributed_checkpoints()
