"""What every family promises, on tiny random models and on the real pretrained Llama."""

import copy
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from compared import ComparedGrower
from conftest import real_batches, real_model
from every_type import build as build_type
from families import EAGER_ONLY, HEADS, VARIANTS, add_dims, build, lm_batches, padded, tokens
from safetensors.torch import load_file
from transformers import AutoModel, AutoModelForCausalLM, GPT2LMHeadModel, LlamaForCausalLM

from hf_growattn import Grower, GrowthConfig, patch_model, unpatch_model
from hf_growattn.growable.attention import attentions
from hf_growattn.growable.growths import extra_parameters, sync_config

# A model for each mechanism of attention. Types that repeat one are tried in `test_every_type`.
MECHANISMS = {
    "llama-2": "keys and values shared by groups of heads, rotation",
    "llama-5-bias": "biases",
    "gpt2-2": "one fused projection with a transposed weight, learned positions",
    "gpt2-5-scaled": "another softmax scale in each layer",
    "mistral": "sliding windows",
    "qwen2": "biases of queries, keys and values alone, windows in some layers",
    "qwen3": "norms of each head's queries and keys",
    "olmo2": "norms over all heads",
    "gemma2": "capped logits",
    "gemma3": "another rotation in each type of layer",
    "granite": "a softmax scale of its own",
    "smollm3": "layers without rotation",
    "stablelm-norms": "partial rotation, norms with one weight a head",
    "phi3": "one fused projection, partial rotation",
    "gpt-neox": "one fused projection, laid out head by head",
    "opt": "queries scaled before, with biases",
    "gpt_oss": "a sink in each head's softmax",
    "deepseek_v3": "a latent in the cache, values of another width than keys",
    "stories260K": "trained weights",
}
MODELS = [*MECHANISMS]
# A family for each way to lay out the projections; what follows from these alone is not asked of every family.
LAYOUTS = ["llama-5-bias", "gpt2-2", "phi3", "gpt-neox", "stories260K"]
MODELS_BY_ATTENTION = [
    (name, how) for name in MODELS for how in ("eager", "sdpa") if how == "eager" or name not in EAGER_ONLY
]


def make(name: str, attention: str | None = None):
    if name == "stories260K":
        return real_model(attn_implementation=attention)
    return build(name, attention=attention) if name in VARIANTS else build_type(name, attn_implementation=attention)


@torch.no_grad()
def mean_loss_of(model, batches: list) -> float:
    """The mean of the batches' losses; a batch of input_ids is its own labels."""
    given = [batch if isinstance(batch, dict) else {"input_ids": batch, "labels": batch} for batch in batches]
    return sum(model(**batch).loss.item() for batch in given) / len(given)


def batches_for(name: str):
    return real_batches(3, size=4, tokens=64) if name == "stories260K" else lm_batches()


def grow_unevenly(model, name: str, optimizer=None):
    """Widen the layers by different amounts: all where the loss asks for it, then the last by 3 more, by chance."""
    last = model.config.num_hidden_layers - 1
    reports = [
        Grower(model, GrowthConfig(qk_dims=4, v_dims=2), optimizer).find(batches_for(name)).keep(),
        ComparedGrower(model, GrowthConfig(qk_dims=3, layers=[last]), optimizer).find(batches_for(name)).keep(),
    ]
    assert [a.width_of("query") for a in attentions(model)].count(attentions(model)[0].width_of("query")) == last
    return reports


@pytest.fixture(scope="module")
def grown(tmp_path_factory):
    """Every model of the contract, grown unevenly once; tests work on copies.

    They come from checkpoints, as a user's do: some families convert their weights when those are loaded and saved.
    """
    models = {}

    def get(name):
        if name not in models:
            path = tmp_path_factory.mktemp("stock")
            make(name).save_pretrained(path)
            models[name] = patch_model(AutoModelForCausalLM.from_pretrained(path).eval())
            grow_unevenly(models[name], name)
        return copy.deepcopy(models[name])

    return get


@pytest.mark.parametrize("name, attention", MODELS_BY_ATTENTION)
def test_patched_logits_are_bit_equal(name, attention):
    model = make(name, attention)
    inputs = [{"input_ids": tokens()}, padded(), padded(left=False)]
    before = [model(**batch).logits for batch in inputs]
    parameters = dict(model.named_parameters())
    assert patch_model(model) is model
    assert all(torch.equal(model(**batch).logits, logits) for batch, logits in zip(inputs, before))
    after = dict(model.named_parameters())
    assert after.keys() == parameters.keys() and all(after[key] is parameters[key] for key in parameters)


@pytest.mark.parametrize("name, attention", MODELS_BY_ATTENTION)
def test_growth_with_zero_step_keeps_the_function(name, attention):
    model = patch_model(make(name, attention))
    before = model(**padded()).logits
    for index, attention_module in enumerate(attentions(model)):
        add_dims(attention_module, qk_dims=8 + 4 * index, v_dims=4, roles=("key", "value"))
    after = model(**padded()).logits
    if name in ("stories260K", "deepseek_v3"):
        # Some CPU kernels sum in another order for 8-wide heads, and for values as wide as keys: a few fp32 ulps.
        torch.testing.assert_close(after, before, rtol=0, atol=2e-5)
    else:
        assert torch.equal(after, before)


@pytest.mark.parametrize("name", MODELS)
def test_growth_lowers_the_loss_and_says_so(name):
    model, real = patch_model(make(name)), name == "stories260K"
    batches = real_batches(8, size=4, tokens=64) if real else lm_batches(32)  # enough for each family to hold
    others = real_batches(4, start=100, size=4, tokens=64) if real else lm_batches(8, seed=500)
    before = mean_loss_of(model, others)
    report = Grower(model, GrowthConfig(qk_dims=4)).grow(batches)
    assert report.kept
    assert report.fall > 0.01 * report.loss_before
    assert mean_loss_of(model, others) < before - 0.01 * report.loss_before
    assert [layer.width[1] - layer.width[0] for layer in report.layers] == [4] * len(report.layers)


@pytest.mark.parametrize("name", MODELS)
def test_new_dims_travel_with_a_state_and_come_off(name):
    model, other = (patch_model(make(name)) for _ in range(2))
    before = model(tokens()).logits
    for index, attention in enumerate(attentions(model)):
        add_dims(attention, qk_dims=3, v_dims=1 + index)
    other.load_state_dict(model.state_dict())
    widths = [(a.width_of("query"), a.width_of("value")) for a in attentions(model)]
    assert [(a.width_of("query"), a.width_of("value")) for a in attentions(other)] == widths
    assert torch.equal(other(tokens()).logits, model(tokens()).logits)
    assert not torch.equal(other(tokens()).logits, before)
    with pytest.raises(ValueError, match="export_model"):
        unpatch_model(other)
    assert torch.equal(unpatch_model(other, drop_growth=True)(tokens()).logits, before)


@pytest.mark.parametrize("name", MODELS)
def test_cached_generation_equals_full_forward(grown, name):
    model = grown(name)
    input_ids = tokens()
    out = model.generate(
        input_ids,
        attention_mask=torch.ones_like(input_ids),
        max_new_tokens=6,
        do_sample=False,
        return_dict_in_generate=True,
        output_logits=True,
    )
    full = model(out.sequences).logits[:, input_ids.shape[1] - 1 : -1]
    # fp32, another order of summation for one query at a time.
    torch.testing.assert_close(torch.stack(out.logits, dim=1), full, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", LAYOUTS)
def test_optimizer_holds_exactly_the_live_parameters(name):
    model = patch_model(make(name)).train()
    decay = [p for p in model.parameters() if p.dim() > 1]
    rest = [p for p in model.parameters() if p.dim() <= 1]
    optimizer = torch.optim.AdamW([{"params": decay}, {"params": rest, "weight_decay": 0.0}], lr=1e-3)
    batch = batches_for(name)[0]
    batch = batch if isinstance(batch, dict) else {"input_ids": batch, "labels": batch}
    for _ in range(2):
        model(**batch).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    old = {p: dict(state) for p, state in optimizer.state.items()}
    grow_unevenly(model, name, optimizer)
    live = list(model.parameters())
    assert [id(p) for p in optimizer.param_groups[0]["params"]] == [id(p) for p in live if p.dim() > 1]
    assert [id(p) for p in optimizer.param_groups[1]["params"]] == [id(p) for p in live if p.dim() <= 1]
    assert optimizer.state == old and {*live} - {*old} == {*extra_parameters(model)}
    before = [p.detach().clone() for p in live]
    model(**batch).loss.backward()
    optimizer.step()
    assert all(not torch.equal(p, old) for p, old in zip(live, before) if p.grad.any())
    assert all(p.grad is not None for p in live)


@pytest.mark.parametrize("name", MODELS)
def test_a_second_model_is_untouched(name):
    config = make(name).config
    first, second = (AutoModelForCausalLM.from_config(config).eval() for _ in range(2))
    shared = type(second)(second.config).eval()
    assert shared.config is second.config
    classes = [type(module) for module in second.modules()]
    before, dumped = second(tokens()).logits, second.config.to_json_string()
    patch_model(first)
    patch_model(shared).config.id2label[0] = "of this model alone"
    assert ComparedGrower(shared, GrowthConfig(qk_dims=4, layers=[0])).find(batches_for(name)).keep().kept
    assert [type(module) for module in second.modules()] == classes
    assert second.config.to_json_string() == dumped
    assert torch.equal(second(tokens()).logits, before)


@pytest.mark.parametrize("name", MODELS)
def test_unpatching_gives_the_stock_model_back(name):
    model = make(name)
    classes, dumped = [type(module) for module in model.modules()], model.config.to_json_string()
    before = model(tokens()).logits
    patch_model(model)
    assert patch_model(model) is model
    assert unpatch_model(model) is model
    assert [type(module) for module in model.modules()] == classes
    assert model.config.to_json_string() == dumped
    assert torch.equal(model(tokens()).logits, before)
    assert unpatch_model(model) is model


@pytest.mark.parametrize("head", HEADS)
@pytest.mark.parametrize("variant", ["llama-2", "gpt2-2"])
def test_every_head_class_grows(variant, head):
    model = patch_model(build(variant, HEADS[head]))
    labels = {
        "causal-lm": tokens(),
        "sequence-classification": torch.tensor([0, 1, 1]),
        "token-classification": tokens() % 2,
    }
    batch = {**padded(), "labels": labels[head]}
    report = Grower(model, GrowthConfig(qk_dims=4)).grow([batch] * 8)  # random, so only the same rows bear it out
    assert report.kept
    assert mean_loss_of(model, [batch]) < report.loss_before


def test_a_base_model_can_be_patched():
    model = build("llama-2", AutoModel)
    before = model(tokens()).last_hidden_state
    assert torch.equal(patch_model(model)(tokens()).last_hidden_state, before)


@pytest.fixture(scope="module")
def reloaded(grown, tmp_path_factory):
    """Save every grown model in several ways, and load all of them in one fresh process."""
    folder = tmp_path_factory.mktemp("checkpoints")
    jobs, expected = {}, {}

    def add(name, model, auto_class="AutoModelForCausalLM", new_tokens=12, **save):
        path = folder / name
        model.save_pretrained(path, **save)
        jobs[name] = {"path": str(path), "auto_class": auto_class, "input_ids": tokens().tolist()}
        jobs[name]["new_tokens"] = new_tokens
        with torch.no_grad():
            expected[name] = {"output": model(tokens())[0]}
            if new_tokens:
                expected[name]["tokens"] = model.generate(tokens(), max_new_tokens=new_tokens, do_sample=False)

    for name in MODELS:
        add(name, grown(name))
    for name in ("llama-5-bias", "gpt2-2", "stories260K"):
        add(f"{name}-sharded", grown(name), max_shard_size="20KB")
        assert len(list((folder / f"{name}-sharded").glob("model-*.safetensors"))) > 1
        # Loaded in bf16, not cast: casting would also round the rotary frequencies, which loading never does.
        add(f"{name}-bf16", AutoModelForCausalLM.from_pretrained(folder / name, dtype=torch.bfloat16).eval())
    for variant in ("llama-2", "gpt2-2"):
        for head in ("sequence-classification", "token-classification"):
            model = patch_model(build(variant, HEADS[head]))
            add_dims(attentions(model)[1], qk_dims=5)
            sync_config(model)
            add(f"{variant}-{head}", model, HEADS[head].__name__, new_tokens=0)
        add(f"{variant}-base", grown(variant).base_model, "AutoModel", new_tokens=0)
    (folder / "jobs.json").write_text(json.dumps(jobs))
    script = Path(__file__).with_name("reload.py")
    subprocess.run([sys.executable, script, folder / "jobs.json", folder / "results.pt"], check=True)
    return folder, expected, torch.load(folder / "results.pt", weights_only=True)


def test_fresh_process_gives_equal_outputs(reloaded):
    _, expected, results = reloaded
    assert results.keys() == expected.keys()
    for name, result in results.items():
        assert result["class"].startswith("GrowAttn"), name
        assert result["dtype"] == ("torch.bfloat16" if name.endswith("bf16") else "torch.float32")
        # The same code on the same weights: nothing but memory alignment differs.
        torch.testing.assert_close(result["output"], expected[name]["output"], rtol=1e-6, atol=1e-6)
        if "tokens" in result:
            assert torch.equal(result["tokens"], expected[name]["tokens"]), name


def test_checkpoints_are_safetensors_with_a_config_of_our_own(reloaded):
    folder, _, _ = reloaded
    config = json.loads((folder / "llama-5-bias" / "config.json").read_text())
    assert config["model_type"] == "growattn_llama"
    assert config["architectures"] == ["GrowAttnLlamaForCausalLM"]
    assert config["head_dim"] == 16
    first, second = {"growth_1": [4, 2]}, {"growth_2": [3, 0]}
    assert config["extra_dims"] == dict.fromkeys("0123", first) | {"4": first | second}
    assert not list(folder.rglob("*.bin")) and not list(folder.rglob(".*"))


@pytest.mark.parametrize("name", MODELS)
def test_stock_weights_stay_as_they_were_to_the_bit(reloaded, tmp_path, name):
    make(name).save_pretrained(tmp_path)
    stock, grown = (load_file(folder / "model.safetensors") for folder in (tmp_path, reloaded[0] / name))
    assert all(torch.equal(grown[key], value) for key, value in stock.items())
    assert all(".extra.growths.growth_" in key for key in grown.keys() - stock.keys())


@pytest.mark.parametrize("name", ["llama-2", "stories260K", "gpt2-2"])
def test_a_stock_class_reports_every_new_weight_as_unexpected(reloaded, name):
    stock = GPT2LMHeadModel if name == "gpt2-2" else LlamaForCausalLM
    _, found = stock.from_pretrained(reloaded[0] / name, output_loading_info=True)
    saved = AutoModelForCausalLM.from_pretrained(reloaded[0] / name).state_dict()
    assert found["unexpected_keys"] == {key for key in saved if ".extra." in key} != set()
    assert not found["missing_keys"]


def test_growing_again_after_reloading(reloaded):
    model = AutoModelForCausalLM.from_pretrained(reloaded[0] / "llama-5-bias")
    report = Grower(model, GrowthConfig(qk_dims=2, layers=[1])).find(lm_batches()).keep()
    assert report.layers[0].width == (20, 22)
    assert [a.width_of("query") for a in attentions(model)] == [20, 22, 20, 20, 23]
