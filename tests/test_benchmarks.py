"""Every benchmark in its short form: it runs, and leaves a page with its figures, of which some are certain."""

import itertools
import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from conftest import ROOT

BENCH = ROOT / "scripts" / "bench"
sys.path.insert(0, str(BENCH))


def names() -> list[str]:
    return sorted(path.stem for path in BENCH.glob("*.py") if "def main(" in path.read_text())


def patched_models_hold_as_much_memory_as_stock_ones(figures):
    for comparisons in figures["models"].values():
        for action in ("forward", "forward + backward", "generate"):
            assert comparisons["patched / stock"][action]["memory"]["ratio"] == pytest.approx(1, abs=0.01)
        assert comparisons["grown / as wide"]["forward + backward"]["memory"]["ratio"] < 1.01


def zero_dims_change_nothing_under_the_kept_scale(figures):
    """But for the order of rounding; under the others they change the logits."""
    import page

    by_policy = {}
    for row in page.in_rows(figures["rows"]):
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


@pytest.fixture(scope="module")
def short_forms():
    """A process that runs scripts in forks of its own."""
    command, environment = (
        [sys.executable, Path(__file__).parent / "short_forms.py"],
        {**os.environ, "OMP_NUM_THREADS": "1"},
    )
    pipes = dict(stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    with subprocess.Popen(command, cwd=ROOT, env=environment, **pipes) as process:
        yield process
        process.stdin.close()


@pytest.mark.parametrize("name", names())
def test_a_benchmark_in_its_short_form(name, short_forms, tmp_path):
    log = tmp_path / "log"
    job = [str(BENCH / f"{name}.py"), str(log), ["--quick", "--output", str(tmp_path)]]
    short_forms.stdin.write(json.dumps(job) + "\n")
    short_forms.stdin.flush()
    assert short_forms.stdout.readline() == "0\n", log.read_text()
    page, text = json.loads((tmp_path / f"{name}.json").read_text()), (tmp_path / f"{name}.md").read_text()
    title, claim, summary, *_ = text.split("\n\n")
    assert page["command"].startswith(f"OMP_NUM_THREADS=1 python scripts/bench/{name}.py --quick")
    assert page["machine"]["threads"] == 1 and page["versions"]["torch"] == torch.__version__
    assert title.startswith("# ") and claim.endswith(".") and summary.startswith("| ") and summary.count("|") > 8
    assert str(ROOT) not in text and str(tmp_path) not in text
    assert (tmp_path / f"{name}.png").read_bytes().startswith(b"\x89PNG")
    CERTAIN.get(name, lambda figures: None)(page["figures"])


def test_every_script_is_read_in_one_sitting():
    assert [path.name for path in BENCH.glob("*.py") if len(path.read_text().splitlines()) > 400] == []


def test_results_hold_what_their_pages_need_a_line_for_each_run():
    import page

    texts = {file.stem: file.read_text() for file in page.RESULTS.glob("*.json")}
    lines = [line for text in texts.values() for line in text.splitlines()]
    assert texts.keys() == set(page.PAGES) == set(names())
    runs = [line for line in lines if not line.startswith(' "command"')]  # which is one line, however long
    assert len(lines) <= 6000 and sum(map(len, lines)) < 300_000 and max(map(len, runs)) < 400
    assert all(text == page.lines_of(page.rounded(json.loads(text))) + "\n" for text in texts.values())


def test_every_page_and_the_readme_are_what_the_figures_say():
    """In a process of its own: the scripts and the tests have modules of the same names."""
    rendered = "{name: page.markdown(*page.read(name)) for name in page.PAGES}"
    command = [sys.executable, "-c", f"import json, page; print(json.dumps([{rendered}, page.readme()]))"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=BENCH)
    assert done.returncode == 0, done.stderr
    pages, readme = json.loads(done.stdout)
    for name, text in pages.items():
        assert (BENCH / "results" / f"{name}.md").read_text() == text, name
    assert (BENCH / "README.md").read_text() == readme


def test_figures_keep_what_is_named_with_thin_curves():
    import page

    curve = [[step, step / 7] for step in range(1001)]
    (run,) = page.kept([{"seed": 3, "loss": 0.5, "report": {"layers": []}, "curve": curve}], "seed", "loss", "curve")
    assert list(run) == ["seed", "loss", "curve"] and run["seed"] == 3
    assert len(run["curve"]) == page.POINTS and run["curve"][0] == curve[0] and run["curve"][-1] == curve[-1]
    steps = [step for step, _ in run["curve"]]
    assert steps == sorted(set(steps)) and max(b - a for a, b in itertools.pairwise(steps)) <= 1000 / 39 + 1
    assert page.kept([{"curve": curve[:40]}], "seed", "curve") == [{"curve": curve[:40]}]


def test_runs_in_columns_are_the_same_runs():
    import page

    rows = itertools.product((0, 1), (3, 5))
    runs = [{"row": row, "seed": seed, "loss": seed / 7} | ({"right": 1} if row else {}) for row, seed in rows]
    columns = page.in_columns(runs, "seed", "loss", "right")
    assert columns[1] == {"row": 1, "seed": [3, 5], "loss": [3 / 7, 5 / 7], "right": [1, 1]}
    assert page.in_rows(columns) == runs


def test_rows_near_lora_take_more_seeds_and_all_growth_if_one_of_it_does():
    """By the better of their learning rates, on the tasks where anything is near."""

    def more_seeds(*done: dict) -> list[dict]:
        read = "import json, real_model, sys; print(json.dumps(real_model.more_seeds(json.load(sys.stdin))))"
        given = dict(input=json.dumps(done), capture_output=True, text=True, cwd=BENCH)
        ended = subprocess.run([sys.executable, "-c", read], **given)
        return json.loads(ended.stdout or pytest.fail(ended.stderr))

    def run(task: str, row: str, *losses: float) -> dict:
        ended = [{"rate": 10.0**-place, "loss": loss} for place, loss in enumerate(losses, 1)]
        return {"model": "", "task": task, "path": "", "row": row, "seed": 0, "setting": {}, "ended": ended}

    lora, growth, mix, whole = "LoRA on all linear layers", "growth", "1/3 growth, 2/3 LoRA", "all weights"
    far = [run("apart", lora, 2.0), run("apart", growth, 1.97), run("apart", whole, 2.03)]
    near = [run("near", lora, 2.5, 2.0), run("near", growth, 2.5), run("near", mix, 2.019), run("near", whole, 2.021)]
    found = more_seeds(run("near", "", 3.0), *far, *near)
    assert [job["row"] for job in found] == [lora, growth, mix] * 2
    assert [job["seed"] for job in found] == [1] * 3 + [2] * 3
    assert {job["task"] for job in found} == {"near"} and found[0]["rates"] == [0.01]
    found = more_seeds(run("near", lora, 2.0), run("near", growth, 2.1), run("near", whole, 1.99))
    assert [job["row"] for job in found] == [lora, whole] * 2  # no growth is near


def test_figures_are_rounded_to_what_an_fp32_holds():
    import page

    values = {
        "loss": [1 / 3, 123456789.123],
        "tokens": 123456789123,
        "spread": (math.inf, True),
        "row": "0.333333333333",
    }
    kept = {"loss": [0.333333333, 123456789.0], "tokens": 123456789123, "spread": [math.inf, True]}
    assert page.rounded(values) == kept | {"row": "0.333333333333"}
    fp32 = torch.rand(1000)
    assert torch.equal(torch.tensor(page.rounded(fp32.tolist())), fp32)


def test_a_run_takes_a_line_and_a_long_one_fills_some():
    import page

    runs = [{"row": f"row {seed}", "seed": seed, "loss": seed / 3} for seed in range(9)]
    curves = [
        {"seed": seed, "curve": [[step, step / 3] for step in range(90)], "end": {"loss": 1.5}} for seed in (0, 1)
    ]
    figures = {"setting": {"text": "a " * 300}, "runs": runs, "curves": curves, "none": [], 0.5: "rate"}
    lines = page.lines_of(figures).splitlines()
    assert json.loads("\n".join(lines)) == json.loads(json.dumps(figures))
    assert all(any(json.dumps(run) in line for line in lines) for run in runs)
    assert max(len(line) for line in lines if "a a" not in line) <= page.WIDTH
    assert len(lines) < 60
