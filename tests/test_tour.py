"""The tour runs from top to bottom, and what each of its cells says is seen."""

import re
import subprocess
import sys

import notebook
import pytest
from conftest import ROOT
from huggingface_hub import ModelCard

TOUR = ROOT / "scripts" / "tour.py"


@pytest.fixture(scope="module")
def toured(tmp_path_factory):
    """What the tour printed, and its folder."""
    home = tmp_path_factory.mktemp("tour")
    done = subprocess.run([sys.executable, TOUR], cwd=home, capture_output=True, text=True)
    assert done.returncode == 0 and "Warning" not in done.stderr, done.stderr
    return done.stdout, home / "scripts" / "output" / "tour"


def test_the_notebook_is_what_the_script_makes_of_the_tour():
    made = (TOUR.parent / "tour.ipynb").read_text(encoding="utf-8")
    assert made == notebook.tour(), "run scripts/notebook.py"


def test_it_asks_first_and_then_grows(toured):
    out, folder = toured
    assert out.index("lead over LoRA") < out.index("The winner is growth") < out.index("It falls by")
    before, kept, later = re.search(
        r"falls from ([\d.]+) to ([\d.]+)\.\nAfter 32 steps of training it is ([\d.]+)\.\n", out
    ).groups()
    assert float(later) < float(kept) < float(before)
    before, now = (re.findall(rf"^Layer \d, head 0, {name}: (.*)\.$", out, re.MULTILINE) for name in ("before", "now"))
    assert len(before[0].split(", ")) == 8 < len(now[0].split(", ")) and (folder / "directions.png").exists()
    (mixed,) = re.findall(r"LoRA with growth: ([\d.]+)\.\n", out)
    assert float(mixed) < float(kept)


def test_it_is_saved_loaded_elsewhere_and_taken_off(toured):
    out, folder = toured
    here, there = re.search(r"Here: (\S+)\nIn a fresh process.*: (\S+) False", out).groups()
    assert here == there and "Taken off: EuroBertModel." in out
    assert f"Put on again: {here}\n" in out
    assert "## What grew" in ModelCard.load(folder / "grown" / "README.md").text
