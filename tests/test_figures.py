"""`figures.json` may come from anywhere: what is wrong is refused with the fix, and a card shows names and numbers."""

import json
import os

import pytest
from families import build
from test_hub import BASE_CARD
from typer.testing import CliRunner

from hf_growattn import model_card, patch_model
from hf_growattn.cli.commands import app
from hf_growattn.growable.models import attentions
from hf_growattn.interop.checkpoints import card_of
from hf_growattn.interop.figures import source_of

LAYER = {"layer": 1, "kind": "patterns", "width": 20, "starvation": 0.5, "gain": 0.1, "step_size": 1.0}
GROWTH = {"step": 4, "held_out": [2.5, 2.25], "growth_batches": [3.0, 2.9], "added_parameters": 512, "layers": [LAYER]}
FIGURES = {
    "base_model": "",
    "dataset": "some words",
    "with_growth": {"held_out": [[0, 3.0], [8, 2.0]]},
    "without_growth": {"held_out": [[0, 3.0], [8, 2.1]]},
    "compared": [{"name": "LoRA", "loss": 2.1, "lead": 0.1, "error": 0.02, "cache_bytes": 256}],
    "growths": [GROWTH],
    "before": {"parameters": 1000},
}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    model = patch_model(build("llama-2"))
    attentions(model)[1].widen(4)
    model.sync_config()
    model.save_pretrained(tmp_path_factory.mktemp("checkpoint"))
    return model, tmp_path_factory.getbasetemp() / "checkpoint0"


def card(checkpoint, figures) -> str:
    model, folder = checkpoint
    (folder / "figures.json").write_text(figures if isinstance(figures, str) else json.dumps(figures))
    return str(card_of(folder, model, "me/m"))


def edited(*path, value):
    """The figures with another value somewhere; without it, if that is ..."""
    figures = inner = json.loads(json.dumps(FIGURES))
    for key in path[:-1]:
        inner = inner[key]
    inner[path[-1]] = value
    if value is ...:
        del inner[path[-1]]
    return figures


def test_what_a_growth_leaves_is_shown(checkpoint):
    text = card(checkpoint, FIGURES)
    assert "| 1 | patterns | 20 | 0.50 | 0.1000 |\n" in text and "| before growth, step 4 | 2.5000 | 12.18 |" in text
    assert "| LoRA | 2.1000 | +0.1000 ± 0.0200 | 256 |" in text
    assert "1,000 before growth" in text and "`some words`" in text


@pytest.mark.parametrize(
    "path",
    [
        *(
            ("base_model",),
            ("dataset",),
            ("with_growth",),
            ("without_growth",),
            ("compared",),
            ("growths",),
            ("before",),
        ),
        *((name, "held_out") for name in ("with_growth", "without_growth")),
        *(("growths", 0, name) for name in ("step", "held_out")),
        ("before", "parameters"),
    ],
)
@pytest.mark.parametrize("value", [None, ...])
def test_what_may_be_absent(checkpoint, path, value):
    if path[-1] == "held_out" and path[0] != "growths":
        with pytest.raises(ValueError, match=rf"figures.json .*{path[0]}.held_out.*delete it"):
            card(checkpoint, edited(*path, value=value))
    else:
        assert "# m" in card(checkpoint, edited(*path, value=value))


@pytest.mark.parametrize(
    "where, path, values",
    [
        ("base_model", ("base_model",), [3, ["a/b"]]),
        ("dataset", ("dataset",), [3, {}]),
        ("before.parameters", ("before", "parameters"), ["many", True, [1]]),
        ("before", ("before",), [3, []]),
        ("growths", ("growths",), [3, {}, "all"]),
        (r"growths\[0\]", ("growths", 0), [3, None, [], "first"]),
        *(
            (rf"growths\[0\].{name}", ("growths", 0, name), ["<b>", [1], [1, "2"], {}])
            for name in ("held_out", "growth_batches")
        ),
        *((rf"growths\[0\].{name}", ("growths", 0, name), ["<b>", [1], {}]) for name in ("step", "added_parameters")),
        (r"growths\[0\].layers", ("growths", 0, "layers"), [3, {}, None, ...]),
        (r"growths\[0\].layers\[0\].kind", ("growths", 0, "layers", 0, "kind"), ["<script>", 3, [], None, ...]),
        *(
            (
                rf"growths\[0\].layers\[0\].{name}",
                ("growths", 0, "layers", 0, name),
                ["|", None, ..., float("nan"), 10**400],
            )
            for name in ("layer", "width", "starvation", "gain", "step_size")
        ),
        *(
            (rf"compared\[0\].{name}", ("compared", 0, name), ["|", None, ...])
            for name in ("loss", "lead", "error", "cache_bytes")
        ),
        (r"compared\[0\].name", ("compared", 0, "name"), [3, None, ...]),
        (r"with_growth.held_out\[1\]", ("with_growth", "held_out", 1), [3, [8], [8, None], [8, float("inf")]]),
        (r"without_growth.held_out\[0\]", ("without_growth", "held_out", 0), ["", [8], [8, "low"]]),
    ],
)
def test_what_is_malformed_is_refused_by_name(checkpoint, where, path, values):
    for value in values:
        with pytest.raises(ValueError, match=rf"figures.json does not hold .*: see {where}\. Put back .* delete it"):
            card(checkpoint, edited(*path, value=value))


@pytest.mark.parametrize("text", ["", "{", "[]", "3", "null", '"a"', "[" * 100_000, "\0", '{"growths": NaN}'])
def test_what_is_no_json_of_figures(checkpoint, text):
    with pytest.raises(ValueError, match=r"figures.json does not hold .* delete it"):
        card(checkpoint, text)
    done = CliRunner().invoke(app, ["card", str(checkpoint[1]), "me/m"])
    assert done.exit_code == 1 and "figures.json" in done.stderr and "Traceback" not in done.output


def test_a_dict_is_checked_as_a_file_is(checkpoint):
    with pytest.raises(ValueError, match=r"dict of figures does not hold .*: see growths\[0\]"):
        model_card(checkpoint[0], "me/m", figures={"growths": [3]})


def test_a_pipe_is_no_figures(checkpoint):
    model, folder = checkpoint
    (folder / "figures.json").unlink(missing_ok=True)
    os.mkfifo(folder / "figures.json")
    assert "# m" in str(card_of(folder, model, "me/m"))
    (folder / "figures.json").unlink()


MARKUP = (
    "<script>alert(1)</script> [x](javascript:alert) ![p](http://a/b.png) | **b** `c`\n# Title\n---\n{{ form }} \ud800"
)


@pytest.mark.parametrize("name", ["dataset", "base_model"])
def test_no_markup_reaches_the_card(checkpoint, name):
    text = card(checkpoint, {name: MARKUP})
    clean = card(checkpoint, {name: "no id"})
    assert not any(mark in text for mark in ("<script", "</script", "](javascript", "![p", "**b", "\n# Title", "{{"))
    assert text.count("\n") == clean.count("\n") and text.count("|") == clean.count("|")
    assert text.encode()


def test_no_markup_of_a_base_models_card_reaches_the_card(checkpoint, tmp_path):
    model, folder = checkpoint
    front = {"license": "other", "license_name": MARKUP[:-1], "tags": ["growattn"], "base_model": [MARKUP[:-1]]}
    (tmp_path / "README.md").write_text(f"---\n{json.dumps(front)}\n---\n")
    (folder / "figures.json").unlink(missing_ok=True)
    text = str(card_of(folder, model, "me/m", base=str(tmp_path)))
    assert "carried over" in text and "not recorded" in text
    assert not any(mark in text for mark in ("<script", "](javascript", "![p", "**b", "{{"))


def test_of_a_folder_that_figures_name_nothing_is_read(checkpoint, tmp_path):
    """Whoever wrote them chose it, and the card is public; who pushes may name it."""
    model, folder = checkpoint
    private = tmp_path / "private"
    private.mkdir()
    (private / "README.md").write_bytes(BASE_CARD)
    (private / "figures.json").write_text(json.dumps({"base_model": "someone/secret"}))
    text = card(checkpoint, {"base_model": str(private)})
    assert "`private`" in text and "licen" not in text.replace("Licence | not stated", "") and "secret" not in text
    (private / "figures.json").unlink()
    assert "tiny-licence, carried over" in str(card_of(folder, model, "me/m", base=str(private)))


def test_figures_that_name_their_own_folder(checkpoint):
    model, folder = checkpoint
    assert f"`{folder.name}`" in card(checkpoint, {"base_model": str(folder)})
    (folder / "figures.json").write_text(json.dumps({"base_model": str(folder)}))
    assert f"`{folder.name}`" in str(model_card(model, "me/m", base_model=str(folder)))


def test_a_training_leads_to_what_its_base_was_trained_from(tmp_path):
    """Noted when the user names that folder, so that the card need not look into it."""
    (tmp_path / "figures.json").write_text(json.dumps({"base_model": "someone/base"}))
    assert source_of(str(tmp_path), "words")["base_model"] == "someone/base"
    (tmp_path / "figures.json").write_text("{")
    assert source_of(str(tmp_path), "words")["base_model"] == str(tmp_path)
