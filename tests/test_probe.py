"""The probe against attention with materialised logits, and the sketch against the whole gradient."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from conftest import real_batches, real_model
from families import build, lm_batches, padded, tokens
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import eager_mask

from hf_growattn import functional as F
from hf_growattn import patch_model
from hf_growattn.modeling import attentions
from hf_growattn.probe import (
    PatternProbe,
    batch_loss,
    exact_gradients,
    sketched_gradients,
    undisturbed,
    whitenings,
)

VARIANTS = ["llama-2", "llama-5-bias", "gpt2-2", "gpt2-5-scaled"]


def _materialised(module, query, key, value, attention_mask, scaling, dropout=0.0, **kwargs):
    """Eager attention that keeps its logits, and their gradient, for a test to read."""
    groups = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    module.logits = (query @ key.mT * scaling).requires_grad_()
    module.logits.retain_grad()
    weights = torch.softmax(module.logits + attention_mask, dim=-1)
    return (weights @ value).transpose(1, 2).contiguous(), weights


AttentionInterface.register("materialised", _materialised)
AttentionMaskInterface.register("materialised", eager_mask)


def cross_from_logits(model, batches):
    """`T = s sum_n X_n^T G_n X_n` of every head, from materialised logits: a list of (H, d + 1, d + 1)."""
    inputs = {}
    layers = attentions(model)
    hooks = [
        layer.register_forward_pre_hook(
            lambda module, args, kwargs: inputs.__setitem__(module, args[0] if args else kwargs["hidden_states"]),
            with_kwargs=True,
        )
        for layer in layers
    ]
    model.set_attn_implementation("materialised")
    crosses = [0.0] * len(layers)
    for batch in batches:
        model(**batch).loss.backward()
        for index, layer in enumerate(layers):
            x = F.augment(inputs[layer].detach())
            crosses[index] += layer.scaling * torch.einsum("nia,nhij,njb->hab", x, layer.logits.grad, x) / len(batches)
    for hook in hooks:
        hook.remove()
    return crosses


@pytest.mark.parametrize(
    # In fp64, transformers' eager Llama gives NaN under left padding: its softmax is fp32, its mask is not.
    "attention, dtype",
    [("eager", torch.float32), ("sdpa", torch.float32), ("sdpa", torch.float64)],
)
@pytest.mark.parametrize("variant", VARIANTS)
def test_probe_reads_the_gradient_of_the_logits(variant, attention, dtype):
    batches = lm_batches()
    expected = cross_from_logits(patch_model(build(variant, dtype=dtype)), batches)
    model = patch_model(build(variant, attention=attention, dtype=dtype))
    layers = attentions(model)
    probes = []
    with undisturbed(model):
        for layer in layers:
            heads, groups = layer.heads("query"), layer.heads("key")
            features = layer.config.hidden_size + (layer.bias("query") is not None)
            identity = torch.eye(features, dtype=dtype)
            psi = torch.randn(heads, features, 3, dtype=dtype)
            layer.extension = PatternProbe(identity.expand(groups, -1, -1), psi, heads, features)
            probes.append(layer.extension)
        plain = [build(variant, attention=attention, dtype=dtype)(**batch).loss for batch in batches]
        for batch, loss in zip(batches, plain):
            probed = batch_loss(model, batch, 0)
            torch.testing.assert_close(probed, loss, rtol=1e-5, atol=0)
            probed.backward()
    for layer, probe, cross in zip(layers, probes, expected):
        features = probe.zero_query.shape[1]
        cross = cross[:, :features, :features]
        read = probe.zero_query.grad / len(batches)
        assert (read - cross).norm() <= 1e-5 * cross.norm()
        mirrored = (cross.mT @ probe.query_probe).unflatten(0, (layer.heads("key"), -1)).sum(1)
        assert (probe.zero_key.grad / len(batches) - mirrored).norm() <= 1e-5 * mirrored.norm()


@pytest.mark.parametrize("variant", VARIANTS)
def test_exact_directions_are_those_of_the_whitened_gradient(variant):
    batches = lm_batches()
    expected = cross_from_logits(patch_model(build(variant)), batches)
    model = patch_model(build(variant))
    layers = attentions(model)
    with undisturbed(model):
        roots, loss = whitenings(model, layers, batches, ridge=0.05)
        gradients = exact_gradients(model, layers, roots, batches, dims=4)
    assert loss == pytest.approx(sum(model(**b).loss.item() for b in batches) / len(batches), rel=1e-6)
    for layer, root, gradient, cross in zip(layers, roots, gradients, expected):
        cross = cross[:, : len(root.query_root), : len(root.key_root)]
        groups = layer.heads("key")
        whole = F.whiten(cross, root.query_whitening, root.key_whitening, groups)
        query = F.join_bias(layer.weight("query"), layer.bias("query"))
        key = F.join_bias(layer.weight("key"), layer.bias("key"))
        residual = F.bottleneck(
            whole,
            F.column_basis(F.stack_groups(root.query_root @ query, groups)),
            F.column_basis(root.key_root @ key),
        )
        torch.testing.assert_close(gradient.sigma, torch.linalg.svdvals(residual)[:, :4], rtol=1e-4, atol=0)
        assert gradient.starvation == pytest.approx((residual.norm() / whole.norm()).item(), rel=1e-4)


def test_moments_leave_padding_out():
    model = patch_model(build("llama-2"))
    layers = attentions(model)
    with undisturbed(model):
        both = whitenings(model, layers, [{**padded(), "labels": tokens()}], ridge=0.05)[0]
        alone = padded()
        rows = [
            {"input_ids": alone["input_ids"][i : i + 1, 2 * i :], "labels": tokens()[i : i + 1, 2 * i :]}
            for i in range(3)
        ]
        apart = whitenings(model, layers, rows, ridge=0.05)[0]
    for one, other in zip(both, apart):
        torch.testing.assert_close(one.query_root, other.query_root, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", ["stories260K", "tinystories-3M-gpt2"])
def test_sketch_keeps_the_gain(name):
    model = patch_model(real_model(name))
    layers, batches = attentions(model), [{"input_ids": x, "labels": x} for x in real_batches(4, name)]
    with undisturbed(model):
        roots, _ = whitenings(model, layers, batches, ridge=0.05)
        exact = exact_gradients(model, layers, roots, batches, dims=16)
        for dims in (2, 4, 8, 16):
            sketched = sketched_gradients(model, layers, roots, batches, dims, oversampling=8, seed=dims)
            kept = [
                F.first_order_gain(s.sigma) / F.first_order_gain(e.sigma[:, :dims]) for s, e in zip(sketched, exact)
            ]
            kept = torch.cat(kept)
            print(f"{name}: p={dims}, mean {kept.mean():.4f}, least {kept.min():.4f}")
            assert kept.mean() >= 0.95
            assert kept.max() <= 1 + 1e-4
            for one, other in zip(sketched, exact):
                assert one.starvation == pytest.approx(other.starvation, rel=0.2)


def test_sketched_gain_is_what_the_exact_gradient_gives_its_directions():
    model = patch_model(build("llama-5-bias"))
    layers, batches = attentions(model), lm_batches()
    expected = cross_from_logits(patch_model(build("llama-5-bias")), batches)
    with undisturbed(model):
        roots, _ = whitenings(model, layers, batches, ridge=0.05)
        sketched = sketched_gradients(model, layers, roots, batches, 4, oversampling=4, seed=0)
    for layer, gradient, cross in zip(layers, sketched, expected):
        new_q, new_k = gradient.factors(layer.heads("query"))
        pattern = new_q @ new_k.repeat_interleave(2, 0).mT
        assert (cross * pattern).sum().item() == pytest.approx(-gradient.gain, rel=1e-3)


@pytest.mark.parametrize("checkpointing", [None, False, True])
@pytest.mark.parametrize("variant", ["llama-2", "gpt2-2"])
def test_activation_checkpointing_changes_no_statistic(variant, checkpointing):
    model = patch_model(build(variant)).train()
    layers, batches = attentions(model), lm_batches()
    if checkpointing is not None:
        enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
        enable({"use_reentrant": checkpointing})
    recomputed = []
    layers[0].register_forward_hook(lambda *args: recomputed.append(1))
    with undisturbed(model):
        roots, _ = whitenings(model, layers, batches, ridge=0.05)
        del recomputed[:]
        gradients = exact_gradients(model, layers, roots, batches, dims=4)
    assert len(recomputed) == len(batches) * (1 if checkpointing is None else 2)
    reference = patch_model(build(variant))
    with undisturbed(reference):
        expected = exact_gradients(reference, attentions(reference), roots, batches, dims=4)
    for one, other in zip(gradients, expected):
        torch.testing.assert_close(one.sigma, other.sigma, rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize("variant", ["llama-2", "gpt2-2"])
def test_nothing_is_disturbed(variant, fails):
    model = patch_model(build(variant))
    model.train()
    model.base_model.get_input_embeddings().weight.requires_grad_(False)
    next(m for m in model.modules() if isinstance(m, torch.nn.LayerNorm | torch.nn.Linear)).eval()
    layers, batches = attentions(model), lm_batches()
    torch.manual_seed(1)
    model(**batches[0]).loss.backward()
    before = {
        "weights": {n: (p.data_ptr(), p.detach().clone(), p.requires_grad) for n, p in model.named_parameters()},
        "gradients": {n: None if p.grad is None else (p.grad, p.grad.clone()) for n, p in model.named_parameters()},
        "training": [module.training for module in model.modules()],
        "hooks": [len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules()],
        "modules": [name for name, _ in model.named_modules()],
        "random": torch.get_rng_state(),
        "grad": torch.is_grad_enabled(),
    }
    batches = batches[:2] if not fails else [batches[0], {"input_ids": tokens() + 1000, "labels": tokens()}]
    try:
        with undisturbed(model):
            roots, _ = whitenings(model, layers, batches[:1], ridge=0.05)
            sketched_gradients(model, layers, roots, batches, 2, oversampling=2, seed=0)
        assert not fails
    except IndexError:
        assert fails
    for name, parameter in model.named_parameters():
        pointer, value, flag = before["weights"][name]
        assert parameter.data_ptr() == pointer and torch.equal(parameter, value) and parameter.requires_grad == flag
        gradient = before["gradients"][name]
        assert parameter.grad is None if gradient is None else parameter.grad is gradient[0]
        assert gradient is None or torch.equal(*gradient)
    assert [module.training for module in model.modules()] == before["training"]
    assert [len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules()] == before["hooks"]
    assert [name for name, _ in model.named_modules()] == before["modules"]
    assert torch.equal(torch.get_rng_state(), before["random"])
    assert torch.is_grad_enabled() == before["grad"]
    assert all(layer.extension is None for layer in layers)


def test_statistics_are_fp32_whatever_the_model():
    model = patch_model(build("llama-2", dtype=torch.bfloat16))
    layers, batches = attentions(model), lm_batches()
    with undisturbed(model):
        roots, _ = whitenings(model, layers, batches, ridge=0.05)
        gradients = exact_gradients(model, layers, roots, batches, dims=4)
    reference = patch_model(build("llama-2"))
    with undisturbed(reference):
        expected = exact_gradients(reference, attentions(reference), roots, batches, dims=4)
    for root, one, other in zip(roots, gradients, expected):
        assert root.query_root.dtype == one.sigma.dtype == torch.float32
        # bf16 keeps 8 bits, and this net of wide random weights amplifies them.
        torch.testing.assert_close(one.sigma, other.sigma, rtol=0.3, atol=0)


@pytest.mark.skipif(sys.platform != "linux", reason="reads the peak memory from /proc")
def test_memory_of_the_sketch_stays_near_a_training_step():
    """At T = 2,048: neither a T x T nor a per-head d x d matrix would fit into this allowance."""
    script = Path(__file__).with_name("memory.py")
    peaks = {
        mode: json.loads(subprocess.run([sys.executable, script, mode], check=True, capture_output=True).stdout)
        for mode in ("training", "sketch")
    }
    ratio = peaks["sketch"]["work"] / peaks["training"]["work"]
    print(f"training {peaks['training']['work'] / 2**20:.0f} MiB, sketch {ratio:.2f} of it")
    assert ratio <= 1.3
    assert peaks["sketch"]["work"] < peaks["sketch"]["square"] + peaks["training"]["work"]
