"""Where others look a model up by its type or by the name of its class, ours are found as the stock ones are."""

import json
import logging
import shutil

import modalities
import pytest
import torch
from conftest import data_path
from families import VARIANTS, build
from transformers import AutoTokenizer
from transformers.models.auto import modeling_auto, tokenization_auto

from hf_growattn import patch_model, unpatch_model
from hf_growattn.model.configuration import register_type_names

TEXT = "First Citizen: we're 12\n\n  proceed,  na\u00efve <s> hear</s>"
# As files of the Hub may have it: right for the type, missing, or of another class.
TOKENIZER_CLASSES = ("as it is", None, "LlamaTokenizer", "GPT2Tokenizer")


@pytest.mark.parametrize("variant", VARIANTS)
def test_class_names_stand_wherever_the_stock_ones_do(variant):
    """Trainer looks the names of causal models up to shift their labels, and the pipelines those of their task."""
    config = VARIANTS[variant]()
    patch_model(build(variant))
    tables = {name: table for name, table in vars(modeling_auto).items() if name.endswith("_MAPPING_NAMES")}
    tables.pop("CONFIG_MAPPING_NAMES")  # of no model class
    stood = {name: table[config.model_type] for name, table in tables.items() if config.model_type in table}
    assert "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES" in stood
    for name, stock in stood.items():
        ours = tables[name][f"growattn_{config.model_type}"]
        assert ours == (f"GrowAttn{stock}" if isinstance(stock, str) else tuple(f"GrowAttn{one}" for one in stock))


def loaded_tokenizer(files, folder, model, tokenizer_class):
    """What AutoTokenizer makes of the files of a tokenizer beside the config of a model."""
    folder.mkdir()
    shutil.copy(files / "tokenizer.json", folder)
    described = json.loads((files / "tokenizer_config.json").read_text())
    if tokenizer_class is not None:
        named = {} if tokenizer_class == "as it is" else {"tokenizer_class": tokenizer_class}
        (folder / "tokenizer_config.json").write_text(json.dumps({**described, **named}))
    model.config.save_pretrained(folder)
    try:
        return AutoTokenizer.from_pretrained(folder)
    except Exception as error:  # such files do not suit such a type
        return str(error)


@pytest.mark.parametrize("variant", ["llama-2", "gpt2-2", "qwen2", "phi3", "mistral", "gemma", "olmo2", "gpt-neox"])
def test_the_same_tokenizer_is_loaded(tmp_path, variant):
    files = data_path("models", "stories260K")
    for index, tokenizer_class in enumerate(TOKENIZER_CLASSES):
        stock = loaded_tokenizer(files, tmp_path / f"stock{index}", build(variant), tokenizer_class)
        ours = loaded_tokenizer(files, tmp_path / f"ours{index}", patch_model(build(variant)), tokenizer_class)
        assert type(ours) is type(stock), tokenizer_class
        if isinstance(stock, str):
            assert ours == stock
        else:
            assert ours(TEXT)["input_ids"] == stock(TEXT)["input_ids"], tokenizer_class


def test_types_whose_hub_names_another_tokenizer_are_known_by_our_name(monkeypatch):
    monkeypatch.setattr(tokenization_auto, "MODELS_WITH_INCORRECT_HUB_TOKENIZER_CLASS", {"llama"})
    register_type_names("llama")
    assert "growattn_llama" in tokenization_auto.MODELS_WITH_INCORRECT_HUB_TOKENIZER_CLASS


@pytest.fixture
def _quiet():
    """Whisper's generation passes itself arguments that transformers deprecates."""
    logging.disable(logging.WARNING)
    yield
    logging.disable(logging.NOTSET)


def test_code_that_goes_by_the_type_of_a_config_runs_as_on_stock(tmp_path, _quiet):
    model = modalities.build("whisper")
    model.generation_config.eos_token_id = None
    inputs = {"input_features": modalities.batches("whisper", 1)[0]["input_features"], "max_new_tokens": 5}
    inputs["prompt_ids"] = torch.tensor([7, 8])  # which generation reads for one type alone
    expected = model.generate(**inputs)
    assert torch.equal(patch_model(model).generate(**inputs), expected)
    model.save_pretrained(tmp_path)
    loaded = type(model).from_pretrained(tmp_path)
    assert loaded.config.model_type == unpatch_model(loaded).config.model_type == "whisper"
    assert torch.equal(loaded.generate(**inputs), expected)
