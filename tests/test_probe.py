"""The probe against attention with materialised logits, and the sketch against the whole gradient."""

import itertools
from dataclasses import replace

import pytest
import torch
from compared import best_directions, column_basis, exact_directions, old_factors, residual, whiten, whole_gradients
from conftest import real_batches, real_model
from families import build, build_encoder_decoder, lm_batches, padded, tokens
from torch.autograd.profiler import profile
from transformers import AttentionInterface, AttentionMaskInterface, LlamaConfig, LlamaForCausalLM
from transformers.masking_utils import eager_mask

from hf_growattn import Grower, GrowthConfig, patch_model
from hf_growattn.growable.attention import attentions, set_trial
from hf_growattn.measure import directions
from hf_growattn.measure import functional as F
from hf_growattn.measure.bottlenecks import QK, V, compute_moments
from hf_growattn.measure.directions import KindProbe, Probe, sketched_directions
from hf_growattn.measure.halves import halves_of
from hf_growattn.measure.passes import Objective, evaluation_mode

VARIANTS = ["llama-2", "llama-5-bias", "gpt2-2", "gpt2-5-scaled"]


def _materialised(module, query, key, value, attention_mask, scaling, dropout=0.0, **kwargs):
    """Eager attention that keeps its logits, their gradient and its weights for a test to read."""
    groups = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    module.logits = (query @ key.mT * scaling).requires_grad_()
    module.logits.retain_grad()
    module.attended = torch.softmax(module.logits + attention_mask, dim=-1)
    return (module.attended @ value).transpose(1, 2).contiguous(), module.attended


AttentionInterface.register("materialised", _materialised)
AttentionMaskInterface.register("materialised", eager_mask)


def _keep(module, args, kwargs, output):
    module.inputs, module.outputs = args[0] if args else kwargs["hidden_states"], output[0]
    module.outputs.retain_grad()


def crosses(model, batches):
    """`T` of every head from what is materialised: lists of (H, d + 1, d + 1) for patterns, (H, d, d + 1) for messages.

    Patterns: `s sum_n X_n^T G_n X_n`; messages: `sum_n (dL/dY_n)^T A_n X_n`.
    """
    layers = [attention.module for attention in attentions(model)]
    hooks = [layer.register_forward_hook(_keep, with_kwargs=True) for layer in layers]
    model.set_attn_implementation("materialised")
    patterns, messages = [0.0] * len(layers), [0.0] * len(layers)
    for batch in batches:
        model(**batch).loss.backward()
        for index, layer in enumerate(layers):
            x = F.augment(layer.inputs.detach())
            patterns[index] += layer.scaling * torch.einsum("nia,nhij,njb->hab", x, layer.logits.grad, x) / len(batches)
            attended = layer.attended.detach() @ x[:, None]
            messages[index] += torch.einsum("nia,nhib->hab", layer.outputs.grad, attended) / len(batches)
    for hook in hooks:
        hook.remove()
    return {"qk": patterns, "v": messages}


def cut(cross, bottleneck):
    """A materialised cross without the constant features that the bottleneck's projections lack."""
    stacked, shared = old_factors(bottleneck)
    return cross[:, : stacked.shape[1], : shared.shape[1]]


def measured(model, batches, kinds=(QK, V)):
    return compute_moments(Objective(model), attentions(model), list(kinds), batches)


@pytest.mark.parametrize(
    # In fp64, transformers' eager Llama gives NaN under left padding: its softmax is fp32, its mask is not.
    "attention, dtype",
    [("eager", torch.float32), ("sdpa", torch.float32), ("sdpa", torch.float64)],
)
@pytest.mark.parametrize("variant", VARIANTS)
def test_probe_reads_the_gradient_of_logits_and_outputs(variant, attention, dtype):
    batches = lm_batches()
    expected = crosses(patch_model(build(variant, dtype=dtype)), batches)
    model = patch_model(build(variant, attention=attention, dtype=dtype))
    layers = attentions(model)
    with evaluation_mode(model):
        for layer in layers:
            probes = {}
            for kind in (QK, V):
                heads, groups = layer.shape.num_heads, layer.shape.num_key_value_heads
                stacked, shared = layer.features_of(kind.stacked), layer.features_of(kind.shared)
                identity = torch.eye(shared, dtype=dtype).expand(groups, -1, -1)
                probes[kind.name] = KindProbe(identity, torch.randn(heads, stacked, 3, dtype=dtype))
            set_trial(layer, Probe(layer.shape, **probes))
        plain = [build(variant, attention=attention, dtype=dtype)(**batch).loss for batch in batches]
        for batch, loss in zip(batches, plain):
            probed = Objective(model)(batch, 0)
            torch.testing.assert_close(probed, loss, rtol=1e-5, atol=0)
            probed.backward()
        for index, layer in enumerate(layers):
            for kind in (QK, V):
                probe = getattr(layer.extra.trial, kind.name)
                cross = expected[kind.name][index][:, : probe.zero_stacked.shape[1], : probe.shared_probe.shape[1]]
                read = probe.zero_stacked.grad / len(batches)
                assert (read - cross).norm() <= 1e-5 * cross.norm()
                mirrored = (cross.mT @ probe.stacked_probe).unflatten(0, (layer.shape.num_key_value_heads, -1)).sum(1)
                assert (probe.zero_shared.grad / len(batches) - mirrored).norm() <= 1e-5 * mirrored.norm()


@pytest.mark.parametrize("variant", VARIANTS)
def test_directions_are_those_of_the_whitened_gradient(variant):
    """With as many columns of each half as features a sketch is exact."""
    batches = lm_batches(4)  # of which every pass reads all
    halves = halves_of(batches)
    parts = [crosses(patch_model(build(variant)), half) for half in halves]
    model = patch_model(build(variant))
    with evaluation_mode(model):
        bottlenecks, losses = measured(model, batches)
        found = sketched_directions(Objective(model), bottlenecks, halves, dims=64, seed=0)
    assert losses == pytest.approx([model(**b).loss.item() for b in batches], rel=1e-6)
    for bottleneck, own in zip(bottlenecks, found):
        layer = attentions(model).index(bottleneck.attention)
        roots, name = bottleneck.roots, bottleneck.kind.name
        crosses_of_halves = [cut(part[name][layer], bottleneck) for part in parts]
        whole = [
            whiten(cross, roots.stacked_whitening, roots.shared_whitening, bottleneck.groups)
            for cross in crosses_of_halves
        ]
        first, second = whole
        if bottleneck.span_is_known:
            first, second = (residual(part, *bottleneck.whitened(*old_factors(bottleneck))) for part in whole)
        sigma = torch.linalg.svdvals((first + second) / 2)[:, :4]
        torch.testing.assert_close(own.sigma[:, :4], sigma, rtol=1e-4, atol=1e-7)
        torch.testing.assert_close(own.in_sample[:4], sigma.square().sum(0), rtol=1e-3, atol=1e-9)
        # Validated: the directions of one half, judged by the other.
        validated = 0
        for chosen, other in ((first, second), (second, first)):
            u, s, v = best_directions(chosen, 4)
            validated = validated + (s * (u * (other @ v)).sum(-2)).sum(0) / 2
        scale = own.in_sample.max().item()
        torch.testing.assert_close(own.validated[:4], validated, rtol=1e-3, atol=1e-3 * scale)
        rotates = variant.startswith("llama") and bottleneck.kind is QK
        assert rotates == (not bottleneck.span_is_known) and (not rotates or own.out_of_reach is None)


@pytest.mark.parametrize("left", [True, False])
def test_moments_leave_padding_out(left):
    model, alone = patch_model(build("llama-2")), padded(left=left)
    with evaluation_mode(model):
        both = measured(model, [{**alone, "labels": tokens()}])[0]
        parts = [slice(2 * i, None) if left else slice(17 - 2 * i) for i in range(3)]
        rows = [
            {"input_ids": alone["input_ids"][i : i + 1, part], "labels": tokens()[i : i + 1, part]}
            for i, part in enumerate(parts)
        ]
        apart = measured(model, rows)[0]
    for one, other in zip(both, apart):
        for name in ("stacked_root", "shared_root"):  # of values, the stacked one is the size of the output
            torch.testing.assert_close(getattr(one.roots, name), getattr(other.roots, name), rtol=1e-4, atol=1e-5)


def test_cross_attention_has_a_moment_for_either_input():
    """Messages are measured in units of the rms norm of the output."""
    model, encoded = patch_model(build_encoder_decoder()), padded(left=False)
    cross, queries, outputs = attentions(model)[-1], [], []

    def record(module, args, output):
        queries.append(args[0])
        outputs.append(output[0])

    cross.module.register_forward_hook(record)
    batches = [{**encoded, "labels": tokens(seed=4)}]
    with evaluation_mode(model):
        bottlenecks, _ = compute_moments(Objective(model), [cross], [QK, V], batches)
        sources = model.model.encoder(**encoded).last_hidden_state

    def root(inputs, mask):
        moment = F.moment_sum(F.augment(inputs), mask) / mask.sum()
        return F.square_roots(F.ridged(moment, 0.05))[0]

    every, size = torch.ones(queries[0].shape[:2]), outputs[0].norm(dim=-1).square().mean().sqrt()
    torch.testing.assert_close(bottlenecks[1].roots.stacked_whitening, size)
    torch.testing.assert_close(bottlenecks[1].roots.stacked_root, 1 / size)
    torch.testing.assert_close(bottlenecks[0].roots.stacked_root, root(queries[0], every), rtol=1e-4, atol=1e-5)
    for bottleneck in bottlenecks:
        expected = root(sources, encoded["attention_mask"])
        torch.testing.assert_close(bottleneck.roots.shared_root, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("old_dims_train", [True, False])
def test_sketch_keeps_the_gain(old_dims_train):
    model, dims = patch_model(real_model()), 4
    halves = halves_of([{"input_ids": x, "labels": x} for x in real_batches(4, size=4)])
    with evaluation_mode(model):
        bottlenecks, _ = measured(model, halves[0] + halves[1])
        bottlenecks = [replace(bottleneck, old_dims_train=old_dims_train) for bottleneck in bottlenecks]
        exact = exact_directions(Objective(model), bottlenecks, halves, dims)
        sketched = sketched_directions(Objective(model), bottlenecks, halves, dims, seed=0)
    for kind in (QK, V):
        pairs = [(s, e) for s, e in zip(sketched, exact) if s.bottleneck.kind is kind]
        kept = torch.cat([s.sigma.square().sum(-1) / e.sigma.square().sum(-1) for s, e in pairs])
        assert kept.mean() >= 0.95 and kept.max() <= 1 + 1e-4
        validated = [sum(g.validated.sum().item() for g in found) for found in zip(*pairs)]
        assert validated[0] == pytest.approx(validated[1], rel=0.15)
    starved = [sum(g.out_of_reach or 0.0 for g in found) for found in (sketched, exact)]
    assert starved[0] == pytest.approx(starved[1], rel=0.1)


def test_beside_old_dims_that_train_new_ones_leave_out_what_those_can_follow():
    model, batches = patch_model(build("llama-5-bias")), lm_batches(4)
    with evaluation_mode(model):
        bottlenecks, _ = measured(model, batches)
        beyond = sketched_directions(Objective(model), bottlenecks, halves_of(batches), 4, seed=0)
        frozen = [replace(bottleneck, old_dims_train=False) for bottleneck in bottlenecks]
        alone = sketched_directions(Objective(model), frozen, halves_of(batches), 4, seed=0)
    for bottleneck, one, other in zip(bottlenecks, beyond, alone):
        assert one.out_of_reach == other.out_of_reach
        if bottleneck.kind is QK:  # they rotate, and take the whole gradient
            assert one.out_of_reach is None and torch.equal(one.sigma, other.sigma)
            continue
        old = column_basis(bottleneck.whitened(*old_factors(bottleneck))[1])
        follows = [(old.mT @ found.v).norm() / found.v.norm() for found in (one, other)]
        assert follows[0] < 1e-4 and follows[1] > 0.05  # fp32 rounding against a share that is there
        assert other.sigma.square().sum() > one.sigma.square().sum()


@pytest.mark.parametrize("checkpointing", [None, False, True])
@pytest.mark.parametrize("variant", ["llama-2", "gpt2-2"])
def test_activation_checkpointing_changes_no_statistic(variant, checkpointing):
    model = patch_model(build(variant)).train()
    layers, halves = attentions(model), halves_of(lm_batches())
    if checkpointing is not None:
        enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
        enable({"use_reentrant": checkpointing})
    recomputed, hooks = [], len(model.get_input_embeddings()._forward_hooks)
    layers[0].module.register_forward_hook(lambda *args: recomputed.append(1))
    with evaluation_mode(model):
        bottlenecks, _ = measured(model, halves[0] + halves[1])
        del recomputed[:]
        found = exact_directions(Objective(model), bottlenecks, halves, dims=4)
        assert len(recomputed) == 3 * (1 if checkpointing is None else 2)
        assert not any(module.training for module in model.modules())  # recomputing layers are, meanwhile
    assert len(model.get_input_embeddings()._forward_hooks) == hooks
    reference = patch_model(build(variant))
    with evaluation_mode(reference):
        bottlenecks, _ = measured(reference, halves[0] + halves[1])
        expected = exact_directions(Objective(reference), bottlenecks, halves, dims=4)
    for one, other in zip(found, expected):
        torch.testing.assert_close(one.sigma, other.sigma, rtol=1e-4, atol=1e-7)


def test_halves_of_unequal_size_weigh_as_many_batches_as_they_hold():
    model, dims = patch_model(build("llama-2")), 8
    batches = lm_batches(3)
    with evaluation_mode(model):
        bottlenecks, _ = compute_moments(Objective(model), attentions(model), [QK, V], batches)
        for bottleneck in bottlenecks:
            bottleneck.old_dims_train = False
        found = exact_directions(Objective(model), bottlenecks, halves_of(batches), dims)
        sketches = sketched_directions(Objective(model), bottlenecks, halves_of(batches), dims, seed=0)
        wholes = whole_gradients(Objective(model), bottlenecks, (batches,))
    for own, sketch, (whole,) in zip(found, sketches, wholes):
        expected = torch.linalg.svdvals(whole)[..., :dims]
        torch.testing.assert_close(sketch.sigma[..., 0], expected[..., 0], rtol=0.05, atol=0)  # it is a sketch
        # fp32: three batches are summed in another order.
        torch.testing.assert_close(own.sigma, expected, rtol=1e-4, atol=1e-5 * expected.max().item())


def test_a_half_chooses_its_columns_without_the_other(monkeypatch):
    """So what one half chose, the other can judge unseen."""
    model, seen, solve = patch_model(build("llama-2")), [], directions._solve_directions
    batches, others = lm_batches(4), lm_batches(2, seed=5)

    def noting(bottlenecks, inputs, *rest):
        seen[-1] += [columns.chunk(2, -1) for columns in inputs]
        return solve(bottlenecks, inputs, *rest)

    monkeypatch.setattr(directions, "_solve_directions", noting)
    with evaluation_mode(model):
        bottlenecks, _ = compute_moments(Objective(model), attentions(model), [QK, V], batches)
        for halves in ((batches[:2], batches[2:]), (batches[:2], others), (others, batches[2:])):
            seen.append([])
            sketched_directions(Objective(model), bottlenecks, halves, dims=4, seed=0)
    for usual, other_second, other_first in zip(*seen):
        # fp32: kernels may sum the same columns in another order.
        torch.testing.assert_close(usual[0], other_second[0], rtol=1e-3, atol=1e-3)
        torch.testing.assert_close(usual[1], other_first[1], rtol=1e-3, atol=1e-3)
        assert not torch.allclose(usual[1], other_second[1], atol=1e-2)
        assert not torch.allclose(usual[0], other_first[0], atol=1e-2)


def test_a_sketch_without_more_columns_than_dims_finds_as_many():
    model = patch_model(build("llama-2"))
    report = Grower(model, GrowthConfig(qk_dims=8)).find(lm_batches(4)).keep()
    assert report.kept and attentions(model)[0].width_of("query") == 16 + 8


def peak_memory(work) -> int:
    """The bytes that torch allocates at most for some work."""
    with profile(profile_memory=True) as allocations:  # the process would count what it keeps of freed memory
        work()
    sizes = [event.nbytes() for event in allocations.kineto_results.events() if event.name() == "[memory]"]
    return max(itertools.accumulate(sizes))


def test_a_sketch_holds_no_matrix_of_tokens_by_tokens():
    """It takes about as much memory as a training step, and half of such a matrix would show."""
    sizes = dict(vocab_size=256, hidden_size=256, intermediate_size=512, num_hidden_layers=2, num_attention_heads=8)
    model = patch_model(LlamaForCausalLM(LlamaConfig(**sizes))).train()
    ids = torch.randint(0, 256, (1, 2048))
    batch = {"input_ids": ids, "labels": ids}
    square = sizes["num_attention_heads"] * ids.numel() ** 2 * torch.float32.itemsize

    def train():
        model(**batch).loss.backward()

    def sketch():
        with evaluation_mode(model):
            bottlenecks, _ = measured(model, [batch])
            sketched_directions(Objective(model), bottlenecks, ([batch], [batch]), dims=8, seed=0)

    model(ids[:, :16], labels=ids[:, :16]).loss.backward()  # libraries load, and the weights have gradients
    training = peak_memory(train)
    model.zero_grad()
    assert peak_memory(sketch) < training + square / 2
