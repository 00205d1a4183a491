"""What `growattn measure` and `race` run on the model and the data of a `Recipe`."""

from functools import partial

from transformers import PreTrainedModel
from trl.trainer.utils import get_quantization_config

from ..grow.growth import Grower
from ..growable.models import patch_model
from ..interop.checkpoints import load_model
from ..report.comparison import RaceResult
from ..training.methods import move_to_device
from ..training.race import race
from .data import Recipe, read_rows

_SPARE = 16  # times the rows to measure on: packing leaves fewer rows than it gets


def _load_model(recipe: Recipe, dtype: str) -> PreTrainedModel:
    """The patched model, in a precision unless the recipe names one."""
    chosen = recipe.model
    model = load_model(
        recipe.model_name,
        True,
        chosen.model_revision,
        dtype=chosen.dtype or dtype,
        attn_implementation=chosen.attn_implementation,
        quantization_config=get_quantization_config(chosen),
    )
    return patch_model(model)


def prepare_growth(recipe: Recipe) -> tuple[Grower, list[dict]]:
    """A Grower of the recipe's model, and batches of its data."""
    growth_config, training, count = recipe.growth_config(), recipe.training, recipe.growth.growth_batches
    rows = read_rows(recipe, _SPARE * count * training.per_device_train_batch_size)
    model = move_to_device(_load_model(recipe, "auto"), training.device)
    batches = rows.draw_batches(count, training.seed)
    print(f"Measuring on {len(batches)} batches of {recipe.dataset}.")
    return Grower(model, growth_config), batches


def race_recipe(recipe: Recipe) -> RaceResult:
    """The race of LoRA, growth and a mix on the recipe's model and data, read as batches of text."""
    options, training, rows = recipe.growth, recipe.training, read_rows(recipe)
    return race(
        partial(_load_model, recipe, "float32"),
        rows.draw_batches(options.steps * options.seeds, training.seed),
        rows.held_out_batches(),
        budget=recipe.growth_config().budget or 0,
        steps=options.steps,
        seeds=options.seeds,
        growth_batches=options.growth_batches,
        output=training.output_dir,
    )


def training_code(result: RaceResult, recipe: Recipe) -> str:
    """Lines of Python that train by the winner of a race, on your `rows`; growth reads some `batches` of them first."""
    method, training = result.method, recipe.training
    options = f'"DIR", lr_scheduler_type="cosine", warmup_steps=0.1, max_length={training.max_length}'
    if training.packing:
        options += f', packing=True, packing_strategy="{training.packing_strategy}"'
    return f"""import torch
from hf_growattn import Method
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import SFTConfig, SFTTrainer
# Name your data: rows, as SFTTrainer takes them, and batches, some tensors of their input_ids, for growth to read.
model = AutoModelForCausalLM.from_pretrained({recipe.model_name!r}, dtype="float32")
method = Method("{method.name}", budget={method.budget}, learning_rate={method.learning_rate:.2g})
model, parameter_groups = method.prepare(model, batches)
tokenizer = AutoTokenizer.from_pretrained({recipe.model_name!r})
optimizers = (torch.optim.AdamW(parameter_groups), None)
arguments = SFTConfig({options})
trainer = SFTTrainer(model, arguments, train_dataset=rows, processing_class=tokenizer, optimizers=optimizers)
trainer.train()"""
