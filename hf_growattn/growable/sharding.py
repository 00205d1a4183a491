"""Weights of which each process holds a part, by FSDP2 (`fully_shard`) or tensor parallelism, which spreads heads.

They are read whole, one at a time, and replaced in the place they have. Under FSDP2 torch has no public way to give a
module a parameter of another size. The private names which that takes are used in this file alone, and an error says
which one has moved.
"""

import contextlib
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

_HOME = "_fsdp_home"  # what `note` leaves on a sharded parameter: FSDP2's group of it, and its own record there


def is_sharded(tensor: Any) -> bool:
    """Whether a tensor is a DTensor, of which each process holds a part."""
    return hasattr(tensor, "placements")


def whole(tensor: Tensor) -> Tensor:
    """A tensor as it is, or all of a sharded one, gathered from all ranks, which call this together."""
    return tensor.full_tensor() if is_sharded(tensor) else tensor  # pyright: ignore[reportAttributeAccessIssue]


def own_part(tensor: Any) -> Tensor:
    """A tensor as it is, or this rank's part of a sharded one, as a view."""
    return tensor.to_local() if is_sharded(tensor) else tensor


def laid_out_like(tensor: Tensor, like: Any) -> Tensor:
    """A whole tensor, the same on all ranks, sharded as another one is, or as it is if that is not; nothing is sent."""
    if not is_sharded(like):
        return tensor
    from torch.distributed.tensor import distribute_tensor

    return distribute_tensor(tensor, like.device_mesh, like.placements, src_data_rank=None)


def heads_mesh(weight: Any) -> Any:
    """The processes over which tensor parallelism spreads a weight's heads; None if each of them has all.

    A weight that FSDP2 shards is whole when it computes; `note` has marked those.
    """
    return weight.device_mesh if is_sharded(weight) and _HOME not in vars(weight) else None


def sum_of_parts(part: Tensor, mesh: Any) -> Tensor:
    """What the heads of all processes add up to, of which this process's own heads give a part."""
    if mesh is None:
        return part
    from torch.distributed.tensor import DTensor, Partial

    return DTensor.from_local(part, mesh, [Partial()], run_check=False).full_tensor()


def fill_whole(target: Tensor, values: Tensor) -> None:
    """Write whole values, the same on all ranks, into a tensor, sharded or not."""
    own_part(target).copy_(own_part(laid_out_like(values, target)))


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


@contextlib.contextmanager
def gathering_to_the_end(model: nn.Module, missed: Callable[[nn.Module], None]) -> Iterator[None]:
    """Around one forward pass: a rank where it fails gathers with the others what they still need, then fails.

    They would wait for it otherwise. Modules are gathered in the order in which they stand in the model, and `missed`
    takes part in what else the others do there.
    """
    reached = set()
    # Several modules may share a state.
    states = {module: _private(module, "_get_fsdp_state")() for module in sharded_modules(model)}
    handles = [
        module.register_forward_pre_hook(lambda *_, state=state: reached.add(state), prepend=True)
        for module, state in states.items()
    ]
    try:
        yield
    except Exception:
        every: Iterator[Any] = model.modules()
        for module in every:
            if module in states and states[module] not in reached:
                module.unshard()
            missed(module)
        raise
    finally:
        for handle in handles:
            handle.remove()


def forget_pass(model: nn.Module) -> None:
    """Let FSDP2 take up the next pass as if one that failed, here or on another rank, had never begun."""
    reshard(model)
    for module in sharded_modules(model):
        state = _private(module, "_get_fsdp_state")()
        _private(state, "_state_ctx").iter_forward_root = None
        state._training_state = type(_private(state, "_training_state")).IDLE
    for group in _groups(model):
        group._training_state = type(_private(group, "_training_state")).IDLE
        _private(group, "_post_forward_indices").clear()
        _private(_private(group, "comm_ctx"), "post_forward_order").clear()


def note(model: nn.Module) -> None:
    """Reshard, and note on each sharded parameter where FSDP2 keeps it, as `parameter_like` needs it.

    Raises:
        ValueError: the shards are offloaded to the CPU, or this version of torch keeps them in another way.
    """
    reshard(model)
    for group in {id(group): group for group in _groups(model)}.values():
        for record in _private(group, "fsdp_params"):
            if _private(record, "offload_to_cpu"):
                raise ValueError("Growth cannot resize shards that CPUOffloadPolicy keeps: fully_shard without it.")
            vars(_private(record, "sharded_param"))[_HOME] = group, record


def held_by_fsdp(model: nn.Module) -> set[int]:
    """The ids of all parameters that FSDP2 shards."""
    records = (record for group in _groups(model) for record in _private(group, "fsdp_params"))
    return {id(_private(record, "sharded_param")) for record in records}


def parameter_like(old: nn.Parameter, values: Tensor) -> nn.Parameter:
    """Return a parameter of other values, whole and of another size, that can take an old one's place by `put`."""
    if _HOME not in vars(old):
        return nn.Parameter(laid_out_like(values, old), requires_grad=old.requires_grad)
    from torch.distributed.fsdp import OffloadPolicy

    group, record = vars(old)[_HOME]
    placement = _private(record, "fsdp_placement")
    made = type(record)(
        nn.Parameter(values, requires_grad=old.requires_grad),
        _private(record, "_module_info"),
        _private(record, "mesh_info"),
        _private(record, "post_forward_mesh_info"),
        _private(record, "device"),
        None if placement.dim == 0 else lambda _: placement,
        _private(record, "mp_policy"),
        OffloadPolicy(),
    )
    made.init_dtype_attrs(record.mp_policy)
    made._param_fqn = getattr(record, "_param_fqn", None)
    # It took the place when it was made; `put` says when.
    _private(made, "_post_load_hook_handle").remove()
    record._setattr_on_modules(old)
    vars(made.sharded_param)[_HOME] = group, made
    return made.sharded_param


def put(module: nn.Module, name: str, parameter: nn.Parameter) -> None:
    """Let a module hold a parameter in the place of another one, where FSDP2 looks for it too."""
    if _HOME not in vars(parameter):
        setattr(module, name, parameter)
        return
    group, record = vars(parameter)[_HOME]
    _, former = vars(getattr(module, name))[_HOME]
    group.fsdp_params[group.fsdp_params.index(former)] = record
    former._post_load_hook_handle.remove()
    record._post_load_hook_handle = module.register_load_state_dict_post_hook(lambda *_: record.reset_sharded_param())
    record._setattr_on_modules(parameter)


@contextlib.contextmanager
def loss_unrounded(model: nn.Module) -> Iterator[None]:
    """Let the outermost modules give their outputs as they are: a policy of bf16 would round the loss to 3 digits."""
    states = [_private(module, "_get_fsdp_state")() for module in sharded_modules(model)]
    policies = [(state, _private(state, "_mp_policy")) for state in states if state._modules[0] is model]
    for state, policy in policies:
        state._mp_policy = replace(policy, output_dtype=None)
    try:
        yield
    finally:
        for state, policy in policies:
            state._mp_policy = policy


def _groups(model: nn.Module) -> list[Any]:
    found = []
    for module in sharded_modules(model):
        state = _private(module, "_get_fsdp_state")()
        several = hasattr(state, "_fsdp_param_groups")  # one and no more before torch 2.12
        found += state._fsdp_param_groups if several else [_private(state, "_fsdp_param_group")]
    return [group for group in found if group is not None]


def _private(owner: Any, name: str) -> Any:
    """One of torch's own attributes.

    Raises:
        ValueError: this version of torch lacks it; the message names it.
    """
    if not hasattr(owner, name):
        raise ValueError(
            f"torch {torch.__version__} has moved {type(owner).__name__}.{name}, by which growth replaces the "
            "parameters of a sharded model. Grow un-sharded, or with torch 2.13."
        )
    return getattr(owner, name)
