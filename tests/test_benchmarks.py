"""Every benchmark in its short form: it runs, and leaves a page with its figures, of which some are certain."""

import json
import os
import subprocess
import sys

import pytest
import torch
from conftest import ROOT

BENCH = ROOT / "scripts" / "bench"
sys.path.insert(0, str(BENCH))


def names() -> list[str]:
    return sorted(path.stem for path in BENCH.glob("*.py") if "def main(" in path.read_text())


def patched_models_hold_as_much_memory_as_stock_ones(figures):
    for comparisons in figures.values():
        for action in ("forward", "forward + backward", "generate"):
            assert comparisons["patched / stock"][action]["memory"]["ratio"] == pytest.approx(1, abs=0.01)
        assert comparisons["grown / as wide"]["forward + backward"]["memory"]["ratio"] < 1.01


def zero_dims_change_nothing_under_the_kept_scale(figures):
    """But for the order of rounding; under the others they change the logits."""
    by_policy = {}
    for row in figures["rows"]:
        if row["new"] == "zero" and row["source"].startswith("a tiny Llama"):
            by_policy.setdefault(row["policy"], []).append(row)
    kept, again = by_policy["kept (ours)"], by_policy["1 / sqrt(width) again"]
    for quantity in ("variance", "entropy", "loss"):
        assert [row[quantity] for row in kept] == pytest.approx([kept[0][quantity]] * len(kept), rel=1e-4)
    assert again[-1]["variance"] < 0.7 * kept[-1]["variance"]  # half as much, where layers below change nothing


# What figures show even in the short form, where times and losses say nothing.
CERTAIN = {
    "overhead": patched_models_hold_as_much_memory_as_stock_ones,
    "scale": zero_dims_change_nothing_under_the_kept_scale,
}


@pytest.mark.parametrize("name", names())
def test_a_benchmark_in_its_short_form(name, tmp_path):
    command = [sys.executable, BENCH / f"{name}.py", "--quick", "--output", tmp_path]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=environment)
    assert done.returncode == 0, done.stderr
    page, text = json.loads((tmp_path / f"{name}.json").read_text()), (tmp_path / f"{name}.md").read_text()
    assert page["command"].startswith(f"OMP_NUM_THREADS=1 python scripts/bench/{name}.py --quick")
    assert page["machine"]["threads"] == 1 and page["versions"]["torch"] == torch.__version__
    assert page["claim"] in text and page["summary"] in text and page["summary"].count("|") > 8
    assert all(reach["verdict"] in ("reached", "missed", "undecided") for reach in page["reaches"])
    assert str(ROOT) not in text and str(tmp_path) not in text
    assert (tmp_path / f"{name}.png").read_bytes().startswith(b"\x89PNG")
    CERTAIN.get(name, lambda figures: None)(page["figures"])


def test_the_readme_of_the_benchmarks_is_what_their_results_say():
    import page

    assert set(page.PAGES) == set(names())
    assert page.README.read_text() == page.readme()
