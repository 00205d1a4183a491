"""`Grower`: what it promises, what it reports, and that nothing is lost on failure."""

import gc
from dataclasses import replace

import models
import pytest
import torch
from compared import exact_directions
from families import add_dims, build, fingerprint, in_training, lm_batches, same, tokens

from hf_growattn import Grower, GrowthConfig, patch_model
from hf_growattn.grow.trial import Candidate, Trial
from hf_growattn.growable.attention import attentions, set_trial
from hf_growattn.growable.growths import cache_bytes, extra_parameters
from hf_growattn.measure.bottlenecks import QK, V, compute_moments
from hf_growattn.measure.functional import step_factors
from hf_growattn.measure.passes import Objective, evaluation_mode, mean_loss, mean_over_ranks

FIXED = dict(qk_dims=4, v_dims=4)


def fp64_loss(logits, labels, **kwargs):
    """Cross entropy without the cast to fp32 that transformers' own makes."""
    return torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())


def loss_of(model, batches) -> float:
    with evaluation_mode(model):
        return mean_loss(Objective(model), batches)


def everything(model, batches, kinds, dims=4):
    """A trial of the best directions, held or not, and the loss without them."""
    objective = Objective(model)
    with evaluation_mode(model):
        bottlenecks, losses = compute_moments(objective, attentions(model), list(kinds), batches)
        directions = exact_directions(objective, bottlenecks, (batches[0::2], batches[1::2]), dims=dims)
    return Trial([Candidate(found, dims, torch.ones(dims)) for found in directions]), mean_over_ranks(losses)


@pytest.mark.parametrize("kinds", [(QK,), (V,), (QK, V)], ids=lambda k: k[-1].name + str(len(k)))
@pytest.mark.parametrize("variant", ["llama-2", "llama-5-bias", "gpt2-2"])
def test_first_order_is_right_in_fp64(variant, kinds):
    model, batches = patch_model(build(variant, dtype=torch.float64)), lm_batches()
    model.loss_function = fp64_loss
    trial, before = everything(model, batches, kinds)
    slope, count = sum(candidate.slope for candidate in trial.candidates), len(trial.candidates)
    with trial.attached():
        for expected in (1e-4, 3e-5):  # Llama's norms round to fp32, so smaller changes drown
            trial.set_steps([expected / slope] * count)
            measured = before - loss_of(model, batches)
            assert measured == pytest.approx(expected, rel=0.01)
        trial.set_steps([0.0] * count)
        assert loss_of(model, batches) == pytest.approx(before, rel=1e-9)


@pytest.mark.parametrize("dims", [dict(qk_dims=3), dict(v_dims=3), dict(qk_dims=3, v_dims=2)])
def test_layers_and_dims_pick_what_grows(dims):
    model = patch_model(build("llama-5-bias"))
    before = dict(model.named_parameters())
    report = Grower(model, GrowthConfig(**dims, layers=[3, 1, 3])).find(lm_batches(12)).keep()
    assert report.kept
    assert [layer.layer for layer in report.layers] == [layer for layer in (3, 1) for _ in dims]
    qk, v = dims.get("qk_dims", 0), dims.get("v_dims", 0)
    widths = [(a.width_of("query"), a.width_of("value")) for a in attentions(model)]
    assert widths == [(16, 16), (16 + qk, 16 + v), (16, 16), (16 + qk, 16 + v), (16, 16)]
    after = dict(model.named_parameters())
    assert all(after.pop(name) is parameter for name, parameter in before.items())
    names = (
        ["in_projection.weight", "in_projection.bias", "out_projection.weight"]
        if v
        else ["in_projection.weight", "in_projection.bias"]
    )
    assert after.keys() == {
        f"model.layers.{i}.self_attn.extra.growths.growth_1.{name}" for i in (1, 3) for name in names
    }


def test_report_holds_and_prints_what_happened():
    model = patch_model(build("llama-5-bias"))
    count = model.num_parameters()
    report = Grower(model, GrowthConfig(**FIXED)).grow(lm_batches(16))
    patterns, messages = 4 * 6 * (48 + 1), 4 * (4 * 48 + 2 * (48 + 1))
    assert report.added_parameters == model.num_parameters() - count == 5 * (patterns + messages)
    steps = [layer.step_size for layer in report.layers]
    assert all(steps) and len({*steps[0::2]}) == len({*steps[1::2]}) == 1  # one for each kind
    for layer in report.layers:
        assert layer.width == (16, 20) and 0 < (layer.out_of_reach or 1) <= 1
        assert layer.kind == "v" or layer.out_of_reach is None  # they rotate
        assert layer.predicted_gain == pytest.approx(layer.step_size * layer.gain)
    assert report.predicted_gain == pytest.approx(sum(layer.predicted_gain for layer in report.layers))
    assert report.holds and report.fall > report.error > 0 and report.cache_bytes[1] == cache_bytes(model)
    assert "16 -> 20" in str(report) and f"{report.fall:.4f}" in str(report)
    assert loss_of(model, lm_batches(8)) < report.loss_before


@pytest.mark.parametrize("variant, dims", [("llama-5-bias", FIXED), ("gpt2-2", FIXED), ("llama-2", {"budget": 0.05})])
def test_no_improvement_is_rolled_back_to_the_bit(variant, dims, monkeypatch):
    model, optimizer = in_training(variant)
    before = fingerprint(model, optimizer)

    def uphill(*args):  # every step along these makes the loss worse
        stacked, shared = step_factors(*args)
        return stacked, -shared

    monkeypatch.setattr("hf_growattn.measure.functional.step_factors", uphill)
    report = Grower(model, GrowthConfig(**dims), optimizer).grow(lm_batches())
    assert not report.kept and report.predicted_gain == 0
    assert report.fall == report.error == 0 and not report.holds and not report.figures()["growth_added_parameters"]
    assert same(fingerprint(model, optimizer), before)


def test_what_is_found_is_kept_or_dropped():
    model = patch_model(build("llama-5-bias")).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    before, names = fingerprint(model, optimizer), {name for name, _ in model.named_parameters()}
    grower = Grower(model, GrowthConfig(**FIXED), optimizer)
    first, second = grower.find(lm_batches(8)), grower.find(lm_batches(8))
    assert same(fingerprint(model, optimizer), before)
    assert first.report.fall > 0 and [*first.new_dims] == attentions(model)
    assert not first.drop().kept and not first.new_dims
    for end in (first.keep, first.drop):
        with pytest.raises(RuntimeError, match="This growth was dropped"):
            end()
    assert same(fingerprint(model, optimizer), before)
    found, trial = second.new_dims, second._trial
    before = [parameter.clone() for new in found.values() for parameter in new.parameters()]
    trial.set_steps([layer.step_size for layer in second.report.layers])  # of both halves, as reported
    assert all(map(torch.equal, before, (parameter for new in found.values() for parameter in new.parameters())))
    for attention, new in found.items():
        set_trial(attention, new)
    tried = loss_of(model, lm_batches())
    for attention in found:
        set_trial(attention, None)
    report = second.keep()
    for end in (second.keep, second.drop):
        with pytest.raises(RuntimeError, match="This growth was kept"):
            end()
    assert report.kept and [a.extra.growths["growth_1"] for a in attentions(model)] == [*found.values()]
    assert loss_of(model, lm_batches()) == pytest.approx(tried, rel=1e-5)  # it is what was tried
    third = grower.find(lm_batches()).keep()
    assert {part for a in attentions(model) for part in a.extra.growths} == {"growth_1", "growth_2"}
    assert third.layers[0].width == (20, 24) and third.loss_before == pytest.approx(tried, rel=1e-5)
    assert len(extra_parameters(model)) == 2 * 3 * 5
    assert {name for name, _ in model.named_parameters() if ".extra." not in name} == names


def test_new_dims_without_a_gradient_have_one_side_by_which_they_can_train():
    model = patch_model(build("llama-2"))
    attentions(model)[0].weight_of("output").zero_()  # so no logit of this layer matters yet
    assert Grower(model, GrowthConfig(qk_dims=2, v_dims=2)).find(lm_batches(8)).keep().kept
    (new,) = attentions(model)[0].growths.values()
    assert not new.weight_of("query").any() and new.weight_of("key").any(-1).all()
    assert new.weight_of("value").any() and new.weight_of("output").any()  # values do lower the loss


def test_a_second_growth_leaves_what_the_first_computes():
    for name in ("t5", "llama-2", "gpt2-2"):  # T5's queries are not scaled by their width
        model, batch = patch_model(models.build(name)), {"input_ids": tokens(2), "labels": tokens(2)}
        add_dims(attentions(model)[0], 3, 2)
        before = model(**batch).loss
        add_dims(attentions(model)[0], 3, 2, roles=("key", "value"))  # without effect
        torch.testing.assert_close(model(**batch).loss, before, rtol=1e-5, atol=0)  # sums of other lengths


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("update_existing", [True, False])
def test_new_dims_are_in_the_mode_and_the_precision_of_their_model(update_existing, training):
    model = patch_model(build("llama-2"))
    config = GrowthConfig(qk_dims=2, v_dims=2, update_existing=update_existing)
    growth = Grower(model, config).find(lm_batches(4))
    model.train(training).bfloat16()
    assert growth.keep().kept and {weight.dtype for weight in extra_parameters(model)} == {torch.bfloat16}
    parts = [part for attention in attentions(model) for part in attention.growths.values()]
    assert {module.training for part in parts for module in part.modules()} == {training}


@pytest.mark.parametrize("former", [0, 3])
def test_heads_grow_no_wider_than_their_input(former):
    attention = attentions(patch_model(build("llama-2")))[0]
    if former:
        attention.add_new_dims("growth_1", former, 0)
    dims = GrowthConfig(qk_dims=40).most_dims(attention, QK)
    assert attention.width_of("query") + dims == 48


@pytest.mark.parametrize("variant", ["llama-5-bias", "gpt2-2"])
def test_measure_says_what_grow_would_do_and_leaves_everything_as_it_was(variant):
    model, optimizer = in_training(variant)
    grower = Grower(model, GrowthConfig(budget=0.1), optimizer)
    before = fingerprint(model, optimizer)
    measured = grower.measure(lm_batches(24))
    assert same(fingerprint(model, optimizer), before)
    assert measured.holds and not measured.kept
    grown = grower.grow(lm_batches(24))
    assert grown.kept and grown.added_parameters == measured.added_parameters > 0
    assert grown == replace(measured, kept=True)


def test_many_growths_leave_no_tensor_behind():
    """Training needs a weight, its gradient, two moments of its size and the number of the step."""
    model, optimizer = in_training("llama-2")
    grower, beside = Grower(model, GrowthConfig(qk_dims=1, v_dims=1), optimizer), []
    for _ in range(4):
        assert grower.find(lm_batches(4)).keep().kept
        model(**lm_batches()[0]).loss.backward()
        optimizer.step()
        gc.collect()
        alive = [each for each in gc.get_objects() if issubclass(type(each), torch.Tensor) and not each.is_meta]
        beside.append(len(alive) - 5 * len([*model.parameters()]))
    assert len({*beside[1:]}) == 1, beside


@pytest.mark.parametrize("in_place", [False, True])
def test_the_users_model_may_be_compiled(in_place):
    model = patch_model(build("llama-2"))
    if in_place:
        model.compile(backend="eager")  # what is asked is whether the graph is made anew, not what becomes of it
    compiled = model if in_place else torch.compile(model, backend="eager")
    batch = lm_batches()[0]
    compiled(**batch, use_cache=False)
    report = Grower(compiled, GrowthConfig(qk_dims=4)).find(lm_batches()).keep()
    assert report.kept
    expected = model.forward(**batch, use_cache=False).loss
    assert in_place == (model._compiled_call_impl is not None)
    torch.testing.assert_close(compiled(**batch, use_cache=False).loss, expected, rtol=1e-5, atol=0)
    torch._dynamo.reset()
