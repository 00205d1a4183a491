"""Quantized bases: new dims are found, kept, trained and merged beside them, and none of their weights is touched."""

import copy

import peft
import pytest
import torch
from families import add_dims, build, lm_batches, train
from torch import nn
from transformers import AutoModelForCausalLM, BitsAndBytesConfig
from transformers.integrations.bitnet import AutoBitLinear

from hf_growattn import (
    GrowAttnConfig,
    Grower,
    GrowthConfig,
    attention_views,
    export_model,
    initialize_growattn_weights,
    load_growth,
    patch_model,
    save_growth,
    unpatch_model,
)
from hf_growattn.growable.attention import attentions

# What peft and bitsandbytes ask of others is not ours to mend.
pytestmark = [
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning"),
    pytest.mark.filterwarnings("ignore:MatMul8bitLt"),
]
MODEL = "smollm3"  # without biases, and in multiples of 64, as bitsandbytes wants 4-bit layers on CPUs
BATCHES = lm_batches(16)  # so many that what the guided start finds on them holds
GROWTH = GrowthConfig(qk_dims=2, v_dims=2)
FIX = "oad the model without quantization"


class QuantLinear(nn.Module):
    """As GPTQ's and AWQ's layers look: integers and scales in buffers, and no weight."""

    def __init__(self, linear):
        super().__init__()
        self.register_buffer("scales", linear.weight.detach().abs().max() / 127)
        self.register_buffer("qweight", (linear.weight.detach() / self.scales).round().to(torch.int8))
        self.bias = linear.bias
        self.in_features, self.out_features = linear.in_features, linear.out_features

    def forward(self, x):
        return nn.functional.linear(x, self.qweight * self.scales, self.bias)


def bitnet(linear):
    """A layer whose weight is floating-point and still not what it computes with."""
    layer = AutoBitLinear(linear.in_features, linear.out_features, linear.bias is not None)
    layer.load_state_dict({**linear.state_dict(), "weight_scale": torch.full((1,), 0.5)})
    return layer


def in_place(module, convert):
    """Put other layers in the place of all linear ones inside a module, but for the head."""
    for parent in list(module.modules()):
        for name, child in list(parent.named_children()):
            if type(child) is nn.Linear and name != "lm_head":
                setattr(parent, name, convert(child))


def by_torchao(module):
    quantization = pytest.importorskip("torchao.quantization", reason="torchao is not installed")
    quantization.quantize_(module, quantization.Int8WeightOnlyConfig())


def by_bitsandbytes(**options):
    def load(folder):
        pytest.importorskip("bitsandbytes", reason="bitsandbytes is not installed")
        return AutoModelForCausalLM.from_pretrained(folder, quantization_config=BitsAndBytesConfig(**options)).eval()

    return load


def loaded_and(quantize):
    def load(folder):
        model = AutoModelForCausalLM.from_pretrained(folder).eval()
        quantize(model)
        return model

    return load


# How to load a checkpoint quantized, and the name in an error.
KINDS = {
    "int8": (by_bitsandbytes(load_in_8bit=True), r"quantized by bitsandbytes \(Linear8bitLt\)"),
    "nf4": (by_bitsandbytes(load_in_4bit=True, bnb_4bit_quant_type="nf4"), r"by bitsandbytes \(Linear4bit\)"),
    "torchao": (loaded_and(by_torchao), r"quantized by torchao \(\w+\)"),
    "BitNet": (loaded_and(lambda model: in_place(model, bitnet)), r"quantized by transformers \(AutoBitLinear\)"),
    "GPTQ": (loaded_and(lambda model: in_place(model, QuantLinear)), "a QuantLinear of test_quantized"),
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Checkpoints of one model, stock and grown."""
    folder = tmp_path_factory.mktemp("checkpoints")
    model = build(MODEL)
    model.save_pretrained(folder / "stock")
    assert Grower(patch_model(model), GrowthConfig(qk_dims=16)).find(BATCHES).keep().kept
    model.save_pretrained(folder / "grown")
    return folder


def with_lora(model):
    """Under LoRA: on the queries where every version of peft knows how, and else beside them."""
    kind = type(model.model.layers[0].self_attn.q_proj)
    target = "q_proj" if issubclass(kind, nn.Linear) and kind is not nn.Linear else "embed_tokens"
    return peft.get_peft_model(patch_model(model), peft.LoraConfig(target_modules=[target]))


def logits(model):
    with torch.no_grad():
        return model(**BATCHES[0]).logits


def loss_of(model):
    with torch.no_grad():
        return sum(model(**batch).loss.item() for batch in BATCHES) / len(BATCHES)


@pytest.mark.parametrize("wrap", [patch_model, with_lora], ids=["alone", "beside LoRA"])
@pytest.mark.parametrize("kind", KINDS)
def test_growth_keeps_new_dims_next_to_quantized_weights(kind, wrap, folders):
    model = wrap(KINDS[kind][0](folders / "stock")).eval()
    report = Grower(model, GROWTH).find(BATCHES).keep()
    assert report.kept and report.fall > 0.1
    new = {name: parameter for name, parameter in model.named_parameters() if ".extra.growths." in name}
    assert all(parameter.dtype == torch.float32 and parameter.requires_grad for parameter in new.values())
    train(model, torch.optim.AdamW(new.values(), lr=1e-3), 2 * BATCHES[:4])
    # bitsandbytes packs its layers now, and they give no more gradients.
    assert loss_of(model) < report.loss_before - report.fall
    base = model.get_base_model() if wrap is with_lora else model
    unpatch_model(base, drop_growth=True)
    assert torch.equal(logits(model), logits(KINDS[kind][0](folders / "stock")))


@pytest.mark.parametrize("kind", KINDS)
def test_a_quantized_model_is_not_exported(kind, folders, tmp_path):
    load, name = KINDS[kind]
    with pytest.raises(ValueError, match=rf"(q|k|v|o)_proj\b.*({name}|scales, which).*{FIX}"):
        export_model(patch_model(load(folders / "stock")), tmp_path / "exported")
    model = patch_model(build(MODEL))
    in_place(model.model.layers[1].mlp, bitnet)
    with pytest.raises(ValueError, match=f"layers.1.mlp.gate_proj.*{FIX}"):
        export_model(model, tmp_path / "exported")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("kind", KINDS)
def test_a_grown_checkpoint_loads_quantized(kind, folders):
    model = KINDS[kind][0](folders / "grown")
    parts = [attention.extra.growths["growth_1"] for attention in attentions(model)]
    assert all(part.qk_dims == 16 and part.in_projection.weight.is_floating_point() for part in parts)
    assert (logits(model) - logits(KINDS[kind][0](folders / "stock"))).abs().max() > 0.01


@pytest.mark.parametrize("kind", KINDS)
def test_patching_and_adapters_work_beside_quantized_weights(kind, folders):
    load, _ = KINDS[kind]
    model = load(folders / "stock")
    in_training, expected = logits(model.train()), logits(model.eval())  # bitsandbytes rounds otherwise in training
    stock_class = type(model)
    assert torch.equal(logits(patch_model(model)), expected)

    model = peft.get_peft_model(load(folders / "stock"), GrowAttnConfig(qk_dims=3, v_dims=2)).train()
    trained = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert all("growattn_" in name and parameter.dtype == torch.float32 for name, parameter in trained.items())
    assert (logits(model) - in_training).abs().max() <= 1e-5 * in_training.abs().max()
    train(model, torch.optim.AdamW(trained.values(), lr=1e-3), 2 * BATCHES[:4])
    model.eval()
    with model.disable_adapter():
        assert torch.equal(logits(model), expected)
    unloaded = model.unload()
    assert type(unloaded) is stock_class and torch.equal(logits(unloaded), expected)


def dequantized(kind, linear):
    """The weight that a quantized layer stands for, as its own package unpacks it."""
    if kind == "torchao":
        return linear.weight.dequantize()
    if kind == "GPTQ":
        return linear.qweight * linear.scales
    if kind == "int8":
        return linear.state.CB * linear.state.SCB[:, None] / 127
    return pytest.importorskip("bitsandbytes").functional.dequantize_4bit(linear.weight, linear.weight.quant_state)


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "BitNet"])  # that one unpacks nowhere but inside
def test_views_are_those_of_the_dequantized_weights(kind, folders):
    """bitsandbytes answers in fp16 for int8 and on some CPUs in bf16 for 4 bits; all else is rounding of fp32."""
    model = KINDS[kind][0](folders / "stock")
    if kind == "int8":
        logits(model)  # bitsandbytes packs it at the first forward, and on some CPUs 4 bits in its own order
    dense = build(MODEL)
    for ours, layer in zip(dense.model.layers, model.model.layers):
        for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
            weight = dequantized(kind, getattr(layer.self_attn, name)).float()
            getattr(ours.self_attn, name).weight.data.copy_(weight)
    logits(model)
    expected = logits(model)
    in_bf16 = getattr(model.model.layers[0].self_attn.q_proj, "support_avx512bf16_for_cpu", False)
    tolerance = 1e-2 if in_bf16 else 1e-3 if kind == "int8" else 1e-5
    for reference, stock, patched in zip(
        attention_views(dense), attention_views(model), attention_views(patch_model(model))
    ):
        for view in (stock, patched):
            for read in (lambda v: v.pattern(1, 2).dense(), lambda v: v.message(3).dense()):
                assert (read(view) - read(reference)).norm() < tolerance * read(reference).norm()
    assert torch.equal(logits(model), expected)


@pytest.mark.parametrize("kind", KINDS)
def test_a_guided_start_on_a_quantized_base(kind, folders, tmp_path):
    load, _ = KINDS[kind]
    config = dict(budget=2000) if kind in ("nf4", "GPTQ") else dict(qk_dims=2, v_dims=2)
    stock = logits(load(folders / "stock"))
    model = peft.get_peft_model(load(folders / "stock"), GrowAttnConfig(**config)).eval()
    report = initialize_growattn_weights(model, BATCHES)
    assert report.kept and report.fall > 0.1
    with model.disable_adapter():
        assert torch.equal(logits(model), stock)
    trained = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
    assert trained == report.added_parameters
    assert loss_of(model) < report.loss_before - 0.1

    model.save_pretrained(tmp_path)
    again = peft.PeftModel.from_pretrained(load(folders / "stock"), tmp_path).eval()
    assert torch.equal(logits(again), logits(model))

    merged = again.merge_and_unload()  # touches no quantized weight
    assert torch.equal(logits(merged), logits(model))
    dense = peft.PeftModel.from_pretrained(build(MODEL), tmp_path).eval()
    expected = logits(dense)
    merged = dense.merge_and_unload()
    assert (logits(merged) - expected).abs().max() < 1e-5 * expected.abs().max()
    assert loss_of(merged) < report.loss_before


def test_what_bitsandbytes_packs_for_inference_is_kept_for_training(folders):
    """On CPUs with AVX512-BF16 its layers pack their weights when they are evaluated, and lose their gradients."""
    module = pytest.importorskip("bitsandbytes").nn.modules
    if not getattr(module, "has_avx512bf16", bool)():
        pytest.skip("this CPU has no AVX512-BF16")
    load = KINDS["nf4"][0]
    loaded = load(folders / "stock")
    attention_views(loaded)[0].pattern(0)
    model = peft.get_peft_model(loaded, GrowAttnConfig(qk_dims=2)).eval()
    report = initialize_growattn_weights(model, BATCHES)
    layer = model.model.model.layers[0].self_attn.q_proj
    assert report.kept and not hasattr(layer.weight.quant_state, "packing_format_for_cpu")
    logits(model)
    with pytest.raises(ValueError, match=r"was packed for inference by bitsandbytes.*Load the model again"):
        initialize_growattn_weights(model, BATCHES)


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "int8"])  # bitsandbytes takes that on GPUs only
def test_a_state_dict_of_a_quantized_model_leaves_its_layers_as_they_are(kind, folders):
    load, _ = KINDS[kind]
    model = patch_model(load(folders / "stock"))
    before, sizes = logits(model), repr(model)
    model.load_state_dict(copy.deepcopy(model.state_dict()), strict=False)
    assert repr(model) == sizes and torch.equal(logits(model), before)


@pytest.mark.parametrize("kind", KINDS)
def test_a_growth_knows_its_base_quantized_or_not(kind, folders, tmp_path):
    load = KINDS[kind][0]
    model, stock = patch_model(load(folders / "stock")), AutoModelForCausalLM.from_pretrained(folders / "stock")
    add_dims(attentions(model)[0], 2, 2)
    save_growth(model, tmp_path)
    load_growth(patch_model(load(folders / "stock")), tmp_path)
    other = patch_model(AutoModelForCausalLM.from_config(stock.config))
    with pytest.raises(ValueError, match="a base with other weights"):
        load_growth(other, tmp_path)
    if kind != "BitNet":  # which computes with half of each weight here
        load_growth(patch_model(stock), tmp_path)
