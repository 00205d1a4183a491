"""What the commands that read data do: fine-tune by TRL's SFTTrainer with growth, measure, and race."""

import logging
from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any, cast

from datasets import logging as datasets_logging
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers import logging as transformers_logging
from trl.trainer.sft_trainer import SFTTrainer
from trl.trainer.utils import get_peft_config, get_quantization_config

from ..grow.growth import Grower
from ..grow.plan import check_budget
from ..growable.models import attentions, cache_bytes, is_grown
from ..growable.patching import patch_model
from ..interop.cards import save_figures
from ..interop.checkpoints import load_config, load_growable, load_tokenizer
from ..report.pages import save_report
from ..report.report import GrowthReport
from .comparison import Race
from .data import (
    Data,
    Prepared,
    check_length,
    check_tokens,
    draw_batches,
    explain_errors,
    first_rows,
    load_data,
    make_batches,
    prepare_rows,
    split_rows,
)
from .methods import METHODS, Budget, choose_rate, prepare_model
from .options import parse_budget
from .quantized import is_quantized, move_to_device
from .race import measure_rows, run_race
from .recipe import Recipe
from .sft import make_sft_loss, make_trainer, save_model, train
from .trainer import GROWN_BASE, GrownBase, GrowthCallback, load_grown_base

BUDGET = "2%"  # of a training or a race, unless the options say


class FinetuneGrowth(GrowthCallback):
    """Growth, by default half-way; a training that ends before its growth is due is no error."""

    half_way = False

    def on_train_begin(self, args, state, control, **kwargs):
        """Find the middle of the training, and check that growth will be possible."""
        if self.half_way:
            self.steps = [max(state.max_steps // 2, 1)]
        super().on_train_begin(args, state, control, **kwargs)

    def on_train_end(self, args, state, control, **kwargs):
        """Leave it to the summary to say that nothing grew."""


def check_recipe(recipe: Recipe) -> None:
    """Check the options of a fine-tuning before anything is loaded.

    Raises:
        ValueError: options exclude each other, or a value is out of its range.
    """
    growth, model = recipe.growth, recipe.model
    timed = [growth.grow_steps, growth.grow_every, growth.grow_at, growth.max_growths, growth.total_budget]
    if growth.method != "full":
        if any(option is not None for option in timed):
            raise ValueError(
                f"--method {growth.method} grows at the start or not at all: leave out --grow_steps, --grow_every, "
                "--grow_at, --max_growths and --total_budget, or train all weights, by --method full."
            )
        _check_budget_alone(recipe, f"--method {growth.method}")
    adapters = growth.method in ("growth", "lora") or (model.use_peft and growth.max_growths == 0)
    if (model.load_in_4bit or model.load_in_8bit) and not adapters:
        raise ValueError(
            f"Quantized weights can neither train nor grow, as --method {growth.method} would have them. Choose "
            "--method growth or lora, which train new weights next to them."
        )
    _make_callback(recipe)


def _check_budget_alone(recipe: Recipe, name: str) -> None:
    if recipe.growth.qk_dims or recipe.growth.v_dims:
        raise ValueError(f"{name} spends a --budget: leave out --qk_dims and --v_dims.")
    if recipe.model.use_peft:
        raise ValueError(f"{name} makes adapters of its own, by the --budget: leave out --use_peft.")


def _make_callback(recipe: Recipe) -> FinetuneGrowth | None:
    """The callback that grows on the way; None for a method or recipe without one."""
    growth = recipe.growth
    half_way = growth.grow_steps is None and growth.grow_every is None and growth.grow_at is None
    callback = FinetuneGrowth(
        recipe.growth_config(BUDGET),
        steps=[1] if half_way else growth.grow_steps,
        every=growth.grow_every,
        at=growth.grow_at,
        batches=growth.growth_batches,
        max_growths=growth.max_growths or None,
        total_budget=None if growth.total_budget is None else parse_budget(str(growth.total_budget)),
    )
    callback.half_way = half_way
    return None if growth.method != "full" or growth.max_growths == 0 else callback


def _read(recipe: Recipe) -> tuple[Data, PreTrainedConfig, Any]:
    """The data, and the config and the tokenizer of the model."""
    transformers_logging.disable_progress_bar()
    datasets_logging.set_verbosity(logging.CRITICAL)  # its errors are raised as well
    with recipe.training.main_process_first():  # one reads, the others find it in the cache
        data = load_data(recipe)
    name, revision = recipe.model_name, recipe.model.model_revision
    config, tokenizer = load_config(name, revision=revision), load_tokenizer(name, revision=revision)
    check_length(recipe.training, config)
    return data, config, tokenizer


def read_rows(recipe: Recipe) -> tuple[Prepared, PreTrainedConfig, Any]:
    """Rows to train on and held-out ones, and the config and the tokenizer of the model."""
    data, config, tokenizer = _read(recipe)
    with explain_errors(recipe.dataset):
        prepared = prepare_rows(data.train, data.test, tokenizer, recipe.training)
    train_rows, held_out = split_rows(prepared, recipe.training)
    check_tokens(held_out["input_ids"], config)
    return Prepared(train_rows, held_out, prepared.collate), config, tokenizer


def _load_model(recipe: Recipe, dtype: str, dense: bool = False) -> PreTrainedModel:
    """The patched model, in a precision unless the recipe names one; `dense` quantizes nothing."""
    chosen = recipe.model
    options: dict[str, Any] = {"dtype": chosen.dtype or dtype}
    if chosen.attn_implementation:
        options["attn_implementation"] = chosen.attn_implementation
    quantization = get_quantization_config(chosen)
    if quantization and not dense:
        options["quantization_config"] = quantization
    return patch_model(load_growable(recipe.model_name, True, chosen.model_revision, **options))


def prepare_growth(recipe: Recipe) -> tuple[Grower, list[dict], Any]:
    """A Grower of the recipe's model, batches of its data on the model's device, and its tokenizer.

    Raises:
        ValueError: options, model and data do not fit each other.
    """
    growth_config = recipe.growth_config("1%")
    data, config, tokenizer = _read(recipe)
    with explain_errors(recipe.dataset):
        batches, ids = draw_batches(data, tokenizer, recipe.training, recipe.growth.growth_batches)
    check_tokens(ids, config)
    model: Any = _load_model(recipe, "auto")
    check_budget(growth_config, attentions(model), model.num_parameters())
    grower = Grower(model, growth_config)  # which refuses quantized weights
    grower.loss = make_sft_loss(model.to(recipe.training.device), tokenizer, recipe.training)
    return grower, batches, tokenizer


def race_recipe(recipe: Recipe, say: Callable[[str], object] = print) -> Race:
    """The race of LoRA, growth and both on the recipe's model and data; `say` gets the number of steps.

    Raises:
        ValueError: options, model and data do not fit each other.
    """
    _check_budget_alone(recipe, "A race")
    budget = recipe.growth_config(BUDGET).budget
    prepared, _, tokenizer = read_rows(recipe)
    return run_race(
        partial(_load_model, recipe, "float32"),
        tokenizer,
        prepared,
        recipe.training,
        budget=budget or 0,
        steps=recipe.race.steps,
        seeds=recipe.race.seeds,
        growth_batches=recipe.growth.growth_batches,
        say=say,
    )


def finetune(recipe: Recipe) -> dict:
    """Train and save a recipe's model; returns figures for JSON, with a `summary` in words.

    Raises:
        ValueError: options, model and data do not fit each other, or a growth at the start found nothing.
    """
    check_recipe(recipe)
    training, method = recipe.training, METHODS[recipe.growth.method]
    prepared, config, tokenizer = read_rows(recipe)
    training.learning_rate = training.learning_rate or choose_rate(method, config)
    model = _load_model(recipe, "float32")
    before = {"parameters": model.num_parameters(), "cache_bytes": cache_bytes(model)}
    callback = _make_callback(recipe)
    if callback:
        callback.check_budgets(model)
    untrained, report = _prepare_start(recipe, model, prepared, tokenizer)
    rows: tuple[Any, Any] = prepared.train, prepared.test
    trained_by = None if method.base else method
    trainer = make_trainer(untrained, tokenizer, rows, training, get_peft_config(recipe.model), callback, trained_by)
    quantized = is_quantized(untrained)
    if not method.base and not quantized:  # a quantized base stays as it is
        trainer.add_callback(GrownBase())
    train(trainer)
    save_model(trainer, partial(_load_model, recipe, "float32", dense=True))
    reports = callback.reports if callback else [report] if report else []
    figures = _compare_sizes(trainer, before) | {
        "method": recipe.growth.method,
        "output": training.output_dir,
        "growths": [each.to_dict() for each in reports],
    }
    if quantized:  # what was saved is not what was trained
        trained: Any = trainer.model
        nats, counts = measure_rows(trained, rows[1], prepared.collate, training)
        figures["saved_loss"] = sum(nats) / sum(counts)
    figures["summary"] = _summarize(figures, callback)
    if trainer.is_world_process_zero():
        _save_pages(recipe, reports, trainer.state.log_history)
    return figures


def _prepare_start(
    recipe: Recipe, model: PreTrainedModel, prepared: Prepared, tokenizer
) -> tuple[nn.Module, GrowthReport | None]:
    """The model as its training starts, and the report of a growth before it."""
    training, method, report = recipe.training, METHODS[recipe.growth.method], None
    untrained: nn.Module = model
    if not method.base:
        budget = Budget.near(model, recipe.growth_config(BUDGET).budget or 0)
        move_to_device(model, training.device)
        batches = []
        if method.growth:
            count = training.per_device_train_batch_size * recipe.growth.growth_batches
            batches = make_batches(first_rows(prepared.train, count, training.seed), prepared.collate, training)
        loss_of = partial(make_sft_loss, tokenizer=tokenizer, training=training)
        untrained, report = prepare_model(model, method, budget, batches, training.seed, loss_of)
    if report and not report.applied:
        raise ValueError(
            "Growth found nothing that helps on other rows of these data: train by --method lora, or let growth look "
            "at more rows, by --growth_batches."
        )
    grown_base = Path(training.resume_from_checkpoint or "", GROWN_BASE)
    if training.resume_from_checkpoint and grown_base.exists():  # the rest of that checkpoint is adapters
        if method.base:
            return AutoModelForCausalLM.from_pretrained(grown_base), None
        load_grown_base(untrained, grown_base)
    return untrained, report


def _compare_sizes(trainer: SFTTrainer, before: dict) -> dict:
    """Losses by step, and the size of the model before and after."""
    history, model = trainer.state.log_history, cast(PreTrainedModel, trainer.model)
    cache = cache_bytes(model) if is_grown(model) else before["cache_bytes"]
    return {
        "held_out": [[entry["step"], entry["eval_loss"]] for entry in history if "eval_loss" in entry],
        "grown_at": [entry["step"] for entry in history if "growth_added_parameters" in entry],
        "before": before,
        "after": {"parameters": model.num_parameters(), "cache_bytes": cache},
    }


def _summarize(figures: dict, callback: FinetuneGrowth | None) -> str:
    """Losses, costs, and where the model is."""
    (first_step, first), (last_step, last) = figures["held_out"][0], figures["held_out"][-1]
    lines = [f"Held-out loss: {first:.4f} at step {first_step}, {last:.4f} at step {last_step}."]
    if "saved_loss" in figures:
        lines.append(f"Saved with dense weights instead of quantized ones: held-out loss {figures['saved_loss']:.4f}.")
    before, after = figures["before"], figures["after"]
    added = after["parameters"] - before["parameters"]
    if added:
        old, new = before["cache_bytes"], after["cache_bytes"]
        lines.append(f"Weights: {added:,} added ({added / before['parameters']:+.1%}).")
        lines.append(f"KV cache: {old:,} -> {new:,} bytes a token ({new / old - 1:+.1%}).")
    elif figures["grown_at"]:
        lines.append("Nothing grew: no growth was found that helps on other rows.")
    elif callback:
        lines.append("Nothing grew: the training ended before a growth was due. Choose an earlier time to grow.")
    lines.append(f"The model is in {figures['output']}.")
    return "\n".join(lines)


def _save_pages(recipe: Recipe, reports: list[GrowthReport], history: list[dict]) -> None:
    """Leave the figures of a model card and the report next to the model."""
    output, names = Path(recipe.training.output_dir), {"model": recipe.model_name, "dataset": recipe.dataset}
    save_figures(output, reports, **names, log_history=history)
    if reports and find_spec("matplotlib"):
        save_report(reports, output / "report.html", history, model=recipe.model_name, data=recipe.dataset)
