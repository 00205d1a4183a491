"""Growth inside transformers' Trainer: `GrowthCallback`."""

import functools
import shutil
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from torch import nn
from tqdm.auto import tqdm
from transformers import AutoConfig, Trainer, TrainerCallback

from ..grow.growth import Grower
from ..grow.plan import GrowthConfig
from ..growable.growth_files import GROWTH, GROWTH_FILE, load_growth
from ..growable.growths import extra_parameters, growable_model, is_grown, set_dims
from ..growable.projections import is_adapted
from ..growable.training_state import add_new_parameters, bare_optimizers
from ..model.configuration import CODE_FOLDER
from ..report.report import GrowthReport
from .recording import Recording, loss_of, metrics_kept
from .schedule import ADDED, Schedule, growths_of

_CALL = "trainer.add_callback(GrowthCallback(trainer, GrowthConfig(budget=0.02)))"


class GrowthCallback(TrainerCallback):
    """Grow the model of a Trainer (transformers', TRL's, sentence-transformers') on the batches it has just trained on.

    Growth lowers the trainer's own loss, its `compute_loss`, of one micro-batch at a time: all of them count alike,
    while a Trainer that accumulates gradients counts those with more labels more. While training runs, the callback
    keeps the last inputs of that method in the memory of the CPU, and a growth reads those. It reads no data itself:
    data, samplers, random states and the trainer's metrics stay as they are. A growth that is due before enough batches
    were seen waits for them. In a run that was just resumed it may so come later than in one that was not interrupted.

    What a resumed run must know is in the Trainer's log history. A checkpoint of a peft model has the new dims of its
    base in the folder `growth`; they are loaded when the trainer loads the checkpoint.

    TRL's GRPOTrainer must keep old log-probabilities, for instance by `num_iterations=2`. Without them the value of its
    loss is the same for every model, and growth finds nothing.

    Args:
        trainer: whose model grows, as in `trainer.add_callback(GrowthCallback(trainer, config))`.
        config: what to grow each time.
        steps: optimizer steps after which to grow, such as `range(500, 3000, 500)`; None for once, half-way.
        batches: the number of micro-batches to grow on, the last ones of each device.

    Attributes:
        reports: what happened at each growth of this run.

    Raises:
        TypeError: the first argument is no Trainer, or the second one no GrowthConfig.
        ValueError: a value out of its range; when training starts, a time to grow that it will not reach, or a model
            that cannot grow; after its first two batches, a budget that buys nothing, an optimizer that cannot take
            new dims, or a loss that growth cannot lower.
    """

    def __init__(
        self,
        trainer: Trainer,
        config: GrowthConfig | None = None,  # never None: with one argument alone, the error shows the whole call
        steps: Sequence[int] | None = None,
        batches: int = 16,
    ):
        if not isinstance(trainer, Trainer) or not isinstance(config, GrowthConfig):
            raise TypeError(f"GrowthCallback takes a Trainer and a GrowthConfig: {_CALL}.")
        self.trainer: Any = trainer
        self.config, self.schedule = config, Schedule(steps, batches)
        self.reports: list[GrowthReport] = []
        self._recording = Recording(trainer, batches)
        self._made = self._made_before = 0  # growths of a training that did not end, and of one that was begun again
        # Where a checkpoint is loaded, and no event of callbacks announces it before the optimizer is loaded, too.
        self.trainer._load_from_checkpoint = functools.partial(self._load_with_dims, trainer._load_from_checkpoint)

    def on_train_begin(self, args, state, control, **kwargs):
        """Check what can be checked without batches, and begin to record."""
        trainer = self.trainer
        if state is not trainer.state:
            raise ValueError(f"This callback was made for another trainer. Make one for each: {_CALL}.")
        if sum(isinstance(callback, GrowthCallback) for callback in trainer.callback_handler.callbacks) > 1:
            raise ValueError("A trainer takes one GrowthCallback, which can grow several times, by steps=[500, 1000].")
        if getattr(args, "sync_ref_model", False):
            raise ValueError("sync_ref_model=True mixes the model into one that does not grow along: leave it out.")
        self.schedule.check(args, state)
        self._recording.stop()  # of a training that did not end
        self._grower = Grower(trainer.model_wrapped, self.config, trainer.optimizer, loss=loss_of(trainer))
        model = self._grower.model
        if any(entry[ADDED] for entry in growths_of(state)) and not is_grown(model):
            raise ValueError(
                "This training had grown when it was saved, and its model has not. Before the Trainer is made, load "
                'the new dims of adapters by load_growth(model, checkpoint + "/growth"), or a whole model by '
                "from_pretrained(checkpoint)."
            )
        self._made_before = self._made if is_grown(model) and not growths_of(state) else 0
        self._is_checked = self._is_due = False
        self._recording.start()

    def on_step_end(self, args, state, control, **kwargs):
        """Grow, if it is time and enough batches were seen."""
        if state.global_step >= state.max_steps:
            return
        if not self._is_checked and self._recording.count_on_every_rank() >= 2:
            with metrics_kept(self.trainer):  # what would fail in a growth fails before hours of training
                self._grower.check(list(self._recording.inputs)[:2])
            self._is_checked = True
        was_due = self._is_due
        self._is_due = was_due or self.schedule.is_due(state, self._made_before)
        if not self._is_due:
            return
        if self._recording.count_on_every_rank() >= self.schedule.batches:
            self._grow(state, control)
        elif not was_due:
            wanted = self.schedule.batches
            warnings.warn(f"Growth is due at step {state.global_step}, and waits for {wanted} batches.", stacklevel=2)

    def on_save(self, args, state, control, **kwargs):
        """Save the config where Trainer saves shards alone."""
        if state.is_world_process_zero and self.trainer.is_fsdp_enabled:
            self._grower.model.config.save_pretrained(Path(str(args.output_dir), f"checkpoint-{state.global_step}"))

    def on_push_begin(self, args, state, control, **kwargs):
        """Let a push amid training take along what a checkpoint keeps in folders: Trainer copies its files alone."""
        checkpoint = Path(str(args.output_dir), f"checkpoint-{state.global_step}")
        for name in (GROWTH, CODE_FOLDER) if state.is_world_process_zero else ():
            if (checkpoint / name).is_dir():
                shutil.copytree(checkpoint / name, checkpoint.with_name(name), dirs_exist_ok=True)

    def on_train_end(self, args, state, control, **kwargs):
        """Stop recording, give the best model its own new dims, and warn if nothing ever grew."""
        self._recording.stop()
        self._made = 0
        best = args.load_best_model_at_end and state.best_model_checkpoint
        if best and not self.trainer.is_fsdp_enabled:  # of adapters, Trainer has loaded those alone
            set_saved_dims(self.trainer.model, Path(best))
        if not growths_of(state) and not self._made_before:
            message = "GrowthCallback never fired: choose an earlier time to grow, or fewer batches."
            warnings.warn(message, stacklevel=2)

    def _grow(self, state: Any, control: Any) -> None:
        with metrics_kept(self.trainer):
            report = self._grower.grow(list(self._recording.inputs))
        self._is_due = False
        self.reports.append(report)
        self._made += 1
        if state.is_world_process_zero:
            tqdm.write(f"Step {state.global_step}:\n{report}")
        due = control.should_log  # logging takes this back, and the step's own logs may still be due
        # The Trainer's own log, next to its figures: TRL's would close the means of metrics that are under way.
        Trainer.log(self.trainer, report.figures())
        control.should_log = due

    def _load_with_dims(self, load: Callable, folder: str, *args, **kwargs) -> Any:
        """Load a checkpoint as the trainer does, into a model with the new dims of the checkpoint."""
        set_saved_dims(self.trainer.model, Path(folder))
        model = growable_model(self.trainer.model)
        trained = [parameter for parameter in extra_parameters(model) if parameter.requires_grad]
        # An optimizer may be there already: the user's own, or that of FSDP.
        add_new_parameters(bare_optimizers(self.trainer.optimizer), model, trained)
        return load(folder, *args, **kwargs)


def set_saved_dims(model: nn.Module, checkpoint: Path) -> None:
    """Give a model the new dims of a checkpoint, with their weights where the checkpoint itself has adapters alone."""
    if any(map(is_adapted, model.modules())):
        if (checkpoint / GROWTH / GROWTH_FILE).is_file():
            load_growth(model, checkpoint / GROWTH)
        else:
            set_dims(model, {})
    elif (checkpoint / "config.json").is_file():
        set_dims(model, getattr(AutoConfig.from_pretrained(checkpoint), "extra_dims", {}))
