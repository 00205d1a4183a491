"""What the commands that read data do: fine-tune by TRL's SFTTrainer with growth, measure, and race."""

import logging
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from datasets import logging as datasets_logging
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel, TrainerCallback
from trl.trainer.utils import get_peft_config, get_quantization_config

from ..grow.growth import Grower
from ..growable.growths import GROWTH, growable_model, is_grown, load_growth, save_with_adapters
from ..growable.models import patch_model
from ..interop.cards import write_card
from ..interop.checkpoints import load_config, load_model, load_tokenizer
from ..report.report import GrowthReport
from .comparison import Race
from .data import Prepared, draw_batches, first_rows, load_data, prepare_rows
from .methods import METHODS, Budget, choose_rate, prepare_model
from .quantized import is_quantized, move_to_device
from .race import run_race
from .recipe import Recipe
from .sft import make_sft_loss, make_trainer, save_model
from .trainer import GrowthCallback

BUDGET = "2%"  # of a training or a race, unless the options say
_HALF_WAY = [1]  # stands for the middle of a training, of whatever length
_SPARE = 16  # times the rows to measure on: packing leaves fewer rows than it gets
# Options that do not go with adapters of a budget.
_FULL_ONLY = ("qk_dims", "v_dims", "grow_steps", "grow_every", "grow_at", "max_growths")


class FinetuneGrowth(GrowthCallback):
    """Growth, by default half-way."""

    def on_train_begin(self, args, state, control, **kwargs):
        """Find the middle of the training, and check that growth will be possible."""
        if self.steps is _HALF_WAY:
            self.steps = [max(state.max_steps // 2, 1)]
        super().on_train_begin(args, state, control, **kwargs)


def check_recipe(recipe: Recipe) -> FinetuneGrowth | None:
    """Check the options of a fine-tuning before anything is loaded; returns what grows on the way, if anything does.

    Raises:
        ValueError: options exclude each other, or a value is out of its range.
    """
    growth = recipe.growth
    if growth.method != "full":
        _check_adapters(recipe, f"--method {growth.method}")
    if growth.method != "full" or growth.max_growths == 0:
        return None
    untimed = growth.grow_steps is None and growth.grow_every is None and growth.grow_at is None
    return FinetuneGrowth(
        recipe.growth_config(BUDGET),
        steps=_HALF_WAY if untimed else growth.grow_steps,
        every=growth.grow_every,
        at=growth.grow_at,
        batches=growth.growth_batches,
        max_growths=growth.max_growths,
    )


def _check_adapters(recipe: Recipe, name: str) -> None:
    given = [option for option in _FULL_ONLY if getattr(recipe.growth, option, None)] + [
        "use_peft"
    ] * recipe.model.use_peft
    if given:
        raise ValueError(f"{name} trains what a --budget adds at the start: leave out --{', --'.join(given)}.")


def read_rows(recipe: Recipe, count: int | None = None) -> tuple[Prepared, PreTrainedConfig, Any]:
    """Rows to train on and held-out ones, of `count` rows of data or all, and the config and tokenizer of the model.

    Raises:
        ValueError: the data cannot be read, or model, tokenizer and data do not fit each other.
    """
    datasets_logging.set_verbosity(logging.CRITICAL)  # its errors are raised as well
    name, training, revision = recipe.model_name, recipe.training, recipe.model.model_revision
    config, tokenizer = load_config(name, revision=revision), load_tokenizer(name, revision=revision)
    longest = getattr(config.get_text_config(), "max_position_embeddings", None) or sys.maxsize
    if training.max_length == type(training).max_length:  # TRL's default: nobody chose it
        training.max_length = min(training.max_length or longest, longest)
    if (training.max_length or 0) > longest:
        raise ValueError(f"This model reads {longest:,} tokens at once: choose --max_length {longest} or less.")
    try:
        data, test = load_data(recipe)
        if count:
            data = first_rows(data, count, training.seed)
        rows = prepare_rows(data, test, tokenizer, training)
    except Exception as error:
        cause = error.__cause__ or error  # datasets wraps what its readers say
        reason = f"{type(cause).__name__}: {str(cause) or 'there are no rows'}"
        if isinstance(cause, KeyError):
            reason += "; see --dataset_text_field, --dataset_train_split and --dataset_test_split"
        raise ValueError(f"{recipe.dataset} cannot be read by TRL. {reason}") from error
    largest = max(map(max, rows.test["input_ids"]))
    if largest >= config.get_text_config().vocab_size:
        raise ValueError(
            f"The tokenizer has a token {largest:,}, which the model does not know: save the model's own tokenizer in "
            "its folder."
        )
    return rows, config, tokenizer


def _load_model(recipe: Recipe, dtype: str, dense: bool = False) -> PreTrainedModel:
    """The patched model, in a precision unless the recipe names one; `dense` quantizes nothing."""
    chosen = recipe.model
    model = load_model(
        recipe.model_name,
        True,
        chosen.model_revision,
        dtype=chosen.dtype or dtype,
        attn_implementation=chosen.attn_implementation,
        quantization_config=None if dense else get_quantization_config(chosen),
    )
    return patch_model(model)


def prepare_growth(recipe: Recipe) -> tuple[Grower, list[dict], Any]:
    """A Grower of the recipe's model, batches of its data on the model's device, and its tokenizer.

    Raises:
        ValueError: options, model and data do not fit each other.
    """
    growth_config, training, count = recipe.growth_config("1%"), recipe.training, recipe.growth.growth_batches
    rows, _, tokenizer = read_rows(recipe, _SPARE * count * training.per_device_train_batch_size)
    model: Any = _load_model(recipe, "auto")
    grower = Grower(model, growth_config)  # which refuses quantized weights
    grower.loss = make_sft_loss(model.to(training.device), tokenizer, training)
    return grower, draw_batches(rows, training, count, training.seed), tokenizer


def race_recipe(recipe: Recipe, say: Callable[[str], object] = print) -> Race:
    """The race of LoRA, growth and both on the recipe's model and data; `say` gets the number of steps.

    Raises:
        ValueError: options, model and data do not fit each other.
    """
    _check_adapters(recipe, "A race")
    rows, _, tokenizer = read_rows(recipe)
    return run_race(
        partial(_load_model, recipe, "float32"),
        tokenizer,
        rows,
        recipe.training,
        budget=recipe.growth_config(BUDGET).budget or 0,
        steps=recipe.growth.steps,
        seeds=recipe.growth.seeds,
        growth_batches=recipe.growth.growth_batches,
        say=say,
    )


def finetune(recipe: Recipe) -> dict:
    """Train and save a recipe's model; returns figures for JSON, with a `summary` in words.

    Raises:
        ValueError: options, model and data do not fit each other, or a growth at the start found nothing.
    """
    growth = check_recipe(recipe)
    training, method = recipe.training, METHODS[recipe.growth.method]
    rows, config, tokenizer = read_rows(recipe)
    training.learning_rate = training.learning_rate or choose_rate(method, config)
    model = _load_model(recipe, "float32")
    untrained, report = _prepare_start(recipe, model, rows, tokenizer)
    quantized = is_quantized(untrained)
    callbacks: list[TrainerCallback] = [growth] if growth else []
    peft_config = get_peft_config(recipe.model)
    trainer = make_trainer(untrained, tokenizer, rows[:2], training, peft_config, callbacks, method)
    save_with_adapters(growable_model(trainer.model))  # a growth before the training is part of a checkpoint, too
    trainer.train(resume_from_checkpoint=training.resume_from_checkpoint)
    history = trainer.state.log_history
    if trainer.state.global_step not in [entry["step"] for entry in history if "eval_loss" in entry]:
        trainer.evaluate()
    save_model(trainer, partial(_load_model, recipe, "float32", dense=True))
    reports = growth.reports if growth else [report] if report else []
    if trainer.is_world_process_zero() and is_grown(trainer.model):
        write_card(trainer.model, training.output_dir, reports, recipe.model_name, recipe.dataset, history)
    figures = {
        "held_out": [[entry["step"], entry["eval_loss"]] for entry in history if "eval_loss" in entry],
        "grown_at": [entry["step"] for entry in history if entry.get("growth_added_parameters")],
        "growths": [each.to_dict() for each in reports],
        "output": training.output_dir,
    }
    (first_step, first), (last_step, last) = figures["held_out"][0], figures["held_out"][-1]
    lines = [f"Held-out loss: {first:.4f} at step {first_step}, {last:.4f} at step {last_step}."]
    if report:
        lines.append(str(report))
    if quantized:
        lines.append("Saved with dense weights instead of the quantized ones, on which the loss was measured.")
    if growth and not figures["grown_at"]:
        lines.append("Nothing grew: no growth was due before the end, or none was found that helps on other rows.")
    return figures | {"summary": "\n".join([*lines, f"The model is in {training.output_dir}."])}


def _prepare_start(
    recipe: Recipe, model: PreTrainedModel, rows: Prepared, tokenizer
) -> tuple[nn.Module, GrowthReport | None]:
    """The model as its training starts, and the report of a growth before it."""
    training, method = recipe.training, METHODS[recipe.growth.method]
    move_to_device(model, training.device)
    if method.base:
        return model, None
    budget = Budget.near(model, recipe.growth_config(BUDGET).budget or 0)
    batches = draw_batches(rows, training, recipe.growth.growth_batches, training.seed)
    loss_of = partial(make_sft_loss, tokenizer=tokenizer, training=training)
    untrained, report = prepare_model(model, method, budget, batches, training.seed, loss_of)
    if report and not report.applied:
        raise ValueError(
            "Growth found nothing that helps on other rows of these data: train by --method lora, or let growth look "
            "at more rows, by --growth_batches."
        )
    saved = Path(training.resume_from_checkpoint or "", GROWTH)
    if training.resume_from_checkpoint and saved.is_dir():  # the rest of that checkpoint is adapters
        load_growth(untrained, saved)
    return untrained, report
