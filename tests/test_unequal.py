"""The stock form with one width for queries and keys and another for values, and what each form costs."""

import json

import pytest
import torch
from families import HEADS, VARIANTS, build, tokens
from test_export import ROPES, TOLERANCE, difference, llama, widened, without_windows
from transformers import AutoModel, AutoModelForCausalLM

from hf_growattn import export_model, model_card, patch_model
from hf_growattn.growable.models import attentions
from hf_growattn.interop.costs import Cost, costs_of

UNEQUAL = "mimo_v2_flash"


@torch.no_grad()
def cost(model) -> Cost:
    """What one more token takes in the cache that a model really fills, and how many weights it holds."""
    sizes = []
    for length in (2, 3):  # windows are longer
        outputs = model(tokens(1, length), use_cache=True)
        cache = outputs["cache" if "cache" in outputs else "past_key_values"]  # the first since transformers 5.24
        sizes.append(sum(states.nbytes for layer in cache.layers for states in (layer.keys, layer.values)))
    return Cost(sizes[1] - sizes[0], sum(p.numel() for p in model.parameters()))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_costs_are_those_of_the_models_themselves(dtype, tmp_path):
    stock = build("llama-2", dtype=dtype)
    before = cost(stock)
    model = widened(stock)
    report = export_model(model, tmp_path / "unequal")
    assert report.model_type == UNEQUAL and (report.head_dim, report.v_head_dim) == (32, 24)
    export_model(model, tmp_path / "padded", "llama")
    measured = {"before growth": before, "native": cost(model)} | {
        form: cost(AutoModelForCausalLM.from_pretrained(tmp_path / form)) for form in ("padded", "unequal")
    }
    assert report.costs == measured
    caches = [cost.cache_bytes for cost in measured.values()]
    assert caches[0] < caches[1] < caches[3] < caches[2]  # each layer as wide as it is, then two widths, then one
    assert caches[3] / caches[2] == (32 + 24) / (32 + 32)
    card = str(model_card(model, "me/grown"))
    assert all(f"| {form} | {c.cache_bytes:,} | {c.parameters:,} |" in card for form, c in measured.items())


@pytest.mark.parametrize("name", ["gpt2-2", "gpt-neox", "opt", "falcon", "phi3", "qwen2", "stablelm", "gemma2"])
def test_costs_of_other_families(name, tmp_path):
    """A residual stream that widens with the heads costs weights too; biases count; a tied head counts once."""
    stock = build(name)
    before = cost(stock)
    model = widened(stock)
    report = export_model(model, tmp_path)
    assert report.costs["padded"] == cost(AutoModelForCausalLM.from_pretrained(tmp_path))
    assert report.costs["before growth"] == before and report.costs["native"] == cost(model)
    assert "unequal" not in report.costs and report.parameters == report.costs["padded"].parameters


def test_what_has_no_stock_form_has_the_cost_of_none():
    assert [*costs_of(widened(build("cohere2")))] == ["before growth", "native"]


def test_auto_takes_it_where_the_cache_is_smaller(tmp_path):
    """And says what that costs: a tied head is written apart, so there are more weights."""
    models = {
        "patterns": widened(llama(), v_dims=0, qk_dims=8),
        "messages": widened(llama(), v_dims=8, qk_dims=0),
        "tied": widened(llama(tie_word_embeddings=True, vocab_size=400)),
        "equal": patch_model(llama()),
        "equal once padded": widened(llama(), qk_dims=4, v_dims=2),
        "not grown": patch_model(llama()),
    }
    for attention in attentions(models["equal"]):
        attention.widen(8, 8)
    reports = {name: export_model(model, tmp_path / name) for name, model in models.items()}
    assert all(difference(model, tmp_path / name) < TOLERANCE for name, model in models.items())
    taken = {name for name, report in reports.items() if report.model_type == UNEQUAL}
    smaller = {name for name, r in reports.items() if r.costs["unequal"].cache_bytes < r.costs["padded"].cache_bytes}
    assert taken == smaller == {"patterns", "messages", "tied"}
    tied = reports["tied"].costs
    saved = 2 * (32 - 24) * 48 * (2 + 4)  # of 2 layers, in values of 2 heads and outputs of 4
    assert tied["unequal"].parameters - tied["padded"].parameters == 400 * 48 - saved


@pytest.mark.parametrize(
    "make, reason",
    [
        (lambda: build("llama-5-bias"), "biases on queries, keys and values alone"),
        (lambda: llama(mlp_bias=True), "biases on queries, keys and values alone"),
        (lambda: llama(rope_parameters=dict(ROPES["llama3"])), "no scaled rotation"),
        (lambda: build("mistral"), "windows come with sinks"),
        (lambda: build("llama-2", HEADS["token-classification"]), "no class for this task"),
    ],
)
def test_a_block_that_it_cannot_express_is_written_as_before(make, reason, tmp_path):
    model = widened(make())
    with pytest.raises(ValueError, match=rf"not as 'mimo_v2_flash' \(.*{reason}"):
        export_model(model, tmp_path / "m", UNEQUAL)
    assert export_model(model, tmp_path / "m").model_type in ("llama", "mistral")


def test_base_models_and_biases(tmp_path):
    for name, auto_class in (("llama-2", AutoModel), ("qwen2", AutoModelForCausalLM)):
        model = widened(without_windows(name, auto_class))
        report = export_model(model, tmp_path / name)
        assert report.model_type == UNEQUAL and report.difference < TOLERANCE
        assert difference(model, tmp_path / name, auto_class=auto_class) < TOLERANCE
        assert json.loads((tmp_path / name / "config.json").read_text())["attention_bias"] == (name == "qwen2")


def test_other_readers_find_the_names_of_the_first_release(tmp_path):
    """vLLM and SGLang read these and no others: no windows, no sinks, no experts, the rotation and the epsilon."""
    model = widened(llama(rms_norm_eps=3e-5, rope_parameters={"rope_type": "default", "rope_theta": 5e4}))
    export_model(model, tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["hybrid_layer_pattern"] == config["moe_layer_freq"] == [0, 0]
    assert config["layernorm_epsilon"] == 3e-5 and config["rope_theta"] == 5e4
    assert int(config["head_dim"] * config["partial_rotary_factor"]) == 16
    assert config["attention_value_scale"] == 1.0 and not config["tie_word_embeddings"]
    # One type of layer makes vLLM apply the window to every layer: it holds all positions.
    assert config["sliding_window"] == VARIANTS["llama-2"]().max_position_embeddings
    assert config["sliding_window_size"] == config["sliding_window"] - 1
    for name in ("head_dim", "v_head_dim", "num_attention_heads", "num_key_value_heads", "rope_theta"):
        assert config[f"swa_{name}"] == config[name]
    again = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert again.config.sliding_window == config["sliding_window"]
    assert not any(layer.self_attn.sinks is not None for layer in again.model.layers)
