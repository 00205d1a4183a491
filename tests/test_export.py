"""Grown models as stock checkpoints: plain transformers loads them and computes the same."""

import copy
import json
import math
import subprocess
import sys
from pathlib import Path

import models
import peft
import pytest
import torch
from conftest import DATA, data_path, real_batches, real_model
from families import HEADS, LLAMA, VARIANTS, add_dims, build, tokens
from safetensors.torch import load_file
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoTokenizer,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
)

from hf_growattn import Grower, GrowthConfig, export_model, patch_model
from hf_growattn.growable.attention import attentions
from hf_growattn.growable.growths import sync_config
from hf_growattn.interop import export, stock

# By variant, why no stock class holds it once grown.
IMPOSSIBLE = {
    **dict.fromkeys(("stablelm-norms", "qwen3", "qwen3-moe", "gemma3", "olmo2"), "normalizes queries or keys"),
    "cohere2": "does not rotate dims as Llama's does",
    **dict.fromkeys(("phi3", "gpt-neox", "stablelm"), "rotates only a part of each head"),
    **dict.fromkeys(("gpt2-2", "gpt2-5-scaled", "opt"), "its config takes no other width of heads"),
}
# Of other models, "" if a stock class holds them once grown.
OTHERS = {
    **dict.fromkeys(("t5", "umt5", "vit", "vit_mae", "eurobert", "dinov2"), ""),  # vit_mae drops patches at random
    **dict.fromkeys(("bart", "swin"), "takes no other width of heads"),
    **dict.fromkeys(("bert", "roberta", "electra", "distilbert", "esm", "modernbert"), r"model\.save_pretrained"),
    **dict.fromkeys(("whisper", "wav2vec2", "clip", "blip-2"), r"random tokens or an image.*Save the model as it is"),
    "moonshine": "does not rotate dims as Llama's does",
}
AS_IT_IS = ("llama-5-bias", "qwen2", *IMPOSSIBLE)
# Nothing but fp32 differs: measured 2e-7 to 5e-6 of the largest output on these random models.
TOLERANCE = 1e-5


def widened(model, qk_dims: int = 6, v_dims: int = 3):
    """Every layer by other widths, the new dims drawn at random, biases too: the same at every call."""
    patch_model(model)
    torch.manual_seed(8)
    for layer, attention in enumerate(attentions(model)):
        part = add_dims(attention, qk_dims * (layer + 1), v_dims + 2 * layer, std=0.1)
        if part.in_projection.bias is not None:
            torch.nn.init.normal_(part.in_projection.bias, std=0.1)
    sync_config(model)
    return model


def takes_wider_heads(stock) -> bool:
    """Whether the class reads a width of heads from its config, as Dinov2's does since some transformers 5."""
    config = copy.deepcopy(stock.config)
    config.head_dim = 2 * config.hidden_size // config.num_attention_heads
    return type(stock)(config).num_parameters() > stock.num_parameters()


def llama(**fields):
    """A stock Llama with these config fields."""
    torch.manual_seed(7)
    return LlamaForCausalLM(LlamaConfig(**LLAMA | fields, num_hidden_layers=2)).eval()


@torch.no_grad()
def difference(model, path, input_ids=None, auto_class=AutoModelForCausalLM) -> float:
    input_ids = tokens() if input_ids is None else input_ids
    ours, theirs = model(input_ids)[0], auto_class.from_pretrained(path).eval()(input_ids)[0]
    return ((ours - theirs[..., : ours.shape[-1]]).abs().max() / ours.abs().max()).item()


@pytest.fixture(scope="module")
def reloaded(tmp_path_factory):
    """Export every family and head, and load all of that in one fresh process without this library."""
    folder = tmp_path_factory.mktemp("exports")
    jobs, expected = {}, {}

    def add(name, model, auto_class="AutoModelForCausalLM", new_tokens=40):
        input_ids = tokens() if name != "stories260K" else real_batches(1, tokens=64)[0][:2]
        report = export_model(model, folder / name)
        jobs[name] = {"path": str(folder / name), "auto_class": auto_class, "input_ids": input_ids.tolist()}
        jobs[name]["new_tokens"] = new_tokens
        with torch.no_grad():
            expected[name] = {"output": model(input_ids)[0], "report": report}
            if new_tokens:
                expected[name]["tokens"] = model.generate(input_ids, max_new_tokens=new_tokens, do_sample=False)

    for name in VARIANTS:
        if name not in IMPOSSIBLE:
            add(name, widened(build(name)))
    add("llama-2:keys", widened(build("llama-2"), v_dims=0))
    add("llama-tied", widened(llama(tie_word_embeddings=True)))
    if DATA.exists():
        model = patch_model(real_model())
        assert Grower(model, GrowthConfig(qk_dims=3, v_dims=2)).find(real_batches(3)).keep().kept
        add("stories260K", model)
    for variant in ("llama-2", "mistral"):
        for head in ("sequence-classification", "token-classification"):
            add(f"{variant}:{head}", widened(build(variant, HEADS[head])), HEADS[head].__name__, new_tokens=0)
        add(f"{variant}:base", widened(build(variant, AutoModel)), "AutoModel", new_tokens=0)
    (folder / "jobs.json").write_text(json.dumps(jobs))
    script = Path(__file__).with_name("reload.py")
    subprocess.run([sys.executable, script, folder / "jobs.json", folder / "results.pt", "stock"], check=True)
    return folder, expected, torch.load(folder / "results.pt", weights_only=True)


def test_plain_transformers_computes_the_same(reloaded):
    _, expected, results = reloaded
    assert results.keys() == expected.keys()
    for name, result in results.items():
        ours, theirs = expected[name]["output"], result["output"]
        assert not result["class"].startswith("GrowAttn")
        found = ((theirs - ours).abs().max() / ours.abs().max()).item()
        assert found < TOLERANCE, (name, found)
        if "tokens" in result:
            assert torch.equal(result["tokens"], expected[name]["tokens"]), name


def test_reports_say_what_was_written(reloaded):
    folder, expected, _ = reloaded
    for name, result in expected.items():
        report = result["report"]
        config = json.loads((folder / name / "config.json").read_text())
        assert report.path == (folder / name).resolve() and report.model_type == config["model_type"]
        assert report.model_type == VARIANTS[name]().model_type if name in VARIANTS else True
        assert 0 <= report.difference < 1e-4
        assert not any(key in config for key in ("auto_map", "extra_dims"))
        width = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
        assert width == report.head_dim and width % 8 == 0  # which flash kernels take
        assert f"Width of all heads: {width}" in str(report)
        assert f"KV cache: {report.cache_bytes[1]:,} bytes a token" in str(report)
        weights = load_file(folder / name / "model.safetensors")
        assert report.parameters[1] == sum(weight.numel() for weight in weights.values())  # tied ones once
        ends = ("q_proj.weight", "k_proj.weight", "v_proj.weight")  # DoRA divides by the norms of rows
        assert all((weight.norm(dim=1) > 0).all() for key, weight in weights.items() if key.endswith(ends)), name


def test_default_rotation_is_read_alike_by_other_engines(reloaded):
    """llama.cpp and vLLM: the "llama3" formula, with 8192 positions where a reader looks for them in vain."""
    folder, _, _ = reloaded
    for name in ("llama-2:keys", "llama-5-bias", "mistral", "qwen2"):
        config = json.loads((folder / name / "config.json").read_text())
        rope, width = config["rope_parameters"], config["head_dim"]
        assert rope["rope_type"] == "llama3" and "partial_rotary_factor" not in {**config, **rope}
        assert rope["original_max_position_embeddings"] == 8192 and "original_max_position_embeddings" not in config
        frequencies = torch.tensor([rope["rope_theta"] ** (-2 * i / width) for i in range(width // 2)]).double()
        wavelengths = 2 * math.pi / frequencies
        plain, divided = wavelengths < 8192 / rope["high_freq_factor"], wavelengths > 8192 / rope["low_freq_factor"]
        assert (plain ^ divided).all()  # none in between, where readers interpolate
        expected = torch.tensor([10_000.0 ** (-2 * i / 16) for i in range(8)]).double()
        torch.testing.assert_close(frequencies[plain], expected, rtol=1e-12, atol=0)
        assert (frequencies[divided] / rope["factor"]).max() < 1e-20


def test_rotation_is_repeated_under_the_names_of_transformers_4(reloaded):
    """Without these it rotates new dims too, and says nothing; with them 4.57 gave the same logits, to the bit."""
    folder, expected, _ = reloaded
    for name in expected:
        config = json.loads((folder / name / "config.json").read_text())
        rope = config.get("rope_parameters") or {}
        if "rope_type" not in rope:
            assert "rope_theta" not in config and "rope_scaling" not in config
            continue
        assert config.get("rope_theta") == rope.get("rope_theta"), name
        assert config.get("rope_scaling") == (rope if rope["rope_type"] != "default" else None), name
        again = AutoConfig.from_pretrained(folder / name).to_dict()
        assert again["rope_parameters"] == rope and not {"rope_theta", "rope_scaling"} & again.keys()


LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 5e5,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
OTHER_ROPES = {
    "linear": {"rope_type": "linear", "factor": 4.0, "rope_theta": 1e4},
    "dynamic": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0},
}


def test_scaled_rotation_is_kept(tmp_path):
    model = widened(llama(rope_parameters=dict(LLAMA3), initializer_range=0.1))
    rotary = model.model.rotary_emb
    before = {name: value.clone() for name, value in rotary.named_buffers()}
    export_model(model, tmp_path / "m")
    assert model.model.rotary_emb is rotary
    assert all(torch.equal(value, before[name]) for name, value in rotary.named_buffers())
    for length in (20, 120):
        assert difference(model, tmp_path / "m", tokens(length=length)) < TOLERANCE
    config = json.loads((tmp_path / "m" / "config.json").read_text())
    assert config["rope_parameters"] == config["rope_scaling"]
    assert config["original_max_position_embeddings"] == config["max_position_embeddings"]  # transformers 4 reads it


@pytest.mark.parametrize("kind", OTHER_ROPES)
def test_another_rotation_has_no_stock_form_once_grown(kind, tmp_path):
    model = patch_model(llama(rope_parameters=dict(OTHER_ROPES[kind])))
    export_model(model, tmp_path / "not grown")
    with pytest.raises(ValueError, match=rf"it rotates by frequencies of type {kind}\..*model\.save_pretrained"):
        export_model(widened(model), tmp_path / "m")
    assert not (tmp_path / "m").exists()


def test_what_has_not_grown_is_exported_as_itself(tmp_path):
    for variant in AS_IT_IS:
        model = build(variant)
        model.save_pretrained(tmp_path / variant / "stock")
        report = export_model(patch_model(model), tmp_path / variant / "exported")
        assert report.difference == 0.0
        one, other = (json.loads((tmp_path / variant / n / "config.json").read_text()) for n in ("stock", "exported"))
        assert one == other
        states = [
            AutoModelForCausalLM.from_pretrained(tmp_path / variant / n).state_dict() for n in ("stock", "exported")
        ]
        assert states[0].keys() == states[1].keys()
        assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])


def test_a_model_of_few_positions_is_exported(tmp_path):
    config = GPT2Config(vocab_size=97, n_positions=32, n_embd=48, n_layer=1, n_head=4)
    assert export_model(patch_model(GPT2LMHeadModel(config)), tmp_path / "m").difference == 0.0


@pytest.mark.parametrize("variant", ["llama-5-bias", "qwen2"])
def test_the_model_is_not_changed_and_not_copied(variant, tmp_path):
    model = widened(build(variant)).train()
    before = copy.deepcopy(model)
    random_state = torch.get_rng_state()
    export_model(model, tmp_path)
    assert torch.equal(torch.get_rng_state(), random_state) and model.training
    assert type(model) is type(before) and model.config.to_dict() == before.config.to_dict()
    states = [m.state_dict() for m in (model, before)]
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])
    assert all(p.requires_grad and p.grad is None for p in model.parameters())
    exported = stock.stock_model(model)
    ours = {tensor.data_ptr() for tensor in model.state_dict().values()}
    new = {name for name, p in exported.named_parameters() if p.data_ptr() not in ours}
    assert new and all("attn" in name for name in new)


@pytest.mark.parametrize("way", [patch_model, widened])
def test_tokenizer_and_generation_config_travel(way, tmp_path):
    path = data_path("models", "stories260K")
    model = way(real_model())
    model.generation_config.max_new_tokens = 33
    export_model(model, tmp_path / "m", tokenizer=AutoTokenizer.from_pretrained(path))
    assert AutoTokenizer.from_pretrained(tmp_path / "m")("Once upon a time")["input_ids"]
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "m").generation_config.max_new_tokens == 33


def test_a_failed_check_leaves_what_was_there(tmp_path, monkeypatch):
    model = widened(build("llama-2"))

    def wrong(*arguments):
        exported = stock.stock_model(*arguments)
        attentions_of = exported.model.layers[0].self_attn
        attentions_of.q_proj.weight.mul_(1.01)
        return exported

    monkeypatch.setattr(export, "stock_model", torch.no_grad()(wrong))
    with pytest.raises(RuntimeError, match=r"of the largest logit.*model\.save_pretrained"):
        export_model(model, tmp_path / "m")
    assert not list(tmp_path.iterdir())
    (tmp_path / "m").mkdir()
    (tmp_path / "m" / "config.json").write_text("{}")
    with monkeypatch.context() as patch, pytest.raises(RuntimeError, match="differs from the model by nan"):
        patch.setattr(export, "_difference", lambda *_: math.nan)
        export_model(model, tmp_path / "m")
    assert [path.name for path in tmp_path.rglob("*")] == ["m", "config.json"]
    monkeypatch.undo()
    export_model(model, tmp_path / "m")
    assert difference(model, tmp_path / "m") < TOLERANCE


@pytest.mark.parametrize("name", IMPOSSIBLE)
def test_a_family_without_a_stock_form_says_so(name, tmp_path):
    model = widened(build(name), qk_dims=0 if "normalizes" in IMPOSSIBLE[name] else 6)
    with pytest.raises(ValueError, match=rf"no exact stock form: .*{IMPOSSIBLE[name]}.*model\.save_pretrained"):
        export_model(model, tmp_path / "m")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("name", OTHERS)
def test_the_stock_checkpoint_of_another_model_computes_the_same_or_is_refused(name, tmp_path):
    model, (batch,) = patch_model(models.build(name)), models.batches(name, 1)
    if not OTHERS[name].startswith("random"):
        widened(model)
    refusal = OTHERS[name]
    if name == "dinov2" and not takes_wider_heads(models.build(name)):
        refusal = "takes no other width of heads"
    if refusal:
        with pytest.raises(ValueError, match=refusal):
            export_model(model, tmp_path / "m")
        assert not list(tmp_path.iterdir())
        return
    report = export_model(model, tmp_path / "m")
    exported = type(models.build(name)).from_pretrained(tmp_path / "m").eval()
    assert report.parameters[1] == exported.num_parameters()
    assert report.cache_bytes == (0, 0) or "t5" in name
    ours, theirs = models.outputs(model, batch), models.outputs(exported, batch)
    assert (ours - theirs).abs().max() / ours.abs().max() < 10 * TOLERANCE  # deeper models, of larger weights


def test_bad_calls_name_the_fix(tmp_path):
    with pytest.raises(TypeError, match="patched model"):
        export_model(build("llama-2"), tmp_path / "m")
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match="is a file"):
        export_model(widened(build("llama-2")), tmp_path / "file")
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")  # peft reads it
def test_adapters_are_to_be_merged_first(tmp_path):
    model = widened(build("llama-2"))
    adapted = peft.get_peft_model(model, peft.LoraConfig(target_modules=["q_proj"]))
    with pytest.raises(ValueError, match="merge_and_unload"):
        export_model(adapted.get_base_model(), tmp_path / "m")
    assert not list(tmp_path.iterdir())
    merged = adapted.merge_and_unload()
    export_model(merged, tmp_path / "m")
    assert difference(merged, tmp_path / "m") < TOLERANCE


@torch.no_grad()
def cost(model) -> tuple[int, int]:
    """What one more token takes in the cache that a model really fills, and how many weights it holds."""
    sizes = []
    for length in (2, 3):  # windows are longer
        outputs = model(tokens(1, length), use_cache=True)
        cache = outputs["cache" if "cache" in outputs else "past_key_values"]  # the first since transformers 5.24
        sizes.append(sum(states.nbytes for layer in cache.layers for states in (layer.keys, layer.values)))
    return sizes[1] - sizes[0], sum(p.numel() for p in model.parameters())


@pytest.mark.parametrize("name", ["llama-2", "qwen2", "gemma2"])
def test_costs_are_those_of_the_models_themselves(name, tmp_path):
    """Biases count, and a tied head counts once."""
    dtype = torch.bfloat16 if name == "llama-2" else torch.float32
    model = widened(build(name, dtype=dtype))
    report = export_model(model, tmp_path)
    assert cost(model) == (report.cache_bytes[0], report.parameters[0])
    assert cost(AutoModelForCausalLM.from_pretrained(tmp_path)) == (report.cache_bytes[1], report.parameters[1])
    assert report.cache_bytes[0] < report.cache_bytes[1]
