"""Together with peft: LoRA on grown models, and growth under LoRA, which adds new dims beside it that train along."""

import copy

import peft
import pytest
import torch
from compared import column_basis, exact_directions, old_factors
from families import build, lm_batches, same, train
from transformers import AutoModelForCausalLM

import hf_growattn.measure.functional as F
from hf_growattn import Grower, GrowthConfig, load_growth, patch_model, save_growth
from hf_growattn.growable.attention import attentions
from hf_growattn.measure.bottlenecks import QK, V, compute_moments
from hf_growattn.measure.passes import Objective, evaluation_mode, mean_loss

# What peft asks of transformers is not ours to mend.
pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")

LLAMA, GPT2 = "llama-5-bias", "gpt2-2"  # grouped queries and biases; one fused projection with its weight transposed
ALL = {LLAMA: ["q_proj", "k_proj", "v_proj", "o_proj"], GPT2: ["c_attn", "attn.c_proj"]}
DEFAULT = {LLAMA: {"q_proj", "v_proj"}, GPT2: {"c_attn"}}
SUBSETS = [(LLAMA, ALL[LLAMA]), (LLAMA, ["q_proj", "v_proj"]), (LLAMA, ["k_proj", "o_proj"]), (GPT2, ALL[GPT2])]
GROWTH = GrowthConfig(qk_dims=4, v_dims=3, layers=[0, 1])
BATCHES = lm_batches(4)


def lora(variant, targets=None, **kwargs):
    return peft.LoraConfig(r=4, lora_alpha=8, target_modules=targets, fan_in_fan_out=variant == GPT2, **kwargs)


def adapted(variant, targets=None, seed=5, **kwargs):
    """A patched model under LoRA whose adapters are not without effect."""
    model = peft.get_peft_model(patch_model(build(variant)), lora(variant, targets, **kwargs))
    stir(model, seed)
    return model.eval()


def stir(model, seed=5):
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            parameter.data.copy_(0.1 * torch.randn(parameter.shape, generator=generator))


def logits(model):
    with torch.no_grad():
        return model(**BATCHES[0]).logits


def near(one, other):
    """Equal up to fp32 sums in another order, which err by a share of the largest logit."""
    assert (one - other).abs().max() <= 1e-5 * other.abs().max()


def trainable(model):
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


@pytest.mark.parametrize("variant, targets", SUBSETS)
def test_growth_under_lora_lowers_the_loss_and_training_goes_on(variant, targets):
    model = adapted(variant, targets)
    optimizer = torch.optim.AdamW(trainable(model), lr=1e-3)
    train(model, optimizer, BATCHES[:3])
    before = {name: (parameter, parameter.detach().clone()) for name, parameter in model.named_parameters()}
    states = {parameter: copy.deepcopy(state) for parameter, state in optimizer.state.items()}
    frozen = {name for name, parameter in model.named_parameters() if not parameter.requires_grad}
    report = Grower(model, GROWTH, optimizer).find(BATCHES).keep()
    assert report.kept
    new = {name: parameter for name, parameter in model.named_parameters() if name not in before}
    assert report.added_parameters == sum(parameter.numel() for parameter in new.values())
    assert {int(name.split(".extra")[0].split(".")[-2]) for name in new} == set(GROWTH.layers)
    for name, parameter in model.named_parameters():
        if name in before:
            assert parameter is before[name][0] and torch.equal(parameter, before[name][1])
    assert {name for name, parameter in model.named_parameters() if not parameter.requires_grad} == frozen

    held = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    assert [id(p) for p in held] == [id(p) for p in trainable(model)]
    assert same(dict(optimizer.state), states)
    values = {name: p.detach().clone() for name, p in model.named_parameters()}
    train(model, optimizer, 2 * BATCHES)
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, values[name]) == (name in frozen), name
    base = model.get_base_model()
    with evaluation_mode(base):
        assert mean_loss(Objective(base), BATCHES) < report.loss_before - report.fall


@pytest.mark.parametrize("variant", [LLAMA, GPT2])
def test_what_the_old_dims_can_do_is_told_by_the_effective_weights(variant):
    """A model under two adapters, both active, measures what the same model does with both merged."""
    model = adapted(variant, ALL[variant], lora_bias=True)
    model.add_adapter("other", lora(variant, ALL[variant], lora_bias=True))
    stir(model)
    model.base_model.set_adapter(["default", "other"])
    merged = copy.deepcopy(model).merge_and_unload()
    measured = []
    for base in (model.get_base_model(), merged):
        with evaluation_mode(base):
            objective = Objective(base)
            bottlenecks, _ = compute_moments(objective, attentions(base)[:1], [QK, V], BATCHES)
            measured.append(exact_directions(objective, bottlenecks, (BATCHES[0::2], BATCHES[1::2]), dims=4))
    for under_lora, plain_one in zip(*measured):
        for one, other in zip(old_factors(under_lora.bottleneck), old_factors(plain_one.bottleneck)):
            torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(under_lora.in_sample, plain_one.in_sample, rtol=1e-3, atol=0)
        basis = column_basis(plain_one.bottleneck.whitened(*old_factors(plain_one.bottleneck))[1])
        if not under_lora.bottleneck.span_is_known:  # rotated queries and keys
            assert under_lora.out_of_reach is plain_one.out_of_reach is None
            assert (basis.mT @ under_lora.v).abs().max() > 0.01
            continue
        assert under_lora.out_of_reach == pytest.approx(plain_one.out_of_reach, rel=1e-3)
        assert (basis.mT @ under_lora.v).abs().max() < 1e-3  # beyond the old dims, adapters and all
        layer = under_lora.bottleneck.attention
        bare = F.join_bias(layer.weight_of("value"), layer.bias_of("value"))
        if under_lora.bottleneck.kind is V:
            basis = column_basis(under_lora.bottleneck.roots.shared_root @ bare)
            assert (basis.mT @ under_lora.v).abs().max() > 0.01  # not beyond those of the bare weights


def test_half_precision_adds_adapters_in_fp32():
    model = patch_model(build(LLAMA, dtype=torch.bfloat16))
    model = peft.get_peft_model(model, lora(LLAMA, ALL[LLAMA]))  # peft keeps its own weights in fp32
    stir(model)
    layer = attentions(model)[0]
    projection = layer.module.q_proj
    a, b = projection.lora_A["default"].weight, projection.lora_B["default"].weight
    expected = projection.base_layer.weight.float() + 2 * b.float() @ a.float()
    assert torch.equal(layer.factors_of("query", torch.float32)[:, :48].mT.flatten(0, 1), expected)
    assert Grower(model, GROWTH).find(BATCHES).keep().kept
    assert projection.base_layer.weight.dtype == torch.bfloat16


@pytest.mark.parametrize("variant", [LLAMA, GPT2])
def test_lora_before_and_after_growth_merges_saves_and_reloads(variant, tmp_path):
    model = adapted(variant, ALL[variant], lora_bias=True)
    optimizer = torch.optim.AdamW(trainable(model), lr=1e-3)
    train(model, optimizer, BATCHES[:3])
    assert Grower(model, GROWTH, optimizer).find(BATCHES).keep().kept
    train(model, optimizer, BATCHES[:3])
    double = copy.deepcopy(model).double()
    exact = logits(double)
    assert (logits(double.merge_and_unload()) - exact).abs().max() <= 1e-12 * exact.abs().max()
    expected = logits(model)
    merged = model.merge_and_unload()
    near(logits(merged), expected)
    merged.save_pretrained(tmp_path)
    reloaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert torch.equal(logits(reloaded), logits(merged))


@pytest.mark.parametrize("variant, targets", [(LLAMA, None), (GPT2, None), ("opt", ["q_proj", "out_proj"])])
def test_lora_on_a_grown_model(variant, targets):
    model = patch_model(build(variant))
    Grower(model, GROWTH).find(BATCHES).keep()
    expected = logits(model)
    adapter = peft.get_peft_model(model, lora(variant, targets))
    assert adapter.peft_config["default"].target_modules == {*(targets or DEFAULT[variant])}
    near(logits(adapter), expected)
    train(adapter, torch.optim.AdamW(trainable(adapter), lr=1e-2), BATCHES[:3])
    expected = logits(adapter)
    near(logits(adapter.merge_and_unload()), expected)


@pytest.mark.parametrize("variant", [LLAMA, GPT2])
def test_a_model_may_be_patched_under_its_adapters(variant):
    model = peft.get_peft_model(build(variant), lora(variant))
    stir(model)
    expected = logits(model.eval())
    base = patch_model(model.get_base_model())
    assert base is model.get_base_model() and torch.equal(logits(model), expected)
    assert Grower(model, GROWTH).find(BATCHES).keep().kept
    expected = logits(model)
    near(logits(model.merge_and_unload()), expected)


@pytest.mark.parametrize("variant", [LLAMA, GPT2])
def test_merged_adapters_grow_and_unmerge(variant, tmp_path):
    model, unmerged = adapted(variant, ALL[variant]), adapted(variant, ALL[variant])
    model.merge_adapter()
    reports = [Grower(m, GROWTH).find(BATCHES).keep() for m in (model, unmerged)]
    assert reports[0].kept and reports[0].fall == pytest.approx(reports[1].fall, rel=1e-2)
    expected = logits(model)
    save_growth(model, tmp_path)
    load_growth(unmerged, tmp_path)  # of weights with adapters merged into them, nobody knows the base
    model.unmerge_adapter()
    near(logits(model), expected)


OTHERS = {
    "DoRA": lambda: lora(LLAMA, use_dora=True),
    "LoHa": lambda: peft.LoHaConfig(r=4, target_modules=["k_proj"]),
    "VeRA": lambda: peft.VeraConfig(r=4, target_modules=["q_proj"]),
    "AdaLoRA": lambda: peft.AdaLoraConfig(target_modules=["q_proj"], total_step=10),
    "IA3": lambda: peft.IA3Config(),
    "copies": lambda: lora(LLAMA, modules_to_save=["k_proj"]),
    "elsewhere": lambda: lora(LLAMA, ["gate_proj"]),
}


# Kinds of which nobody knows what the old dims can do, where it is not the patterns alone, which rotate.
UNKNOWN = {"DoRA": {"qk", "v"}, "IA3": {"qk", "v"}}


@pytest.mark.parametrize("method", OTHERS)
def test_growth_under_other_adapters(method):
    model = peft.get_peft_model(patch_model(build(LLAMA)), OTHERS[method]()).eval()
    report = Grower(model, GROWTH).find(BATCHES).keep()
    assert report.kept
    unknown = {layer.kind for layer in report.layers if layer.out_of_reach is None}
    assert unknown == UNKNOWN.get(method, {"qk"})
    model.set_adapter("default")
    train(model, torch.optim.AdamW(trainable(model), lr=1e-3), BATCHES[:3])
