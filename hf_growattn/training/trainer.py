"""Growth inside transformers' Trainer: `GrowthCallback`."""

import contextlib
import copy
import math
import random
import shutil
import traceback
import warnings
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import islice, pairwise
from pathlib import Path
from typing import Any

import numpy
import torch
from torch import nn
from torch.utils.data import ConcatDataset
from tqdm.auto import tqdm
from transformers import AutoConfig, Trainer, TrainerCallback
from transformers.trainer_utils import get_last_checkpoint, has_length

from ..grow.growth import Grower
from ..grow.plan import GrowthConfig
from ..growable.growths import (
    DESCRIPTION,
    GROWTH,
    is_grown,
    load_growth,
    save_with_adapters,
    set_dims,
)
from ..growable.projections import is_adapted
from ..growable.training_state import bare_optimizers, sharded_modules
from ..model.configuration import CODE_FOLDER
from ..report.report import GrowthReport

_MOMENTS = ("middle", "epoch", "plateau")
_ADDED = "growth_added_parameters"


class GrowthCallback(TrainerCallback):
    """Grow the model of a Trainer (transformers', TRL's, sentence-transformers') at chosen steps, on its own data.

    What growth lowers is the trainer's own loss, its `compute_loss`, of which its metrics keep no trace. The growth
    batches are drawn with a seed of their own and made by the training data loader's collator, so the order of the
    training data and all random states stay as they are. What a resumed run must know is in the Trainer's log history.
    A checkpoint of a peft model has the new dims of its base in the folder `growth`. To resume one, hand the callback
    over as `Trainer(callbacks=[...])`: added later, it comes after the optimizer.

    Args:
        config: what to grow each time.
        at: "middle" for once, half-way; "epoch" for the end of each epoch; "plateau" for when the evaluation loss stops
            falling, that of the first set if there are several.
        steps: instead, optimizer steps after which to grow, such as `range(500, 3000, 500)`.
        batches: growth batches of a device's batch size, on each device.
        max_growths: growths at most, which together add at most that many budgets.

    Attributes:
        reports: what happened at each growth of this run.

    Raises:
        ValueError: both `steps` and `at`, or a value out of its range; when training starts, a
            time to grow that it will not reach, a budget that buys nothing, or a model or optimizer that cannot grow.
    """

    def __init__(
        self,
        config: GrowthConfig,
        at: str = "middle",
        steps: Sequence[int] | None = None,
        batches: int = 16,
        max_growths: int | None = None,
    ):
        if at != "middle" and steps is not None:
            raise ValueError('Say when to grow by one of steps=[500, 1000], at="epoch" and at="plateau".')
        if at not in _MOMENTS:
            raise ValueError(f"at must be one of {', '.join(map(repr, _MOMENTS))}; got {at!r}.")
        if steps is not None and not (isinstance(steps, Sequence) and len(steps)):
            raise ValueError(f"steps must be a list of at least one step, as in steps=[500]; got {steps!r}.")
        counts = {"batches": batches, "max_growths": max_growths}
        counts |= {f"steps[{index}]": step for index, step in enumerate(steps or ())}
        for name, value in counts.items():
            if value is not None and (type(value) is not int or value < 1):
                raise ValueError(f"{name} must be a whole number, at least 1; got {value!r}.")
        self.config, self.steps, self.at, self.batches, self.max_growths = config, steps, at, batches, max_growths
        self.reports: list[GrowthReport] = []
        self._made = self._made_before = 0  # growths of a training that did not end, and of one that was begun again

    def on_init_end(self, args, state, control, model=None, **kwargs):
        """Let a checkpoint be resumed whose new dims do not come with its model: shards, or adapters alone."""
        trainer = _trainer_of(state)
        trainer.train = partial(_train_with_saved_growth, trainer, trainer.train)

    def on_train_begin(self, args, state, control, **kwargs):
        """Check that growth will be possible, before hours of training."""
        self._trainer = _trainer_of(state)
        if self.at == "plateau" and args.eval_strategy == "no":
            raise ValueError('at="plateau" watches the evaluation loss: set eval_strategy and eval_dataset.')
        due = self._last_due(args, state)
        if due >= state.max_steps:
            raise ValueError(
                f"Growth is set for step {due}, but training ends at step {state.max_steps}. Choose an earlier step, "
                "so that there is training after the growth."
            )
        if getattr(args, "sync_ref_model", False):
            raise ValueError("sync_ref_model=True mixes the model into one that does not grow along: leave it out.")
        wrapped: Any = self._trainer.model_wrapped
        self._grower = Grower(wrapped, self.config, self._trainer.optimizer)
        model = self._grower.model
        if any(entry[_ADDED] for entry in _growths(state)) and not is_grown(model):
            raise ValueError(
                "This training had grown when it was saved, and its model has not: hand GrowthCallback over as "
                "Trainer(callbacks=[...]), so that it can load the growth before the optimizer."
            )
        save_with_adapters(wrapped)
        self._made_before = self._made if is_grown(model) and not _growths(state) else 0
        if state.global_step == 0:
            self._grower.loss = loss_of(self._trainer)
            self._grower.check(self._growth_batches(args, state, 2))

    def on_epoch_end(self, args, state, control, **kwargs):
        """Grow after an epoch of a stream, of which the step that ends it cannot be known."""
        self.on_step_end(args, state, control, epoch_ended=True)

    def on_step_end(self, args, state, control, epoch_ended: bool = False, **kwargs):
        """Grow, if it is time."""
        if self.is_time(state, epoch_ended):
            self._grower.loss = loss_of(self._trainer)
            report = self._grower.grow(self._growth_batches(args, state, self.batches))
            self.reports.append(report)
            self._made += 1
            if state.is_world_process_zero:
                tqdm.write(f"Step {state.global_step}:\n{report}")
            due = control.should_log  # logging takes this back, and the step's own logs may still be due
            # The Trainer's own log, next to its figures: TRL's would close the means of metrics that are under way.
            Trainer.log(self._trainer, report.figures())
            control.should_log = due

    def on_save(self, args, state, control, **kwargs):
        """Save the config where Trainer saves shards alone."""
        if state.is_world_process_zero and self._trainer.is_fsdp_enabled:
            self._grower.model.config.save_pretrained(Path(str(args.output_dir), f"checkpoint-{state.global_step}"))

    def on_push_begin(self, args, state, control, **kwargs):
        """Let a push amid training take along what a checkpoint keeps in folders: Trainer copies its files alone."""
        checkpoint = Path(str(args.output_dir), f"checkpoint-{state.global_step}")
        for name in (GROWTH, CODE_FOLDER) if state.is_world_process_zero else ():
            if (checkpoint / name).is_dir():
                shutil.copytree(checkpoint / name, checkpoint.with_name(name), dirs_exist_ok=True)

    def on_train_end(self, args, state, control, **kwargs):
        """Give the best model its own new dims, and warn if nothing ever grew."""
        self._made = 0
        if args.load_best_model_at_end and state.best_model_checkpoint:  # of adapters, Trainer has loaded those alone
            _set_saved_dims(self._grower.wrapped, Path(state.best_model_checkpoint), self._grower.optimizers)
        if not _growths(state) and not self._made_before:
            warnings.warn("GrowthCallback never fired: choose an earlier time to grow.", stacklevel=2)

    def is_time(self, state, epoch_ended: bool = False) -> bool:
        """Whether to grow after the optimizer step that was just taken."""
        growths, moments = _growths(state), 1 if self.at == "middle" else math.inf
        most = min(self.max_growths or math.inf, len(self.steps) if self.steps else moments)
        if state.global_step >= state.max_steps or self._made_before + len(growths) >= most:
            return False
        if growths and growths[-1]["step"] == state.global_step:
            return False
        if self.at == "epoch":
            return epoch_ended or state.epoch == int(state.epoch)
        if epoch_ended:
            return False
        if self.steps is not None:
            return state.global_step in self.steps
        if self.at == "middle":
            return state.global_step == max(state.max_steps // 2, 1)
        since = growths[-1]["step"] if growths else -1
        losses = _evaluation_losses(state, since)
        return len(losses) > 1 and losses[-1] >= min(losses[:-1])

    def _last_due(self, args, state) -> int:
        """The last of the steps to grow after, or the first one that `at` allows; 0 where that cannot be known."""
        if self.steps:
            return max(self.steps)
        if self.at == "middle":
            return max(state.max_steps // 2, 1)
        loader = self._trainer.callback_handler.train_dataloader
        epoch = math.ceil(len(loader) / args.gradient_accumulation_steps) if has_length(loader) else 0
        if self.at == "epoch":
            return epoch
        return (epoch if args.eval_strategy == "epoch" else state.eval_steps) * (1 if args.eval_on_start else 2)

    def _growth_batches(self, args, state, count: int) -> list[dict]:
        """This rank's part of `count` batches for each rank, which are the same for any number of ranks."""
        loader: Any = self._trainer.callback_handler.train_dataloader
        size, dataset, mine, world = args.train_batch_size, loader.dataset, args.process_index, args.world_size
        with _random_states_kept():
            if hasattr(dataset, "__len__"):
                generator = torch.Generator().manual_seed(self.config.seed + state.global_step)
                drawn = _drawn(dataset, count, world * size, generator)
                # Each rank draws the same number: a loss may gather something over the ranks.
                drawn = [rows for rows in drawn if len(rows) > (world - 1) * size] or drawn
                parts = [[dataset[row] for row in rows[mine * size : (mine + 1) * size]] for rows in drawn]
            else:
                stream = iter(dataset)
                if stream is dataset:
                    raise ValueError(
                        "The training data can be read once, so growth would take rows from the training. Let its "
                        "__iter__ begin anew, as a generator function does."
                    )
                rows = list(islice(stream, count * world * size))
                streamed = [rows[start : start + size] for start in range(0, len(rows), size)]
                parts = streamed[: len(streamed) // world * world or None][mine::world]
            parts = [rows for rows in parts if rows]
            if len(parts) == 1 and len(parts[0]) > 1:  # two to judge each other
                parts = [parts[0][0::2], parts[0][1::2]]
            batches = [loader.collate_fn(rows) for rows in parts]
        if not all(isinstance(batch, Mapping) for batch in batches):
            raise ValueError(
                f"{type(self._trainer).__name__} makes its batches while it trains, so growth cannot draw any. Call "
                "Grower yourself, between two trainings, with batches and a loss= of your own."
            )
        ignored = [_is_ignored(batch.get("labels")) for batch in batches]
        useful = [batch for batch, is_out in zip(batches, ignored) if not is_out] or batches
        # Each rank keeps its number of batches.
        return [dict(useful[i % len(useful)] if is_out else batches[i]) for i, is_out in enumerate(ignored)]


def _is_ignored(labels: Any) -> bool:
    """Whether a batch has no label that counts: its own loss is not a number, though training goes on."""
    return isinstance(labels, torch.Tensor) and bool((labels == -100).all())


def _set_saved_dims(model: nn.Module, checkpoint: Path, optimizers: list) -> None:
    """Give a model the new dims of a checkpoint, with their weights where the checkpoint itself has adapters alone."""
    if any(map(is_adapted, model.modules())):
        if (checkpoint / GROWTH / DESCRIPTION).is_file():
            load_growth(model, checkpoint / GROWTH, optimizers or None)
        else:
            set_dims(model, {}, optimizers)
    elif (checkpoint / "config.json").is_file() and not sharded_modules(model):
        set_dims(model, AutoConfig.from_pretrained(checkpoint).extra_dims, optimizers)


def loss_of(trainer: Any) -> Callable[[Any, dict], torch.Tensor]:
    """The loss of a Trainer on a collated batch, the mean over it, as `compute_loss` gives it."""
    twin = copy.copy(trainer)  # which leaves the metrics that the trainer keeps for its logs as they are
    for name, value in vars(trainer).items():
        if name not in ("train_dataset", "eval_dataset"):
            setattr(twin, name, _own(value))
    twin.log = lambda *_, **__: None
    twin.args = copy.copy(trainer.args)
    twin.args.average_tokens_across_devices = False  # growth itself takes the mean over the ranks

    def loss(model, batch: dict) -> torch.Tensor:
        inputs = twin._prepare_inputs(batch)
        items = twin._get_num_items_in_batch([inputs], trainer.args.device)
        with twin.compute_loss_context_manager():
            return twin.compute_loss(model, inputs, num_items_in_batch=items)

    return loss


def _own(value: Any) -> Any:
    """A copy of containers and the tensors in them, whose other content is the same."""
    if isinstance(value, torch.Tensor):
        return value.clone()
    if isinstance(value, dict):
        twin = copy.copy(value)
        twin.update({key: _own(item) for key, item in value.items()})
        return twin
    return type(value)(map(_own, value)) if type(value) in (list, deque) else value


def _trainer_of(state) -> Any:
    """The Trainer whose state this is, among those that are calling: it hands callbacks no reference to itself."""
    for frame, _ in traceback.walk_stack(None):
        caller: Any = frame.f_locals.get("self")
        if isinstance(caller, Trainer) and caller.state is state:
            return caller
    raise ValueError("GrowthCallback runs inside a transformers Trainer; in another loop, call Grower yourself.")


def _train_with_saved_growth(trainer: Any, train: Callable, resume_from_checkpoint=None, *args, **kwargs) -> Any:
    """Train as a Trainer does, with the new dims of the checkpoint that it resumes, before its optimizer is made."""
    latest = resume_from_checkpoint is True
    folder = get_last_checkpoint(trainer.args.output_dir) if latest else resume_from_checkpoint
    if folder:
        _set_saved_dims(trainer.model, Path(folder), bare_optimizers(trainer.optimizer))
    return train(resume_from_checkpoint, *args, **kwargs)


def _growths(state) -> list[dict]:
    return [entry for entry in state.log_history if _ADDED in entry]


def _evaluation_losses(state, since: int) -> list[float]:
    """The held-out losses after a step, of the first of several evaluation sets."""
    names = (name for entry in state.log_history for name in entry)
    watched = next((name for name in names if name.startswith("eval_") and name.endswith("loss")), None)
    return [entry[watched] for entry in state.log_history if entry["step"] > since and watched in entry]


def _drawn(dataset: Any, batches: int, size: int, generator: torch.Generator) -> list[list[int]]:
    """The rows of a number of batches; where data sets were concatenated, those of a batch are from the same one."""
    ends = dataset.cumulative_sizes if isinstance(dataset, ConcatDataset) else [len(dataset)]
    drawn: list[list[int]] = []
    for start, end in pairwise([0, *ends]):
        rows = start + torch.randperm(end - start, generator=generator)[: batches * size]
        drawn += [part.tolist() for part in rows.split(size)]
    order = torch.randperm(len(drawn), generator=generator).tolist() if len(ends) > 1 else range(len(drawn))
    return [drawn[index] for index in order][:batches]


@contextlib.contextmanager
def _random_states_kept() -> Iterator[None]:
    """Let datasets and collators draw at random without a trace in the training."""
    python, arrays = random.getstate(), numpy.random.get_state()
    with torch.random.fork_rng():
        try:
            yield
        finally:
            random.setstate(python)
            numpy.random.set_state(arrays)
