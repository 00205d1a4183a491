"""The loss that is lowered, and passes over batches that leave the model as it was."""

import contextlib
import functools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from transformers import PreTrainedModel

from ..growable.attention import attentions
from ..growable.projections import kept_unpacked
from ..growable.training_state import (
    all_gather,
    all_reduce_sum,
    is_distributed,
    own_part,
    parameters_of,
    raise_on_all_ranks,
    reshard,
    sharded_modules,
    unsynchronized,
)

ROUNDING = 1e-7  # of a loss in fp32: below it nothing can be measured


@contextlib.contextmanager
def evaluation_mode(model: nn.Module, others: Iterable[nn.Parameter] = ()) -> Iterator[None]:
    """Put a model in evaluation mode with gradients off, and restore everything at the end.

    On leaving, also by an exception, training modes, `requires_grad` flags, gradients and the random state are as they
    were. `others` are parameters outside the model that its loss may train: they are frozen, too.
    """
    check_unpacked(model)
    reshard(model)
    training = [(module, module.training) for module in model.modules()]
    every = dict.fromkeys((*model.parameters(), *others))
    parameters = [(parameter, parameter.requires_grad, parameter.grad) for parameter in every]
    devices = {parameter.device for parameter in model.parameters() if parameter.device.type == "cuda"}
    # Probes would recompile a compiled model for a few passes; what attention itself compiles goes on being compiled.
    compiled = [(m, m._compiled_call_impl) for m in model.modules() if m._compiled_call_impl is not None]
    forked = torch.random.fork_rng(devices=[device.index for device in devices])
    with forked, loss_unrounded(model), kept_unpacked(model):
        try:
            for module, _ in compiled:
                module._compiled_call_impl = None
            model.eval()
            for parameter in every:
                parameter.requires_grad_(False)
                parameter.grad = None  # the user's gradients come back on leaving
            yield
        finally:
            reshard(model)
            for module, call in compiled:
                module._compiled_call_impl = call
            for module, mode in training:
                module.training = mode
            for parameter, requires_grad, gradient in parameters:
                parameter.requires_grad_(requires_grad)
                parameter.grad = gradient


@contextlib.contextmanager
def loss_unrounded(model: nn.Module) -> Iterator[None]:
    """Let FSDP2 leave the outputs of a whole model as they are where no gradients are wanted.

    A mixed precision of bf16 would round the loss to three digits, and the search compares losses.
    """
    if model not in sharded_modules(model):
        yield
        return
    outputs: list[Any] = []

    def note(module, args, output) -> None:
        outputs[:] = [output]

    def give_back(module, args, output) -> Any:
        return output if torch.is_grad_enabled() else outputs[0]

    handles = model.register_forward_hook(note, prepend=True), model.register_forward_hook(give_back)
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


class Objective:
    """The loss that is lowered: the model's own, or a function of a batch, in the autocast of the caller.

    Args:
        model: whose attention grows.
        loss: gives a tensor of one number for a batch; None for what the model returns.
        advance: is called with how long a batch took, in forward passes.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        loss: Callable[[Any], Tensor] | None = None,
        advance: Callable[[int], object] = lambda passes: None,
    ):
        self.model, self._own, self.advance = model, loss, advance
        self.device = attentions(model)[0].empty_like().device
        kind = self.device.type
        enabled = torch.is_autocast_enabled(kind)
        self._autocast = torch.autocast(kind, torch.get_autocast_dtype(kind), enabled=enabled)

    def __call__(self, batch: Any, index: int) -> Tensor:
        """The loss of a batch, which errors name by its number."""
        with self._autocast:
            if self._own is not None:
                return check_loss_value(self._own(batch), index)
            batch = {name: value.to(self.device) if torch.is_tensor(value) else value for name, value in batch.items()}
            return check_loss_value(default_loss(self.model, {"use_cache": False, **batch}, f"batch {index}"), index)


def check_finite(losses: list[float]) -> None:
    """Raise a ValueError, on all ranks, that names a batch whose loss is not finite, and a fix."""
    with raise_on_all_ranks():
        for index, loss in enumerate(losses):
            if not math.isfinite(loss):
                raise ValueError(
                    f"The loss of batch {index} is {loss}. Look for labels that are all -100, for inputs that are "
                    "not finite, or for a diverged model, and leave that batch out."
                )


def mean_loss(objective: Objective, batches: list) -> float:
    """Return the mean of the batches' losses over all ranks, finite or not. Call inside `evaluation_mode`."""
    return mean_over_ranks(compute_losses(objective, batches))


def compute_losses(
    objective: Objective, batches: list, begin_batch: Callable[[bool], object] = lambda counts: None
) -> list[float]:
    """Return the loss of each of this rank's batches, finite or not. Call inside `evaluation_mode`.

    `begin_batch` is called before each batch with whether it counts.
    """
    losses = []
    with torch.no_grad(), failing_together(objective.model):
        for index, batch, counts in in_step(objective.model, batches):
            begin_batch(counts)
            loss = objective(batch, index)
            if counts:
                losses.append(loss)
                objective.advance(1)
    return _read(losses)


def _read(numbers: list[Tensor]) -> list[float]:
    """The numbers in tensors, for which a device is waited for once."""
    return torch.stack([number.detach().reshape(()) for number in numbers]).tolist() if numbers else []


def in_step(model: nn.Module, batches: list) -> Iterator[tuple[int, Any, bool]]:
    """The batches with their numbers, and whether each counts.

    The ranks of a sharded model run it together: those that have fewer batches than another one repeat one meanwhile,
    and those that have none get one of another rank's.
    """
    repeated: list[tuple[int, Any, bool]] = []
    if sharded_modules(model) and is_distributed():
        lengths = all_gather(len(batches))
        spare = all_gather(batches[0] if 0 in lengths and len(batches) == max(lengths) else None)
        again = batches[0] if batches else next((batch for batch in spare if batch is not None), None)
        repeated = [(index, again, False) for index in range(len(batches), max(lengths))]
    yield from ((index, batch, True) for index, batch in enumerate(batches))
    yield from repeated


@contextlib.contextmanager
def failing_together(model: nn.Module) -> Iterator[None]:
    """`raise_on_all_ranks` around passes over batches, but not of a sharded model.

    Its ranks gather weights together, so one that fails amid a pass cannot reach the others, which are waiting for it.
    As in any training under FSDP2, its process ends, and torchrun ends the others.
    """
    with contextlib.nullcontext() if sharded_modules(model) else raise_on_all_ranks():
        yield


def mean_over_ranks(losses: list[float]) -> float:
    """Return the mean of the losses of all ranks' batches."""
    loss, count = all_reduce_sum(sum(losses), len(losses))
    return loss / count


def check_loss_value(value: Any, index: int) -> Tensor:
    """The loss of a batch, if it is a tensor of one number; otherwise raise a ValueError that names the fix."""
    if not torch.is_tensor(value) or value.numel() != 1:
        found = f"a tensor of shape {tuple(value.shape)}" if torch.is_tensor(value) else f"a {type(value).__name__}"
        fix = "pass labels along, and return outputs.loss, or its mean"
        raise ValueError(f"A loss must be a tensor of one number, and that of batch {index} is {found}: {fix}.")
    return value


def default_loss(model: nn.Module, batch: Any, name: str = "a batch") -> Tensor:
    """The loss that a module returns for a dict with targets; a ValueError if it returns none for what `name` says."""
    outputs = model(**batch) if isinstance(batch, Mapping) else None
    if isinstance(outputs, tuple):  # as of transformers with return_dict=False
        return outputs[0]
    loss = outputs.get("loss") if isinstance(outputs, Mapping) else getattr(outputs, "loss", None)
    if loss is None:
        given = sorted(batch.keys() - {"use_cache"}) if isinstance(batch, Mapping) else f"type {type(batch).__name__}"
        raise ValueError(
            f"{type(model).__name__} returns no loss for {name} of {given}. That takes a model with a head, and the "
            'targets in every batch: for a causal LM "labels", a copy of "input_ids"; or your own loss=.'
        )
    return loss


def backward(objective: Objective, batches: list) -> None:
    """Sum the gradients of this rank's batches into whatever asks for them: the attached probes.

    The loss is scaled up by a power of two for the way back, as fp16 needs it and as other types do not notice; a
    ValueError is raised if the gradients are finite at no scale. Call inside `evaluation_mode`.
    """
    model = objective.model
    reshard(model)
    asked = [parameter for parameter in model.parameters() if parameter.requires_grad]
    scale = 2.0**16
    while scale >= 2.0**-16:
        losses: list[Tensor] = []
        for parameter in asked:
            parameter.grad = None
        with torch.enable_grad(), _recomputing(model), failing_together(model):
            for index, batch, counts in in_step(model, batches):
                loss = objective(batch, index)
                if not loss.requires_grad:
                    raise ValueError(f"The loss of batch {index} has no gradient: compute it outside torch.no_grad().")
                (loss * (scale if counts else 0.0)).backward()
                if counts:
                    losses.append(loss)
                    objective.advance(3)  # forward and back, which takes about three times as long
        check_finite(_read(losses))
        gradients = [own_part(parameter.grad) for parameter in asked if parameter.grad is not None]
        are_finite = _read([torch.isfinite(gradient).all().to(objective.device) for gradient in gradients])
        (overflown,) = all_reduce_sum(are_finite.count(False))
        if not overflown:
            for gradient in gradients:
                gradient /= scale
            return
        scale /= 16
    raise ValueError(
        "The loss is finite, but its gradients are not. Look for fully masked rows under eager attention, for diverged "
        "weights, or train in bf16 instead of fp16."
    )


@contextlib.contextmanager
def _recomputing(model: PreTrainedModel) -> Iterator[None]:
    """Keep activation checkpointing at work where the user has it: its layers recompute in training mode only."""
    checkpointed = [module for module in model.modules() if getattr(module, "gradient_checkpointing", False)]
    if not checkpointed:
        yield
        return
    try:
        for module in checkpointed:
            module.training = True  # of this module alone: its children keep dropout off
        yield
    finally:
        for module in checkpointed:
            module.training = False


def check_unpacked(model: nn.Module) -> None:
    """Raise a ValueError if an evaluation has packed weights, so that they give no gradients."""
    for name, module in model.named_modules():
        if getattr(getattr(getattr(module, "weight", None), "quant_state", None), "packing_format_for_cpu", False):
            raise ValueError(
                f"{name} was packed for inference by bitsandbytes, as its first evaluation does on this CPU, and gives "
                "no gradients since. Load the model again and grow before you evaluate it, or use a GPU."
            )


def unwrapped(model: Any) -> nn.Module:
    """The model inside DistributedDataParallel, DataParallel and torch.compile."""
    while isinstance(model, (DistributedDataParallel, nn.DataParallel)) or hasattr(model, "_orig_mod"):
        model = model._orig_mod if hasattr(model, "_orig_mod") else model.module
    return model


def is_called_by_another(model: nn.Module, wrapped: nn.Module) -> bool:
    """Whether a module that is neither peft's nor one of torch's wrappers is around a model, and runs it."""
    outer: Any = unwrapped(wrapped)
    outer = outer.get_base_model() if hasattr(outer, "get_base_model") else outer
    return outer is not model and type(outer).forward is not nn.Module.forward


@contextlib.contextmanager
def lowering(
    loss: Callable | None, model: PreTrainedModel, wrapped: nn.Module, advance: Callable[[int], object]
) -> Iterator[Objective]:
    """The user's loss, or the model's, of the model as the user wraps it; all else runs without autocast."""
    objective = Objective(model, loss and functools.partial(loss, unwrapped(wrapped)), advance)
    with torch.autocast(objective.device.type, enabled=False):
        yield objective


@contextlib.contextmanager
def preserved_state(wrapped: nn.Module, optimizers: list) -> Iterator[None]:
    """`evaluation_mode` for the wrapped model and for other parameters that its optimizers train."""
    trained = [parameter for optimizer in optimizers for parameter in parameters_of(optimizer)]
    with unsynchronized(wrapped), evaluation_mode(unwrapped(wrapped), trained):
        yield
