"""The tour runs from top to bottom, and what each of its cells says is seen."""

import ast
import json
import re

import notebook
import pytest
from conftest import ROOT
from hub_server import Hub, card_errors
from test_hub import TOKEN, client

TOUR = ROOT / "scripts" / "tour.py"


@pytest.fixture(scope="module")
def toured(tmp_path_factory):
    """What the tour printed, its folder, and the stand-in for the Hub that it pushed to."""
    home = tmp_path_factory.mktemp("tour")
    with Hub(TOKEN) as hub:
        done = client(hub, home, TOUR)
    assert done.returncode == 0, done.stderr
    assert "Warning" not in done.stderr, done.stderr
    return done.stdout, home / "scripts" / "output" / "tour", hub


def numbers(pattern: str, text: str) -> list[float]:
    """The numbers in a line of the output."""
    (found,) = re.findall(pattern, text)
    return [float(number) for number in found]


def test_a_head_gains_directions_and_lora_and_growth_are_kept_together(toured):
    out, folder, _ = toured
    before, now = (re.findall(rf"^Layer \d, head 0, {name}: (.*)\.$", out, re.MULTILINE) for name in ("before", "now"))
    assert len(before[0].split(", ")) == 4 < len(now[0].split(", ")) and (folder / "directions.png").exists()
    assert "Both loaded again, the same logits: True." in out


def test_each_cell_is_told_before_it_runs():
    _, *cells = re.split(r"^# %%", TOUR.read_text(), flags=re.MULTILINE)
    assert [cell.startswith(" [markdown]\n# #") for cell in cells] == [True, False] * (len(cells) // 2)


def test_the_notebook_is_what_the_script_makes_of_the_tour_and_needs_no_other_script():
    made = (TOUR.parent / "tour.ipynb").read_text(encoding="utf-8")
    assert made == notebook.tour(), "run scripts/notebook.py"
    cells = ["".join(cell["source"]) for cell in json.loads(made)["cells"] if cell["cell_type"] == "code"]
    trees = [ast.parse(cell) for cell in cells if "%pip" not in cell]
    assert len(trees) == len(cells) - 1 and cells[0].endswith('%pip install --quiet "hf_growattn[peft,trl]"')
    imported = {node.module for tree in trees for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    assert not imported & {path.stem for path in TOUR.parent.glob("*.py")} and "hf_growattn" in imported
    shown = [tree.body[-1].value for tree in trees if isinstance(tree.body[-1], ast.Expr)]
    assert [value.id for value in shown if isinstance(value, ast.Name)] == ["report"]


def test_it_grows_in_the_middle_of_training(toured):
    out, _, _ = toured
    assert "as before, to the bit: True." in out
    assert len(re.findall(r"^Layer \d, v: gradient out of reach 0\.\d\d\.$", out, re.MULTILINE)) == 2
    fall, error = numbers(r"With 4 new dims everywhere the loss falls by ([\d.]+) ± ([\d.]+) on", out)
    assert fall > error > 0
    before, after = numbers(r"before any further training: ([\d.]+) -> ([\d.]+)\.\n", out)
    (later,) = re.findall(r"After 170 steps: held-out loss ([\d.]+)\.\n", out)
    assert float(later) < after < before
    (kept,) = numbers(r"2 more growths, (\d) of them kept", out)
    said = " ".join(out.split())
    assert said.count(" weights added (") == 1 + kept and said.count("Nothing was grown") == 2 - kept


def test_it_is_saved_exported_and_loaded_elsewhere(toured):
    out, folder, _ = toured
    losses = dict(re.findall(r"^(here|grown|exported): \w+, loss ([\d.]+)$", out, re.MULTILINE))
    assert losses["here"] == losses["grown"]
    assert float(losses["exported"]) == pytest.approx(float(losses["here"]), abs=2e-6)  # fp32, sums of other widths
    assert "exported: LlamaForCausalLM" in out and "It says: The value of the" in out
    for page in ("growth.html", "report.html"):
        assert (folder / page).read_text().startswith("<!DOCTYPE html>")
    assert (folder / "growth.png").read_bytes().startswith(b"\x89PNG")


def test_it_grows_as_an_adapter(toured):
    out, _, _ = toured
    start, guided, trained = numbers(r"frozen base: ([\d.]+), from the guided start ([\d.]+), trained ([\d.]+)\.", out)
    assert trained < guided < start
    assert "the same logits: True. Off, those of the base: True." in out
    (apart,) = re.findall(r"logits within ([\de.+-]+)\.\n", out.partition("Merged")[2])
    assert float(apart) < 2e-5  # of logits near 10, in fp32


def test_it_is_ready_for_the_hub_and_pushed_to_the_stand_in_alone(toured):
    out, folder, hub = toured
    assert "what would be pushed to you/your-model" in out and "  model.safetensors\n" in out
    card = (folder / "grown" / "README.md").read_text()
    assert card_errors(card) == [] and "## What grew" in card and "you/your-model" in card
    assert set(hub.repositories) == {"me/tour"} and "model.safetensors" in hub.files("me/tour")
    assert "Loaded from there, the same logits: True." in out
