"""Tiny models of our families under the names by which peft's tests ask the Hub for theirs: three folders of them."""

import json
import sys
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, PretrainedConfig
from transformers.utils.logging import disable_progress_bar

from hf_growattn.model.configuration import growable_config_class

sys.path.insert(0, str(Path(__file__).parents[2] / "tests"))
from families import VARIANTS as FAMILIES
from families import word_tokenizer

VARIANTS = ("stock", "patched", "grown")
NEW_DIMS = (3, 2)  # of the queries and keys, and of the values, of each head that grew
MODELS = {
    "hf-internal-testing/tiny-random-Gemma3ForCausalLM": "gemma3",
    "hf-internal-testing/tiny-random-MistralForCausalLM": "mistral",
    "hf-internal-testing/tiny-random-gpt2": "gpt2-2",
    "peft-internal-testing/tiny-dummy-qwen2": "qwen2",
    "peft-internal-testing/tiny-random-GPT2LMHeadModel": "gpt2-2",
    "peft-internal-testing/tiny-random-OPTForCausalLM": "opt",
    "trl-internal-testing/tiny-Qwen3ForCausalLM": "qwen3",
    "trl-internal-testing/tiny-random-LlamaForCausalLM": "llama-2",
}
CLASSIFIERS = {"trl-internal-testing/tiny-LlamaForSequenceClassification-3.2": "llama-2"}
QUOTES = "ybelkada/english_quotes_copy"


def config_of(stock: PretrainedConfig, variant: str) -> PretrainedConfig:
    """Return a stock config itself, or ours of the same fields: "patched" or "grown"."""
    if variant == "stock":
        return stock
    fields = {name: value for name, value in stock.to_dict().items() if name != "model_type"}
    layers = range(stock.num_hidden_layers) if variant == "grown" else ()
    extra_dims = {str(layer): {"growth_1": list(NEW_DIMS)} for layer in layers}
    return growable_config_class(type(stock))(**fields, extra_dims=extra_dims)


def make_models(folder: Path) -> None:
    """Save each model, with a tokenizer, in `folder / variant / name`, and texts where peft's tests look for some."""
    disable_progress_bar()
    for variant in VARIANTS:
        for models, auto_class in ((MODELS, AutoModelForCausalLM), (CLASSIFIERS, AutoModelForSequenceClassification)):
            for name, family in models.items():
                torch.manual_seed(0)
                auto_class.from_config(config_of(FAMILIES[family](), variant)).save_pretrained(folder / variant / name)
                word_tokenizer().save_pretrained(folder / variant / name)
        quotes = folder / variant / QUOTES / "train.jsonl"
        quotes.parent.mkdir(parents=True)
        quotes.write_text("".join(json.dumps({"quote": f"w{i} w{i + 1} w{i + 2}"}) + "\n" for i in range(2, 92)))
