"""Exported checkpoints as others use them: DoRA trains on them, and short models may lack a type of layer."""

import pytest
import torch
from families import build, lm_batches, tokens
from peft import LoraConfig, get_peft_model
from test_export import widened
from transformers import AutoModelForCausalLM, Gemma3ForCausalLM, Gemma3TextConfig

from hf_growattn import export_model


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_dora_divides_by_the_norms_of_padded_rows(dtype, tmp_path):
    """Which are not zero, and change no logit."""
    model = widened(build("llama-2"))
    export_model(model, tmp_path)
    stock = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=dtype)
    with torch.no_grad():
        before = stock(tokens()).logits
        for layer in stock.model.layers:
            for name in ("q_proj", "k_proj", "v_proj"):
                weight = getattr(layer.self_attn, name).weight
                weight[weight.abs().amax(1) < 1e-5] = 0
        assert torch.equal(stock(tokens()).logits, before)
    stock = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=dtype)
    adapted = get_peft_model(stock, LoraConfig(r=2, use_dora=True, target_modules=["q_proj", "k_proj", "v_proj"]))
    adapted(**lm_batches(1)[0]).loss.backward()
    gradients = [parameter.grad for parameter in adapted.parameters() if parameter.grad is not None]
    assert gradients and all(torch.isfinite(gradient).all() for gradient in gradients)


def test_a_model_that_is_too_short_for_all_its_types_of_layers(tmp_path):
    """Gemma 3 rotates local and global layers apart, and the first five are local."""
    torch.manual_seed(0)
    config = Gemma3TextConfig(
        vocab_size=97, hidden_size=32, intermediate_size=32, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8, query_pre_attn_scalar=8, max_position_embeddings=64, sliding_window=8,
        pad_token_id=0,
    )  # fmt: skip
    model = widened(Gemma3ForCausalLM(config).eval(), qk_dims=0)
    assert export_model(model, tmp_path).difference < 1e-5  # fp32
