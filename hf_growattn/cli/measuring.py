"""What `growattn measure` and `race` run on the model and the data of a `Recipe`."""

from dataclasses import replace
from functools import partial
from typing import Any

from transformers import PreTrainedModel
from trl.trainer.utils import get_quantization_config

from ..grow.growth import Grower
from ..growable.models import patch_model
from ..interop.checkpoints import load_model
from ..training.comparison import Race
from ..training.data import Recipe, read_rows
from ..training.methods import METHODS, make_sft_loss
from ..training.race import run_race

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
    """A Grower of the recipe's model, and batches of its data on the model's device."""
    growth_config, training, count = recipe.growth_config(), recipe.training, recipe.growth.growth_batches
    rows = read_rows(recipe, _SPARE * count * training.per_device_train_batch_size)
    model: Any = _load_model(recipe, "auto")
    grower = Grower(model, growth_config)  # which refuses quantized weights
    grower.loss = make_sft_loss(model.to(training.device), rows)
    batches = rows.draw_batches(count, training.seed)
    print(f"Measuring on {len(batches)} batches of {recipe.dataset}.")
    return grower, batches


def race_recipe(recipe: Recipe) -> Race:
    """The race of LoRA, growth and both on the recipe's model and data."""
    options = replace(recipe.growth, budget=recipe.growth_config().budget)
    rows = read_rows(recipe)
    return run_race(partial(_load_model, recipe, "float32"), rows, options)


def training_code(race: Race, recipe: Recipe) -> str:
    """Lines of Python that train by the winner of a race, on your `rows`; growth reads some `batches` of them first."""
    name, training = race.winner, recipe.training
    rate, weights = race.rates[name], race.runs_of(name)[0].weights
    load = f'AutoModelForCausalLM.from_pretrained({recipe.model_name!r}, dtype="float32")'
    rank = round(METHODS[name].lora * race.rank)
    lora = f'LoraConfig(r={rank}, lora_alpha={2 * rank}, target_modules="all-linear", task_type="CAUSAL_LM")'
    optimizers = ""
    if name == "lora":
        imports = ["from peft import LoraConfig, get_peft_model"]
        lines = [f"model = get_peft_model({load}, {lora})"]
    elif name == "growth":
        imports = [
            "from hf_growattn import GrowAttnConfig, initialize_growattn_weights",
            "from peft import get_peft_model",
        ]
        lines = [
            f'model = get_peft_model({load}, GrowAttnConfig(budget={weights}, task_type="CAUSAL_LM"))',
            "initialize_growattn_weights(model, batches)",
        ]
    else:
        weights -= rank * race.runs_of("lora")[0].weights // race.rank
        grown_rate = METHODS[name].grown_share(race.width) * rate
        imports = [
            "import torch",
            "from hf_growattn import Grower, GrowthConfig, patch_model",
            "from peft import LoraConfig, get_peft_model",
        ]
        lines = [
            f"model = get_peft_model(patch_model({load}), {lora})",
            f"Grower(model, GrowthConfig(budget={weights}, old_dims_train=True)).grow(batches)",
            "trained = [(name, weight) for name, weight in model.named_parameters() if weight.requires_grad]",
            'lora = {"params": [weight for name, weight in trained if "lora_" in name]}',
            'grown = {"params": [weight for name, weight in trained if "lora_" not in name]}',
            f'grown["lr"] = {grown_rate:.2g}',
            f"optimizer = torch.optim.AdamW([lora, grown], lr={rate:.2g}, weight_decay={training.weight_decay})",
        ]
        optimizers = ", optimizers=(optimizer, None)"
    imports += ["from transformers import AutoModelForCausalLM, AutoTokenizer", "from trl import SFTConfig, SFTTrainer"]
    options = f'"DIR", learning_rate={rate:.2g}, max_length={training.max_length}'
    if training.packing:
        options += f', packing=True, packing_strategy="{training.packing_strategy}"'
    lines += [
        f"tokenizer = AutoTokenizer.from_pretrained({recipe.model_name!r})",
        f"arguments = SFTConfig({options})",
        f"trainer = SFTTrainer(model, arguments, train_dataset=rows, processing_class=tokenizer{optimizers})",
        "trainer.train()",
    ]
    return "\n".join([*imports, *lines])
