"""New dims on trial: what they compute, which steps a search finds for them, and what a sketch and a judge read."""

import collections
import inspect
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from compared import exact_directions
from families import VARIANTS, add_dims, build, lm_batches, padded, tokens
from torch.utils._python_dispatch import TorchDispatchMode

import hf_growattn
from hf_growattn import Grower, GrowthConfig, patch_model
from hf_growattn.grow.plan import all_candidates
from hf_growattn.grow.trial import FEW, StepSearch, Trial
from hf_growattn.growable.attention import attentions, set_trial
from hf_growattn.growable.growths import sync_config
from hf_growattn.measure.bottlenecks import QK, V, compute_moments
from hf_growattn.measure.directions import Directions, passes_over, probing
from hf_growattn.measure.halves import HalvedBatches, halves_of
from hf_growattn.measure.passes import Objective, evaluation_mode


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


def test_new_keys_and_values_are_as_large_as_old_ones_at_least():
    model = patch_model(build("llama-2"))
    assert Grower(model, GrowthConfig(qk_dims=2, v_dims=2)).find(lm_batches(4)).keep().kept
    for attention in attentions(model):
        for role in ("key", "value"):
            old = attention.weight_of(role).square().mean().sqrt()
            new = attention.growths["growth_1"].weight_of(role).square().mean(-1).sqrt()
            assert (new > 0.99 * old).all(), role  # fp32 rounds by less


def test_a_trial_takes_off_what_it_put_on_after_an_exception_too():
    model = patch_model(build("llama-2"))
    with evaluation_mode(model):
        bottlenecks, _ = compute_moments(Objective(model), attentions(model), [QK], lm_batches(2))
        directions = exact_directions(Objective(model), bottlenecks, halves_of(lm_batches(2)), dims=2)
    trial = Trial(all_candidates(GrowthConfig(qk_dims=2), directions))
    columns = [
        [torch.eye(rows, 1).expand(groups, -1, -1) for groups, rows in (each.stacked_shape, each.shared_shape)]
        for each in bottlenecks
    ]
    for attaching in (trial.attached(), probing(bottlenecks, columns)):
        with pytest.raises(KeyboardInterrupt), attaching:
            assert all(attention.extra.trial for attention in attentions(model))
            raise KeyboardInterrupt
        assert not any(attention.extra for attention in attentions(model))


class Searched:
    """Stands for a trial: a loss as a function of the steps, and for each candidate a kind and a slope.

    Attributes:
        tried: the steps of every evaluation; each half of the batches is one.
    """

    def __init__(self, loss, slopes, kinds, loss_before):
        self.loss, self.tried = loss, []
        self.candidates = [
            SimpleNamespace(slope=slope, bottleneck=SimpleNamespace(kind=kind)) for slope, kind in zip(slopes, kinds)
        ]
        self.search = StepSearch(None, SimpleNamespace(few_loss_before=loss_before))
        self.search.loss_of_half = self.loss_of_half

    def set_steps(self, steps, half):
        self.half = half
        self.tried.append(steps)

    def loss_of_half(self, half):
        assert half == 1 - self.half  # directions are judged by the other half
        return self.loss(*self.tried[-1])

    def run(self):
        """The steps that a search finds, and the loss there."""
        return self.search.run(self)


def curve(best, kinds):
    """A loss with one minimum, 1, at a step of its own for each candidate; it falls as the slopes promise."""
    slopes = [2 / each for each in best]

    def loss(*steps):
        return 1 + sum((1 - step / each) ** 2 for step, each in zip(steps, best))

    return Searched(loss, slopes, kinds, lambda count: 1.0 + len(best))


@pytest.mark.parametrize("best", [1e-9, 1e-3, 1.0, 1e9])
def test_no_grid_ends_the_search(best):
    (step,), loss = curve([best], [QK]).run()
    assert step == pytest.approx(best, rel=0.3) and loss < 1.1


def test_each_kind_finds_its_own_step():
    steps, _ = curve([1.0, 2.0, 3e-4, 6e-4], [QK, QK, V, V]).run()
    assert steps[0] == steps[1] and steps[2] == steps[3] and steps[0] == pytest.approx(1.2, rel=0.5)
    assert steps[2] == pytest.approx(3.6e-4, rel=0.5)


def test_a_search_of_a_loss_below_zero_steps_downhill():
    """Such as a reward with its sign turned: a step is counted by the size of the loss."""
    searched = Searched(lambda step: 2 * step**2 - 2 * step - 5, [2.0], [QK], lambda count: -5.0)
    (step,), loss = searched.run()
    assert min(searched.tried) > [0] and 0 < step < 1 and loss < -5.3


def test_a_step_that_does_not_fall_at_once_is_searched_on_more_batches():
    """Noise may hide a fall on few; without one there, too, it goes on with smaller steps, and widens no further."""
    read: list[tuple[int, int]] = []  # how many batches of each half, after how many steps

    def loss(step):
        return 5 + 50 * step**2 - step if searched.search.few == FEW else 2.0

    def loss_before(count):
        read.append((count, len(searched.tried)))
        return {1: 1.0, FEW: 5.0}[count]

    searched = Searched(loss, [10.0], [QK], loss_before)
    (step,), lowest = searched.run()
    assert read == [(1, 0), (FEW, 2)]  # once, after the first evaluation of both halves
    assert searched.tried[4][0] == pytest.approx(searched.tried[2][0] / 9)
    assert 0 < step < 0.02 and lowest < 5.0 == searched.search.loss_before
    spent = len(searched.tried)
    searched.run()
    assert read[2:] == [(FEW, spent)]


def test_a_parabola_between_the_best_three_steps_finds_the_lowest_point():
    searched = Searched(lambda step: 5 + (step**0.5 - 0.6**0.5) ** 2, [10.0], [QK], lambda count: 5.6)
    (step,), _ = searched.run()  # between the second and the third step that it tries
    assert step == pytest.approx(0.6, rel=1e-6)
    spent = len(searched.tried)
    searched.run()
    assert searched.tried[spent][0] == pytest.approx(0.6, rel=1e-6)  # a later run begins there


def test_the_first_passes_of_a_sketch_read_parts_of_either_half_and_the_last_one_all():
    halves = [*range(16)], [*range(16, 24)]
    assert passes_over(halves) == [([0, 4, 8, 12], [16, 20]), ([1, 5, 9, 13], [17, 21]), halves]


def test_few_batches_of_each_half_are_compared_with_their_own_losses_of_before():
    halved = HalvedBatches([*range(1000, 1012)], whole=True)
    halved.note_losses([float(2**place) for place in range(12)])
    assert halved.few(3) == [[1000, 1004, 1008], [1001, 1005, 1009]]
    assert halved.few_loss_before(3) == pytest.approx((1 + 16 + 256 + 2 + 32 + 512) / 6)


def test_a_direction_is_taken_by_the_share_of_its_gain_that_held():
    sigma, nothing = torch.tensor([[2.0, 1.0, 1.0], [0.0, 1.0, 1.0]]), torch.empty(0)  # of two groups of heads
    validated = torch.tensor([3.0, -0.5, 0.5])  # of 4, 2 and 2; neighbours out of order pool
    found = Directions(None, nothing, sigma, nothing, nothing, validated, None, ((nothing, sigma, nothing),) * 2)
    assert found.share_that_holds.tolist() == [0.75, 0.0, 0.0]
    found.validated = torch.tensor([-1.0, -2.0, -3.0])
    assert not found.share_that_holds.any() and not found.worth.any()


class _Calls(TorchDispatchMode):
    """Counts the operators that the package runs, by name, without those of transformers."""

    def __init__(self):
        super().__init__()
        self.counts = collections.Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        frame = inspect.currentframe()
        while frame and ("/torch/" in frame.f_code.co_filename or frame.f_code.co_filename == __file__):
            frame = frame.f_back
        if frame and Path(hf_growattn.__file__).parent in Path(frame.f_code.co_filename).parents:
            self.counts[func.overloadpacket.__name__] += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("old_dims_train", [True, False])
@pytest.mark.parametrize("config", [{"budget": 0.05}, {"qk_dims": 2, "v_dims": 2}], ids=["budget", "fixed"])
def test_a_growth_solves_two_eigenproblems_for_all_bottlenecks_together(config, old_dims_train):
    """A GPU would solve them one by one."""
    with _Calls() as calls:
        model = patch_model(build("gpt2-5-scaled"))
        Grower(model, GrowthConfig(old_dims_train=old_dims_train, **config)).find(lm_batches(4)).keep()
    assert {name: number for name, number in calls.counts.items() if "eig" in name or "svd" in name} == {
        "_linalg_eigh": 2
    }


def test_measuring_reads_no_number_of_each_batch():
    """A GPU that is waited for has run out of work."""
    read = []
    for count in (8, 16):
        grower = Grower(patch_model(build("llama-2")), GrowthConfig(budget=0.05))
        with _Calls() as calls, grower._session(lm_batches(count)) as session:
            calls.counts.clear()
            grower._measure_directions(session)
        read.append(calls.counts["_local_scalar_dense"])
    assert 0 < read[0] == read[1]
