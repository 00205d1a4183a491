"""Weights of which each process holds a part, by FSDP2 (`fully_shard`).

Old ones are read whole, one at a time; new dims are sharded by `fully_shard` like the rest. That a failing rank takes
the others along needs private names of torch, which are used in this file alone; an error says which one has moved.
"""

import contextlib
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn


def is_sharded(tensor: Any) -> bool:
    """Whether a tensor is a DTensor, of which each process holds a part."""
    return hasattr(tensor, "placements")


def whole(tensor: Tensor) -> Tensor:
    """A tensor as it is, or all of a sharded one, gathered from all ranks, which call this together."""
    return tensor.full_tensor() if is_sharded(tensor) else tensor  # pyright: ignore[reportAttributeAccessIssue]


def own_part(tensor: Any) -> Tensor:
    """A tensor as it is, or this rank's part of a sharded one, as a view."""
    return tensor.to_local() if is_sharded(tensor) else tensor


def shard_like(part: nn.Module, attention: nn.Module) -> None:
    """Shard the modules of new dims over the processes that shard an attention module, if any do."""
    mesh = next((p.device_mesh for p in attention.parameters() if is_sharded(p)), None)  # pyright: ignore
    if mesh is None:
        return
    from torch.distributed.fsdp import fully_shard

    for module in (child for child in part.children() if any(True for _ in child.parameters())):
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
            f"torch {torch.__version__} has moved {type(owner).__name__}.{name}, by which the passes of a growth end "
            "together on all processes. Grow un-sharded, or with torch 2.13."
        )
    return getattr(owner, name)
