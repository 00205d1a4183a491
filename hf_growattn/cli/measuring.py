"""What `growattn measure` and `race` run on a model and text for it."""

from functools import partial
from typing import Any

from accelerate import Accelerator
from transformers import BitsAndBytesConfig, PreTrainedModel

from ..grow.growth import Grower
from ..grow.plan import GrowthConfig
from ..growable.models import patch_model
from ..interop.checkpoints import load_model
from ..report.comparison import RaceResult
from ..training.methods import move_to_device
from ..training.race import race
from .data import SEED, TextData, read_rows

_SPARE = 16  # times the rows to measure on: packing leaves fewer rows than it gets


def _load_model(data: TextData, dtype: str, load_in_4bit: bool) -> PreTrainedModel:
    quantization = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4") if load_in_4bit else None
    return patch_model(load_model(data.model, True, dtype=dtype, quantization_config=quantization))


def prepare_growth(
    data: TextData, budget: int | float, growth_batches: int, dtype: str, load_in_4bit: bool = False
) -> tuple[Grower, list[dict]]:
    """A Grower of the model, and batches of the data."""
    rows = read_rows(data, _SPARE * growth_batches * data.batch_size)
    model = move_to_device(_load_model(data, dtype, load_in_4bit), Accelerator().device)
    batches = rows.draw_batches(growth_batches)
    print(f"Measuring on {len(batches)} batches of {data.title}.")
    return Grower(model, GrowthConfig(budget=budget, seed=SEED)), batches


def race_on_text(
    data: TextData, dtype: str, load_in_4bit: bool, steps: int, seeds: int, **options: Any
) -> tuple[RaceResult, str]:
    """The race of LoRA, growth and a mix on text, and Python that trains by the winner.

    Other options are those of `race`.
    """
    rows = read_rows(data)
    make_model = partial(_load_model, data, dtype, load_in_4bit)
    batches, held_out = rows.draw_batches(steps * seeds), rows.held_out_batches()
    result = race(make_model, batches, held_out, steps=steps, seeds=seeds, **options)
    return result, training_code(result, rows.data)


def training_code(result: RaceResult, data: TextData) -> str:
    """Lines of Python that train by the winner of a race, on your `rows`; growth reads some `batches` of them first."""
    method = result.method
    options = f'"DIR", lr_scheduler_type="cosine", warmup_steps=0.1, max_length={data.max_length}'
    if data.is_plain_text:
        options += ', packing=True, packing_strategy="wrapped"'
    grows = method.name != "lora"
    batches = "; and batches, a list of tensors of input_ids, which growth reads" * grows
    return f"""import torch
from hf_growattn import Method
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import SFTConfig, SFTTrainer
# Your data: rows, as SFTTrainer takes them{batches}.
model = AutoModelForCausalLM.from_pretrained({data.model!r}, dtype="float32")
method = Method("{method.name}", budget={method.budget}, learning_rate={method.learning_rate:.2g})
model, parameter_groups = method.prepare(model{", batches" * grows})
tokenizer = AutoTokenizer.from_pretrained({data.model!r})
optimizers = (torch.optim.AdamW(parameter_groups), None)
arguments = SFTConfig({options})
trainer = SFTTrainer(model, arguments, train_dataset=rows, processing_class=tokenizer, optimizers=optimizers)
trainer.train()"""
