"""A growth is short: few evaluations of few batches, passes over parts of them, and a bar that knows its end."""

import collections
import inspect
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from families import build, lm_batches
from torch.utils._python_dispatch import TorchDispatchMode

from hf_growattn import Grower, GrowthConfig, patch_model
from hf_growattn.grow import growth, trial
from hf_growattn.measure import directions
from hf_growattn.measure.bottlenecks import KINDS

CONFIGS = [GrowthConfig(budget=0.05), GrowthConfig(qk_dims=2, v_dims=2)]


@pytest.mark.parametrize("config", CONFIGS, ids=["budget", "fixed"])
@pytest.mark.parametrize("batches", [2, 12])
def test_ten_evaluations_of_few_batches_are_the_most(config, batches, monkeypatch):
    evaluated, measured = [], []
    loss_at, mean_loss = trial.StepSearch.loss_at, trial.mean_loss

    def counting(self, steps):
        before = sum(measured)
        assert any(steps)  # the loss without them is known
        loss = loss_at(self, steps)
        evaluated.append(sum(measured) - before)
        return loss

    def noting(objective, few):
        measured.append(len(few))
        return mean_loss(objective, few)

    monkeypatch.setattr(trial.StepSearch, "loss_at", counting)
    monkeypatch.setattr(trial, "mean_loss", noting)
    assert Grower(patch_model(build("llama-2")), config).find(lm_batches(batches)).keep().kept
    assert 4 <= len(evaluated) <= 10 and evaluated[0] == 2 and max(evaluated) <= 4


def test_what_pricing_leaves_of_the_evaluations_is_there_for_what_was_bought(monkeypatch):
    losses, left, loss_at, run = [], [], trial.StepSearch.loss_at, trial.StepSearch.run

    def noting(self, tried, spare=0):
        found = run(self, tried, spare)
        left.append((self.left, trial.MOST_EVALUATIONS - len(losses)))
        return found

    monkeypatch.setattr(trial.StepSearch, "loss_at", lambda *args: losses.append(args) or loss_at(*args))
    monkeypatch.setattr(trial.StepSearch, "run", noting)
    assert Grower(patch_model(build("llama-2")), CONFIGS[0]).find(lm_batches(4)).keep().kept
    assert len(left) == 2 and all(noted == expected for noted, expected in left)


class _Bar:
    """Stands for tqdm: notes what it was told."""

    def __init__(self, **kwargs):
        self.total, self.n, self.totals = None, 0, []

    def __enter__(self):
        self.__class__.last = self
        return self

    def __exit__(self, *args):
        return False

    def set_description(self, text):
        pass

    def update(self, n=1):
        self.n += n
        self.totals.append(self.total)


@pytest.mark.parametrize("config", CONFIGS, ids=["budget", "fixed"])
def test_the_bar_knows_its_end_from_the_first_second(config, monkeypatch):
    monkeypatch.setattr(growth, "tqdm", _Bar)
    model = patch_model(build("llama-2"))
    Grower(model, config, torch.optim.AdamW(model.parameters())).grow(lm_batches(8))
    assert len(set(_Bar.last.totals)) == 1
    assert 0.6 * _Bar.last.total < _Bar.last.n <= _Bar.last.total


def test_a_sketch_looks_at_part_of_the_batches_and_what_does_not_hold_is_not_grown(monkeypatch):
    passes, backward, solve = [], directions.backward, directions._solve_directions

    def nothing_holds(*args):
        found = solve(*args)
        for each in found:
            each.validated = -each.validated.abs()
        return found

    monkeypatch.setattr(
        directions,
        "backward",
        lambda objective, batches: passes.append([*map(id, batches)]) or backward(objective, batches),
    )
    monkeypatch.setattr(directions, "_solve_directions", nothing_holds)
    report = Grower(patch_model(build("llama-2")), CONFIGS[1]).measure(lm_batches(24))
    assert [*map(len, passes)] == [4, 4, 4, 4, 12, 12] and not report.kept
    first, second = {*passes[0], *passes[1]}, {*passes[2], *passes[3]}
    assert not first & second and first | second < {*passes[4], *passes[5]}
    assert "Nothing was grown" in str(report)


def one_candidate(slope: float):
    """A trial of one candidate with this slope, and the list of the steps that it is set to, one for each half."""
    candidate, tried = SimpleNamespace(bottleneck=SimpleNamespace(kind=KINDS["qk"]), slope=slope), []
    return SimpleNamespace(candidates=[candidate], set_steps=lambda steps, half: tried.append(steps[0])), tried


def search_of(loss_of_half, loss_before):
    """A search whose batches have these losses; the one before is a function of how many of each half are read."""
    search = trial.StepSearch(None, SimpleNamespace(few_loss_before=loss_before))
    search.loss_of_half = loss_of_half
    return search


def test_a_search_of_a_loss_below_zero_steps_downhill():
    """Such as a reward with its sign turned: a step is counted by the size of the loss."""
    candidate, tried = one_candidate(slope=2.0)
    search = search_of(lambda half: 2 * tried[-1] ** 2 - 2 * tried[-1] - 5, lambda count: -5.0)
    (step,), loss = search.run(candidate)
    assert min(tried) > 0 and 0 < step < 1 and loss < -5.3


def test_a_step_that_does_not_fall_at_once_is_searched_on_more_batches():
    """Noise may hide a fall on few; without one there, too, it goes on with smaller steps, and widens no further."""
    candidate, tried = one_candidate(slope=10.0)
    read: list[tuple[int, int]] = []  # how many batches of each half, after how many steps

    def loss_of_half(half):
        return 5 + 50 * tried[-1] ** 2 - tried[-1] if search.few == trial.FEW else 2.0

    def loss_before(count):
        read.append((count, len(tried)))
        return {1: 1.0, trial.FEW: 5.0}[count]

    search = search_of(loss_of_half, loss_before)
    (step,), loss = search.run(candidate)
    assert read == [(1, 0), (trial.FEW, 2)]  # once, after the first evaluation of both halves
    assert tried[4] == pytest.approx(tried[2] / 9)
    assert 0 < step < 0.02 and loss < 5.0 == search.loss_before
    spent = len(tried)
    search.run(candidate)
    assert read[2:] == [(trial.FEW, spent)]


def test_a_parabola_between_the_best_three_steps_finds_the_lowest_point():
    candidate, tried = one_candidate(slope=10.0)
    search = search_of(lambda half: 5 + (tried[-1] ** 0.5 - 0.6**0.5) ** 2, lambda count: 5.6)
    (step,), _ = search.run(candidate)  # between the second and the third step that it tries
    assert step == pytest.approx(0.6, rel=1e-6)
    spent = len(tried)
    search.run(candidate)
    assert tried[spent] == pytest.approx(0.6, rel=1e-6)  # a later run begins there


def test_a_search_that_widens_compares_more_batches_of_each_half_with_themselves(monkeypatch):
    read, searches, mean_loss, run = [], [], trial.mean_loss, trial.StepSearch.run
    model, batches = patch_model(build("llama-2")), lm_batches(12)
    with torch.no_grad():
        losses = [model(**batches[index]).loss.item() for index in (0, 4, 8, 1, 5, 9)]
    monkeypatch.setattr("hf_growattn.measure.directions.OVERSAMPLING", 4)
    monkeypatch.setattr(trial, "_FIRST", 1e3)  # far too long a step
    monkeypatch.setattr(trial, "mean_loss", lambda loss, few: read.append(len(few)) or mean_loss(loss, few))
    monkeypatch.setattr(trial.StepSearch, "run", lambda self, *args: searches.append(self) or run(self, *args))
    Grower(model, CONFIGS[1]).measure(batches)
    assert read[:4] == [1, 1, 3, 3]
    assert searches[0].loss_before == pytest.approx(sum(losses) / 6, rel=1e-5)


class _Calls(TorchDispatchMode):
    """Counts what the package runs, by name, without what transformers runs."""

    def __init__(self):
        super().__init__()
        self.counts = collections.Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        frame = inspect.currentframe()
        while frame and ("/torch/" in frame.f_code.co_filename or frame.f_code.co_filename == __file__):
            frame = frame.f_back
        if frame and Path(growth.__file__).parents[1] in Path(frame.f_code.co_filename).parents:
            self.counts[func.overloadpacket.__name__] += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("old_dims_train", [True, False])
@pytest.mark.parametrize("config", CONFIGS, ids=["budget", "fixed"])
def test_a_growth_solves_two_eigenproblems_for_all_bottlenecks_together(config, old_dims_train):
    """A GPU would solve them one by one."""
    with _Calls() as calls:
        model = patch_model(build("gpt2-5-scaled"))
        assert Grower(model, replace(config, old_dims_train=old_dims_train)).find(lm_batches(4)).keep().kept
    assert {name: number for name, number in calls.counts.items() if "eig" in name or "svd" in name} == {
        "_linalg_eigh": 2
    }


def test_measuring_reads_no_number_of_each_batch():
    """A GPU that is waited for has run out of work."""
    read = []
    for count in (8, 16):
        grower = Grower(patch_model(build("llama-2")), CONFIGS[0])
        with _Calls() as calls, grower._session(lm_batches(count)) as session:
            calls.counts.clear()
            grower._measure_directions(session)
        read.append(calls.counts["_local_scalar_dense"])
    assert 0 < read[0] == read[1]
