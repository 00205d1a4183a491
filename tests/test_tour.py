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


def numbers(pattern: str, text: str) -> list[float]:
    """The numbers in a line of the output."""
    (found,) = re.findall(pattern, text)
    return [float(number) for number in found]


def test_a_head_gains_directions_and_lora_and_growth_are_kept_together(toured):
    out, folder = toured
    before, now = (re.findall(rf"^Layer \d, head 0, {name}: (.*)\.$", out, re.MULTILINE) for name in ("before", "now"))
    assert len(before[0].split(", ")) == 4 < len(now[0].split(", ")) and (folder / "directions.png").exists()
    assert "Both loaded again, the same logits: True." in out


def test_the_notebook_is_what_the_script_makes_of_the_tour():
    made = (TOUR.parent / "tour.ipynb").read_text(encoding="utf-8")
    assert made == notebook.tour(), "run scripts/notebook.py"


def test_it_grows_in_the_middle_of_training(toured):
    out, _ = toured
    assert "as before, to the bit: True." in out
    fall, error = numbers(r"With 4 new dims everywhere the loss falls by ([\d.]+) ± ([\d.]+) on", out)
    assert fall > error > 0
    before, after = numbers(r"before any further training: ([\d.]+) -> ([\d.]+)\.\n", out)
    (later,) = re.findall(r"After 170 steps: held-out loss ([\d.]+)\.\n", out)
    assert float(later) < after < before


def test_it_is_saved_exported_and_loaded_elsewhere(toured):
    out, folder = toured
    losses = dict(re.findall(r"^(here|grown|exported): \w+, loss ([\d.]+)$", out, re.MULTILINE))
    assert losses["here"] == losses["grown"]
    assert float(losses["exported"]) == pytest.approx(float(losses["here"]), abs=2e-6)  # fp32, sums of other widths
    assert "exported: LlamaForCausalLM" in out and "It says: The value of the" in out
    assert "## What grew" in ModelCard.load(folder / "grown" / "README.md").text


def test_it_grows_as_an_adapter(toured):
    out, _ = toured
    start, guided, trained = numbers(r"frozen base: ([\d.]+), from the guided start ([\d.]+), trained ([\d.]+)\.", out)
    assert trained < guided < start
    assert "the same logits: True. Off, those of the base: True." in out
    (apart,) = re.findall(r"logits within ([\de.+-]+)\.\n", out.partition("Merged")[2])
    assert float(apart) < 2e-5  # of logits near 10, in fp32
