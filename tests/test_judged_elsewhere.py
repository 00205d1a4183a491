"""What a growth may do, to the dim: what counts is what holds elsewhere, and a config's numbers mean what they say."""

from types import SimpleNamespace

import compared
import pytest
import torch
from compared import ComparedGrower, compared_gradients
from families import build, lm_batches
from test_functional import normal

from hf_growattn import Grower, GrowthConfig, patch_model
from hf_growattn.grow import growth, search
from hf_growattn.grow.plan import candidates, spend
from hf_growattn.grow.trial import Change, Trial
from hf_growattn.growable.models import attentions
from hf_growattn.measure import functional as F
from hf_growattn.measure.blocks import Block, measure_moments
from hf_growattn.measure.gradients import Gradient, _existing_step, exact_gradients, sketched_gradients
from hf_growattn.measure.kinds import MESSAGES, PATTERNS
from hf_growattn.measure.passes import mean_loss, undisturbed

DIM = 6 * 48  # weights that one more dim of patterns adds to a layer of "llama-2"


def found(block: Block, validated: list[float]) -> Gradient:
    """Directions of a block, each worth 1 where it was found and `validated` elsewhere."""
    ones, values = torch.ones(1, len(validated)), torch.tensor(validated)
    return Gradient(block, None, ones, None, ones[0], values, 0.5, ((None, ones, None),) * 2)


def widened(dims: int) -> Block:
    """The patterns of a layer whose heads were 16 wide, and are wider by so many dims."""
    attention = attentions(patch_model(build("llama-2")))[0]
    attention.widen(qk_dims=dims)
    return Block(attention, PATTERNS, None)


# What a config's numbers mean


def test_the_ridge_is_the_one_that_was_asked_for(monkeypatch):
    """Of the mean eigenvalue of `C`, 0.5 of it raises every eigenvalue by 0.4 more than 0.1 does."""
    seen = []

    def spied(model, blocks, *rest):
        seen.append([block.roots.shared_root @ block.roots.shared_root for block in blocks])
        return sketched_gradients(model, blocks, *rest)

    monkeypatch.setattr(growth, "sketched_gradients", spied)
    for ridge in (0.1, 0.5):
        Grower(patch_model(build("llama-2")), GrowthConfig(qk_dims=1, v_dims=1, ridge=ridge)).measure(lm_batches(2))
    for less, more in zip(*seen):
        mean = less.trace() / len(less) / 1.1
        torch.testing.assert_close(more - less, 0.4 * mean * torch.eye(len(less)), rtol=1e-4, atol=1e-4 * mean.item())


def test_an_estimator_for_comparison_takes_the_same_ridge(monkeypatch):
    def spied(name, model, blocks, halves, dims, ridge, *rest):
        assert ridge == 0.5
        return compared_gradients(name, model, blocks, halves, dims, ridge, *rest)

    monkeypatch.setattr(compared, "compared_gradients", spied)
    grower = ComparedGrower(patch_model(build("llama-2")), GrowthConfig(v_dims=1, ridge=0.5), estimator="per-sequence")
    assert grower.measure(lm_batches(2)).layers


@pytest.mark.parametrize("dims", [dict(qk_dims=32), dict(v_dims=32)])
def test_heads_may_grow_to_hidden_size_and_no_further(dims):
    model = patch_model(build("llama-2"))
    report = Grower(model, GrowthConfig(**dims)).grow(lm_batches(4))
    assert report.applied and all(layer.width == (16, 48) for layer in report.layers)
    with pytest.raises(ValueError, match="hidden_size=48"):
        Grower(model, GrowthConfig(**dict.fromkeys(dims, 1))).grow(lm_batches(4))


def test_widths_are_multiples_whatever_they_were():
    block = widened(3)  # 19 wide
    for config, width in (
        (dict(qk_dims=3), 24),
        (dict(qk_dims=6), 32),
        (dict(qk_dims=9, max_qk_head_dim=31), 24),
        (dict(qk_dims=9, max_qk_head_dim=23), 19),
        (dict(budget=0.5), 40),  # 16 dims at least to choose from
    ):
        assert 19 + GrowthConfig(**config, multiple_of=8).most_dims(block.attention, block.kind) == width
    for dims, bought in ((4, 0), (5, 5), (12, 5), (13, 13), (100, 21)):  # 24, 32 and 40 wide
        config = GrowthConfig(budget=dims * DIM, kinds=["patterns"], multiple_of=8)
        (change,) = spend(config, candidates(config, [found(block, [0.5] * 21)]), [1.0], 10**6)
        assert change.dims == bought


# What a budget buys


@pytest.mark.parametrize("multiple_of, bought", [(1, 2), (3, 2), (4, 4)])
def test_a_budget_is_not_spent_on_dims_that_do_not_hold(multiple_of, bought):
    """Two of eight hold, and the rest is left; but for a width that is rounded up."""
    config = GrowthConfig(budget=100 * DIM, kinds=["patterns"], multiple_of=multiple_of)
    gradient = found(widened(0), [0.9, 0.6, -0.1, -0.2, -0.2, -0.3, -0.4, -0.5])
    (change,) = spend(config, candidates(config, [gradient]), [1.0], 10**6)
    assert change.dims == bought and change.strength.tolist()[:2] == pytest.approx([0.9, 0.6])
    assert not change.strength[2:].any()
    (change,) = spend(config, candidates(config, [found(widened(0), [-0.1] * 8)]), [1.0], 10**6)
    assert change.dims == 0


# What one half found, the other judges


def existing(parts, weights=(0.75, 0.25)):
    factors = normal(2, 7, 3), normal(2, 5, 3, seed=2)
    return _existing_step(SimpleNamespace(whitened_factors=lambda: factors), parts, weights), factors


def test_the_step_of_the_existing_weights_is_as_long_as_the_other_half_admits():
    one = normal(2, 7, 3, seed=3), normal(2, 5, 3, seed=4)
    other = tuple(side + 0.7 * normal(*side.shape, seed=5) for side in one)
    step, factors = existing([one, other])
    own = [F.tangent_step(*part, *factors) for part in (one, other)]
    gains = [[-sum((g * c).sum() for g, c in zip(part, change)) for change in own] for part in (one, other)]
    strength = (gains[0][1] + gains[1][0]) / (gains[0][0] + gains[1][1])
    assert 0.1 < strength < 0.9
    together = tuple(0.75 * a + 0.25 * b for a, b in zip(one, other))
    for change, whole in zip((step.stacked, step.shared), F.tangent_step(*together, *factors)):
        torch.testing.assert_close(change, strength * whole)
    assert step.validated == pytest.approx(strength.item() * (gains[0][1] + gains[1][0]).item() / 2)


def test_halves_that_contradict_each_other_leave_the_existing_weights():
    one = normal(2, 7, 3, seed=3), normal(2, 5, 3, seed=4)
    step, _ = existing([one, tuple(-side for side in one)])
    assert not step.stacked.any() and not step.shared.any()
    assert step.slope == step.validated == step.quadratic_ratio == 0


@pytest.mark.parametrize("config", [dict(budget=0.1), dict(qk_dims=2, v_dims=2, update_existing=True)])
def test_no_step_is_chosen_on_the_half_that_its_directions_come_from(config, monkeypatch):
    batches, seen, taken = lm_batches(6), [], []

    class Watched(Trial):
        def take(self, steps, half=None):
            taken.append(half if any(steps) else None)
            super().take(steps, half)

    def watched(model, measured, *rest):
        places = {
            index % 2 for index, own in enumerate(batches) for batch in measured if own["labels"] is batch["labels"]
        }
        seen.append((taken[-1], places))
        return mean_loss(model, measured, *rest)

    monkeypatch.setattr(growth, "Trial", Watched)
    monkeypatch.setattr(search, "Trial", Watched)
    monkeypatch.setattr(growth, "mean_loss", watched)
    assert Grower(patch_model(build("llama-2")), GrowthConfig(**config)).measure(batches).found
    judged = [(half, places) for half, places in seen if half is not None]
    assert len(judged) > 6 and all(places == {1 - half} for half, places in judged)


def test_each_half_is_tried_with_its_own_directions():
    """Those that it gives where it stands for both: other ones gain less on it."""
    model, batches = patch_model(build("llama-2", dtype=torch.float64)), lm_batches(6)
    halves = batches[0::2], batches[1::2]
    with undisturbed(model):
        blocks, _ = measure_moments(model, attentions(model), [PATTERNS, MESSAGES], batches, 0.05)
        gradients = exact_gradients(model, blocks, halves, dims=2)
        alone = [exact_gradients(model, blocks, (half, half), dims=2) for half in halves]
    trial = Trial([Change(gradient, 2, torch.ones(2)) for gradient in gradients])
    for half, own in enumerate(alone):
        trial.take([1.0] * len(gradients), half)
        for change, expected in zip(trial.changes, own):
            torch.testing.assert_close(change.gradient.halves[half][1], expected.sigma)
            block = change.gradient.block
            beside = trial.beside[block.attention]
            stacked, shared = (F.join_bias(beside.weights[role], beside.biases[role]) for role in block.kind.roles)
            roots = expected.block.roots
            product = F.step_factors(
                expected.u, expected.sigma, expected.v, roots.stacked_whitening, roots.shared_whitening, 4
            )
            of_heads = [side.repeat_interleave(2, 0).mT for side in (shared, product[1])]
            torch.testing.assert_close(stacked @ of_heads[0], product[0] @ of_heads[1])
