"""Old weights that move with a growth: joint refactoring, and the steepest step of the existing weights."""

import pytest
import torch
from compared import old_factors, product_norm, residual, sketched, whole_gradients
from families import add_dims, build, fingerprint, lm_batches, same

from hf_growattn import Grower, GrowthConfig, patch_model
from hf_growattn.grow.old_dims import _old_step, tangent_steps, with_old_steps
from hf_growattn.grow.trial import Candidate, Trial, read_factors
from hf_growattn.growable.attention import attentions
from hf_growattn.growable.growths import sync_config
from hf_growattn.measure.bottlenecks import QK, V, compute_moments
from hf_growattn.measure.halves import halves_of
from hf_growattn.measure.passes import Objective, evaluation_mode, mean_loss

WAYS = [dict(update_existing=True), dict(method="refactor")]
STOCK = 16  # width of the tiny models


def grow(model, batches=None, optimizer=None, **config):
    return Grower(model, GrowthConfig(**config), optimizer).find(batches or lm_batches(6)).keep()


def loss_of(model, batches):
    with evaluation_mode(model):
        return mean_loss(Objective(model), batches)


def trial_of(model, candidates, batches, **config) -> Trial:
    """A trial in which old weights move, to be attached."""
    with evaluation_mode(model):
        return Trial(
            with_old_steps(GrowthConfig(qk_dims=1, **config), Objective(model), candidates, halves_of(batches))
        )


def old_weights(model):
    return {name: p.detach().clone() for name, p in model.named_parameters() if ".extra." not in name}


@pytest.mark.parametrize("variant", ["gpt2-2", "gpt2-5-scaled"])
def test_refactoring_keeps_the_function_before_the_step_and_balances_the_factors(variant):
    model, batches = patch_model(build(variant, dtype=torch.float64)), lm_batches(6)
    directions = sketched(model, batches, 4)
    bottlenecks = [found.bottleneck for found in directions]
    logits = model(**batches[0]).logits
    norms = [product_norm(*bottleneck.whitened(*old_factors(bottleneck))) for bottleneck in bottlenecks]
    candidates = [Candidate(found, 4, found.share_that_holds) for found in directions]
    trial = trial_of(model, candidates, batches, method="refactor")
    with trial.attached():
        for step in (0.0, 1e-9, 1e-3):
            trial.set_steps([step] * len(candidates))
            if step < 1e-3:
                torch.testing.assert_close(model(**batches[0]).logits, logits, rtol=1e-6, atol=1e-6)
            if step == 0:  # nothing to refactor
                continue
            for bottleneck, norm in zip(bottlenecks, norms):
                # The best of the stepped product, and balanced: both sides have the singular values as Gram matrix.
                old = read_factors(bottleneck.attention, bottleneck.kind)
                new = read_factors(trial.new_dims[bottleneck.attention], bottleneck.kind)
                stacked, shared = (torch.cat(side, -1) for side in zip(old, new))
                assert stacked.shape[-1] == STOCK + 4
                stacked, shared = bottleneck.whitened(stacked, shared)
                if step < 1e-3:
                    torch.testing.assert_close(product_norm(stacked, shared), norm)
                    grams = stacked.mT @ stacked
                    diagonal = torch.diag_embed(grams.diagonal(dim1=-2, dim2=-1))
                    torch.testing.assert_close(grams, diagonal, rtol=1e-6, atol=1e-9)
                torch.testing.assert_close(stacked.mT @ stacked, shared.mT @ shared, rtol=1e-6, atol=1e-9)
    torch.testing.assert_close(model(**batches[0]).logits, logits, rtol=0, atol=0)


def test_refactored_weights_start_with_a_fresh_optimizer_state():
    model, batches = patch_model(build("gpt2-2")), lm_batches(6)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model(**batches[0]).loss.backward()
    optimizer.step()
    parameters = dict(model.named_parameters())
    report = grow(model, batches, optimizer, qk_dims=4, v_dims=2, method="refactor")
    assert report.kept
    assert loss_of(model, batches) < report.loss_before
    for name, parameter in parameters.items():
        assert (parameter in optimizer.state) == (".attn." not in name or name.endswith("c_proj.bias"))
        assert parameter is model.get_parameter(name)
    model(**batches[0]).loss.backward()
    optimizer.step()


def test_a_step_of_zero_refactors_nothing_and_keeps_the_optimizer_state():
    model, batches = patch_model(build("gpt2-2")), lm_batches(6)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model(**batches[0]).loss.backward()
    optimizer.step()
    growth = Grower(model, GrowthConfig(qk_dims=4, method="refactor"), optimizer).find(batches)
    with growth._trial.attached():
        growth._trial.set_steps([0.0] * len(growth._trial.candidates))
    growth.keep()
    assert all(attention.module.c_attn.weight in optimizer.state for attention in attentions(model))


def test_where_no_dims_join_old_weights_are_not_refactored_and_keep_their_optimizer_state():
    model, batches = patch_model(build("gpt2-2")), lm_batches(6)
    for attention in attentions(model):
        add_dims(attention, v_dims=64 - STOCK)  # as wide as they can be
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model(**batches[0]).loss.backward()
    optimizer.step()
    report = grow(model, batches, optimizer, budget=0.1, method="refactor")
    assert report.added_parameters and {layer.width[1] for layer in report.layers if layer.kind == "v"} == {64}
    assert all(attention.module.c_proj.weight in optimizer.state for attention in attentions(model))


def test_old_weights_that_moved_within_autocast_are_cast_anew():
    """Autocast keeps the casts of weights until its outermost region ends."""
    model, batches = patch_model(build("gpt2-2")), lm_batches(6)
    with torch.autocast("cpu", torch.bfloat16):
        before = model(**batches[0]).loss.item()
        assert grow(model, batches, budget=0.1, update_existing=True).kept
        within = model(**batches[0]).loss.item()
    with torch.autocast("cpu", torch.bfloat16):
        assert model(**batches[0]).loss.item() == within != before


@pytest.mark.parametrize("of_other_half", [0.0, -0.5])
def test_a_step_of_old_weights_that_one_half_alone_finds_is_not_taken(of_other_half):
    bottleneck = sketched(patch_model(build("gpt2-2")), lm_batches(2), 1)[0].bottleneck
    found = [torch.randn_like(side) for side in bottleneck.whitened(*old_factors(bottleneck))]
    step = _old_step(bottleneck, [found, [of_other_half * side for side in found]], (0.5, 0.5))
    assert step.validated == 0 and not any(side.any() for change in step.changes for side in change)


@pytest.mark.parametrize(
    "variant, dims, way", [*((name, 0, WAYS[0]) for name in ("llama-2", "gpt2-2")), ("gpt2-2", 4, WAYS[1])]
)
def test_the_steepest_step_of_the_existing_weights_descends(variant, dims, way):
    model, batches = patch_model(build(variant, dtype=torch.float64)), lm_batches(6)
    directions, before = sketched(model, batches, max(dims, 1)), loss_of(model, batches)
    candidates = [Candidate(found, dims, torch.ones(dims)) for found in directions]
    weights, trial = old_weights(model), trial_of(model, candidates, batches, **way)
    slope = sum(candidate.slope for candidate in trial.candidates)
    assert slope > 0
    expected = 1e-4
    with trial.attached():
        trial.set_steps([expected / slope] * len(candidates))
        assert before - loss_of(model, batches) == pytest.approx(expected, rel=0.02)
    assert all(torch.equal(value, weights[name]) for name, value in old_weights(model).items())


@pytest.mark.parametrize("variant", ["gpt2-2", "gpt2-5-scaled", "llama-5-bias", "gpt-neox"])
def test_tangent_steps_are_the_steepest_of_the_existing_weights(variant):
    """Where nothing rotates the ordinary gradients are `T W_K` and `T^T W_Q`; messages never rotate."""
    model, batches = patch_model(build(variant)), lm_batches()
    with evaluation_mode(model):
        bottlenecks, _ = compute_moments(Objective(model), attentions(model), [QK, V], batches)
        steps = tangent_steps(
            Objective(model), bottlenecks, (batches, batches)
        )  # halves that agree keep the step's length
        assert not any(p.requires_grad or p.grad is not None for p in model.parameters())
        gradients = whole_gradients(Objective(model), bottlenecks, (batches,))
    for bottleneck, step, (whole,) in zip(bottlenecks, steps, gradients):
        assert step.slope > 0
        if bottleneck.kind is QK and bottleneck.attention.rotate is not None:
            continue
        stacked, shared = bottleneck.whitened(*old_factors(bottleneck))
        tangent = whole - residual(whole, stacked, shared)
        moved = step.changes[0][0] @ shared.mT + stacked @ step.changes[0][1].mT
        assert (moved + tangent).norm() <= 1e-3 * tangent.norm()
        assert step.slope == pytest.approx(tangent.square().sum().item(), rel=1e-3)
        assert step.validated == pytest.approx(step.slope, rel=1e-4)


def test_updating_the_existing_weights_moves_them_with_the_rest():
    model, batches = patch_model(build("llama-2")), lm_batches(6)
    old = attentions(model)[0].weight_of("query").clone()
    report = grow(model, batches, qk_dims=2, update_existing=True)
    assert report.kept and not torch.equal(attentions(model)[0].weight_of("query"), old)
    assert loss_of(model, batches) < report.loss_before
    still = grow(patch_model(build("llama-2")), batches, qk_dims=2)
    assert all(both.gain > new.gain for both, new in zip(report.layers, still.layers))


def test_old_weights_move_alone_where_a_budget_buys_nothing():
    model = patch_model(build("llama-2"))
    for attention in attentions(model):  # as wide as its input
        add_dims(attention, 0, attention.shape.in_features - attention.shape.v_head_dim)
    sync_config(model)
    before, weights, dims = loss_of(model, lm_batches(6)), old_weights(model), model.config.extra_dims
    report = grow(model, None, budget=10_000, update_existing=True, kinds=["v"])
    assert report.kept and not report.added_parameters
    assert loss_of(model, lm_batches(6)) < before
    assert model.config.extra_dims == dims
    assert any(not torch.equal(value, weights[name]) for name, value in old_weights(model).items())


@pytest.mark.parametrize("way", WAYS)
def test_what_is_found_changes_nothing_until_it_is_kept(way):
    model, batches = patch_model(build("gpt2-2", dtype=torch.bfloat16)).train(), lm_batches(6)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model(**batches[0]).loss.backward()
    optimizer.step()
    before = fingerprint(model, optimizer)
    grower = Grower(model, GrowthConfig(qk_dims=2, v_dims=2, **way), optimizer)
    dropped, growth = grower.find(batches), grower.find(batches)
    dropped.drop()
    assert same(fingerprint(model, optimizer), before)
    report = growth.keep()
    assert report.kept and loss_of(model, batches) < report.loss_before


@pytest.mark.parametrize("way", WAYS)
def test_parts_of_former_growths_stay_as_they_are(way):
    model, batches = patch_model(build("gpt2-2")), lm_batches(6)
    grow(model, batches, qk_dims=2, v_dims=2)
    former = {name: p.detach().clone() for name, p in model.named_parameters() if ".growth_1." in name}
    report = grow(model, batches, qk_dims=2, v_dims=2, **way)
    assert report.kept and loss_of(model, batches) < report.loss_before
    assert former and all(torch.equal(model.get_parameter(name), value) for name, value in former.items())


def test_halves_that_disagree_promise_no_more_than_the_step_that_is_taken():
    """The step is shortened by what held on the other half, and so is its promise."""
    model = patch_model(build("llama-2"))
    with evaluation_mode(model):
        bottlenecks, _ = compute_moments(Objective(model), attentions(model), [QK], lm_batches(2))
        steps = tangent_steps(Objective(model), bottlenecks, tuple([batch] for batch in lm_batches(2)))
    for step in steps:
        shortened = step.validated / step.slope  # of a step of which all held, its promise is its slope
        assert 0 <= step.validated < step.slope and shortened < 1
