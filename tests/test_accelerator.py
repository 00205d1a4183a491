"""On an accelerator: growth in and out of autocast, generation, saving, kernels; skipped without one."""

import copy

import pytest
import torch
from families import build, lm_batches, tokens
from transformers import AutoModelForCausalLM

from hf_growattn import Grower, GrowthConfig, export_model, patch_model
from hf_growattn.growable.growths import cache_bytes

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no accelerator is here")
CONFIG = GrowthConfig(qk_dims=3, v_dims=3)  # widths that kernels have to pad
FAMILIES = ["llama-2", "gpt2-2", "gemma2"]


def batches(count: int = 4) -> list[dict]:
    return [{name: tensor.cuda() for name, tensor in batch.items()} for batch in lm_batches(count)]


def train(model, optimizer, dtype, steps: int = 3) -> float:
    """Train under the autocast of a type, and return the last loss."""
    for batch in batches(steps):
        with torch.autocast("cuda", dtype, enabled=dtype != torch.float32):
            loss = model(**batch, use_cache=False).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return loss.item()


@torch.no_grad()
def logits(model, ids):
    return model(input_ids=ids, use_cache=False).logits.float()


@pytest.mark.parametrize("variant", FAMILIES)
def test_a_growth_is_that_of_the_cpu(variant):
    """Sums of another order differ in the last of 24 bits, which these steep models multiply."""
    there, here = patch_model(build(variant)), patch_model(build(variant))
    expected = Grower(there, CONFIG).find(lm_batches(4)).keep()
    report = Grower(here.cuda(), CONFIG).find(batches()).keep()
    assert report.loss_before == pytest.approx(expected.loss_before, rel=1e-4)
    assert report.fall == pytest.approx(expected.fall, rel=5e-2)
    for one, other in zip(report.layers, expected.layers):
        assert one.gain == pytest.approx(other.gain, rel=2e-2, abs=1e-3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("variant", FAMILIES)
def test_a_training_that_grows_is_saved_and_loaded_and_generates(variant, dtype, tmp_path):
    model = patch_model(build(variant)).cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    train(model, optimizer, dtype)
    bytes_before = cache_bytes(model)
    with torch.autocast("cuda", dtype, enabled=dtype != torch.float32):
        report = Grower(model, CONFIG, optimizer).find(batches()).keep()
    assert report.kept
    train(model, optimizer, dtype)
    model.eval().save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, device_map="cuda")
    ids = tokens().cuda()
    assert cache_bytes(loaded) > bytes_before and torch.equal(logits(model, ids), logits(loaded, ids))
    options = dict(max_new_tokens=8, do_sample=False)
    with_cache, without = (loaded.generate(ids, use_cache=use, **options) for use in (True, False))
    assert torch.equal(with_cache, without)


@pytest.mark.parametrize("variant", FAMILIES[:2])
def test_kernels_agree(variant, tmp_path):
    """In bf16 the output of each layer is rounded to 8 bits; a wrong width would be off by the logits' own size."""
    model = patch_model(build(variant, dtype=torch.bfloat16)).cuda()
    Grower(model, CONFIG).find(batches()).keep()
    model.eval()
    expected = logits(copy.deepcopy(model).float(), tokens().cuda())
    for implementation in ("eager", "sdpa"):
        model.set_attn_implementation(implementation)
        difference = logits(model, tokens().cuda()) - expected
        assert difference.norm() < 0.05 * expected.norm(), implementation
    if variant == "llama-2":
        export_model(model, tmp_path)
        stock = AutoModelForCausalLM.from_pretrained(tmp_path, device_map="cuda")
        assert (logits(stock, tokens().cuda()) - expected).norm() < 0.05 * expected.norm()


def test_a_compiled_model_grows_between_steps():
    model = patch_model(build("llama-2")).cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    compiled = torch.compile(model)
    train(compiled, optimizer, torch.bfloat16)
    Grower(model, CONFIG, optimizer).find(batches()).keep()
    loss = model(**batches(1)[0], use_cache=False).loss
    assert compiled(**batches(1)[0], use_cache=False).loss.item() == pytest.approx(loss.item(), rel=1e-4)
    static = dict(max_new_tokens=8, do_sample=False)
    ids = tokens().cuda()
    model.eval()
    assert torch.equal(model.generate(ids, cache_implementation="static", **static), model.generate(ids, **static))
