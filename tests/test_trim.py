"""`trim_model`: dead dims go without a trace, others only as far as the measured loss allows."""

import copy
from types import SimpleNamespace

import pytest
import torch
from conftest import real_batches
from families import FAMILIES, build, lm_batches, tokens
from test_growth import fingerprint, same
from transformers import AutoModelForCausalLM

from hf_growattn import Grower, GrowthConfig, patch_model, trim_model, unpatch_model
from hf_growattn.grow import trim
from hf_growattn.grow.trial import read_factors
from hf_growattn.grow.trim import GrownDims, cut_parts
from hf_growattn.growable.growths import attentions, next_name, swap_parts, sync_config
from hf_growattn.measure.bottlenecks import MESSAGES, PATTERNS, Bottleneck, Roots, compute_moments
from hf_growattn.measure.passes import Objective, evaluation_mode, mean_loss
from hf_growattn.report.report import LayerTrim, TrimReport

STOCK, QK, V = 16, 4, 3  # widths of the tiny models, and what they grow by here
ROLES = ("query", "key", "value", "output")
VARIANTS = ["llama-2", *FAMILIES]


def grown(variant, scale=0.3, dtype=torch.float32):
    """A tiny model whose new dims, biases among them, hold random numbers, as after training."""
    model = patch_model(build(variant, dtype=dtype))
    generator = torch.Generator().manual_seed(5)
    for attention in attentions(model):
        attention.make_extra().parts["growth_1"] = attention.new_part(QK, V)
        for tensor in (new_dims(attention, role, name) for role in ROLES for name in ("weight", "bias")):
            if tensor is not None:
                tensor.copy_(scale * torch.randn(tensor.shape, generator=generator))
    sync_config(model)
    return model


def new_dims(attention, role, name="weight"):
    """A view on the new dims of a role, (heads, new dims, ...)."""
    (part,) = attention.parts
    tensor = getattr(part, f"{name}_of")(role)
    return None if tensor is None else tensor.detach()


def kill(attention, role, dim, heads=slice(None)):
    for name in ("weight", "bias"):
        tensor = new_dims(attention, role, name)
        if tensor is not None:
            tensor[heads, dim] = 0


def widths(model):
    return [(a.width_of("query"), a.width_of("value")) for a in attentions(model)]


def logits(model):
    with torch.no_grad():
        return model(tokens()).logits


def loss(model, batches):
    with evaluation_mode(model):
        return mean_loss(Objective(model), batches)


def assert_near(one, other):
    """Equal up to fp32 sums that have lost some zeros, which err by a share of the largest logit."""
    assert (one - other).abs().max() <= 1e-5 * other.abs().max()


def kill_some(model):
    """Two dead pattern dims and one dead message dim in every head, elsewhere in each, on this side or on that."""
    for attention in attentions(model):
        groups = attention.shape.num_key_value_heads
        per_group = attention.shape.num_heads // groups
        for group in range(groups):
            queries = slice(group * per_group, (group + 1) * per_group)
            kill(attention, "query", group % QK, queries)
            kill(attention, "key", (group + 2) % QK, group)
            kill(attention, *(("value", 0, group) if group % 2 else ("output", 1, queries)))


@pytest.mark.parametrize("variant", VARIANTS)
def test_dead_dims_go_and_the_function_stays(variant):
    model = grown(variant)
    kill_some(model)
    count, before = model.num_parameters(), logits(model)
    kept = [new_dims(a, "key", "weight").clone() for a in attentions(model)]
    report = trim_model(model)
    assert set(widths(model)) == {(STOCK + QK - 2, STOCK + V - 1)}
    assert_near(logits(model), before)
    assert report.removed_parameters == count - model.num_parameters() > 0
    assert report.loss_before is report.loss_after is None
    for attention, old in zip(attentions(model), kept):  # what stays is what it was, to the bit
        assert torch.equal(new_dims(attention, "key")[0], old[0, [1, 3]])
        assert torch.equal(new_dims(attention, "key")[1], old[1, [0, 2]])
    again = trim_model(model)
    assert not again.removed_parameters and "Nothing was cut" in str(again)


@pytest.mark.parametrize("variant", FAMILIES)
def test_zeros_in_one_head_keep_the_width(variant):
    model = grown(variant)
    for attention in attentions(model):
        for dim in range(QK):
            kill(attention, "query", dim, 0)
        for dim in range(V):
            kill(attention, "output", dim, 0)
    before = fingerprint(model)
    assert not trim_model(model).removed_parameters
    assert same(fingerprint(model), before)


@pytest.mark.parametrize("variant", FAMILIES)
def test_a_bias_keeps_a_dim_alive(variant):
    model = grown(variant)
    attention = attentions(model)[0]
    new_dims(attention, "key")[:] = 0  # the keys are their biases: the same for all tokens, yet not nothing
    assert not trim_model(model).removed_parameters
    new_dims(attention, "key", "bias")[:] = 0
    trim_model(model)
    assert widths(model)[0] == (STOCK, STOCK + V)


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_model_trimmed_everywhere_is_stock_again(variant):
    model, stock = patch_model(build(variant)), build(variant)
    for attention in attentions(model):
        attention.make_extra().parts["growth_1"] = attention.new_part(QK, V)
        torch.nn.init.normal_(new_dims(attention, "key"))  # half a dim computes nothing
    sync_config(model)
    report = trim_model(model)
    assert {layer.width for layer in report.layers} == {(STOCK + QK, STOCK), (STOCK + V, STOCK)}
    assert model.config.extra_dims == {} and not any(attention.extra for attention in attentions(model))
    assert type(unpatch_model(model)) is type(stock)
    assert torch.equal(logits(model), logits(stock))
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), stock.parameters()))


@pytest.mark.parametrize("variant", VARIANTS)
def test_growth_that_training_undid_is_cut_within_the_bound(variant):
    model, batches = grown(variant, scale=1e-3), lm_batches()
    before = loss(model, batches)
    report = trim_model(model, batches)
    assert set(widths(model)) == {(STOCK, STOCK)}
    assert report.loss_before == pytest.approx(before) and report.loss_after <= before + 1e-3
    assert report.loss_after == pytest.approx(loss(model, batches), abs=1e-6)
    assert {layer.error for layer in report.layers} == {1.0}


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_product_of_small_rank_needs_no_more_dims(variant):
    """No dim is dead, and yet two directions are all there is to a pattern: two dims compute the same."""
    model, batches = grown(variant), lm_batches()
    mixing = torch.randn(QK, 2, generator=torch.Generator().manual_seed(1))
    for attention in attentions(model):
        for name in ("weight", "bias"):
            query = new_dims(attention, "query", name)
            if query is not None:
                query.copy_(torch.einsum("pr,hr...->hp...", mixing, query[:, :2]))
    before = logits(model)
    assert not trim_model(model).removed_parameters
    keep = {new: 2 if new.kind is PATTERNS else V for new in found(model, batches)}
    assert max(new.trimmed_to(kept).error for new, kept in keep.items()) < 1e-10  # rounding, squared
    swap_parts(cut_parts(keep))
    error = (logits(model) - before).abs().max() / before.abs().max()
    print(f"{variant}: {error:.1e}")
    assert error < 1e-4  # fp32, through roots of the moments and back
    swap_parts(cut_parts({new: 1 if new.kind is PATTERNS else V for new in found(model, batches)}))
    assert (logits(model) - before).abs().max() > 1e-2 * before.abs().max()


@pytest.mark.parametrize("variant", FAMILIES)
def test_what_must_stay_stays_to_the_bit(variant):
    """A dim that growth has just lowered the loss with is kept; the trial without it leaves no trace."""
    model, batches = patch_model(build(variant)).train(), lm_batches()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model(**batches[0]).loss.backward()
    optimizer.step()
    growth = Grower(model, GrowthConfig(qk_dims=1, layers=[1]), optimizer).grow(batches)
    assert growth.applied
    before = fingerprint(model, optimizer)
    report = trim_model(model, batches, max_loss_increase=0, optimizer=optimizer)
    assert not report.removed_parameters and report.loss_after == report.loss_before
    assert report.layers[0].worth == pytest.approx(growth.loss_before - growth.loss_after, abs=1e-5)
    assert same(fingerprint(model, optimizer), before)
    bound = growth.loss_before - growth.loss_after + 1e-4
    assert trim_model(model, batches, bound, optimizer).removed_parameters
    assert loss(model, batches) == pytest.approx(growth.loss_before, abs=1e-5)


@pytest.mark.parametrize("call", [0, 1, 5])
@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_an_exception_leaves_everything_as_it_was(call, error, monkeypatch):
    import hf_growattn.grow.trim as trim

    model, batches = grown("llama-5-bias").train(), lm_batches()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model(**batches[0]).loss.backward()
    optimizer.step()
    before, calls = fingerprint(model, optimizer), iter(range(100))

    def failing(*args):
        if next(calls) == call:
            raise error("on purpose")
        return mean_loss(*args)

    monkeypatch.setattr(trim, "mean_loss", failing)
    with pytest.raises(error, match="on purpose"):
        trim_model(model, batches, 0.01, optimizer)
    assert same(fingerprint(model, optimizer), before)
    monkeypatch.setattr("hf_growattn.growable.growths.add_new_parameters", failing)
    calls = iter([call])
    kill_some(model)
    before = fingerprint(model, optimizer)
    with pytest.raises(error, match="on purpose"):
        trim_model(model, optimizer=optimizer)
    assert same(fingerprint(model, optimizer), before)


def test_growths_that_lose_nothing_stay_as_they_are():
    """One of two growths has dead dims: the other one keeps its parameters, their gradients and optimizer states."""
    model, batches = grown("llama-5-bias"), lm_batches()
    for attention in attentions(model):
        kill(attention, "key", 1)
        attention.extra.parts["growth_2"] = part = attention.new_part(2, 2)
        for parameter in part.parameters():
            torch.nn.init.normal_(parameter, std=0.3)
    sync_config(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.0, weight_decay=0.0)
    model(**batches[0]).loss.backward()
    optimizer.step()
    for attention in attentions(model):
        attention.parts[0].weight_of("key").data[:, 1] = 0
        attention.parts[0].bias_of("key").data[:, 1] = 0
    before, old = logits(model), {name: (p, p.grad) for name, p in model.named_parameters()}
    trim_model(model, optimizer=optimizer)
    assert model.config.extra_dims["0"] == {"growth_1": [QK - 1, V], "growth_2": [2, 2]}
    assert_near(logits(model), before)
    for name, parameter in model.named_parameters():
        if ".growth_1." in name:
            assert parameter.grad is None and parameter not in optimizer.state
        else:
            assert parameter is old[name][0] and parameter.grad is old[name][1] and parameter in optimizer.state
    held = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    assert held == list(model.parameters()) and {*optimizer.state} <= {*held}


def test_the_directions_of_several_growths_are_found_together():
    """Two growths of the same dims compute what half as many could: no direction of either is lost by that."""
    model, batches = grown("gpt2-2"), lm_batches()
    for attention in attentions(model):
        attention.extra.parts["growth_2"] = copy.deepcopy(attention.parts[0])
    sync_config(model)
    before, every = logits(model), found(model, batches)
    keep = {new: QK if new.kind is PATTERNS else V for new in every}
    assert max(new.trimmed_to(kept).error for new, kept in keep.items()) < 1e-10
    swap_parts(cut_parts(keep))
    assert [[*a.extra.parts] for a in attentions(model)] == [["growth_1"]] * 2
    assert (logits(model) - before).abs().max() < 1e-4 * before.abs().max()


@pytest.mark.parametrize("variant", FAMILIES)
@pytest.mark.parametrize("dead", [True, False])
def test_training_goes_on(variant, dead):
    model, batches = grown(variant).train(), lm_batches()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    losses = []
    for step in range(8):
        if step == 4:
            if dead:
                kill_some(model)
            arguments = () if dead else (batches, 0.05)
            trim_model(model, *arguments, optimizer=optimizer)
            part = next(part for a in attentions(model) for part in a.parts if (part.qk_dims, part.v_dims) != (QK, V))
            assert part.inside.weight not in optimizer.state
            before = part.inside.weight.detach().clone()
        total = sum(model(**batch).loss for batch in batches) / len(batches)
        total.backward()
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        losses.append(total.item())
        if step == 4:  # no step is larger than Adam's ever are
            assert (part.inside.weight - before).abs().max() < 3 * scheduler.get_last_lr()[0]
    held = {id(p) for group in optimizer.param_groups for p in group["params"]}
    assert held == {id(p) for p in model.parameters()} == {id(p) for p in optimizer.state}
    assert losses[-1] < losses[4] < losses[0]


@pytest.mark.parametrize("variant", VARIANTS)
def test_save_reload_and_grow_again(variant, tmp_path):
    model, batches = grown(variant), lm_batches()
    kill_some(model)
    report = trim_model(model, batches, 0.5)
    assert 0 < report.removed_parameters
    model.save_pretrained(tmp_path)
    reloaded = AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    assert widths(reloaded) == widths(model) and torch.equal(logits(reloaded), logits(model))
    again = Grower(reloaded, GrowthConfig(qk_dims=2)).grow(batches)
    assert again.applied and again.loss_after < report.loss_after


def test_a_head_with_fewer_directions_can_still_train():
    """What a layer keeps for other heads is idle in this one: one side zero, and never both."""
    model, batches = grown("gpt2-2"), lm_batches()
    attention = attentions(model)[0]
    for dim in range(QK):
        kill(attention, "query", dim, 0)
    every = [new for new in found(model, batches) if new.attention is attention]
    former = swap_parts(cut_parts({new: QK - 1 if new.kind is PATTERNS else V for new in every}))
    assert not new_dims(attention, "query")[0].any() and not new_dims(attention, "query", "bias")[0].any()
    assert new_dims(attention, "key")[0].abs().amax(-1).min() > 0
    swap_parts(former)
    assert widths(model)[0] == (STOCK + QK, STOCK + V)


def found(model, batches, whitened=True):
    """The new dims of every layer and kind, factored anew; without the whitening in the metric of the weights."""
    with evaluation_mode(model):
        bottlenecks, _ = compute_moments(Objective(model), attentions(model), [PATTERNS, MESSAGES], batches, 0.05)
    every = []
    for bottleneck in bottlenecks:
        if not whitened:
            one, plain = torch.tensor(1.0), torch.eye(len(bottleneck.roots.shared_root))
            bottleneck = Bottleneck(bottleneck.attention, bottleneck.kind, Roots(one, one, plain, plain))
        every.append(GrownDims(bottleneck.attention, bottleneck.kind))
        every[-1].refactor(bottleneck)
    return every


@pytest.fixture(scope="module")
def grown_llama():
    """stories260K grown by 8 dims in every layer and trained on for a little while; what is held out is fresh to it."""
    from conftest import real_model

    torch.manual_seed(0)
    model = patch_model(real_model())
    Grower(model, GrowthConfig(qk_dims=8, v_dims=8)).grow(real_batches(4))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
    for ids in real_batches(12, start=100):
        model(ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return model


def real_dicts(count, start):
    return [{"input_ids": ids, "labels": ids} for ids in real_batches(count, start=start)]


def test_the_real_model_is_trimmed_within_the_bound(grown_llama):
    model, batches, fresh = copy.deepcopy(grown_llama), real_dicts(4, start=20), real_dicts(4, start=40)
    before = loss(model, fresh)
    report = trim_model(model, batches, max_loss_increase=0.02)
    after = loss(model, fresh)
    print(f"{report}\nheld out {before:.4f} -> {after:.4f}")
    assert report.loss_after <= report.loss_before + 0.02 and report.removed_parameters > 6_000
    assert report.loss_after == pytest.approx(loss(model, batches), abs=1e-5)
    assert after < before + 2 * 0.02  # other batches than those that were measured, so no promise
    for layer in report.layers:
        assert layer.worth is not None and (layer.error > 0) == (layer.width[0] > layer.width[1])
    text = str(report)
    assert "16 -> " in text and f"{report.loss_after:.4f}" in text and "parameters removed" in text


@pytest.mark.parametrize("kind", [PATTERNS, MESSAGES], ids=lambda kind: kind.name)
def test_whitened_directions_beat_plain_ones_and_the_first_dims(grown_llama, kind):
    """The claim behind the whitening: a quarter of the new dims kept in every layer, on text that was not measured.

    The first dims come close, since growth wrote them by the worth that they had then.
    """
    model, batches, fresh = grown_llama, real_dicts(4, start=20), real_dicts(8, start=40)
    uncut, rise = loss(model, fresh), {}
    for name, whitened in (("whitened", True), ("plain", False)):
        former = swap_parts(cut_parts({new: 2 if new.kind is kind else 8 for new in found(model, batches, whitened)}))
        rise[name] = loss(model, fresh) - uncut
        swap_parts(former)
    every = found(model, batches)
    for new in every:
        new.factors = read_factors(new.attention.parts[0], new.kind)
    former = swap_parts(cut_parts({new: 2 if new.kind is kind else 8 for new in every}))
    rise["the first dims"] = loss(model, fresh) - uncut
    swap_parts(former)
    print(f"loss {uncut:.4f}, rises by {rise}")
    assert rise["whitened"] < 0.9 * rise["plain"] and rise["whitened"] < rise["the first dims"]
    assert loss(model, fresh) == uncut


def test_what_pays_is_kept_and_what_does_not_is_cut(grown_llama):
    """Noise in two layers, trained dims in three: the noise goes first."""
    model, batches = copy.deepcopy(grown_llama), real_dicts(4, start=20)
    for attention in attentions(model):
        if attention.layer in (1, 3):
            for role in ROLES:
                weight = new_dims(attention, role)
                weight[:] = 0.3 * attention.weight_of(role).std() * torch.randn(weight.shape)
    report = trim_model(model, batches, max_loss_increase=0.001)
    cut = {layer.layer: 0 for layer in report.layers}
    for layer in report.layers:
        cut[layer.layer] += layer.width[0] - layer.width[1]
    print(report)
    assert min(cut[1], cut[3]) > max(cut[0], cut[2], cut[4])


@pytest.mark.parametrize("variant", FAMILIES)
def test_bf16_and_autocast(variant):
    model, batches = grown(variant, dtype=torch.bfloat16), lm_batches()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        report = trim_model(model, batches, 0.1)
    assert report.removed_parameters and {p.dtype for p in model.parameters()} == {torch.bfloat16}
    assert report.loss_after <= report.loss_before + 0.1


def test_frozen_weights_stay_frozen():
    model = grown("llama-2").requires_grad_(False)
    kill_some(model)
    assert trim_model(model).removed_parameters
    assert not any(p.requires_grad for p in model.parameters())


def test_a_name_is_never_given_twice():
    """Where the first of several growths is gone, the next one must not take the place of the last."""
    model = patch_model(build("llama-2"))
    for attention in attentions(model):
        attention.add_part("growth_2", 1, 1)
    assert next_name(model) == "growth_3"


def test_dims_that_cost_more_weights_go_first(monkeypatch):
    """Of equal worth, those of the wider layer."""
    monkeypatch.setattr(trim, "parameters_of_a_dim", lambda attention, kind: attention)
    live = [SimpleNamespace(errors=torch.ones(2), live=2, worth=1.0, attention=cost, kind=PATTERNS) for cost in (10, 1)]
    assert trim._ranking(live) == [0, 0, 1, 1]


def test_a_worth_of_zero_is_told():
    layer = LayerTrim(0, "patterns", (17, 17), 0.0, 0.0, 0)
    assert "0.0000" in repr(TrimReport(1.0, 1.0, 0.001, [layer]))
