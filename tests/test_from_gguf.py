"""A model that transformers loaded from a GGUF is an ordinary one by then: it grows and saves like any other."""

import json

import numpy
import pytest
import torch
from families import GROUPED, VOCABULARY, lm_batches, tokens
from transformers import AutoModelForCausalLM

from hf_growattn import Grower, GrowthConfig, export_model, patch_model, unpatch_model
from hf_growattn.growable.growths import attentions

gguf = pytest.importorskip("gguf", reason="needs gguf: pip install gguf")
WIDTH, HEADS = GROUPED["hidden_size"], GROUPED["num_attention_heads"]
LAYER = dict.fromkeys(("attn_q", "attn_output", "ffn_gate", "ffn_up", "ffn_down"), (WIDTH, WIDTH))
LAYER |= {"attn_k": (WIDTH // 2, WIDTH), "attn_v": (WIDTH // 2, WIDTH), "attn_norm": (WIDTH,), "ffn_norm": (WIDTH,)}
SHAPES = {"token_embd": (VOCABULARY, WIDTH), "output": (VOCABULARY, WIDTH), "output_norm": (WIDTH,)}
SHAPES |= {f"blk.{layer}.{name}": shape for layer in range(2) for name, shape in LAYER.items()}


@pytest.fixture(params=["F32", "Q8_0"])
def loaded(request, tmp_path):
    """A tiny Llama out of a GGUF, its matrices in fp32 or in blocks of 8 bits."""
    writer, kind = gguf.GGUFWriter(tmp_path / "m.gguf", "llama"), gguf.GGMLQuantizationType[request.param]
    writer.add_vocab_size(VOCABULARY)
    writer.add_context_length(128)
    writer.add_block_count(2)
    writer.add_embedding_length(WIDTH)
    writer.add_feed_forward_length(WIDTH)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(HEADS // 2)
    writer.add_layer_norm_rms_eps(1e-5)
    numbers = numpy.random.default_rng(0)
    for name, shape in SHAPES.items():
        values, matrix = numbers.normal(size=shape).astype(numpy.float32), len(shape) > 1
        stored = gguf.quants.quantize(values * 0.2, kind) if matrix else 1 + values
        writer.add_tensor(f"{name}.weight", stored, raw_dtype=kind if matrix else None)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    model = AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file="m.gguf").eval()
    assert model.is_quantized and model.dtype == torch.float32  # which is why the stock one cannot be saved
    return model


def reloaded(path):
    assert "quantization_config" not in json.loads((path / "config.json").read_text())
    return AutoModelForCausalLM.from_pretrained(path).eval()(tokens()).logits


def test_it_saves_before_and_after_growth_and_as_a_stock_model(loaded, tmp_path):
    expected = loaded(tokens()).logits
    model = patch_model(loaded)
    assert not model.is_quantized  # which Trainer asks
    model.save_pretrained(tmp_path / "patched")
    assert torch.equal(reloaded(tmp_path / "patched"), expected)
    assert Grower(model, GrowthConfig(qk_dims=3, v_dims=2, oversampling=4)).grow(lm_batches()).applied
    model.save_pretrained(tmp_path / "grown")
    assert torch.equal(reloaded(tmp_path / "grown"), model(tokens()).logits)
    export_model(model, tmp_path / "stock")
    assert torch.allclose(reloaded(tmp_path / "stock"), model(tokens()).logits, atol=1e-3)


def test_it_saves_when_it_is_stock_again(loaded, tmp_path):
    model = unpatch_model(patch_model(loaded))
    model.save_pretrained(tmp_path / "stock")
    assert torch.equal(reloaded(tmp_path / "stock"), model(tokens()).logits)


def test_weights_that_stayed_in_blocks_are_quantized_still(loaded):
    """As with a kernel that computes on them: nothing here may call them ordinary."""
    head = loaded.lm_head
    head.weight = torch.nn.Parameter(head.weight.to(torch.uint8), requires_grad=False)
    assert patch_model(loaded).is_quantized and attentions(loaded)
