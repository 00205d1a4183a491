"""What a growth is judged by, and what becomes of the model: kept if it holds, otherwise as it was, to the bit."""

import math
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
from families import build, fingerprint, lm_batches, same
from transformers import LlamaConfig, LlamaForCausalLM

from hf_growattn import Grower, GrowthConfig, patch_model
from hf_growattn.grow import growth as growing
from hf_growattn.growable import growths
from hf_growattn.growable.attention import attentions
from hf_growattn.growable.growths import extra_parameters
from hf_growattn.measure.halves import HalvedBatches
from hf_growattn.report import words

CONFIG = GrowthConfig(qk_dims=2, v_dims=2)


def join(report) -> str:
    return " ".join(str(report).split())


def small_llama(seed: int, **config):
    torch.manual_seed(seed)
    sizes = dict(vocab_size=97, hidden_size=64, intermediate_size=64, num_hidden_layers=2)
    return patch_model(LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=8, num_key_value_heads=4, **config)))


def test_noise_is_not_kept():
    """Uniform tokens: whatever is found lowers the loss of no other batch."""
    kept = 0
    for seed in range(8):
        model, optimizer = small_llama(seed), None
        batches = torch.randint(97, (8, 4, 32))
        before = fingerprint(model, optimizer)
        report = Grower(model, GrowthConfig(budget=0.05), optimizer).grow(batches)
        assert report.kept == report.holds == bool(model.config.extra_dims)
        assert report.kept or same(fingerprint(model, optimizer), before)
        kept += report.kept
    assert kept <= 1


def test_what_does_not_hold_is_kept_by_word():
    model = small_llama(0)
    growth = Grower(model, CONFIG).find(torch.randint(97, (8, 4, 32)))
    report = growth.report
    assert not report.holds and 0 < abs(report.fall) < report.error and "8 -> 10" not in str(report)
    report = growth.keep()
    assert report.kept and not report.holds and "8 -> 10" in str(report) and "Pass more" not in str(report)
    assert "Cost: " in str(report)
    assert all(layer.width == (8, 10 if layer.step_size > 0 else 8) for layer in report.layers)
    assert report.added_parameters == sum(parameter.numel() for parameter in extra_parameters(model))


def test_kept_by_word_without_a_step_they_change_nothing_yet(no_step):
    model, batches = small_llama(0), lm_batches(8)
    logits = model(**batches[0]).logits
    growth = Grower(model, CONFIG).find(batches)
    assert growth.report.fall == growth.report.error == 0 and not growth.report.holds
    assert growth.report.added_parameters > 0 == growth.report.figures()["growth_added_parameters"]
    assert growth.keep().kept and growth.report.kept and extra_parameters(model)
    torch.testing.assert_close(model(**batches[0]).logits, logits)
    for attention in attentions(model):
        new = attention.growths["growth_1"]
        assert not new.weight_of("query").any() and not new.weight_of("output").any()
        assert new.weight_of("key").any() and new.weight_of("value").any()  # both zero would not learn


def test_a_kind_without_a_step_is_not_added_to_the_other_and_everything_agrees(monkeypatch):
    run = growing.StepSearch.run

    def values_only(self, trial, spare=0):
        steps, loss = run(self, trial, spare)
        kinds = [candidate.bottleneck.kind.name for candidate in trial.candidates]
        return [step if kind == "v" else 0.0 for step, kind in zip(steps, kinds)], loss

    monkeypatch.setattr(growing.StepSearch, "run", values_only)
    model = patch_model(build("llama-2"))
    report = Grower(model, GrowthConfig(qk_dims=2, v_dims=2)).find(lm_batches(8)).keep()
    widths = {(layer.layer, layer.kind): layer.width for layer in report.layers}
    for attention in attentions(model):
        assert model.config.extra_dims[str(attention.layer)] == {"growth_1": [0, 2]}
        assert widths[attention.layer, "qk"] == (16, attention.width_of("query")) == (16, 16)
        assert widths[attention.layer, "v"] == (16, attention.width_of("value")) == (16, 18)
    assert report.holds
    for row, layer in zip(words.rows_of(report), report.layers):
        assert (row[2], row[-1] == "-") == (("16", True) if layer.kind == "qk" else ("16 -> 18", False))


def test_both_halves_are_as_uncertain_as_one_of_them(monkeypatch):
    batches = SimpleNamespace(unseen=([1.0, 2.0], [3.0, 4.0]), losses_before=lambda objective, half: [9.0, 9.0])
    trial = SimpleNamespace(attached=nullcontext, set_steps=lambda steps, source: None)
    monkeypatch.setattr(growing, "compute_losses", lambda objective, judges: [9.0 - fall for fall in judges])
    fall, error = growing._measure_fall(SimpleNamespace(batches=batches, objective=None), trial, [1.0])
    # Student's quantile of 3 degrees of freedom, the deviation of 1 to 4, and 2 judges in a half.
    assert (fall, error) == (2.5, pytest.approx(3.182446 * 1.290994 / 2**0.5, rel=1e-6))


def test_few_batches_are_judged_by_their_rows():
    few, many = HalvedBatches(lm_batches(4)), HalvedBatches(lm_batches(8))
    assert [*map(len, few.judges)] == [6, 6] and all(row["input_ids"].shape == (1, 17) for row in few.judges[0])
    assert torch.equal(torch.cat([row["input_ids"] for row in few.judges[1][:3]]), few.halves[1][0]["input_ids"])
    assert many.judges is many.halves
    whole = HalvedBatches([("any", "form")] * 4, whole=True)
    assert whole.judges is whole.halves
    single = HalvedBatches([{name: value[:1] for name, value in batch.items()} for batch in lm_batches(4)])
    assert single.judges is single.halves
    images = HalvedBatches([{"input_ids": torch.ones(2, 3), "pixel_values": torch.ones(5, 4)}] * 2)
    assert images.judges is images.halves


def test_a_row_without_labels_of_its_own_does_not_count():
    batches = lm_batches(4)
    batches[0]["labels"][0] = -100  # the mean over no token is no number
    report = Grower(patch_model(build("llama-2")), CONFIG).measure(batches)
    assert math.isfinite(report.fall) and 0 < report.error < math.inf


def test_rows_that_are_in_both_halves_do_not_judge():
    """As in several epochs over few rows: each half would judge what it was computed from."""
    torch.manual_seed(0)
    rows = torch.randint(97, (16, 24))
    epochs = [rows[order] for _ in range(4) for order in torch.randperm(16).split(4)]
    report = Grower(small_llama(0), CONFIG).grow(epochs)
    assert not (report.kept or report.holds or report.fall) and "the same rows are in both halves" in join(report)
    batches = [{"input_ids": torch.arange(6).view(2, 3) + 6 * index} for index in range(4)]
    own = HalvedBatches([*batches, *map(dict, batches[:2])])  # each of the repeated ones is in its own half
    assert [*map(len, own.unseen)] == [6, 6]  # rows, as of few batches
    other = HalvedBatches([*batches, batches[2], {"input_ids": batches[0]["input_ids"][1:]}])
    assert [*map(len, other.unseen)] == [5, 4]  # a row of the first batch is in the other half
    padded = {"input_ids": torch.tensor([[0, 0, 5, 6]]), "attention_mask": torch.tensor([[0, 0, 1, 1]])}
    assert HalvedBatches([padded, {name: value.roll(2, 1) for name, value in padded.items()}]).unseen == ([], [])


def test_new_dims_that_break_one_batch_do_not_hold():
    model, batches = patch_model(build("llama-2")), lm_batches(24)
    halved = HalvedBatches(batches)
    searched = {id(batch) for batch in halved.few(4)[0]}
    bad = next(batch for batch in halved.unseen[0] if id(batch) not in searched)
    before = float(model(**bad).loss)

    def loss(model, batch):
        value = model(**batch).loss
        return value * math.nan if batch is bad and abs(float(value) - before) > 1e-3 else value

    report = Grower(model, CONFIG, loss=loss).grow(batches)
    assert not report.holds and not report.kept and "not finite" in join(report)


def test_gradients_that_cancel_give_no_queries_and_keys():
    """In rows of one repeated token every key is the same, so that rounding alone is left of their gradient."""
    model = small_llama(0, initializer_range=0.2)
    batches = [torch.randint(97, (4, 1)).expand(4, 32).contiguous() for _ in range(8)]
    report = Grower(model, GrowthConfig(qk_dims=2, v_dims=2)).find(batches).keep()
    gains = {kind: [layer.gain for layer in report.layers if layer.kind == kind] for kind in ("qk", "v")}
    assert not any(gains["qk"]) and all(gains["v"])
    assert max(parameter.abs().max() for parameter in extra_parameters(model)) < 10


@pytest.mark.parametrize(
    "way", [{}, {"update_existing": True}, {"method": "refactor"}], ids=["append", "old", "refactor"]
)
@pytest.mark.parametrize(
    "place", ["swap_growths", "sync_config", "add_new_parameters", "remove_parameters", "commit", "leave_checkpoint"]
)
def test_an_interrupt_amid_keep_leaves_nothing_grown(place, way, monkeypatch):
    model = patch_model(build("gpt2-2")).train()
    model.config.name_or_path = "someone/base"
    optimizer = torch.optim.AdamW(model.named_parameters(), lr=1e-3)
    (names,) = (group["param_names"] for group in optimizer.param_groups)
    model(**lm_batches()[0]).loss.backward()
    optimizer.step()
    growth = Grower(model, GrowthConfig(qk_dims=2, v_dims=2, **way), optimizer).find(lm_batches(8))
    before, named = fingerprint(model, optimizer), [*names]
    room = growing if place == "leave_checkpoint" else growths
    if place == "commit":
        room = type(growth._trial.candidates[-1])
    with monkeypatch.context() as patch:
        calls, original = [], getattr(room, place)

        def interrupted(*args):
            calls.append(original(*args))
            if len(calls) == (2 if place == "commit" else 1):  # some have written already
                raise KeyboardInterrupt
            return calls[-1]

        patch.setattr(room, place, interrupted)
        with pytest.raises(KeyboardInterrupt):
            growth.keep()
    assert same(fingerprint(model, optimizer), before) and names == named
    assert model.config.name_or_path == "someone/base"
    assert growth.keep().kept and model.config.extra_dims and model.config.name_or_path == ""
    assert {*extra_parameters(model)} <= {p for group in optimizer.param_groups for p in group["params"]}
