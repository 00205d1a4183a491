"""The race: its rule on made-up runs, and one real race of a tiny model."""

import copy
import dataclasses
import json
import math
from pathlib import Path

import pytest
import torch
from datasets import Dataset
from families import build, save_with_text, word_tokenizer
from trl import SFTConfig

from hf_growattn import patch_model
from hf_growattn.cli.measuring import prepare_growth, race_recipe
from hf_growattn.cli.options import read_recipe
from hf_growattn.training import race as module
from hf_growattn.training.comparison import Race, Run, compare_runs, compete
from hf_growattn.training.data import prepare_rows
from hf_growattn.training.options import RaceOptions

STEPS = 8
# TRL itself sets it
pytestmark = pytest.mark.filterwarnings("ignore:`gradient_checkpointing` is deprecated:FutureWarning")


def run_of(method: str, nats: list[float], seed: int = 0, rate: float = 1e-2, steps: int = STEPS) -> Run:
    return Run(method, rate, steps, seed, nats, [2] * len(nats), 10, 20)


def race_of(lora: list[list[float]], growth: list[list[float]]) -> Race:
    """A race of made-up losses: for each seed the nats of every row, which has two tokens."""
    race = Race(STEPS, run_of("start", [9.0] * len(lora[0]), steps=0))
    for name, seeds in (("lora", lora), ("growth", growth)):
        race.runs += [run_of(name, nats, seed) for seed, nats in enumerate(seeds)]
    return race


ROWS = [4.0, 5.0, 6.0, 7.0]


def lower(by: list[float]) -> list[float]:
    return [nats - 2 * less for nats, less in zip(ROWS, by)]


@pytest.mark.parametrize(
    "by, winner, sentence",
    [
        ([0.10, 0.11, 0.10, 0.11], "growth", "growth wins: it is 0.1"),
        ([0.009, 0.008, 0.009, 0.008], "lora", "lower, but must lead by more than 0.01"),
        ([0.9, -0.7, 0.8, -0.7], "lora", "two standard errors"),
        ([-0.10, -0.11, -0.10, -0.11], "lora", "higher"),
    ],
)
def test_growth_wins_by_a_margin_and_two_errors(by, winner, sentence):
    race = race_of([ROWS], [lower(by)])
    assert race.winner == winner
    assert sentence in race.verdict and race.verdict in str(race)


def test_a_diverged_training_loses():
    """It has no losses of rows, and nothing of it is invalid JSON."""
    race = Race(STEPS, run_of("start", ROWS, steps=0), [run_of("lora", ROWS), diverged_run("growth")])
    assert race.winner == "lora" and "diverged" in race.verdict and "inf" in race.table()
    json.dumps(race.figures(), allow_nan=False)
    race.runs = [diverged_run("lora"), run_of("growth", ROWS)]
    assert race.winner == "growth" and "diverged" in race.verdict
    race.runs = [diverged_run("lora"), diverged_run("growth")]
    assert race.winner == "lora"


def diverged_run(method: str) -> Run:
    return dataclasses.replace(run_of(method, ROWS), nats=[])


def test_runs_are_paired_by_row_and_seed():
    """What rows and seeds have in common is no error; a seed that one of the two lacks does not count."""
    own = [run_of("growth", [1.0, 7.0], 0), run_of("growth", [3.0, 9.0], 1), run_of("growth", [0.0, 0.0], 2)]
    other = [run_of("lora", [2.0, 8.0], 0), run_of("lora", [4.0, 10.0], 1)]
    assert compare_runs(own, other) == (0.5, 0.0)
    mean, error = compare_runs(own[:1], [run_of("lora", [2.0, 10.0], 0)])
    assert mean == 1.0 and error == pytest.approx(math.sqrt(2 * (1 + 1)) / 4)
    mean, error = compare_runs(own[:2], [other[0], run_of("lora", [6.0, 12.0], 1)])
    assert mean == 1.0 and error == pytest.approx(0.5)


@pytest.mark.parametrize("best, tried", [(4.0, [0.1, 1.0, 3.0]), (0.9, [0.1, 1.0, 3.0]), (0.0, [0.1, 1.0, 0.1 / 3])])
def test_learning_rates_go_beyond_the_best_end(best, tried):
    """And a second call, which has all runs, trains nothing."""
    asked = []

    def train(method, rate, steps, seed):
        asked.append((method, rate, steps, seed))
        return run_of(method, [abs(rate - best), 1.0], seed, rate, steps)

    race = Race(STEPS, run_of("start", [9.0, 9.0], steps=0))
    for _ in range(2):
        compete(race, train, ["lora", "growth", "both"], [0.1, 1.0], seeds=3)
    for method in ("lora", "growth", "both"):
        short = [rate for name, rate, steps, _ in asked if (name, steps) == (method, 2)]
        assert short == tried
    assert race.rates["lora"] == min(tried, key=lambda rate: abs(rate - best))
    further = [(name, seed) for name, _, steps, seed in asked if steps == STEPS and seed]
    assert further == [("lora", 1), ("growth", 1), ("lora", 2), ("growth", 2)]


def test_without_growth_lora_wins():
    def train(method, rate, steps, seed):
        return None if method != "lora" else run_of(method, ROWS, seed, rate, steps)

    race = Race(STEPS, run_of("start", ROWS, steps=0))
    compete(race, train, ["lora", "growth"], [0.1, 1.0], seeds=2)
    assert race.winner == "lora" and "no growth" in race.verdict
    json.dumps(race.figures(), allow_nan=False)


def given_rows(first: int = 0) -> Dataset:
    """Sequences in which each token has one successor."""
    rows = []
    for row in range(64):
        ids = [2 + (first + row) % 95]
        while len(ids) < 12:
            ids.append(2 + 5 * ids[-1] % 95)
        rows.append(ids)
    return Dataset.from_dict({"input_ids": rows, "labels": rows})


def hold(folder: Path, model=None, rows=None, seeds=1, steps=STEPS, budget=0.2, **options) -> Race:
    """Hold a race in a folder."""
    how = dict(max_length=16, per_device_train_batch_size=4, use_cpu=True, bf16=False, report_to=[])
    training = SFTConfig(str(folder), **how | options)
    model = model or build("llama-2")
    rows = rows or given_rows()
    prepared = prepare_rows(rows, None, word_tokenizer(), training)
    return module.run_race(lambda: patch_model(copy.deepcopy(model)), prepared, RaceOptions(budget, 4, steps, seeds))


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A finished race: its folder and result."""
    folder = tmp_path_factory.mktemp("race") / "out"
    return folder, hold(folder)


@pytest.fixture
def untrained(monkeypatch):
    """Fail if anything trains."""

    def refuse(*args):
        raise AssertionError("this run is in the file")

    monkeypatch.setattr(module._Trainings, "train", refuse)


def test_a_race_leaves_its_runs(finished):
    folder, race = finished
    assert [path.name for path in folder.iterdir()] == ["race.jsonl"]
    assert json.loads(json.dumps(race.figures(), allow_nan=False))["winner"] == race.winner
    weights = {run.method: run.weights for run in race.runs}
    assert {*weights} == {"lora", "growth", "both"} and max(weights.values()) == weights["lora"]
    assert all(race.runs_of(method)[0].loss < race.start.loss for method in weights)


def test_the_given_model_does_not_change(tmp_path, monkeypatch):
    model = build("llama-2")
    before = copy.deepcopy(model.state_dict())
    monkeypatch.setattr(module, "compete", lambda *args: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        hold(tmp_path, model)
    assert all(value.equal(before[name]) for name, value in model.state_dict().items())
    assert type(model).__name__ == "LlamaForCausalLM" and all(weight.requires_grad for weight in model.parameters())


def test_the_same_call_trains_nothing_again(finished, untrained):
    folder, race = finished
    kept = (folder / "race.jsonl").read_text()
    assert str(hold(folder)) == str(race) and (folder / "race.jsonl").read_text() == kept


def copied(folder: Path, to: Path, lines: int) -> Path:
    """A folder with the first runs of a race."""
    to.mkdir()
    kept = (folder / "race.jsonl").read_text().splitlines(keepends=True)
    (to / "race.jsonl").write_text("".join(kept[:lines]))
    return to


def test_a_killed_race_continues(finished, tmp_path):
    """The last line is half-written; the run is trained again, with the same result."""
    folder, race = finished
    killed = copied(folder, tmp_path / "killed", lines=2 + len(race.runs) - 2)
    with (killed / "race.jsonl").open("a") as file:
        file.write('{"method": "lo')
    assert str(hold(killed)) == str(race)
    assert (killed / "race.jsonl").read_text() == (folder / "race.jsonl").read_text()


def test_a_diverged_run_is_kept(finished, tmp_path, monkeypatch):
    """The last run of the race, of which nothing is trained again."""
    folder, race = finished
    runs = len(race.runs)
    diverged = copied(folder, tmp_path / "diverged", lines=2 + runs - 1)

    def diverge(*args, reduction="mean", **options):
        losses = cross_entropy(*args, reduction=reduction, **options)
        return losses * math.nan if reduction == "none" else losses  # of rows

    cross_entropy = torch.nn.functional.cross_entropy
    monkeypatch.setattr(torch.nn.functional, "cross_entropy", diverge)
    race = hold(diverged)
    assert len(race.runs) == runs and [run.loss == math.inf for run in race.runs] == [False] * (runs - 1) + [True]
    assert str(hold(diverged)) == str(race)
    for line in (diverged / "race.jsonl").read_text().splitlines():
        json.loads(line, parse_constant=pytest.fail)  # of NaN and Infinity


def test_a_finished_race_takes_more_seeds(finished, tmp_path):
    folder, race = finished
    longer = copied(folder, tmp_path / "longer", lines=1000)
    more = hold(longer, seeds=2)
    assert [run.seed for run in more.runs_of("lora")] == [run.seed for run in more.runs_of(more.challenger)] == [0, 1]
    assert more.runs[: len(race.runs)] == race.runs


def other_weights() -> dict:
    model = build("llama-2")
    torch.nn.init.normal_(model.model.layers[0].mlp.up_proj.weight)
    return {"model": model}


@pytest.mark.parametrize(
    "other, named",
    [
        (other_weights, "model"),
        (lambda: {"rows": given_rows(first=1)}, "train_dataset"),
        (lambda: {"weight_decay": 0.1}, "weight_decay"),
        (lambda: {"per_device_train_batch_size": 2}, "per_device_train_batch_size"),
        (lambda: {"steps": 12}, "steps"),
        (lambda: {"budget": 0.5}, "budget"),
    ],
)
def test_another_race_is_refused_by_name(other, named, finished, untrained):
    folder, _ = finished
    kept = (folder / "race.jsonl").read_text()
    with pytest.raises(ValueError, match=rf"holds a race with another .*\b{named}\b.*Name a new folder"):
        hold(folder, **other())
    assert (folder / "race.jsonl").read_text() == kept


def test_ctrl_c_leaves_the_table(finished, tmp_path, monkeypatch, capsys):
    folder, _ = finished
    stopped = copied(folder, tmp_path / "stopped", lines=6)  # the start, and all of LoRA

    def interrupt(*args):
        raise KeyboardInterrupt

    monkeypatch.setattr(module._Trainings, "train", interrupt)
    with pytest.raises(KeyboardInterrupt, match="the same command continues in"):
        hold(stopped)
    assert "LoRA on all linear layers" in capsys.readouterr().out


def test_rank_one_is_not_shared(tmp_path, monkeypatch, capsys):
    asked = []
    monkeypatch.setattr(module, "compete", lambda race, train, methods, *_: asked.extend(methods) or interrupt_race())
    with pytest.raises(KeyboardInterrupt):
        hold(tmp_path, budget=1)
    assert asked == ["lora", "growth"] and "race of lora, growth takes" in capsys.readouterr().out


def interrupt_race():
    raise KeyboardInterrupt


@pytest.mark.parametrize("name, value", [("steps", 0), ("seeds", 0)])
def test_numbers_out_of_range_are_refused(name, value, tmp_path):
    with pytest.raises(ValueError, match="at least 4 steps and 1 seed"):
        hold(tmp_path, **{name: value})


def test_a_race_of_the_methods_that_train_quantized_models(tmp_path):
    pytest.importorskip("bitsandbytes")
    save_with_text(tmp_path, words=1200, variant="smollm3")  # in multiples of 64, as 4 bits want it on CPUs
    words = [str(tmp_path / "model"), str(tmp_path / "text.txt"), "-o", str(tmp_path / "race"), "--load_in_4bit"]
    words += "--steps 8 --seeds 1 --budget 0.1 --growth_batches 4 --max_length 16".split()
    race = race_recipe(read_recipe("race", words))
    assert race.runs_of("growth")[0].cache > race.runs_of("lora")[0].cache
    with pytest.raises(ValueError, match="quantized"):  # weights that are do not grow by themselves
        prepare_growth(read_recipe("measure", [*words[:2], "--load_in_4bit", "--max_length", "16"]))
