"""Fine-tuning by TRL's SFTTrainer, whose attention grows on the way.

`growattn finetune` is its command line, `run` is for models that are in memory already.
"""

import copy
import logging
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from datasets import logging as datasets_logging
from torch import nn
from tqdm.auto import tqdm
from transformers import (
    AutoModelForCausalLM,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    ProgressCallback,
)
from transformers import logging as transformers_logging
from trl.trainer.sft_trainer import SFTTrainer
from trl.trainer.utils import get_peft_config, get_quantization_config

from ..grow.provenance import origin_of
from ..growable.patching import patch_model
from ..interop.checkpoints import load_config, load_growable, load_tokenizer
from ..interop.figures import source_of
from ..report.pages import save_report
from ..report.report import GrowthReport
from ..report.words import Compared
from . import outcome
from .arguments import budget_of
from .contest import Run, paired
from .data import Data, Rows, check_length, check_tokens, first_rows, make_batches, prepare_rows, split_rows
from .judged import judged
from .methods import METHODS, Budget, choose_rate, prepare_model
from .quantized import check_adapted, is_quantized, move_to_device
from .recipe import Recipe
from .sft import make_sft_loss, make_trainer, save_model, train
from .trainer import GROWN_BASE, GrownBase, GrowthCallback, load_grown_base, note, twin_of


class MeasuredGrowth(GrowthCallback):
    """Growth, half-way if no time is given, that also notes the held-out loss right before and after."""

    trainer: SFTTrainer  # set by whoever makes it

    def on_train_begin(self, args, state, control, **kwargs):
        """Find the middle of the training, and check that growth will be possible."""
        if self.steps == [0]:
            self.steps = [max(state.max_steps // 2, 1)]
        super().on_train_begin(args, state, control, **kwargs)

    def on_step_end(self, args, state, control, **kwargs):
        """Measure, grow, measure, if it is time."""
        if self.is_time(state):
            before = self._held_out()
            super().on_step_end(args, state, control, **kwargs)
            after, due = self._held_out(), control.should_log
            report = self.reports[-1]
            measured = {outcome.BEFORE: before, outcome.AFTER: after, outcome.SECONDS: sum(report.seconds.values())}
            note(self.trainer, measured | ({outcome.FORWARD: report.forward_ratio} if report.forward_ratio else {}))
            control.should_log = due  # logging takes this back
            if state.is_world_process_zero:
                tqdm.write(f"Held-out loss {before:.4f} -> {after:.4f} at the growth.")

    def _held_out(self) -> float:
        # evaluate() would log it as one of the regular evaluations, which a plateau is read from
        twin = twin_of(self.trainer)
        loop = twin.evaluation_loop(twin.get_eval_dataloader(), "Held out", prediction_loss_only=True)
        for bar in twin.callback_handler.callbacks:
            if isinstance(bar, ProgressCallback):  # which otherwise goes on counting where this evaluation ended
                bar.on_predict(twin.args, twin.state, twin.control, metrics={})
        return (loop.metrics or {})["eval_loss"]


def callback_of(recipe: Recipe) -> MeasuredGrowth | None:
    """Make the callback that grows; None if nothing shall grow.

    Raises:
        ValueError: the arguments contradict each other, or one is out of its range.
    """
    growth, own = recipe.growth, recipe.growth.method not in ("full", "auto")
    timed = [growth.grow_steps, growth.grow_every, growth.grow_at, growth.max_growths, growth.total_budget]
    if own and any(option is not None for option in timed):
        raise ValueError(
            f"--method {growth.method} grows at the start or not at all: leave out --grow_steps, --grow_every, "
            "--grow_at, --max_growths and --total_budget, or train all weights, by --method full."
        )
    if growth.race and growth.method != "auto":
        raise ValueError("--race names a race that --method auto goes on from: add that, or leave out --race.")
    check_adapted(recipe)
    if growth.method != "full":
        check_spends(recipe, f"--method {growth.method}")
    if growth.method == "lora" and growth.compare:
        raise ValueError("--compare shows what growing gives, and --method lora grows nothing. Drop one of them.")
    half_way = growth.grow_steps is None and growth.grow_every is None and growth.grow_at is None
    if growth.compare and growth.max_growths == 0:
        raise ValueError("--compare shows what growing gives, and --max_growths 0 grows nothing. Drop one of them.")
    callback = MeasuredGrowth(
        recipe.growth_config(default="2%"),
        steps=[1] if half_way else growth.grow_steps,
        every=growth.grow_every,
        at=growth.grow_at,
        batches=growth.growth_batches,
        max_growths=growth.max_growths or None,
        total_budget=None if growth.total_budget is None else budget_of(str(growth.total_budget)),
    )
    if half_way:
        callback.steps = [0]
    return None if own or growth.max_growths == 0 else callback


def check_spends(recipe: Recipe, what: str) -> None:
    """Check that nothing but a budget says what to add.

    Raises:
        ValueError: something else does; `what` is what spends a budget.
    """
    if recipe.growth.qk_dims or recipe.growth.v_dims:
        raise ValueError(f"{what} spends a --budget: leave out --qk_dims and --v_dims.")
    if recipe.model.use_peft:
        raise ValueError(f"{what} makes adapters of its own, by the --budget: leave out --use_peft.")


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


Start = Callable[[PreTrainedModel], tuple[nn.Module, GrowthReport | None]]


def run(
    model: PreTrainedModel,
    tokenizer,
    data: tuple[Rows, Rows],
    recipe: Recipe,
    start: Start | None = None,
    verdict: str = "",
    ended: Callable[[Run], object] | None = None,
) -> dict:
    """Train with growth and save, then as others would where asked; leave pictures and figures beside the model.

    Args:
        model: a stock or grown causal LM; it is patched, and saved as a stock one if nothing grew.
        tokenizer: its own, saved beside it.
        data: rows to train on and held-out ones, as `split` gives them.
        recipe: how to train and to grow.
        start: makes the patched model ready for another method than "full", as `methods.prepare_model`.
        verdict: of a race before it.
        ended: gets what was saved gives on the held-out rows, one by one.

    Returns:
        What `figures.json` holds.

    Raises:
        ValueError: the training ended before it was time to grow, and the trained model is saved; or nothing grew at
            its start.
    """
    training, peft_config, callback = recipe.training, get_peft_config(recipe.model), callback_of(recipe)
    source, output = source_of(origin_of(model), recipe.dataset), Path(training.output_dir)
    twin = copy.deepcopy(model) if recipe.growth.compare else None
    before, dense = outcome.size_of(patch_model(model)), partial(load, recipe, dtype="float32", dense=True)
    untrained, report = (model, None) if start is None else start(model)
    if report and not report.applied:
        raise ValueError(
            "Nothing that growth could add holds on other rows of these data: train by --method lora, or let it look "
            "at more of them, by --growth_batches."
        )
    grown_base = Path(training.resume_from_checkpoint or "", GROWN_BASE)
    if training.resume_from_checkpoint and grown_base.exists():  # the rest of that checkpoint is adapters
        if start:
            load_grown_base(untrained, grown_base)
        else:
            untrained = AutoModelForCausalLM.from_pretrained(grown_base)
    method = METHODS[recipe.growth.method] if start else None
    trainer = make_trainer(untrained, tokenizer, data, training, peft_config, callback, method)
    quantized = is_quantized(untrained)
    if start and not quantized:  # whose base stays as it is
        trainer.add_callback(GrownBase())
    reports = callback.reports if callback else [report] if report else []
    try:
        seconds = train(trainer) - sum(sum(report.seconds.values()) for report in reports)
    except RuntimeError as error:
        if trainer.state.global_step < trainer.state.max_steps or reports or not callback:
            raise
        save_model(trainer, dense)  # it never grew, and yet is trained
        raise ValueError(f"{error} It is saved in {output}.") from error
    save_model(trainer, dense)
    first, after = trainer.is_world_process_zero(), outcome.size_of(trainer.model)
    after = {"cache_bytes": before["cache_bytes"]} | after  # one that did not grow is a stock model again
    own = None
    if quantized or twin is not None or ended:
        own = judged(trainer, recipe.growth.method, data[1], after["cache_bytes"])
    sample = torch.tensor(data[1][0]["input_ids"])[None]
    difference = reloaded_difference(trainer.model, sample, output) if first else 0.0
    history = trainer.state.log_history
    grew = callback or report or any(outcome.AFTER in entry for entry in history)  # it may have before it stopped
    histories = {"with_growth" if grew else "without_growth": history}
    told = partial(
        outcome.figures,
        source,
        before=before,
        after=after,
        seconds=seconds,
        difference=difference,
        race=verdict,
        saved=own.loss if own and quantized else None,
    )
    figures = told(histories, report)
    if first:
        outcome.write(figures, output)
        if reports and outcome.drawable():  # a resumed run may have grown before it stopped
            save_report(reports, output / outcome.REPORT, history, verdict=verdict)
    if own and ended:
        ended(own)
    if own and twin is not None:
        others = _compared(twin, tokenizer, data, recipe, figures)
        histories |= {name: history for name, (history, _) in others.items()}
        compared = [
            Compared(outcome.OTHERS[name], other.loss, *paired([own], [other]), other.cache)
            for name, (_, other) in others.items()
        ]
        figures = told(histories, report, compared=compared)
        if first:
            outcome.write(figures, output)
            if reports and outcome.drawable():
                save_report(reports, output / outcome.REPORT, history, compared=compared)
    if first:
        print(outcome.summary(figures, output))
    if difference > 1e-5 and model.dtype == torch.float32:
        raise RuntimeError("The reloaded model computes something else: this is a bug, please report it.")
    return figures


def _compared(twin: PreTrainedModel, tokenizer, data: tuple[Rows, Rows], recipe: Recipe, figures: dict) -> dict:
    """Train what people would do instead: LoRA with as many weights, or all weights without growth.

    Returns:
        By name the log history, and what it gave on the held-out rows.
    """
    training = copy.copy(recipe.training)
    training.resume_from_checkpoint, training.report_to, training.save_strategy = None, [], "no"
    training.eval_on_start = training.evaluates
    weights = figures["after"]["parameters"] - figures["before"]["parameters"]
    others: dict[str, PreTrainedModel] = {"lora": copy.deepcopy(twin)}
    if recipe.growth.method == "full":
        others["without_growth"] = twin
    ended, cache = {}, figures["before"]["cache_bytes"]
    for name, model in others.items():
        untrained, how, peft_config = model, copy.copy(training), get_peft_config(recipe.model)
        if name == "lora":
            patched, method = patch_model(model), METHODS["lora"]
            untrained, _ = prepare_model(patched, method, Budget.near(patched, max(weights, 1)), [], training.seed)
            how.learning_rate, peft_config = choose_rate(method, model.config), None
        other = make_trainer(untrained, tokenizer, data, how, peft_config)
        train(other)
        ended[name] = other.state.log_history, judged(other, name, data[1], cache)
    return ended


def read_all(recipe: Recipe) -> tuple[Data, PreTrainedConfig, PreTrainedTokenizerBase]:
    """Read what a recipe names but the model's weights: the data, the model's config and its tokenizer.

    Raises:
        ValueError: there is none of these, or they do not fit each other.
    """
    transformers_logging.disable_progress_bar()
    datasets_logging.set_verbosity(logging.CRITICAL)  # what it says comes again, as an error
    with recipe.training.main_process_first():  # one reads, the others find it in the cache
        data = Data(recipe)
    name, revision = recipe.name, recipe.model.model_revision
    config, tokenizer = load_config(name, revision=revision), load_tokenizer(name, revision=revision)
    check_length(recipe.training, config)
    return data, config, tokenizer


def loading_options(recipe: Recipe, **others) -> dict:
    """How a recipe wants models to be loaded: what `from_pretrained` takes, with others where it says nothing."""
    chosen = recipe.model
    options = dict(dtype=chosen.dtype, attn_implementation=chosen.attn_implementation)
    options |= dict(quantization_config=get_quantization_config(chosen))
    return others | {name: value for name, value in options.items() if value is not None}


def load(recipe: Recipe, dtype: str, dense: bool = False) -> PreTrainedModel:
    """Load the model of a recipe, patched, in a precision where the recipe names none; `dense` quantizes nothing."""
    options = loading_options(recipe, dtype=dtype)
    if dense:
        options.pop("quantization_config", None)
    return patch_model(load_growable(recipe.name, True, recipe.model.model_revision, **options))


def main(recipe: Recipe, verdict: str = "", ended: Callable[[Run], object] | None = None) -> dict:
    """Read the data of a recipe, then its model, and `run` it; `verdict` is what a race before it told.

    Raises:
        ValueError, ImportError: no such model or data, or they do not fit each other.
    """
    callback, training = callback_of(recipe), recipe.training
    data, config, tokenizer = read_all(recipe)
    made = prepare_rows(data.train, data.test, tokenizer, training)
    rows = split_rows(made, training)
    check_tokens(rows[1]["input_ids"], config)
    method, start = METHODS[recipe.growth.method], None
    training.learning_rate = training.learning_rate or choose_rate(method, config)
    model: Any = load(recipe, dtype="float32")
    if callback:
        callback.check_budgets(model)
    if not method.base:
        budget = Budget.near(model, recipe.growth_config(default="2%").budget or 0)
        move_to_device(model, training.device)
        batches = []
        if method.growth:
            wanted = training.per_device_train_batch_size * recipe.growth.growth_batches
            batches = make_batches(first_rows(rows[0], wanted, training.seed), made.collate, training)
        loss_of = partial(make_sft_loss, tokenizer=tokenizer, training=training)
        start = partial(
            prepare_model, method=method, budget=budget, batches=batches, seed=training.seed, loss_of=loss_of
        )
    return run(model, tokenizer, rows, recipe, start, verdict, ended)
