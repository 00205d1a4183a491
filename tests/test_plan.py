"""What a config buys: budgets, limits, multiples and gains; and what a growth takes as batches."""

from contextlib import nullcontext
from types import SimpleNamespace

import models
import pytest
import torch
from compared import old_factors, sketched
from families import HEADS, build, lm_batches, tokens

from hf_growattn import Grower, GrowthConfig, patch_model
from hf_growattn.grow import trial as trying
from hf_growattn.grow.plan import all_candidates, read_batches, spend
from hf_growattn.grow.trial import Candidate, Trial, parameters_of_a_dim, price_kinds, read_factors
from hf_growattn.growable.attention import attentions
from hf_growattn.growable.growths import name_after
from hf_growattn.measure import directions
from hf_growattn.measure.bottlenecks import QK, V
from hf_growattn.measure.halves import halves_of
from hf_growattn.model.families import number_layers
from hf_growattn.model.new_dims import in_order

SMALL = GrowthConfig(qk_dims=2)
# Weights that one more dim of every head adds to one layer of "llama-5-bias": (query + key, value + output).
DIM = {"qk": 6 * (48 + 1), "v": 4 * 48 + 2 * (48 + 1)}


def grow(model, batches=None, **config):
    return Grower(model, GrowthConfig(**config)).find(batches or lm_batches(6)).keep()


def added(report):
    return sum((layer.width[1] - layer.width[0]) * DIM[layer.kind] for layer in report.layers)


@pytest.mark.parametrize("budget, kinds", [(300, ("qk", "v")), (2_000, ("qk",)), (0.05, ("v",)), (0.05, ("qk", "v"))])
def test_a_budget_is_not_exceeded_and_goes_to_what_holds(budget, kinds):
    model = patch_model(build("llama-5-bias"))
    count = model.num_parameters()
    report = grow(model, budget=budget, kinds=kinds)
    limit = budget if isinstance(budget, int) else int(budget * count)
    assert 0 < report.added_parameters == model.num_parameters() - count == added(report) <= limit
    assert {layer.kind for layer in report.layers} == set(kinds)
    grown = [layer for layer in report.layers if layer.step_size > 0]
    assert all(layer.gain > 0 for layer in grown)
    assert report.added_parameters > limit - 2 * max(DIM.values())  # there was more that held than it could buy


def test_a_budget_goes_by_the_fourth_root_of_what_a_layer_gains():
    """A sixteenfold gain buys twice the dims: 4, at 2/1, 2/2, 2/3 and 2/4, before a third one of the other, at 1/3."""
    config, ones = GrowthConfig(budget=6 * DIM["v"]), torch.ones(8)
    bottlenecks = [SimpleNamespace(attention=a, kind=V) for a in attentions(patch_model(build("llama-5-bias")))[:2]]
    found = [SimpleNamespace(bottleneck=each, worth=gain * ones) for each, gain in zip(bottlenecks, (16.0, 1.0))]
    bought = spend(config, [Candidate(each, 8, ones) for each in found], {V: 1.0}, 100_000)
    assert [candidate.dims for candidate in bought] == [4, 2]
    found[0].worth = 128 * (torch.arange(8) == 0)  # as much in all, of one dim: the others do not hold
    bought = spend(config, [Candidate(each, 8, ones) for each in found], {V: 1.0}, 100_000)
    assert [candidate.dims for candidate in bought] == [1, 5]


def test_allocation_prefers_the_layer_that_gains():
    """Four of five layers are cut off from the loss, so the budget goes to the fifth."""
    model = patch_model(build("llama-5-bias"))
    for layer in (0, 1, 3, 4):
        model.model.layers[layer].self_attn.o_proj.weight.data.mul_(1e-4)
    report = grow(model, budget=1_500, kinds=["qk"])
    assert {layer.layer for layer in report.layers if layer.width[1] > layer.width[0]} == {2}


def test_of_each_layer_and_kind_four_times_its_share_of_a_budget_is_looked_at():
    model = patch_model(build("llama-2"))
    one_of_each = sum(parameters_of_a_dim(layer, kind) for layer in attentions(model) for kind in (QK, V))
    growth = Grower(model, GrowthConfig(budget=one_of_each)).find(lm_batches(6))
    assert {len(candidate.directions.validated) for candidate in growth._trial.candidates} == {4}


def test_the_tenth_growth_comes_after_the_ninth_and_cross_attention_after_all_layers():
    names = [f"growth_{number}" for number in range(1, 12)]
    assert [name for name, _ in in_order(dict.fromkeys(sorted(names)))] == names
    assert name_after(names) == "growth_12"
    assert number_layers(["l.1.self", "l.2.self", "l.1.cross", "l.2.cross"]) == [1, 2, 3, 4]
    assert number_layers(["encoder.0.self", "encoder.1.self", "decoder.0.self"]) == [0, 1, 2]


def test_dims_that_do_not_hold_start_without_effect_but_can_learn():
    model, batches = patch_model(build("llama-2")), lm_batches(6)
    directions = sketched(model, batches, 4)
    logits = model(**batches[0]).logits
    trial = Trial([Candidate(found, 4, torch.zeros(4)) for found in directions])
    with trial.attached():
        trial.set_steps([1.0] * len(trial.candidates))
        torch.testing.assert_close(model(**batches[0]).logits, logits, rtol=1e-5, atol=1e-5)
        for part in trial.new_dims.values():
            part.requires_grad_(True)
        model(**batches[0]).loss.backward()
    layer = attentions(model)[1]
    part = trial.new_dims[layer]
    rms = [weight.square().mean().sqrt() for weight in (layer.weight_of("key"), part.weight_of("key"))]
    torch.testing.assert_close(*rms, rtol=0.2, atol=0)
    assert not part.weight_of("query").any() and not part.weight_of("output").any()
    rows = 4 * 4  # heads times dims, of the queries
    assert part.in_projection.weight.grad[:rows].abs().amin(-1).gt(0).all() and part.out_projection.weight.grad.any()


def of_groups(side: torch.Tensor, groups: int) -> torch.Tensor:
    """(heads, inputs, dims) -> the norms of the new dims of all heads of a group, (groups, dims)."""
    return side.unflatten(0, (groups, -1)).norm(dim=(1, -2))


@pytest.mark.parametrize("variant", ["gpt2-2", "llama-2"])
def test_a_new_dim_has_one_length_on_both_sides_but_its_shared_side_is_never_smaller_than_the_old_weights(
    variant, monkeypatch
):
    model, batches = patch_model(build(variant)), lm_batches(6)
    monkeypatch.setattr(directions, "OVERSAMPLING", 8)  # more columns would be nearly dependent here, and so shortened
    measured = sketched(model, batches, 4)
    trial = Trial([Candidate(found, 4, torch.ones(4)) for found in measured])
    bottlenecks, products = [found.bottleneck for found in measured], {}
    for step in (1e-3, 1e9):
        trial.set_steps([step] * len(measured))
        found = [read_factors(trial.new_dims[bottleneck.attention], bottleneck.kind) for bottleneck in bottlenecks]
        products[step] = [a @ b.repeat_interleave(len(a) // len(b), 0).mT / step for a, b in found]
        for bottleneck, (stacked, shared) in zip(bottlenecks, found):
            old, new = old_factors(bottleneck)[1].square().mean().sqrt(), shared.square().mean(-2).sqrt()
            assert new.shape == (bottleneck.groups, 4)
            if step < 1:
                torch.testing.assert_close(new, old.expand_as(new))
                assert (of_groups(stacked, bottleneck.groups) < 0.1 * shared.norm(dim=-2)).all()
            else:
                assert (new > old).all()
                norms = [of_groups(side, bottleneck.groups) for side in bottleneck.whitened(stacked, shared)]
                torch.testing.assert_close(*norms, rtol=1e-3, atol=0)
    for small, large in zip(*products.values()):
        torch.testing.assert_close(small, large, rtol=1e-3, atol=1e-5 * large.abs().max().item())


def test_a_single_batch_is_split_by_its_rows_and_a_single_sequence_refused():
    batch = lm_batches(1)[0]
    assert grow(patch_model(build("llama-2")), [batch], qk_dims=2).layers
    with pytest.raises(ValueError, match=r"two sequences.*few dozen"):
        grow(patch_model(build("llama-2")), [{key: value[:1] for key, value in batch.items()}], qk_dims=2)


def test_there_is_one_candidate_for_every_bottleneck():
    model, batches = patch_model(build("llama-2")), lm_batches(4)
    candidates = all_candidates(GrowthConfig(qk_dims=3, v_dims=2), sketched(model, batches, 4))
    assert [candidate.dims for candidate in candidates] == [3, 2, 3, 2]
    assert all(len(candidate.share_that_holds) == candidate.dims for candidate in candidates)


def test_a_kind_is_priced_by_what_it_adds_first_and_last(monkeypatch):
    """What both gain together is 1.0, and alone they gain 0.8 and 0.1: 0.85 and 0.15 are what each adds on average."""
    alone = {QK: 0.8, V: 0.1}

    class Search:
        relative_steps, loss_before = alone, 5.0

        def run(self, trial, spare):
            return [], self.loss_before - 1.0

        def gain_alone(self, kind):
            return alone[kind]

    directions = [SimpleNamespace(bottleneck=SimpleNamespace(kind=kind), worth=torch.tensor([2.0])) for kind in alone]
    candidates = [Candidate(found, 1, torch.ones(1)) for found in directions]
    monkeypatch.setattr(trying, "Trial", lambda tried: SimpleNamespace(attached=nullcontext))
    prices = price_kinds(Search(), candidates)
    assert [prices[kind] for kind in alone] == pytest.approx([0.85 / 2, 0.15 / 2])


def test_no_config_lets_a_head_grow_wider_than_its_input():
    attention = attentions(patch_model(build("llama-2")))[0]
    config = GrowthConfig(qk_dims=60)
    room = attention.shape.in_features - attention.width_of("query")
    assert config.most_dims(attention, QK) == room < 60
    model = patch_model(build("llama-2"))
    assert Grower(model, GrowthConfig(qk_dims=room, v_dims=room, layers=0)).find(lm_batches(4)).keep().added_parameters
    assert Grower(model, GrowthConfig(budget=0.02)).measure(lm_batches(4)).has_room  # in the other layer


def test_a_single_batch_keeps_its_odd_row():
    rows = torch.arange(15).view(5, 3)
    first, second = halves_of([{"input_ids": rows}])
    assert torch.equal(torch.cat([first[0]["input_ids"], second[0]["input_ids"]]), rows)


def test_tensors_and_generators_are_batches():
    reports = [
        Grower(patch_model(build("llama-2")), SMALL).find(batches).keep()
        for batches in (
            (tokens(seed=s) for s in range(2)),
            [{"input_ids": tokens(seed=s), "labels": tokens(seed=s)} for s in range(2)],
        )
    ]
    assert reports[0] == reports[1]


@pytest.mark.parametrize("dtype", [torch.int32, torch.int16, torch.uint8])
def test_tokens_of_any_whole_numbers_grow_without_gradients_around(dtype):
    ids = tokens().to(dtype)
    with torch.no_grad():
        assert Grower(patch_model(build("llama-2")), SMALL).find([ids, ids]).keep().loss_before > 0


def test_labels_of_detection_are_a_list_of_dicts():
    batch = {"pixel_values": torch.zeros(1, 3, 4, 4), "labels": [{"boxes": torch.zeros(1, 4)}]}
    assert read_batches([batch], patch_model(build("llama-2"))) == [batch]


def test_labels_of_other_heads_are_no_tokens():
    model = patch_model(build("llama-2", HEADS["sequence-classification"]))
    batch = {"input_ids": tokens(4), "labels": torch.tensor([0, 1, 1, 0])}
    assert Grower(model, SMALL).measure([batch]).layers


def test_labels_of_an_encoder_decoder_may_be_shorter_than_its_inputs():
    batch = {"input_ids": tokens(2), "labels": tokens(2)[:, :5]}
    assert Grower(patch_model(models.build("t5")), SMALL).measure([batch]).layers


def test_another_seed_draws_another_sketch():
    gains = [
        Grower(patch_model(build("llama-2")), GrowthConfig(qk_dims=2, seed=seed)).measure(lm_batches(4)).predicted_gain
        for seed in (0, 0, 1)
    ]
    assert gains[0] == gains[1] != gains[2]


def test_a_single_layer_may_be_chosen_by_its_number():
    for number in (0, 1):
        report = Grower(patch_model(build("llama-2")), GrowthConfig(qk_dims=2, layers=number)).measure(lm_batches(2))
        assert {layer.layer for layer in report.layers} == {number}
