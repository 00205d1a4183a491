"""Carry an optimizer through a growth: every resized parameter keeps its group, its place and its state."""

import torch
from torch import Tensor, nn

# Running means of squared gradients, by the names torch's optimizers give them. New entries start at the old ones'
# mean: at zero, with the old step count, a first update could be several times the learning rate.
_SECOND_MOMENTS = ("exp_avg_sq", "max_exp_avg_sq", "square_avg", "sum", "exp_inf")


def check_optimizer(optimizer: torch.optim.Optimizer, parameters: dict[str, nn.Parameter]) -> None:
    """Make sure that `swap_parameters` will succeed, before anything changes.

    Args:
        parameters: the parameters to be resized, by a name for messages.

    Raises:
        ValueError: the optimizer lacks one of them, or keeps a state for it whose shape is not the parameter's.
    """
    held = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    missing = [name for name, parameter in parameters.items() if id(parameter) not in held]
    if missing:
        raise ValueError(
            f"The optimizer does not hold {len(missing)} of the parameters to grow, such as {missing[0]}. Build it "
            "from this model's parameters, after loading and moving the model."
        )
    for name, parameter in parameters.items():
        for key, value in optimizer.state.get(parameter, {}).items():
            if torch.is_tensor(value) and value.dim() > 0 and value.shape != parameter.shape:
                raise ValueError(
                    f"{type(optimizer).__name__} keeps {key!r} of {name} in shape {tuple(value.shape)}, which cannot "
                    "be carried to a wider parameter. Use AdamW, Adam, SGD or another with a state for each weight."
                )


def swap_parameters(optimizer: torch.optim.Optimizer, resizes) -> None:
    """Put new parameters in the places of old ones, in one step: groups, order and state stay.

    Args:
        resizes: records with `old`, `new` (parameters), `axis` and `kept`, and with `carry`, which copies a tensor of
            the old shape into one of the new; `GrowableAttention.widen` gives them. Where nothing is kept, momentum
            starts anew.
    """
    new_of = {id(resize.old): resize.new for resize in resizes}
    # Everything that can fail for want of memory comes first.
    states = {r.new: _carry(optimizer.state[r.old], r) for r in resizes if r.old in optimizer.state}
    for group in optimizer.param_groups:
        group["params"] = [new_of.get(id(parameter), parameter) for parameter in group["params"]]
    for resize in resizes:
        optimizer.state.pop(resize.old, None)
    optimizer.state.update(states)


def _carry(state: dict, resize) -> dict:
    """Spread every state tensor of the old parameter's shape over the new one's; other entries stay."""
    return {
        key: _spread(value, resize, mean=key in _SECOND_MOMENTS)
        if torch.is_tensor(value) and value.dim() > 0 and value.shape == resize.old.shape
        else value
        for key, value in state.items()
    }


def _spread(old: Tensor, resize, mean: bool) -> Tensor:
    new = old.new_zeros(resize.new.shape)
    if mean:
        new += old.mean(dim=resize.axis, keepdim=True)
    return resize.carry(old, new)
