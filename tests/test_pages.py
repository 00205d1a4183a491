"""A report as text and as JSON: measured losses, and what they cost."""

import json
import statistics
from dataclasses import replace

import pytest
import torch
from families import build, lm_batches

from hf_growattn import Grower, GrowthConfig, GrowthReport, patch_model
from hf_growattn.measure.functional import step_factors
from hf_growattn.measure.halves import HalvedBatches
from hf_growattn.report import words

EMPTY = GrowthReport(1.0, 0.0, 0.0, False, [], 0)


@pytest.fixture(scope="module")
def grown():
    return Grower(patch_model(build("llama-2")), GrowthConfig(budget=0.02)).grow(lm_batches(4))


@pytest.fixture(scope="module")
def rolled_back():
    """A growth all of whose steps go uphill."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            "hf_growattn.measure.functional.step_factors",
            lambda *args: [s * (-1) ** i for i, s in enumerate(step_factors(*args))],
        )
        return Grower(patch_model(build("llama-2")), GrowthConfig(qk_dims=2, layers=[1])).grow(lm_batches(8))


def join_lines(text: str) -> str:
    """A printed report as one line, once it is seen that it fits a terminal."""
    assert max(map(len, text.splitlines())) <= 80
    return " ".join(text.split())


WAYS = {"dims": {}, "update": {"update_existing": True}, "refactor": {"method": "refactor"}}
WAYS = {name: {"qk_dims": 2, "v_dims": 2} | way for name, way in WAYS.items()} | {"budget": {"budget": 0.05}}


@pytest.mark.parametrize("name", WAYS)
def test_the_printed_fall_was_measured_on_the_other_half(name):
    """The mean over batches of what each half falls by along the other's directions, with its error."""
    moves_old = name in ("update", "refactor")
    model, batches = patch_model(build("gpt2-2" if moves_old else "llama-2")), lm_batches(8)
    with torch.no_grad():
        losses = [model(**batch, use_cache=False).loss.item() for batch in batches]
    growth = Grower(model, GrowthConfig(**WAYS[name])).find(batches)
    report, trial, falls, unseen = growth.report, growth._trial, [], HalvedBatches(batches).unseen
    for half in (0, 1):  # as `halves_of` deals them out
        with trial.attached(), torch.no_grad():
            trial.set_steps([layer.step_size for layer in report.layers if moves_old or layer.step_size > 0], half)
            judges = [i for i, batch in enumerate(batches) if any(batch is each for each in unseen[1 - half])]
            falls += [losses[i] - model(**batches[i], use_cache=False).loss.item() for i in judges]
    assert report.fall == pytest.approx(statistics.fmean(falls), rel=1e-4)
    quantile = {5: 2.570582, 6: 2.446912, 7: 2.364624}[len(falls) - 1]  # of Student's t at 95 %
    assert report.error == pytest.approx(quantile * statistics.stdev(falls) / (len(falls) / 2) ** 0.5, rel=1e-4)
    if not moves_old:
        text = join_lines(str(report))
        assert report.holds and f"It falls by {report.fall:.4f} ± {report.error:.4f} (95 % confidence)" in text
    assert growth.keep().kept


def test_the_table_says_where_nothing_grew(grown, rolled_back):
    few = Grower(patch_model(build("llama-2")), GrowthConfig(budget=600)).measure(lm_batches(12))
    assert few.added_parameters <= 600 and "-" in {row[-1] for row in words.rows_of(few)}
    assert words.columns_of(rolled_back) == tuple(words.COLUMNS)[:-1] and "no step along" in join_lines(
        str(rolled_back)
    )
    assert [row[2] for row in words.rows_of(rolled_back)] == ["16"]
    layers = [replace(grown.layers[0], out_of_reach=share) for share in (0.0, None)]
    assert [row[3] for row in words.rows_of(replace(grown, layers=layers))] == ["0.00", "-"]


def test_one_layer_without_a_gain_is_not_all_of_them(grown):
    failed = replace(grown, fall=0.1, error=0.2, holds=False, kept=False)
    some, none = ([replace(each, gain=gain) for each, gain in zip(grown.layers, gains)] for gains in ([0, 1], [0, 0]))
    assert words.why_not(replace(failed, layers=some)).startswith("the best step lowers the loss by 0.1")
    assert words.why_not(replace(failed, layers=none)).startswith("no direction lowers")


def test_dims_that_are_kept_by_word_are_in_the_table(grown):
    kept = replace(grown, holds=False, kept=True)
    assert [row[2] for row in words.rows_of(kept)] == [row[2] for row in words.rows_of(grown)]
    assert all("->" in row[2] for row, layer in zip(words.rows_of(kept), kept.layers) if len({*layer.width}) > 1)


def test_printed_tables_fit_a_terminal_and_cut_no_word(grown):
    text = join_lines(words.report_text(grown, "my_model", ["my.txt"]))
    assert text.endswith("hf_growattn.race, or on text: growattn race my_model my.txt -o race")
    cache, added = grown.cache_bytes, grown.added_parameters
    larger = f"{cache[0]:,} -> {cache[1]:,} bytes a token (+{100 * (cache[1] - cache[0]) / cache[0]:.1f}%)"
    assert f"KV cache {larger}, {added:,} weights added" in text
    shares = [float(row[-1].rstrip("%")) for row in words.rows_of(grown) if row[-1].endswith("%")]
    assert shares and sum(shares) == pytest.approx(100, abs=2)  # each is rounded
    columns = ["held-out loss", "KV cache, bytes a token", "unbreakable"]
    table = words.format_table(columns, [["1", "2", "3"]])
    assert all(word in table.split() for name in columns for word in name.split())


def test_a_report_as_json(grown, rolled_back):
    for report in (grown, rolled_back, EMPTY):
        read_back = json.loads(json.dumps(report.to_dict(), allow_nan=False))
        assert read_back["kept"] == report.kept and read_back["fall"] == report.fall
        assert report.figures()["growth_added_parameters"] == (report.added_parameters if report.kept else 0)
        assert [layer["width"] for layer in read_back["layers"]] == [list(layer.width) for layer in report.layers]


def test_in_a_notebook(grown, monkeypatch):
    expected = str(grown)
    monkeypatch.setattr("rich.console._is_jupyter", lambda: True)
    assert str(grown) == repr(grown) == expected
