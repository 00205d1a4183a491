"""`figures.json` may come from anywhere: what is wrong is refused with the fix, and a card shows names and numbers."""

import json
import os

import pytest
from families import add_dims, build

from hf_growattn import model_card, patch_model
from hf_growattn.growable.growths import attentions, sync_config
from hf_growattn.interop.cards import FIGURES, read_figures
from hf_growattn.interop.checkpoints import write_publication

GROWTH = {"step": 4, "growth_batches": [3.0, 2.9], "added_parameters": 512}
WHOLE = {"base_model": "", "dataset": "some words", "held_out": [[0, 3.0], [8, 2.0]], "growths": [GROWTH]}
MARKUP = (
    "<script>alert(1)</script> [x](javascript:alert) ![p](http://a/b.png) | **b** `c`\n# Title\n---\n{{ form }} \ud800"
)


@pytest.fixture(scope="module")
def model():
    model = patch_model(build("llama-2"))
    add_dims(attentions(model)[1], 4)
    sync_config(model)
    return model


def make_card(model, folder, figures) -> str:
    (folder / FIGURES).write_text(figures if isinstance(figures, str) else json.dumps(figures))
    return str(model_card(model, "me/m", figures=read_figures(folder)))


def test_figures_are_shown(model, tmp_path):
    text = make_card(model, tmp_path, WHOLE)
    assert "At step 4, 512 weights were added" in text and "3.0000 before and 2.9000 after" in text
    assert "| step 0 | 3.0000 |" in text and "| step 8 | 2.0000 |" in text and "`some words`" in text


@pytest.mark.parametrize("text", ["", "{", "[]", "3", "null", '"a"', "[" * 100_000, "\0"])
def test_text_without_figures_is_refused(model, tmp_path, text):
    with pytest.raises(ValueError, match=r"figures.json does not hold .* delete it"):
        make_card(model, tmp_path, text)


@pytest.mark.parametrize("name", GROWTH)
def test_numbers_are_numbers(model, tmp_path, name):
    with pytest.raises((TypeError, ValueError)):
        make_card(model, tmp_path, WHOLE | {"growths": [GROWTH | {name: "<b>"}]})


@pytest.mark.parametrize("name", ["dataset", "base_model"])
def test_no_markup_reaches_the_card(model, tmp_path, name):
    text, clean = (make_card(model, tmp_path, WHOLE | {name: value}) for value in (MARKUP, "no id"))
    assert not any(mark in text for mark in ("<script", "</script", "](javascript", "![p", "**b", "\n# Title", "{{"))
    assert text.count("\n") == clean.count("\n") and text.count("|") == clean.count("|")
    assert text.encode()


def test_a_pipe_is_no_figures(model, tmp_path):
    model.save_pretrained(tmp_path / "m")
    os.mkfifo(tmp_path / "m" / FIGURES)
    (tmp_path / "out").mkdir()
    write_publication(tmp_path / "m", tmp_path / "out", "me/m", "native")
    assert "# m" in (tmp_path / "out" / "README.md").read_text()
