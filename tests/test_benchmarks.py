"""Every benchmark in its short form: it runs, and leaves a page with its figures; what they say is not judged here."""

import json
import os
import subprocess
import sys

import pytest
import torch
from conftest import ROOT

BENCH = ROOT / "scripts" / "bench"
SHARED = (
    "finetuning_page",
    "finetuning_run",
    "memory",
    "page",
    "runs",
    "tasks",
)  # what the benchmarks import, and no benchmarks
sys.path.insert(0, str(BENCH))


def names() -> list[str]:
    return sorted(path.stem for path in BENCH.glob("*.py") if path.stem not in SHARED)


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


def test_the_readme_of_the_benchmarks_is_what_their_results_say():
    import page

    assert set(page.PAGES) == set(names())
    assert page.README.read_text() == page.readme()
