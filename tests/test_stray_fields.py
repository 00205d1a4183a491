"""Fields of other families in a config.json: the stock attention ignores them, and so do we."""

import json

import pytest
import torch
from families import VARIANTS, lm_batches, tokens
from transformers import AutoConfig, AutoModelForCausalLM

from hf_growattn import Grower, GrowthConfig, patch_model, unpatch_model
from hf_growattn.growable.attention import attentions
from hf_growattn.growable.growths import is_grown

BOTH = ("num_key_value_heads", "head_dim")
IGNORED = dict.fromkeys(("gpt2-2", "gpt2-5-scaled", "gpt-neox", "opt"), BOTH)
IGNORED |= dict.fromkeys(("stablelm", "stablelm-norms"), ("head_dim",))
CASES = [(name, field) for name in VARIANTS for field in BOTH]


def value(name, field):
    """What no variant has there. StableLM's rotation reads its head_dim, and this one rotates as many dims."""
    return 1 if field == "num_key_value_heads" else 18 if name.startswith("stablelm") else 24


def stray(name, *fields):
    """A stock model whose config.json holds fields that no model of its family was saved with."""
    torch.manual_seed(7)
    config = AutoConfig.for_model(**VARIANTS[name]().to_dict() | {field: value(name, field) for field in fields})
    return AutoModelForCausalLM.from_config(config).eval()


def sizes(model):
    return [parameter.shape for parameter in model.parameters()]


@pytest.mark.parametrize("name, field", CASES)
def test_a_field_counts_where_the_stock_attention_reads_it(name, field):
    model = stray(name, field)
    assert (sizes(model) == sizes(stray(name))) == (field in IGNORED.get(name, ()))
    expected = model(tokens()).logits
    patch_model(model)
    assert torch.equal(model(tokens()).logits, expected) and not is_grown(model)
    for attention in attentions(model):
        assert attention.is_known("query", "key", "value", "output")
    assert torch.equal(unpatch_model(model)(tokens()).logits, expected)


@pytest.mark.parametrize("name", IGNORED)
def test_a_model_with_stray_fields_grows_and_saves(name, tmp_path):
    model = patch_model(stray(name, *IGNORED[name]))
    assert Grower(model, GrowthConfig(qk_dims=4)).find(lm_batches()).keep().kept
    model.save_pretrained(tmp_path / "grown")
    saved = json.loads((tmp_path / "grown" / "config.json").read_text())
    assert all(saved[field] == value(name, field) for field in IGNORED[name])
    reloaded = AutoModelForCausalLM.from_pretrained(tmp_path / "grown")
    assert torch.equal(reloaded(tokens()).logits, model(tokens()).logits)
