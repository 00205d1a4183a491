"""What a Trainer trains on, and by which loss: its last inputs, kept for a growth, and its own `compute_loss`."""

import contextlib
import copy
import functools
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from accelerate.utils import send_to_device


class Recording:
    """Keeps the last inputs of a trainer's `compute_loss` while it trains, as they were given, on the CPU.

    Attributes:
        inputs: those of the last `count` micro-batches that have any label that counts.
    """

    def __init__(self, trainer: Any, count: int):
        self._trainer, self._former = trainer, None
        self.inputs: deque = deque(maxlen=count)

    def start(self) -> None:
        """Put a `compute_loss` that records into the place of the trainer's own."""
        self.stop()  # a training that did not end may have left one
        trainer, compute_loss = self._trainer, self._trainer.compute_loss

        @functools.wraps(compute_loss)
        def record_and_compute(model, inputs, *args, **kwargs):
            if model.training and not _is_ignored(inputs):  # in training, that is, not in evaluation
                # A copy, since compute_loss may take the labels out.
                self.inputs.append(send_to_device(copy.copy(inputs), "cpu"))
            return compute_loss(model, inputs, *args, **kwargs)

        self._former = {"compute_loss": trainer.compute_loss} if "compute_loss" in vars(trainer) else {}
        trainer.compute_loss = record_and_compute

    def stop(self) -> None:
        """Forget the inputs, and leave the trainer as it was."""
        if self._former is not None:
            del self._trainer.compute_loss
            vars(self._trainer).update(self._former)
        self._former = None
        self.inputs.clear()

    def count_on_every_rank(self) -> int:
        """The number of inputs on the rank that has the fewest: ranks grow together."""
        count = torch.tensor([len(self.inputs)], device=self._trainer.args.device)
        return int(self._trainer.accelerator.gather(count).min())


def _is_ignored(inputs: Any) -> bool:
    """Whether a batch has no label that counts: its own loss is not a number, though training goes on."""
    labels = inputs.get("labels") if isinstance(inputs, Mapping) else None
    return isinstance(labels, torch.Tensor) and bool((labels == -100).all())


def loss_of(trainer: Any) -> Callable[[Any, Any], torch.Tensor]:
    """The loss of a Trainer on inputs as its `compute_loss` takes them: the mean over this batch alone."""
    compute_loss = trainer.compute_loss

    def loss(model: torch.nn.Module, batch: Any) -> torch.Tensor:
        inputs, items = send_to_device(copy.copy(batch), trainer.args.device), None
        if trainer.compute_loss_func is not None:  # a function of the user's own may divide by the number of items
            _, items = trainer.get_batch_samples(iter([inputs]), 1, trainer.args.device)
        with trainer.compute_loss_context_manager():
            return compute_loss(model, inputs, num_items_in_batch=items)

    return loss


@contextlib.contextmanager
def metrics_kept(trainer: Any) -> Iterator[None]:
    """Let `compute_loss` note and log what it likes: afterwards, the trainer's attributes are as they were."""
    before = dict(vars(trainer))
    vars(trainer).update({name: _copy_notes(value) for name, value in before.items()}, log=lambda *_, **__: None)
    try:
        yield
    finally:
        for name in vars(trainer).keys() - before.keys():
            delattr(trainer, name)
        vars(trainer).update(before)


def _copy_notes(value: Any) -> Any:
    """A copy of a container of numbers, as trainers keep them for their next log; anything else as it is."""
    if type(value) in (dict, defaultdict):
        copied = copy.copy(value)
        copied.update({name: _copy_notes(item) for name, item in value.items()})
        return copied
    if type(value) in (list, deque):
        return copy.copy(value)
    return value.clone() if type(value) is torch.Tensor else value
