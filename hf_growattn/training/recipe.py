"""One parser for every command that reads data: options and YAML recipes, TRL's own and those of growth."""

import os
import warnings
from dataclasses import dataclass, field
from itertools import takewhile
from pathlib import Path
from typing import NamedTuple

import torch
from transformers.trainer_utils import IntervalStrategy
from transformers.utils.import_utils import is_torch_bf16_gpu_available
from trl.scripts.utils import DatasetMixtureConfig, ScriptArguments, TrlParser
from trl.trainer.model_config import ModelConfig
from trl.trainer.sft_config import SFTConfig

from ..grow.plan import GrowthConfig
from .options import SFT_DOCS, DataArguments, EvaluationArguments, GrowthOptions, RaceOptions, parse_budget


@dataclass
class Training(SFTConfig):
    """SFTConfig that measures the held-out loss on the way, and trains in fp32 on CPUs."""

    output_dir: str = field(default="", metadata={"help": "new folder to write", "aliases": ["-o", "--output"]})
    eval_strategy: str = field(
        default="steps", metadata={"help": "when to measure the held-out loss: no, steps, epoch"}
    )
    eval_steps: float | None = field(default=0.1, metadata={"help": "after so many steps, or such a share of all"})
    eval_on_start: bool = field(default=True, metadata={"help": "measure the held-out loss before the first step"})

    def __post_init__(self):
        if self.resume_from_checkpoint in ("True", "true"):
            self.resume_from_checkpoint = last_checkpoint(Path(self.output_dir))
            if not self.resume_from_checkpoint:
                raise ValueError(f"There is no checkpoint to resume from in {self.output_dir}.")
        if not torch.accelerator.is_available():
            # Without it accelerate joins no processes: each would train by itself.
            self.use_cpu, self.dataloader_pin_memory = True, False
        if self.bf16 is None:  # TRL takes it for granted
            self.bf16 = not (self.fp16 or self.use_cpu) and is_torch_bf16_gpu_available()
        self.prediction_loss_only = True
        # Trainer would log the same held-out loss twice, which reads as a plateau.
        self.eval_on_start = self.eval_on_start and self.eval_strategy != "no" and not self.resume_from_checkpoint
        with warnings.catch_warnings():  # of names that TRL itself uses
            warnings.simplefilter("ignore", FutureWarning)
            super().__post_init__()
        started = int(os.environ.get("WORLD_SIZE", 1))
        if started > 1 and self.world_size == 1:
            raise ValueError(
                f"{started} processes were started, and each would train by itself on {self.device}, into one folder. "
                "Start one process, or add --use_cpu to train on CPUs."
            )

    @property
    def evaluates(self) -> bool:
        """Whether the held-out loss is measured on the way."""
        return self.eval_strategy != IntervalStrategy.NO


class Recipe(NamedTuple):
    """What a command was told, by groups of options; `models` are the names before the first option."""

    models: list[str]
    data: DataArguments
    growth: GrowthOptions
    race: RaceOptions
    evaluation: EvaluationArguments
    script: ScriptArguments
    training: Training
    model: ModelConfig
    mixture: DatasetMixtureConfig

    @property
    def name(self) -> str:
        """Which model."""
        return self.model.model_name_or_path or ""

    @property
    def dataset(self) -> str:
        """What to call the data."""
        return ", ".join(part.path for part in self.mixture.datasets) or self.script.dataset_name or ""

    def growth_config(self, default: str) -> GrowthConfig:
        """What to grow each time, by a budget of so much where nothing was said.

        Raises:
            ValueError: a value is out of its range.
        """
        growth = self.growth
        budget = growth.budget or (None if growth.qk_dims or growth.v_dims else default)
        chosen = None if budget is None else parse_budget(str(budget))
        return GrowthConfig(budget=chosen, qk_dims=growth.qk_dims, v_dims=growth.v_dims, seed=self.training.seed)


def read(words: list[str], usage: str) -> Recipe:
    """Read a command line: names, then options, of which `--config` names a recipe in YAML.

    Raises:
        SystemExit: an option is unknown or out of its range, which is told on standard error; or help was asked for.
    """
    groups = [Recipe.__annotations__[name] for name in Recipe._fields[1:]]
    parser = TrlParser(groups, usage=usage, allow_abbrev=False)
    # What these are if nothing is said, the data or the method say.
    parser.set_defaults(packing=None, packing_strategy=None, dtype=None, learning_rate=None)
    for action in parser._actions:
        kind = getattr(action.type, "__name__", "_")
        if kind == "string_to_bool":  # an option that may be None, too, is a flag
            action.nargs, action.const, kind = "?", True, "bool"
        if not action.choices and not kind.startswith("_"):
            action.metavar = kind
    names = list(takewhile(lambda word: not word.startswith("-"), words))
    try:
        *parsed, unknown = parser.parse_args_and_config(words[len(names) :], return_remaining_strings=True)
    except (ValueError, OSError) as error:
        parser.error(str(error))
    if unknown:
        parser.error(
            f"unknown: {' '.join(unknown)}. Name MODEL and DATA first. --help_all lists the options, and {SFT_DOCS} "
            "explains those of TRL."
        )
    recipe = Recipe(names, *parsed)
    if names:
        recipe.model.model_name_or_path = names[0]
    if names[1:]:
        recipe.script.dataset_name = names[1]
    return recipe


def last_checkpoint(folder: Path) -> str | None:
    """The latest checkpoint of a training that was saved to the end."""
    whole = [path.parent for path in folder.glob("checkpoint-*/trainer_state.json")]  # Trainer writes that file last
    return str(max(whole, key=lambda path: int(path.name.partition("-")[2]))) if whole else None
