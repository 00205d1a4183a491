"""New dims on trial compute what they do once they are kept, and leave no trace when they are dropped."""

import pytest
import torch
from compared import exact_directions
from families import VARIANTS, add_dims, build, lm_batches, padded, tokens

from hf_growattn import Grower, GrowthConfig, patch_model
from hf_growattn.grow.plan import all_candidates
from hf_growattn.grow.trial import StepSearch, Trial
from hf_growattn.growable.attention import attentions, set_trial
from hf_growattn.growable.growths import sync_config
from hf_growattn.measure.bottlenecks import QK, compute_moments
from hf_growattn.measure.directions import probing
from hf_growattn.measure.passes import HalvedBatches, Objective, evaluation_mode, halves_of


@pytest.mark.parametrize(
    "variant, qk_dims, v_dims",
    [*((variant, 2, 5) for variant in VARIANTS), ("llama-5-bias", 3, 0), ("llama-5-bias", 0, 2), ("gpt2-2", 3, 0)],
)
@torch.no_grad()
def test_kept_dims_compute_what_they_did_on_trial(variant, qk_dims, v_dims):
    model, batch = patch_model(build(variant)), padded()
    kept = batch["attention_mask"].bool()
    before, state = model(**batch).logits, {name: value.clone() for name, value in model.state_dict().items()}
    for attention in attentions(model):
        add_dims(attention, qk_dims, v_dims)
    sync_config(model)
    after, drafted = model(**batch).logits, model.generate(tokens(), max_new_tokens=4, do_sample=False)
    assert (after - before)[kept].abs().max() > 0.01
    parts = {attention: attention.extra.growths.pop("growth_1") for attention in attentions(model)}
    for attention, part in parts.items():
        set_trial(attention, part)
    assert torch.equal(model(**batch).logits, after)
    assert torch.equal(model.generate(tokens(), max_new_tokens=4, do_sample=False), drafted)
    for attention in parts:
        set_trial(attention, None)
    assert torch.equal(model(**batch).logits, before)
    dropped = model.state_dict()
    assert dropped.keys() == state.keys() and all(torch.equal(dropped[name], state[name]) for name in state)


@pytest.mark.parametrize("variant", ["llama-5-bias", "gpt2-2"])
def test_a_search_reads_the_weights_and_writes_none(variant, monkeypatch):
    model = patch_model(build(variant))
    weights = {name: (parameter, parameter.detach().clone()) for name, parameter in model.named_parameters()}
    taken = []

    def set_steps(trial, steps, half=None, original=Trial.set_steps):
        original(trial, steps, half)
        live = dict(model.named_parameters())
        assert all(
            live[name] is parameter and torch.equal(parameter, was) for name, (parameter, was) in weights.items()
        )
        taken.append(any(steps))

    monkeypatch.setattr(Trial, "set_steps", set_steps)
    assert Grower(model, GrowthConfig(budget=0.05)).find(lm_batches(6)).keep().kept
    assert sum(taken) > 10


def test_the_directions_of_either_half_are_judged_on_the_other(monkeypatch):
    model, batches = patch_model(build("llama-2")), lm_batches(4)
    halves, calls = HalvedBatches(batches), []

    def set_steps(trial, steps, half=None, original=Trial.set_steps):
        original(trial, steps, half)
        calls.append(("directions", half))

    monkeypatch.setattr(Trial, "set_steps", set_steps)
    with evaluation_mode(model):
        bottlenecks, losses = compute_moments(Objective(model), attentions(model), [QK], batches)
        halves.note_losses(losses)
        directions = exact_directions(Objective(model), bottlenecks, halves.halves, dims=2)
        trial, search = Trial(all_candidates(GrowthConfig(qk_dims=2), directions)), StepSearch(Objective(model), halves)

        def loss_of_half(half, original=search.loss_of_half):
            calls.append(("loss", half))
            return original(half)

        search.loss_of_half = loss_of_half
        with trial.attached():
            calls.clear()
            search.run(trial)
    assert calls[:4] == [("directions", 0), ("loss", 1), ("directions", 1), ("loss", 0)]
    assert calls == calls[:4] * (len(calls) // 4)


def test_a_trial_takes_off_what_it_put_on_after_an_exception_too():
    model = patch_model(build("llama-2"))
    with evaluation_mode(model):
        bottlenecks, _ = compute_moments(Objective(model), attentions(model), [QK], lm_batches(2))
        directions = exact_directions(Objective(model), bottlenecks, halves_of(lm_batches(2)), dims=2)
    trial = Trial(all_candidates(GrowthConfig(qk_dims=2), directions))
    with pytest.raises(KeyboardInterrupt), trial.attached():
        assert all(attention.extra.trial is trial.new_dims[attention] for attention in attentions(model))
        raise KeyboardInterrupt
    assert not any(attention.extra for attention in attentions(model))
    with pytest.raises(KeyboardInterrupt), probing(bottlenecks, [_eyes(each) for each in bottlenecks]):
        assert all(attention.extra.trial for attention in attentions(model))
        raise KeyboardInterrupt
    assert not any(attention.extra for attention in attentions(model))


def _eyes(bottleneck):
    """Inputs that probe one column of either side."""
    return tuple(
        torch.eye(rows, 1).expand(groups, -1, -1)
        for groups, rows in (bottleneck.stacked_shape, bottleneck.shared_shape)
    )
