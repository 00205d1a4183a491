"""Fine-tuning of a causal language model on a text with transformers' Trainer, whose attention grows on the way.

`growattn finetune` and `scripts/finetune.py` are its command lines, `run` is for models that are in memory already.
"""

import argparse
import copy
import math
import subprocess
import sys
from dataclasses import dataclass, field, fields
from importlib.util import find_spec
from pathlib import Path

import torch
from torch.utils.data import Dataset
from tqdm.auto import tqdm
from transformers import (
    AutoModelForCausalLM,
    HfArgumentParser,
    PreTrainedModel,
    ProgressCallback,
    Trainer,
    TrainingArguments,
    default_data_collator,
    set_seed,
)
from transformers import logging as transformers_logging

from . import outcome
from .arguments import TRAINER_DOCS, GrowthArguments, ModelArguments, TextArguments, budget_of
from .cards import source_of
from .checkpoints import load_growable, load_tokenizer
from .pages import save_report
from .patch import patch_model
from .plan import GrowthConfig
from .texts import blocks_of, check_length, check_tokens, load_texts
from .trainer import GROWN_BASE, GrowthCallback


def _default(name: str, value):
    """An option of TrainingArguments with another default and the same help."""
    (stock,) = (option for option in fields(TrainingArguments) if option.name == name)
    return field(default=value, metadata=stock.metadata)


@dataclass
class FinetuneArguments(TrainingArguments):
    """TrainingArguments with the defaults of a short fine-tuning: 400 steps, unless epochs are asked for."""

    _argument_group_name = "training: the options of transformers' Trainer"

    num_train_epochs: float | None = _default("num_train_epochs", None)
    learning_rate: float = _default("learning_rate", 2e-4)
    weight_decay: float = _default("weight_decay", 0.01)
    lr_scheduler_type: str = _default("lr_scheduler_type", "cosine")
    warmup_steps: float = _default("warmup_steps", 0.05)
    logging_steps: float = _default("logging_steps", 0.05)
    eval_strategy: str = _default("eval_strategy", "steps")
    eval_steps: float | None = _default("eval_steps", 0.1)
    eval_on_start: bool = _default("eval_on_start", True)
    save_steps: float = _default("save_steps", 0.25)
    save_total_limit: int | None = _default("save_total_limit", 2)
    report_to: str = _default("report_to", "none")
    dataloader_pin_memory: bool = _default("dataloader_pin_memory", torch.cuda.is_available())

    def __post_init__(self):
        if self.num_train_epochs is None:
            self.num_train_epochs = 3.0
            self.max_steps = self.max_steps if self.max_steps > 0 else 400
        if self.resume_from_checkpoint in ("True", "true"):
            self.resume_from_checkpoint = last_checkpoint(Path(self.output_dir))
            if not self.resume_from_checkpoint:
                raise ValueError(f"There is no checkpoint to resume from in {self.output_dir}.")
        self.prediction_loss_only = True
        # Trainer would log the same held-out loss twice, which reads as a plateau.
        self.eval_on_start = self.eval_on_start and self.eval_strategy != "no" and not self.resume_from_checkpoint
        super().__post_init__()

    def half_of(self, rows: int) -> int:
        """The optimizer step half-way through a training on so many rows, 1 at least."""
        steps = self.max_steps
        if steps <= 0:
            batch = self.train_batch_size * self.gradient_accumulation_steps * self.world_size
            steps = math.ceil(rows / batch * self.num_train_epochs)
        return max(steps // 2, 1)


def last_checkpoint(folder: Path) -> str | None:
    """The latest checkpoint of a training that was saved to the end."""
    whole = [path.parent for path in folder.glob("checkpoint-*/trainer_state.json")]  # Trainer writes that file last
    return str(max(whole, key=lambda path: int(path.name.partition("-")[2]))) if whole else None


def callback_of(growth: GrowthArguments, seed: int, half: int) -> "MeasuredGrowth":
    """Make the callback that grows: after the step `half`, where no other time was given.

    Raises:
        ValueError: the arguments contradict each other, or one is out of its range.
    """
    when = dict(steps=growth.grow_steps, every=growth.grow_every, at=growth.grow_at)
    if all(given is None for given in when.values()):
        when = dict(steps=[half])
    widths = dict(qk_dims=growth.qk_dims, v_dims=growth.v_dims)
    budget = growth.budget if growth.budget is not None or any(widths.values()) else "2%"
    return MeasuredGrowth(
        GrowthConfig(budget=None if budget is None else budget_of(budget), **widths, seed=seed),
        **when,
        batches=growth.growth_batches,
        max_growths=growth.max_growths,
        total_budget=None if growth.total_budget is None else budget_of(growth.total_budget),
    )


class Blocks(Dataset):
    """Rows for causal language modelling from token blocks, (rows, tokens)."""

    def __init__(self, blocks: torch.Tensor):
        self.blocks = blocks

    def __len__(self) -> int:
        return len(self.blocks)

    def __getitem__(self, row: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.blocks[row], "labels": self.blocks[row]}


class MeasuredGrowth(GrowthCallback):
    """Growth that also notes the held-out loss right before and after; `trainer` is set by whoever makes it."""

    trainer: Trainer

    def on_step_end(self, args, state, control, **kwargs):
        """Measure, grow, measure, if it is time."""
        if self.is_time(state):
            before = self._held_out()
            super().on_step_end(args, state, control, **kwargs)
            after, due = self._held_out(), control.should_log
            seconds = sum(self.reports[-1].seconds.values())
            self.trainer.log({outcome.BEFORE: before, outcome.AFTER: after, outcome.SECONDS: seconds})
            control.should_log = due  # logging takes this back
            if state.is_world_process_zero:
                tqdm.write(f"Held-out loss {before:.4f} -> {after:.4f} at the growth.")

    def _held_out(self) -> float:
        # evaluate() would log it as one of the regular evaluations, which a plateau is read from
        return self.trainer.predict(self.trainer.eval_dataset).metrics["test_loss"]


class Progress(ProgressCallback):
    """Trainer's progress bar, on terminals only, with the losses in few words; all the rest is in the log history."""

    def on_train_begin(self, args, state, control, **kwargs):
        """Open the bar."""
        self.current_step, self.losses = state.global_step, {}
        if state.is_world_process_zero:
            self.training_bar = tqdm(total=state.max_steps, initial=state.global_step, dynamic_ncols=True, disable=None)

    def on_prediction_step(self, args, state, control, **kwargs):
        """An evaluation is too short for a bar."""

    def on_log(self, args, state, control, logs=None, **kwargs):
        """Write a line for each evaluation."""
        self.losses |= logs
        if state.is_world_process_zero and "eval_loss" in logs:
            names = {"loss": "training loss", "eval_loss": "held-out loss"}
            told = [f"{names[key]} {self.losses[key]:.4f}" for key in names if key in self.losses]
            tqdm.write(f"Step {state.global_step}: {', '.join(told)}")


def split(blocks: torch.Tensor, seed: int) -> tuple[Blocks, Blocks]:
    """Shuffle the blocks and set a tenth of them aside: rows to train on, and held-out ones."""
    shuffled = blocks[torch.randperm(len(blocks), generator=torch.Generator().manual_seed(seed))]
    count = min(max(len(blocks) // 10, 8), 128)
    return Blocks(shuffled[count:]), Blocks(shuffled[:count])


def make_trainer(model, tokenizer, data: tuple[Blocks, Blocks], training, lora_rank: int, growth=None) -> Trainer:
    """Make a Trainer of all weights or of adapters, that grows if asked."""
    set_seed(training.seed)  # adapters start at random
    if lora_rank:
        from peft import LoraConfig, get_peft_model

        model = get_peft_model(model, LoraConfig(r=lora_rank, task_type="CAUSAL_LM"))
    trainer = Trainer(
        model,
        training,
        data_collator=default_data_collator,
        train_dataset=data[0],
        eval_dataset=data[1],
        processing_class=tokenizer,
        callbacks=[growth] if growth else None,
    )
    if growth:
        growth.trainer = trainer
    if not training.disable_tqdm:
        trainer.remove_callback(ProgressCallback)
        trainer.add_callback(Progress)
    return trainer


def train(trainer: Trainer) -> float:
    """Train to the end, measure the held-out loss there, and return the seconds it took, growths included."""
    output = trainer.train(resume_from_checkpoint=trainer.args.resume_from_checkpoint)
    evaluated = [entry["step"] for entry in trainer.state.log_history if "eval_loss" in entry]
    if not evaluated or evaluated[-1] < trainer.state.global_step:
        trainer.evaluate()
    return output.metrics["train_runtime"]


def save(trainer: Trainer, lora_rank: int) -> None:
    """Save the model, adapters merged, and the tokenizer; every process calls this."""
    trainer.model = trainer.accelerator.unwrap_model(trainer.model, keep_fp32_wrapper=False, keep_torch_compile=False)
    if lora_rank:
        trainer.model = trainer.model.merge_and_unload()
    trainer.save_model()


RELOAD = """
import sys, torch, hf_growattn
from transformers import AutoModelForCausalLM
sample = torch.load(sys.argv[2], weights_only=True)
with torch.no_grad():
    logits = AutoModelForCausalLM.from_pretrained(sys.argv[1]).eval()(sample["input_ids"]).logits
print((logits.float() - sample["logits"].float()).abs().max().item())
"""


@torch.no_grad()
def reloaded_difference(model, sample: torch.Tensor, output: Path) -> float:
    """Load what was saved in a fresh process, and return the largest difference of the logits."""
    model = copy.deepcopy(model).cpu().eval()
    kept = output / "sample.pt"
    torch.save({"input_ids": sample, "logits": model(sample).logits}, kept)
    command = [sys.executable, "-c", RELOAD, str(output), str(kept)]
    difference = float(subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()[-1])
    kept.unlink()
    return difference


def run(
    model: PreTrainedModel,
    tokenizer,
    blocks: torch.Tensor,
    dataset: str,
    growth: GrowthArguments,
    training: FinetuneArguments,
    lora_rank: int = 0,
) -> dict:
    """Train with growth and save, then train without it where asked; leave pictures and figures beside the model.

    Args:
        model: a stock or grown causal LM; it is patched.
        tokenizer: its own, saved beside it.
        blocks: the text's tokens, (rows, tokens), of which a tenth is held out.
        dataset: what to call the text.
        growth: what to grow, when, and from how many batches.
        training: the Trainer's arguments.
        lora_rank: of adapters that are trained and merged; 0 trains all weights.

    Returns:
        What `figures.json` holds.

    Raises:
        ValueError: the training ended before it was time to grow; the trained model is saved.
    """
    source = source_of(model.config.name_or_path, dataset)
    data = split(blocks, training.seed)
    callback = callback_of(growth, training.seed, training.half_of(len(data[0])))
    twin = copy.deepcopy(model) if growth.compare else None
    before = outcome.size_of(patch_model(model))
    grown_base = Path(training.resume_from_checkpoint or "", GROWN_BASE)
    if training.resume_from_checkpoint and grown_base.exists():  # the rest of that checkpoint is adapters
        model = AutoModelForCausalLM.from_pretrained(grown_base)
    trainer = make_trainer(model, tokenizer, data, training, lora_rank, callback)
    try:
        seconds = train(trainer) - sum(sum(report.seconds.values()) for report in callback.reports)
    except RuntimeError as error:
        if trainer.state.global_step < trainer.state.max_steps or callback.reports:
            raise
        save(trainer, lora_rank)  # it never grew, and yet is trained
        raise ValueError(f"{error} It is saved in {training.output_dir}.") from error
    save(trainer, lora_rank)
    output, first = Path(training.output_dir), trainer.is_world_process_zero()
    difference = reloaded_difference(trainer.model, data[1].blocks[:2], output) if first else 0.0
    after = outcome.size_of(trainer.model)
    figures = outcome.figures(source, trainer.state.log_history, None, before, after, seconds, difference)
    if first:
        outcome.write(figures, output)
        if callback.reports and outcome.drawable():  # a resumed run may have grown before it stopped
            save_report(callback.reports, output / outcome.REPORT, trainer.state.log_history)
    if twin is not None:
        plain_training = copy.copy(training)
        plain_training.resume_from_checkpoint, plain_training.report_to = None, []
        plain_training.save_strategy = "no"
        plain_training.eval_on_start = training.eval_strategy != "no"
        plain = make_trainer(twin, tokenizer, data, plain_training, lora_rank)
        train(plain)
        history = plain.state.log_history
        figures = outcome.figures(source, trainer.state.log_history, history, before, after, seconds, difference)
        if first:
            outcome.write(figures, output)
    if first:
        print(outcome.summary(figures, output))
    if difference > 1e-5 and trainer.model.dtype == torch.float32:
        raise RuntimeError("The reloaded model computes something else: this is a bug, please report it.")
    return figures


class _Help(argparse.ArgumentDefaultsHelpFormatter, argparse.RawDescriptionHelpFormatter):
    """The text as it stands, and each option's default."""


def main(words: list[str], usage: str, description: str | None = None) -> dict:
    """Read a command line of options, `--model`, `--dataset` and `--output_dir` among them, and run it.

    Returns:
        What `figures.json` holds.

    Raises:
        SystemExit: an option is unknown, or out of its range; that is told on standard error.
        ValueError, ImportError: no such model or text, or they do not fit each other.
    """
    groups = (ModelArguments, TextArguments, GrowthArguments, FinetuneArguments)
    parser = HfArgumentParser(groups, description=description, formatter_class=_Help, usage=usage)
    try:
        *parsed, unknown = parser.parse_args_into_dataclasses(
            words, return_remaining_strings=True, look_for_args_file=False
        )
        chosen, text, growth, training = parsed
        callback_of(growth, seed=0, half=1)  # wrong values are told before anything is loaded
    except ValueError as error:
        parser.error(str(error))
    if unknown:
        parser.error(f"unknown: {' '.join(unknown)}. --help lists the options; those of Trainer are at {TRAINER_DOCS}")
    if chosen.lora_rank and find_spec("peft") is None:
        parser.error("--lora_rank trains adapters of peft: pip install peft.")
    transformers_logging.disable_progress_bar()
    with training.main_process_first():  # one reads, the others find it in the cache
        texts = load_texts(text.dataset)
    model, tokenizer = load_growable(chosen.model, causal=True), load_tokenizer(chosen.model)
    check_length(text.block_size, model)
    blocks = blocks_of(texts, tokenizer, text.block_size)
    check_tokens(blocks, model)
    return run(model, tokenizer, blocks, text.dataset, growth, training, chosen.lora_rank)
