"""What a command that reads data was asked to do: TRL's options and those of growth."""

import warnings
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from transformers.trainer_utils import get_last_checkpoint
from transformers.utils.import_utils import is_torch_bf16_gpu_available
from trl.scripts.utils import DatasetMixtureConfig, ScriptArguments
from trl.trainer.model_config import ModelConfig
from trl.trainer.sft_config import SFTConfig

from ..grow.plan import GrowthConfig

BUDGET = 0.02  # of the model's weights, unless the options say


@dataclass
class Training(SFTConfig):
    """SFTConfig that takes its folder by -o, and trains in fp32 on CPUs."""

    output_dir: str = field(default="", metadata={"help": "new folder to write", "aliases": ["-o", "--output"]})

    def __post_init__(self):
        if str(self.resume_from_checkpoint).lower() == "true":  # a text, from the command line
            self.resume_from_checkpoint = get_last_checkpoint(self.output_dir)
        if not torch.accelerator.is_available():
            # Without it accelerate joins no processes: each would train by itself.
            self.use_cpu, self.dataloader_pin_memory = True, False
        if self.bf16 is None:  # TRL takes it for granted
            self.bf16 = not (self.fp16 or self.use_cpu) and is_torch_bf16_gpu_available()
        # Trainer would log the same held-out loss twice, which reads as a plateau.
        self.eval_on_start = self.eval_on_start and self.eval_strategy != "no" and not self.resume_from_checkpoint
        with warnings.catch_warnings():  # of names that TRL itself uses
            warnings.simplefilter("ignore", FutureWarning)
            super().__post_init__()


class Recipe(NamedTuple):
    """A model, data, and the options of a command by groups."""

    model_name: str
    datasets: list[str]
    growth: Any  # the command's own options, one of the classes in `options`
    script: ScriptArguments
    training: Training
    model: ModelConfig
    mixture: DatasetMixtureConfig
    words: list[str]  # all options, as they were given

    @property
    def dataset(self) -> str:
        """What to call the data."""
        return ", ".join(self.datasets or [part.path for part in self.mixture.datasets])

    def growth_config(self) -> GrowthConfig:
        """What to grow each time."""
        budget = self.growth.budget
        qk_dims, v_dims = (getattr(self.growth, name, 0) for name in ("qk_dims", "v_dims"))
        if budget is None and not (qk_dims or v_dims):
            budget = BUDGET
        if budget is not None and budget >= 1 and budget % 1 == 0:  # a number of weights
            budget = int(budget)
        return GrowthConfig(qk_dims, v_dims, budget, seed=self.training.seed)
