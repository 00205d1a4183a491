"""Benchmarks: short forms run, leave a page and go on where they ended; the page of evidence links every page."""

import json
import re

import page
import pytest
import torch
from conftest import LONG, ROOT
from families import build, lm_batches
from fit import fit

from hf_growattn import Method, race
from hf_growattn.measure.passes import default_loss

BENCH = ROOT / "scripts" / "bench"
SHORT = ("growth_cost", "overhead", "gpu", "matching", "text", *["records"] * LONG)
GOING_ON = ("growth_cost", "text")  # which keep what has ended


pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")  # of peft


@pytest.mark.parametrize("name", SHORT)
def test_a_benchmark_in_its_short_form(name, forks, tmp_path):
    done = forks.run(BENCH / f"{name}.py", "--quick", "--output", tmp_path)
    assert done.returncode == 0, done.stderr
    made, text = json.loads((tmp_path / f"{name}.json").read_text()), (tmp_path / f"{name}.md").read_text()
    title, claim, summary, *_ = text.split("\n\n")
    assert made["command"].startswith(f"OMP_NUM_THREADS=1 python scripts/bench/{name}.py --quick")
    assert made["machine"]["threads"] == 1 and made["versions"]["torch"] == torch.__version__
    assert title.startswith("# ") and claim.endswith(".") and summary.startswith("| ") and summary.count("|") > 8
    assert str(ROOT) not in text and str(tmp_path) not in text
    assert (tmp_path / f"{name}.png").read_bytes().startswith(b"\x89PNG")
    if name == "overhead":
        for comparisons in made["figures"]["models"].values():
            for action in ("forward", "training step"):
                assert comparisons["patched / stock"][action]["memory"]["ratio"] == pytest.approx(1, abs=0.01)
    if name in GOING_ON:  # the times, too, are those of the first call
        assert forks.run(BENCH / f"{name}.py", "--quick", "--output", tmp_path).returncode == 0
        assert json.loads((tmp_path / f"{name}.json").read_text())["figures"] == made["figures"]


@pytest.mark.parametrize("name", ["lora", "growth"])
def test_a_method_is_trained_as_in_the_race(name):
    """A page trains on by what `Method.prepare` returns: at the race's rate, the race's own losses come out."""
    train, held_out = lm_batches(6), lm_batches(2, seed=12)
    result = race(lambda: build("llama-2"), train, held_out, budget=0.3, steps=6, seeds=1, growth_batches=4)
    (run,) = result.runs_of(name)
    torch.manual_seed(0)
    method = Method(name, learning_rate=run.rate, **result.options)
    model, groups = method.prepare(build("llama-2"), train)
    fit(model, groups, train, default_loss, 6)
    with torch.no_grad():
        losses = [default_loss(model, batch).item() for batch in held_out]
    assert losses == pytest.approx(run.losses, rel=1e-5)  # the order of some sums is another


def test_the_page_of_evidence_links_every_page_and_is_short():
    text = (BENCH / "README.md").read_text()
    written = {file.stem for file in page.RESULTS.glob("*.md")}
    assert {*re.findall(r"\(results/(\w+)\.md\)", text)} == written == {f.stem for f in page.RESULTS.glob("*.png")}
    assert {*re.findall(r"`[^`]*scripts/bench/([a-z_]+)\.py", text)} == written and len(text.split()) <= 1500
    for name in written:
        json.loads((page.RESULTS / f"{name}.json").read_text())


def test_every_script_is_read_in_one_sitting():
    assert [path.name for path in BENCH.glob("*.py") if len(path.read_text().splitlines()) > 400] == []
