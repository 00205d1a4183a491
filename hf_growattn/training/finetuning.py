"""What the commands that read data do: fine-tune by TRL's SFTTrainer with growth, measure, and race."""

import sys
import tempfile
from collections.abc import Callable
from dataclasses import fields, replace
from functools import partial
from math import prod
from pathlib import Path
from typing import Any

from peft import PeftModel
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel
from trl.trainer.sft_trainer import SFTTrainer
from trl.trainer.utils import get_peft_config, get_quantization_config

from ..grow.growth import Grower
from ..grow.plan import layers_to_grow
from ..growable.growths import GROWTH, is_grown, load_growth
from ..growable.models import patch_model, unpatch_model
from ..interop.cards import write_card
from ..interop.checkpoints import load_config, load_model, load_tokenizer
from ..report.report import GrowthReport
from . import methods
from .callback import GrowthCallback
from .comparison import Race
from .data import Prepared, first_rows, load_data, prepare_rows
from .options import UsageError
from .race import run_race
from .recipe import Recipe
from .schedule import Schedule

_SPARE = 16  # times the rows to measure on: packing leaves fewer rows than it gets
_AT_START = ("method", "budget", "growth_batches")  # options of a growth before the training


def make_schedule(recipe: Recipe) -> Schedule | None:
    """When a fine-tuning grows, if it does; nothing is loaded."""
    options = recipe.growth
    if options.method != "full":
        others = [item for item in fields(options) if item.name not in _AT_START]
        given = [f"--{item.name}" for item in others if getattr(options, item.name) != item.default]
        given += ["--use_peft"] * recipe.model.use_peft
        if given:
            raise UsageError(
                f"--method {options.method} trains what a --budget adds at the start: leave out {', '.join(given)}."
            )
        return None
    if options.max_growths == 0:
        return None
    recipe.growth_config()  # which refuses what cannot be grown
    return Schedule(options.grow_at, options.grow_steps, options.growth_batches, options.max_growths)


def read_rows(recipe: Recipe, count: int | None = None) -> tuple[Prepared, PreTrainedConfig]:
    """Rows to train on and held-out ones, of `count` rows of data or all, and the config of the model."""
    name, training, revision = recipe.model_name, recipe.training, recipe.model.model_revision
    config, tokenizer = load_config(name, revision=revision), load_tokenizer(name, revision=revision)
    longest = getattr(config.get_text_config(), "max_position_embeddings", None) or sys.maxsize
    if training.max_length == type(training).max_length:  # TRL's default: nobody chose it
        training.max_length = min(training.max_length or longest, longest)
    if training.max_length is not None and not 2 <= training.max_length <= longest:
        raise ValueError(f"This model reads {longest:,} tokens at once: choose --max_length from 2 to {longest}.")
    try:
        data, test = load_data(recipe)
        if count:
            data = first_rows(data, count, training.seed)
        rows = prepare_rows(data, test, tokenizer, training)
    except Exception as error:
        cause = error.__cause__ or error  # datasets wraps what its readers say
        raise ValueError(
            f"{recipe.dataset} cannot be read by TRL. {type(cause).__name__}: {str(cause) or 'there are no rows'} "
            "(See TRL's --dataset_text_field, --dataset_train_split, --dataset_test_split, --chat_template_path and "
            "--eos_token.)"
        ) from error
    largest = max(map(max, rows.test["input_ids"]))
    if largest >= config.get_text_config().vocab_size:
        raise ValueError(
            f"The tokenizer has a token {largest:,}, which the model does not know: save the model's own tokenizer in "
            "its folder."
        )
    return rows, config


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


def prepare_growth(recipe: Recipe) -> tuple[Grower, list[dict]]:
    """A Grower of the recipe's model, and batches of its data on the model's device."""
    growth_config, training, count = recipe.growth_config(), recipe.training, recipe.growth.growth_batches
    rows, _ = read_rows(recipe, _SPARE * count * training.per_device_train_batch_size)
    model: Any = _load_model(recipe, "auto")
    grower = Grower(model, growth_config)  # which refuses quantized weights
    grower.loss = methods.make_sft_loss(model.to(training.device), rows)
    batches = rows.draw_batches(count, training.seed)
    print(f"Measuring on {len(batches)} batches of {recipe.dataset}.")
    return grower, batches


def race_recipe(recipe: Recipe) -> Race:
    """The race of LoRA, growth and both on the recipe's model and data."""
    options = replace(recipe.growth, budget=recipe.growth_config().budget)
    rows, _ = read_rows(recipe)
    return run_race(partial(_load_model, recipe, "float32"), rows, options)


def finetune(recipe: Recipe) -> dict:
    """Train and save a recipe's model; returns figures for JSON, with a `summary` in words."""
    schedule = make_schedule(recipe)
    training, method = recipe.training, methods.METHODS.get(recipe.growth.method)
    rows, config = read_rows(recipe)
    width = config.get_text_config().hidden_size
    between = prod(methods.RATES) ** 0.5 / width  # the rates of a race
    training.learning_rate = training.learning_rate or (between if method else type(training).learning_rate)
    model: Any = methods.move_to_device(_load_model(recipe, "float32"), training.device)
    report = None
    if method:
        model, report = _prepare_start(recipe, method, model, rows)
    if schedule:
        layers_to_grow(model, recipe.growth_config())  # which refuses a budget that buys nothing, before TRL begins
    quantized = methods.is_quantized(model)
    share = method.grown_share(width) if method else 1.0
    trainer = methods.make_trainer(model, rows, share, peft_config=get_peft_config(recipe.model))
    growth = GrowthCallback(trainer, recipe.growth_config(), **vars(schedule)) if schedule else None
    if growth:
        trainer.add_callback(growth)
    trainer.train(resume_from_checkpoint=training.resume_from_checkpoint)
    history = trainer.state.log_history
    if trainer.state.global_step not in [entry["step"] for entry in history if "eval_loss" in entry]:
        trainer.evaluate()
    save_model(trainer, partial(_load_model, recipe, "float32", dense=True))
    reports = growth.reports if growth else [report] if report else []
    saved: Any = trainer.model
    if trainer.is_world_process_zero() and is_grown(saved):
        write_card(saved, training.output_dir, reports, recipe.model_name, recipe.dataset, history)
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
    recipe: Recipe, method: methods.Method, model: Any, rows: Prepared
) -> tuple[nn.Module, GrowthReport | None]:
    """The model as its training by a method starts, and the report of a growth before it."""
    training = recipe.training
    rank = methods.choose_rank(model, recipe.growth_config().budget or 0)
    batches = rows.draw_batches(recipe.growth.growth_batches, training.seed)
    loss_of = partial(methods.make_sft_loss, rows=rows)
    untrained, report = methods.prepare_model(model, method, rank, batches, training.seed, loss_of)
    if report and not report.kept:
        raise ValueError(
            "Growth found nothing that helps on other rows of these data: train by --method lora, or let growth look "
            "at more rows, by --growth_batches."
        )
    saved = Path(training.resume_from_checkpoint or "", GROWTH)
    if training.resume_from_checkpoint and saved.is_dir():  # the rest of that checkpoint is adapters
        load_growth(untrained, saved)
    return untrained, report


def save_model(trainer: SFTTrainer, load_dense: Callable[[], PreTrainedModel]) -> None:
    """Save the model, adapters merged, as a stock one if nothing grew, and the tokenizer; every process calls this.

    Adapters of a quantized model are merged into the patched model that `load_dense` gives.
    """
    model: Any = trainer.accelerator.unwrap_model(trainer.model, keep_fp32_wrapper=False, keep_torch_compile=False)
    if methods.is_quantized(model):
        with tempfile.TemporaryDirectory() as folder:
            model.save_pretrained(folder, save_embedding_layers=False)
            model, growth = load_dense(), Path(folder, GROWTH)
            if growth.is_dir():
                load_growth(model, growth)
            model = PeftModel.from_pretrained(model, folder)
    if hasattr(model, "merge_and_unload"):
        model = model.merge_and_unload()
    model.__dict__.pop("forward", None)  # TRL's own, which computes a loss without logits
    trainer.model = model if is_grown(model) else unpatch_model(model)
    trainer.save_model()
