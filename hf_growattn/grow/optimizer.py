"""Carry optimizers through a growth: every resized parameter keeps its group, its place and its state."""

from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from ..growable.resize import Resize
from ..growable.sharding import is_sharded, laid_out_like, whole
from ..measure.ranks import raise_on_all_ranks

# Measures of scale, by the names optimizers give them, and the power of the gradient that each one follows. New entries
# start at the old ones' mean, and higher where their gradients are larger than the old ones', as those of new values
# are: at zero, with the old step count, a first update could be several times the learning rate.
_SCALES = {
    **dict.fromkeys(("exp_avg_sq", "max_exp_avg_sq", "square_avg", "sum", "variance"), 2),
    **dict.fromkeys(("row_var", "col_var", "exp_avg_sq_row", "exp_avg_sq_col"), 2),
    **{"exp_inf": 1, "acc_delta": 0, "step_size": 0},
}
# Factored states of torch's and of transformers' Adafactor, by the axis of the parameter that each is a mean over: kept
# with size 1 by the former, left out by the latter. They follow all other axes.
_AVERAGED_AXIS = {"row_var": -1, "col_var": -2, "exp_avg_sq_row": -1, "exp_avg_sq_col": -2}


def bare_optimizers(optimizer) -> list[torch.optim.Optimizer]:
    """The optimizers in one optimizer, a list or tuple of them, or None, each without accelerate's wrapper."""
    if optimizer is None:
        return []
    listed = optimizer if isinstance(optimizer, (list, tuple)) else [optimizer]
    return [getattr(wrapped, "optimizer", wrapped) for wrapped in listed]


def check_optimizers(optimizers: list[torch.optim.Optimizer], parameters: dict[str, nn.Parameter]) -> None:
    """Make sure that `swap_parameters` will succeed, before anything changes.

    The parameters to be resized come by a name for messages; with no optimizer there is nothing to check.

    Raises:
        ValueError: no optimizer holds one of the parameters, or one keeps a state whose entries do not match the
            parameter's weight by weight: flat, quantized or sharded.
    """
    known = {id(parameter) for optimizer in optimizers for parameter in held(optimizer)}
    missing = [name for name, parameter in parameters.items() if id(parameter) not in known]
    if optimizers and missing:
        raise ValueError(
            f"The optimizer does not hold {len(missing)} of the parameters to grow, such as {missing[0]}. Build it "
            "from this model's parameters, after loading and moving the model, and pass all optimizers if there are "
            "several."
        )
    names = {id(parameter): name for name, parameter in parameters.items()}
    for optimizer in optimizers:
        for parameter in held(optimizer):
            name = names.get(id(parameter), f"a parameter of shape {tuple(parameter.shape)}")
            for key, value in optimizer.state.get(parameter, {}).items():
                fault = _fault(key, value, parameter)
                if fault:
                    raise ValueError(f"{type(optimizer).__name__} keeps {key!r} of {name} {fault}")


def follow_gradients(optimizers: list[torch.optim.Optimizer]) -> set[Tensor]:
    """The parameters for which an optimizer keeps a measure of how large their gradients are."""
    states = (entry for optimizer in optimizers for entry in optimizer.state.items())
    return {parameter for parameter, state in states if any(_SCALES.get(key) for key in state)}


def swap_parameters(optimizers: list[torch.optim.Optimizer], resizes: list[Resize]) -> None:
    """Put new parameters in the places of old ones, in one step and on all ranks: groups, order, state and hooks stay.

    The optimizers are bare ones that `check_optimizers` has found fit. Where nothing is kept, momentum starts at zero.
    """
    with raise_on_all_ranks():  # everything that can fail for want of memory comes first
        states = [
            {r.new: _carried(optimizer.state[r.old], r) for r in resizes if r.old in optimizer.state}
            for optimizer in optimizers
        ]
    for resize in resizes:
        resize.hand_over_hooks()
    for optimizer, state in zip(optimizers, states):
        _replace(optimizer, {resize.old: resize.new for resize in resizes}, state)


def add_new_parameters(
    optimizers: list[torch.optim.Optimizer], model: nn.Module, parameters: Iterable[nn.Parameter]
) -> None:
    """Add parameters that began to train to the optimizers, in the order of the model.

    Each goes into a group whose parameters have the same number of axes, or into an empty one; among several, into the
    first without weight decay. No group is added, since schedulers expect the number that they started with. Parameters
    that an optimizer holds already stay where they are.
    """
    order = {id(parameter): place for place, parameter in enumerate(model.parameters())}
    groups = [group for optimizer in optimizers for group in optimizer.param_groups]
    held = {id(parameter) for group in groups for parameter in group["params"]}
    for new in (parameter for parameter in parameters if groups and id(parameter) not in held):

        def choose_group(group: dict, axes: int = new.dim()) -> tuple[bool, ...]:
            alike = any(parameter.dim() == axes for parameter in group["params"])
            return not alike, bool(group["params"]), bool(group.get("weight_decay"))

        inside = min(groups, key=choose_group)["params"]
        later = (place for place, p in enumerate(inside) if order.get(id(p), -1) > order[id(new)])
        inside.insert(next(later, len(inside)), new)


def follow_resized(optimizers: list[torch.optim.Optimizer]) -> bool:
    """Put the live parameter in the place of every stale one, whose `_grown_into` is its successor, stale or live.

    The state stays where all of it fits the live parameter already, as when it was loaded first; otherwise it is
    dropped.

    Returns:
        Whether any parameter was stale.
    """
    changed = False
    for optimizer in optimizers:
        new_of = {p: _live(p) for p in held(optimizer) if hasattr(p, "_grown_into")}
        states = {
            new: optimizer.state[old]
            for old, new in new_of.items()
            if old in optimizer.state and all(_fits(key, value, new) for key, value in optimizer.state[old].items())
        }
        _replace(optimizer, new_of, states)
        changed |= bool(new_of)
    return changed


def held(optimizer: torch.optim.Optimizer) -> Iterable[nn.Parameter]:
    """All parameters of an optimizer."""
    return (parameter for group in optimizer.param_groups for parameter in group["params"])


def _replace(optimizer: torch.optim.Optimizer, new_of: dict, states: dict) -> None:
    for group in optimizer.param_groups:  # the list itself stays: LBFGS holds on to it
        group["params"][:] = [new_of.get(parameter, parameter) for parameter in group["params"]]
    for old in new_of:
        optimizer.state.pop(old, None)
    optimizer.state.update(states)


def _live(parameter: nn.Parameter) -> nn.Parameter:
    while "_grown_into" in vars(parameter):
        parameter = vars(parameter)["_grown_into"]
    return parameter


def _fault(key: str, value, parameter: nn.Parameter) -> str | None:
    """What keeps a state entry from being carried, as the end of a sentence with the fix; None if nothing does."""
    if is_sharded(value) and getattr(parameter, "placements", None) != value.placements:
        return (
            "sharded otherwise than the parameter, so it cannot be carried on. Use an optimizer with "
            "plain floating-point numbers for each weight, such as AdamW or SGD, made after fully_shard."
        )
    if not _fits(key, value, parameter):
        form = f"in shape {tuple(value.shape)}" if torch.is_tensor(value) else f"as a {type(value).__name__} of tensors"
    elif not torch.is_tensor(value) or value.numel() <= 1:
        return None
    elif type(value) not in (Tensor, nn.Parameter) and not is_sharded(value):
        form = f"as a {type(value).__name__}"
    elif not value.is_floating_point():
        form = f"as {value.dtype}"
    else:
        return None
    return (
        f"{form}, which cannot be carried to a wider parameter. Use an optimizer with plain floating-point numbers for "
        "each weight, such as AdamW, Adafactor, Muon or SGD."
    )


def _fits(key: str, value, parameter: nn.Parameter) -> bool:
    """Whether an entry of a state is a single number, not a tensor, or has the parameter's shape."""
    if not torch.is_tensor(value):
        return not any(torch.is_tensor(leaf) and leaf.numel() > 1 for leaf in tree_leaves(value))
    return value.numel() <= 1 or _aligned(key, value, parameter) is not None


def _aligned(key: str, value: Tensor, parameter: nn.Parameter) -> Tensor | None:
    """A state with the axes of its parameter, of size 1 where it is a mean; None if the shapes differ."""
    shape, axis = list(parameter.shape), _AVERAGED_AXIS.get(key)
    if axis is not None and len(shape) > 1:
        shape[axis] = 1
        value = value.unsqueeze(axis) if value.dim() < len(shape) else value
    return value if list(value.shape) == shape else None


def _carried(state: dict, resize: Resize) -> dict:
    """Spread every state tensor that follows the resized axis over the new size; other entries stay."""
    carried = dict(state)
    for key, value in state.items():
        old = _aligned(key, whole(value), resize.old) if torch.is_tensor(value) and value.numel() > 1 else None
        if old is not None and old.shape[resize.axis] == resize.old.shape[resize.axis]:
            new = laid_out_like(_spread(key, old, resize), value)
            carried[key] = new if value.dim() == new.dim() else new.squeeze(_AVERAGED_AXIS[key])
    return carried


def _spread(key: str, old: Tensor, resize: Resize) -> Tensor:
    shape = list(old.shape)
    shape[resize.axis] = resize.new.shape[resize.axis]
    new = old.new_zeros(shape)
    if key in _SCALES:
        trained = old.index_select(resize.axis, resize.trained(resize.old).to(old.device))
        new += trained.mean(dim=resize.axis, keepdim=True)
        if resize.steepness is not None:
            steeper = resize.steepness.to(new.device).clamp_min(1) ** (_SCALES[key] / 2)
            new.transpose(resize.axis, -1).mul_(steeper)
    return resize.carry(old, new)
