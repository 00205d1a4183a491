"""Fields of other families in a config.json: the stock attention ignores them, and so do we."""

import json
import re

import pytest
import torch
from families import VARIANTS, lm_batches, tokens
from transformers import AutoConfig, AutoModelForCausalLM

from hf_growattn import Grower, GrowthConfig, export_model, patch_model, unpatch_model
from hf_growattn.growable.models import attentions, is_grown
from hf_growattn.model.configuration import growable_config_class

BOTH = ("num_key_value_heads", "head_dim")
IGNORED = dict.fromkeys(("gpt2-2", "gpt2-5-scaled", "gpt2-2-upcast", "gpt-neo", "gpt-neox", "opt"), BOTH)
IGNORED |= dict.fromkeys(("falcon", "falcon-alibi"), ("num_key_value_heads",))
IGNORED |= dict.fromkeys(("stablelm", "stablelm-norms"), ("head_dim",))
FALCONS = ("falcon", "falcon-alibi")  # whose config has no room for a head_dim
CASES = [(name, field) for name in VARIANTS for field in BOTH if name not in FALCONS or field != "head_dim"]
NO_STOCK_FORM = (
    "cohere2",
    "falcon",
    "falcon-alibi",
    "gpt2-2",
    "gpt2-2-upcast",
    "gpt2-5-scaled",
    "gpt-neo",
    "gpt-neox",
    "opt",
)
NO_STOCK_FORM += ("stablelm", "stablelm-norms")


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
        assert attention.weight_of("key").shape[:2] == (attention.heads_of("key"), model.config.qk_head_dim)
        assert attention.weight_of("key").shape[1] == attention.head_dim
    assert torch.equal(unpatch_model(model)(tokens()).logits, expected)


@pytest.mark.parametrize("name", IGNORED)
def test_a_model_with_stray_fields_grows_saves_and_exports(name, tmp_path):
    model = patch_model(stray(name, *IGNORED[name]))
    assert Grower(model, GrowthConfig(qk_dims=4)).grow(lm_batches()).applied
    model.save_pretrained(tmp_path / "grown")
    saved = json.loads((tmp_path / "grown" / "config.json").read_text())
    assert all(saved[field] == value(name, field) for field in IGNORED[name])
    reloaded = AutoModelForCausalLM.from_pretrained(tmp_path / "grown")
    assert torch.equal(reloaded(tokens()).logits, model(tokens()).logits)
    if name not in NO_STOCK_FORM:
        export_model(model, tmp_path / "exported")  # which compares the two


@pytest.mark.parametrize("width", ["", "16", [], 0, -4, 2.5, True])
@pytest.mark.parametrize("per_layer_config", [None, {"1": {"qk_head_dim": 20}}])
def test_a_width_that_is_no_width_is_refused_clearly(width, per_layer_config):
    fields = VARIANTS["phi3"]().to_dict() | {"head_dim": width}
    fields.pop("model_type")
    with pytest.raises(ValueError, match=f"head_dim is {re.escape(repr(width))}; it must be a whole number"):
        growable_config_class("phi3")(**fields, per_layer_config=per_layer_config)
