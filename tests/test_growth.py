"""`Grower`: what it promises, what it reports, and that nothing is lost on failure."""

import copy
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from compared import exact_directions
from conftest import real_batches
from families import build, lm_batches

from hf_growattn import Grower, GrowthConfig, patch_model
from hf_growattn.grow import growth
from hf_growattn.grow.trial import Candidate, StepSearch, Trial
from hf_growattn.growable import growths
from hf_growattn.growable.attention import attentions, set_trial
from hf_growattn.growable.growths import cache_bytes, extra_parameters
from hf_growattn.measure.bottlenecks import QK, V, compute_moments
from hf_growattn.measure.functional import step_factors
from hf_growattn.measure.passes import Objective, evaluation_mode, mean_loss, mean_over_ranks

FIXED = dict(qk_dims=4, v_dims=4)


def fingerprint(model, optimizer=None):
    """Everything that a failed or refused growth must leave as it was."""
    state = [] if optimizer is None else [[id(p) for p in group["params"]] for group in optimizer.param_groups]
    if optimizer is not None:
        state.append(
            {id(p): {k: (id(v), torch.as_tensor(v).clone()) for k, v in s.items()} for p, s in optimizer.state.items()}
        )
    return (
        {
            name: (id(p), p.detach().clone(), p.requires_grad, id(p.grad), None if p.grad is None else p.grad.clone())
            for name, p in model.named_parameters()
        },
        [(name, type(m), m.training, [*m._forward_pre_hooks, *m._forward_hooks]) for name, m in model.named_modules()],
        model.config.to_json_string(),
        [(a.width_of("query"), a.width_of("value")) for a in attentions(model)],
        torch.get_rng_state(),
        state,
    )


def same(one, other) -> bool:
    if torch.is_tensor(one):
        return torch.equal(one.nan_to_num(), other.nan_to_num()) and torch.equal(one.isnan(), other.isnan())
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[k], other[k]) for k in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    return one == other


def fp64_loss(logits, labels, **kwargs):
    """Cross entropy without the cast to fp32 that transformers' own makes."""
    return torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())


def loss_of(model, batches) -> float:
    with evaluation_mode(model):
        return mean_loss(Objective(model), batches)


def everything(model, batches, kinds=(QK, V), dims=4):
    """A trial of the best directions, held or not, and the loss without them."""
    objective = Objective(model)
    with evaluation_mode(model):
        bottlenecks, losses = compute_moments(objective, attentions(model), list(kinds), batches, 0.05)
        directions = exact_directions(objective, bottlenecks, (batches[0::2], batches[1::2]), dims=dims)
    return Trial([Candidate(found, dims, torch.ones(dims)) for found in directions]), mean_over_ranks(losses)


def test_a_kind_without_a_step_is_not_added_next_to_one_that_has_one():
    class OfPatterns(Grower):
        def search_steps(self, session, trial):
            steps = super().search_steps(session, trial)
            return [step * (each.bottleneck.kind is QK) for each, step in zip(trial.candidates, steps)]

    model = patch_model(build("llama-2"))
    report = OfPatterns(model, GrowthConfig(qk_dims=2, v_dims=2)).find(lm_batches(4)).keep()
    now = {(each.layer, kind.name): each.width_of(kind.shared) for each in attentions(model) for kind in (QK, V)}
    assert now == {(layer.layer, layer.kind): layer.width[1] for layer in report.layers}
    assert {layer.width for layer in report.layers} == {(16, 18), (16, 16)}
    assert report.added_parameters == sum(weight.numel() for weight in extra_parameters(model))


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
            print(f"{variant}: expected {expected}, measured {measured / expected:.5f} of it")
            assert measured == pytest.approx(expected, rel=0.01)
        trial.set_steps([0.0] * count)
        assert loss_of(model, batches) == pytest.approx(before, rel=1e-9)


def test_first_order_is_right_on_the_real_model(real_llama):
    batches = [{"input_ids": x, "labels": x} for x in real_batches(8)]
    trial, before = everything(real_llama, batches, dims=8)
    expected, slope = 1e-3 * before, sum(candidate.slope for candidate in trial.candidates)
    with trial.attached():
        trial.set_steps([expected / slope] * len(trial.candidates))
        measured = before - loss_of(real_llama, batches)
    print(f"expected {expected:.6f}, measured {measured:.6f}")
    assert measured == pytest.approx(expected, rel=0.01)


def test_the_real_model_gets_better_on_fresh_text(real_llama):
    fresh = [{"input_ids": x, "labels": x} for x in real_batches(8, start=50)]
    before = loss_of(real_llama, fresh)
    report = Grower(real_llama, GrowthConfig(qk_dims=8)).grow(real_batches(16))
    after = loss_of(real_llama, fresh)
    print(f"fresh loss {before:.4f} -> {after:.4f}")
    assert report.kept and after < before - 0.1


def test_sketch_and_exact_growth_come_out_alike(real_llama):
    other, batches = copy.deepcopy(real_llama), real_batches(4)
    sketched = Grower(real_llama, GrowthConfig(**FIXED, oversampling=16)).grow(batches)
    exact = Grower(other, GrowthConfig(**FIXED, oversampling=64)).grow(batches)
    gained = [report.fall for report in (sketched, exact)]
    assert gained[0] > 0.9 * gained[1]


@pytest.mark.parametrize("variant", ["llama-5-bias", "gpt2-2"])
def test_growing_is_deterministic(variant):
    config = GrowthConfig(qk_dims=2, v_dims=2)
    reports = [Grower(patch_model(build(variant)), config).grow(lm_batches()) for _ in range(2)]
    assert reports[0] == reports[1]


@pytest.mark.parametrize("dims", [dict(qk_dims=3), dict(v_dims=3), dict(qk_dims=3, v_dims=2)])
def test_layers_and_dims_pick_what_grows(dims):
    model = patch_model(build("llama-5-bias"))
    before = dict(model.named_parameters())
    report = Grower(model, GrowthConfig(**dims, layers=[3, 1])).find(lm_batches(12)).keep()
    assert report.kept
    assert [layer.layer for layer in report.layers] == [layer for layer in (3, 1) for _ in dims]
    qk, v = dims.get("qk_dims", 0), dims.get("v_dims", 0)
    widths = [(a.width_of("query"), a.width_of("value")) for a in attentions(model)]
    assert widths == [(16, 16), (16 + qk, 16 + v), (16, 16), (16 + qk, 16 + v), (16, 16)]
    after = dict(model.named_parameters())
    assert all(after.pop(name) is parameter for name, parameter in before.items())
    names = ["in_proj.weight", "in_proj.bias", "out_proj.weight"] if v else ["in_proj.weight", "in_proj.bias"]
    assert after.keys() == {
        f"model.layers.{i}.self_attn.extra.growths.growth_1.{name}" for i in (1, 3) for name in names
    }


def test_report_holds_and_prints_what_happened():
    model = patch_model(build("llama-5-bias"))
    count = model.num_parameters()
    report = Grower(model, GrowthConfig(**FIXED)).grow(lm_batches(8))
    patterns, messages = 4 * 6 * (48 + 1), 4 * (4 * 48 + 2 * (48 + 1))
    assert report.added_parameters == model.num_parameters() - count == 5 * (patterns + messages)
    steps = [layer.step_size for layer in report.layers]
    assert all(steps) and len({*steps[0::2]}) == len({*steps[1::2]}) == 1  # one for each kind
    for layer in report.layers:
        assert 0 <= layer.out_of_reach <= 1 and layer.width == (16, 20)
        assert layer.predicted_gain == pytest.approx(layer.step_size * layer.gain)
    assert report.predicted_gain == pytest.approx(sum(layer.predicted_gain for layer in report.layers))
    assert report.holds and report.fall > report.error > 0 and report.cache_bytes[1] == cache_bytes(model)
    text = " ".join(str(report).split())
    assert "16 -> 20" in text and f"{report.added_parameters:,} weights added" in text
    assert f"falls by {report.fall:.4f} ± {report.error:.4f}" in text
    assert loss_of(model, lm_batches(8)) < report.loss_before


class _Curve:
    """Stands for a trial: a loss with one minimum, at a step of its own for each candidate."""

    def __init__(self, best, kinds):
        self.best = best
        self.candidates = [
            SimpleNamespace(slope=2 / b, bottleneck=SimpleNamespace(kind=kind)) for b, kind in zip(best, kinds)
        ]

    def set_steps(self, steps, half):
        self.steps, self.half = steps, half

    def search(self, loss_before):
        """The steps that a search finds, and the loss there."""
        search = StepSearch(None, SimpleNamespace(few_loss_before=lambda count: loss_before))
        search.loss_of_half = self.loss_of_half
        return search.run(self)

    def loss_of_half(self, half):
        assert half == 1 - self.half  # directions are judged by the other half
        return 1 + sum((1 - step / best) ** 2 for step, best in zip(self.steps, self.best))


def test_no_grid_ends_the_search():
    """Steps of 1e-9 and of 1e9 are found alike: the search has no ends, only a curve that turns."""
    for best in (1e-9, 1e-3, 1.0, 1e9):
        (step,), loss = _Curve([best], [QK]).search(2.0)
        assert step == pytest.approx(best, rel=0.3) and loss < 1.1


def test_each_kind_finds_its_own_step():
    best, kinds = [1.0, 2.0, 3e-4, 6e-4], [QK, QK, V, V]
    steps, _ = _Curve(best, kinds).search(5.0)
    assert steps[0] == steps[1] and steps[2] == steps[3] and steps[0] == pytest.approx(1.2, rel=0.5)
    assert steps[2] == pytest.approx(3.6e-4, rel=0.5)


@pytest.mark.parametrize("variant", ["llama-2", "llama-5-bias", "gpt2-2"])
def test_no_improvement_is_rolled_back_to_the_bit(variant, monkeypatch):
    model = patch_model(build(variant)).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model(**lm_batches()[0]).loss.backward()
    optimizer.step()
    before = fingerprint(model, optimizer)
    logits = model.eval()(**lm_batches()[0]).logits
    model.train()

    def uphill(*args):  # every step along these makes the loss worse
        stacked, shared = step_factors(*args)
        return stacked, -shared

    monkeypatch.setattr("hf_growattn.measure.functional.step_factors", uphill)
    report = Grower(model, GrowthConfig(**FIXED), optimizer).grow(lm_batches())
    assert not report.kept and report.predicted_gain == 0
    assert report.fall == report.error == 0 and not report.holds and not report.figures()["growth_added_parameters"]
    assert "no step along the new directions lowers the loss" in " ".join(str(report).split())
    assert same(fingerprint(model, optimizer), before)
    assert torch.equal(model.eval()(**lm_batches()[0]).logits, logits)


@pytest.mark.parametrize(
    "phase, error",
    [
        ("compute_moments", KeyboardInterrupt),
        ("sketched_directions", RuntimeError),
        ("StepSearch", KeyboardInterrupt),
        ("add_new_parameters", MemoryError),
        *[("Trial", error) for error in (RuntimeError, KeyboardInterrupt, MemoryError)],
    ],
)
def test_an_exception_in_any_phase_leaves_everything_as_it_was(phase, error, monkeypatch):
    room = growth if hasattr(growth, phase) and phase != "add_new_parameters" else growths
    model = patch_model(build("llama-5-bias")).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model(**lm_batches()[0]).loss.backward()
    optimizer.step()
    before = fingerprint(model, optimizer)
    original = getattr(room, phase)

    def failing(*args, **kwargs):
        if phase == "Trial":
            monkeypatch.setattr("hf_growattn.grow.trial.set_trial", _fail_at(3, error))
            return original(*args, **kwargs)
        if phase == "StepSearch":
            search = original(*args, **kwargs)
            loss_of_half, calls = search.loss_of_half, iter(range(100))
            search.loss_of_half = lambda half: loss_of_half(half) if next(calls) < 7 else _raise(error)
            return search
        if phase == "add_new_parameters":
            original(*args, **kwargs)  # some of them may be in already
        raise error("on purpose")

    monkeypatch.setattr(room, phase, failing)
    with pytest.raises(error):
        Grower(model, GrowthConfig(**FIXED, oversampling=4), optimizer).find(lm_batches()).keep()
    assert same(fingerprint(model, optimizer), before)


def test_what_is_found_is_kept_or_dropped():
    model = patch_model(build("llama-5-bias")).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    before, names = fingerprint(model, optimizer), {name for name, _ in model.named_parameters()}
    grower = Grower(model, GrowthConfig(**FIXED, oversampling=4), optimizer)
    first, second = grower.find(lm_batches(8)), grower.find(lm_batches(8))
    assert same(fingerprint(model, optimizer), before)
    assert first.report.fall > 0 and [*first.new_dims] == attentions(model)
    assert not first.drop().kept and not first.new_dims
    assert same(fingerprint(model, optimizer), before)
    found, trial = second.new_dims, second._trial
    trial.attach()
    tried = loss_of(model, lm_batches())
    trial.detach()
    report = second.keep()
    assert report.kept and [a.extra.growths["growth_1"] for a in attentions(model)] == [*found.values()]
    assert loss_of(model, lm_batches()) == pytest.approx(tried, rel=1e-5)  # it is what was tried
    third = grower.find(lm_batches()).keep()
    assert {part for a in attentions(model) for part in a.extra.growths} == {"growth_1", "growth_2"}
    assert third.layers[0].width == (20, 24) and third.loss_before == pytest.approx(tried, rel=1e-5)
    assert len(extra_parameters(model)) == 2 * 3 * 5
    assert {name for name, _ in model.named_parameters() if ".extra." not in name} == names


@pytest.mark.parametrize("variant", ["llama-5-bias", "gpt2-2"])
def test_measure_says_what_grow_would_do_and_leaves_everything_as_it_was(variant):
    model = patch_model(build(variant)).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model(**lm_batches()[0]).loss.backward()
    optimizer.step()
    grower = Grower(model, GrowthConfig(budget=0.1), optimizer)
    before = fingerprint(model, optimizer)
    measured = grower.measure(lm_batches(24))
    assert same(fingerprint(model, optimizer), before)
    assert measured.holds and not measured.kept and "weights would be added" in " ".join(str(measured).split())
    grown = grower.grow(lm_batches(24))
    assert grown.kept and grown.added_parameters == measured.added_parameters > 0
    assert grown == replace(measured, kept=True)


def _raise(error):
    raise error("on purpose")


def _fail_at(call, error):
    calls = []

    def maybe(*args):
        calls.append(args)
        if len(calls) == call:
            raise error("on purpose")
        return set_trial(*args)

    return maybe


@pytest.mark.parametrize("variant", ["llama-2", "gpt2-2"])
def test_bf16_models_grow(variant):
    model = patch_model(build(variant, dtype=torch.bfloat16))
    report = Grower(model, GrowthConfig(qk_dims=4)).find(lm_batches()).keep()
    assert report.kept and {p.dtype for p in model.parameters()} == {torch.bfloat16}


def test_training_goes_on_from_the_growth():
    model = patch_model(build("llama-2"))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    batches, losses = lm_batches(), []
    for step in range(12):
        if step == 6:
            report = Grower(model, GrowthConfig(qk_dims=4), optimizer).find(batches).keep()
        loss = sum(model(**batch).loss for batch in batches) / len(batches)
        loss.backward()
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert report.kept and losses[6] < losses[5]
    assert losses[-1] < losses[6]


def test_accelerate_with_one_process():
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    model = patch_model(build("llama-2"))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model, optimizer = accelerator.prepare(model, optimizer)
    report = Grower(model, GrowthConfig(qk_dims=4), optimizer).find(lm_batches()).keep()
    assert report.kept
    held = {id(p) for group in optimizer.param_groups for p in group["params"]}
    assert held == {id(p) for p in model.parameters()}
    accelerator.backward(model(**lm_batches()[0]).loss)
    optimizer.step()


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
