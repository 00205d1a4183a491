"""Benchmarks: short forms run and leave a page; the harness keeps runs, sweeps rates, and compares equal things."""

import json
import re
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import harness
import methods
import page
import pytest
import results
import torch
from conftest import LONG, ROOT
from recall_task import PhoneBook

from hf_growattn.growable.attention import attentions
from hf_growattn.growable.growths import cache_bytes

BENCH = ROOT / "scripts" / "bench"
# Timings and real tables; then also a causal LM from a folder.
SHORT = ("growth_cost", "overhead", "gpu", "matching", *["real_model", "records"] * LONG)
BOOK = PhoneBook(
    steps=3, growth_batches=2, hidden=16, head_dim=2, names=16, numbers=4, few=(2,), many=4, pretraining=2, pairs=8,
    dims=2, asked=(2,), held_out=4,
)  # fmt: skip


pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")  # of peft


@pytest.fixture(autouse=True)
def models_elsewhere(tmp_path, monkeypatch):
    """Pretrained models of tests go into a folder of their own."""
    monkeypatch.setattr(harness, "MODELS", tmp_path / "models")


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


@dataclass(frozen=True)
class Slope(harness.Task):
    """A number that falls fastest at a learning rate, without a model: runs take no time."""

    steps: int = 1
    best: float = 0.01
    path: str = ""

    @property
    def name(self) -> str:
        return f"slope {self.best}"

    def files(self) -> list[str]:
        return [self.path]


def run_slope(job: harness.Job) -> dict:
    off = abs(torch.tensor(job.rate / job.task.best).log().item())
    figures = {"loss": float("nan") if job.rate > 1 else off + job.seed / 1e4, "weights": 3, "cache": 0.0}
    row = {"key": job.key(), "task": job.task.name, "method": job.title, "rate": job.rate, "seed": job.seed}
    with open(job.task.path, "a") as file:
        file.write(f"{job.rate}\n")
    return harness.finite(row | figures | {"forward": 1.0, "seconds": 1.0, "curve": []})


@pytest.fixture
def slope(tmp_path, monkeypatch):
    monkeypatch.setattr(harness, "run_job", run_slope)
    monkeypatch.setattr(Slope, "files", lambda task: [])
    return Slope(path=str(tmp_path / "ran"))


def rates_that_ran(task: Slope) -> list[float]:
    return [float(line) for line in Path(task.path).read_text().splitlines()]


def test_the_sweep_goes_beyond_an_end_and_the_best_rate_trains_all_seeds(slope, tmp_path):
    compared = {
        methods.LORA: methods.Method(rates=(1e-3, 3e-3)),
        "one rate": methods.Method(rates=(0.5,)),
        "diverges": methods.Method(rates=(2.0, 3.0)),
    }
    cell = harness.Cell(slope, compared)
    found = harness.run_cells([cell], [0, 1, 2], tmp_path / "rows.jsonl")
    swept = {title: [r["rate"] for r in found["sweep"] if r["method"] == title] for title in compared}
    assert swept[methods.LORA] == [1e-3, 3e-3, 9e-3, 2.7e-2] and swept["one rate"] == []
    ended = [(row["method"], row["rate"], row["seed"]) for row in found["rows"]]
    assert [(methods.LORA, 9e-3, seed) for seed in range(3)] == [row for row in ended if row[0] == methods.LORA]
    assert {row["seed"] for row in found["sweep"]} == {harness.TUNING_SEED}
    table = results.Results([cell], found)
    lead = table.lead(slope.name, "one rate")
    assert lead.mean < -3 and lead.error == pytest.approx(0, abs=1e-6) and lead.is_clear
    assert "diverges | diverged |" in table.table().replace("**", "") or found["rows"][-1]["loss"] is not None
    json.dumps(table.figures(), allow_nan=False)


def test_the_same_command_goes_on_where_it_was_killed(slope, tmp_path):
    kept = tmp_path / "rows.jsonl"
    jobs = [harness.Job(slope, "growth", methods.Method(growth={}), rate, 0) for rate in (0.1, 0.2, 5.0)]
    first = harness.collect(jobs[:2], kept)
    whole = kept.read_text()
    kept.write_text(whole + '{"key": "half')
    rows = harness.collect(jobs, kept)
    assert rows[:2] == first and rates_that_ran(slope) == [0.1, 0.2, 5.0]
    assert kept.read_text().startswith(whole) and len(kept.read_text().splitlines()) == 3
    assert rows[2]["loss"] is None  # it diverged, and is valid JSON


def test_whatever_changes_a_result_makes_another_run(tmp_path, monkeypatch):
    file = tmp_path / "text.txt"
    file.write_text("one")
    job = harness.Job(Slope(path=str(file)), "title", methods.Method(adapter="lora"), 0.1, 0)
    others = [replace(job, rate=0.2), replace(job, seed=1), replace(job, method=methods.Method(adapter="dora"))]
    others += [replace(job, task=replace(job.task, steps=2)), replace(job, task=BOOK)]
    keys = {each.key() for each in (job, *others)}
    assert len(keys) == 6 and replace(job, title="another").key() == job.key()
    monkeypatch.setattr(harness, "_FILES", {})
    file.write_text("two")
    assert job.key() not in keys


COMPARED = {
    "lora": methods.Method(adapter="lora"),
    "growth": methods.Method(growth={}),
    "random growth": methods.Method(growth={"qk_dims": 2}, random=True),
    "library": methods.Method(library="growth"),
    "both": methods.Method(growth={}, share=0.25, adapter="lora"),
}


@pytest.mark.parametrize("title", COMPARED)
def test_methods_train_what_they_add_within_the_budget(title):
    task, method = replace(BOOK, dims=8), COMPARED[title]  # a rank of LoRA on all layers is within this budget
    model = task.model(0)
    before = {name: weight.detach().clone() for name, weight in model.named_parameters()}
    row = harness.train(harness.Job(task, title, method, 0.01, 0))
    assert 0 < row["weights"] <= task.budget(model)
    assert (row["cache"] > 0) == method.grows and row["curve"][-1] == [3, row["recall"]]
    batches = [task.batch(0, step) for step in range(2)]
    trained, optimizer, _ = methods.add_to_model(model, method, task, batches, 0, 0.01, None)
    for step in range(2):
        task.loss(trained, batches[step]).backward()
        optimizer.step()
        optimizer.zero_grad()
    after = dict(model.named_parameters())
    for name, old in before.items():
        module, _, leaf = name.rpartition(".")
        new = after[name] if name in after else after[f"{module}.base_layer.{leaf}"]
        assert torch.equal(new.detach(), old), name


def test_random_new_dims_change_nothing_at_first_and_are_as_many_as_guided_ones():
    task, widths = BOOK, []
    batches = [task.batch(0, step) for step in range(2)]
    for random in (False, True):
        model = task.model(0)
        before = task.loss(model, batches[0]).item()
        method = methods.Method(growth={"qk_dims": 2}, random=random)
        trained, _, _ = methods.add_to_model(model, method, task, batches, 0, 0.01, None)
        assert (task.loss(trained, batches[0]).item() == pytest.approx(before, abs=1e-6)) == random
        widths.append([attention.width_of("query") for attention in attentions(model)])
        (part,) = attentions(model)[1].growths.values()
        assert part.weight_of("key").abs().min() > 0
    assert widths[0] == widths[1]


def test_growth_in_the_middle_keeps_the_optimizer_and_the_wide_model_costs_what_a_grown_one_does():
    method = methods.Method(growth={"qk_dims": 2}, at=0.34, base=True)
    grown = harness.train(harness.Job(BOOK, "growth", method, 1e-3, 1))
    wide = harness.train(harness.Job(BOOK, "wide", methods.Method(wide=True, base=True), 1e-3, 1))
    assert grown["weights"] == wide["weights"] and grown["cache"] == pytest.approx(wide["cache"])
    assert cache_bytes(BOOK.model(0, wide=True)) > cache_bytes(BOOK.model(0))


def test_batches_are_the_same_whenever_they_are_asked_for():
    def same(one: dict, other: dict) -> bool:
        return all(torch.equal(one[name], other[name]) for name in ("input_ids", "labels"))

    assert same(BOOK.batch(0, 2), BOOK.batch(0, 2))
    assert not same(BOOK.batch(0, 2), BOOK.batch(0, 3)) and not same(BOOK.batch(0, 2), BOOK.batch(1, 2))


def test_the_page_of_evidence_links_every_page_and_is_short():
    text = (BENCH / "README.md").read_text()
    written = {file.stem for file in page.RESULTS.glob("*.md")}
    assert {*re.findall(r"\(results/(\w+)\.md\)", text)} == written == {f.stem for f in page.RESULTS.glob("*.png")}
    assert {*re.findall(r"`[^`]*scripts/bench/([a-z_]+)\.py", text)} == written and len(text.split()) <= 1500
    for name in written:
        json.loads((page.RESULTS / f"{name}.json").read_text())


def test_a_page_keeps_a_line_for_each_run(tmp_path):
    made = page.Page("Title", "Claim.", page.table(["a"], [[1]]), "Text.", lambda plt: plt.figure())
    rows = [{"seed": seed, "curve": [[0, seed / 3]]} for seed in range(4)]
    page.publish("real_model", made, {"rows": rows, "task": asdict(BOOK)}, [0], tmp_path, 60.0)
    text = (tmp_path / "real_model.md").read_text()
    assert text.startswith("# Title\n\nClaim.\n\n| a |")
    lines = (tmp_path / "real_model.json").read_text().splitlines()
    assert all(any(json.dumps(row) in line for line in lines) for row in rows)


def test_every_script_is_read_in_one_sitting():
    assert [path.name for path in BENCH.glob("*.py") if len(path.read_text().splitlines()) > 400] == []
