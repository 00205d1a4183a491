"""The race: real trainings, by each method and through the command line."""

import gc
import json
import re
import shlex
from pathlib import Path

import pytest
from datasets import Dataset
from families import save_with_text
from test_cli import call
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import SFTConfig

import hf_growattn
from hf_growattn.training.contest import Contest
from hf_growattn.training.methods import METHODS, Budget, Method

OPTIONS = "--max_length 16 --growth_batches 4 --budget 20% --per_device_train_batch_size 4".split()


@pytest.fixture(scope="module")
def given(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("given")
    save_with_text(folder, words=2400)
    return folder


@pytest.fixture(scope="module")
def told(given):
    """A race that ended: its folder, and what it printed."""
    done = call("race", given / "model", given / "text.txt", "-o", given / "race", "--steps", 12, *OPTIONS)
    assert done.exit_code in (0, 3), done.output
    return given / "race", done


def test_a_race_ends_in_a_sentence_and_a_model(told, given):
    folder, done = told
    figures = json.loads((folder / "race.json").read_text())
    assert done.exit_code == (0 if figures["winner"] in ("growth", "both") else 3)
    assert "LoRA on all linear layers" in done.stdout and figures["verdict"].split(".")[0] in done.stdout
    assert "steps of" in done.stderr and "About 1 min" in done.stderr  # before it starts
    assert "A mix of both needs" not in done.stderr  # it races
    leads_to = next(line for line in done.stderr.splitlines() if line.startswith("Train by the winner: "))
    assert leads_to.endswith(f" --method {figures['winner']} --learning_rate {figures['rate']}")
    assert "--steps" not in leads_to and "--budget 20%" in leads_to  # training has no use for steps
    weights = {run["weights"] for run in figures["runs"] if run["method"] == "lora"}
    assert len(weights) == 1 and all(run["weights"] <= max(weights) for run in figures["runs"])
    assert all((run["forward"] == 1) == (run["method"] == "lora") and run["forward"] > 0 for run in figures["runs"])
    assert sorted(path.name for path in folder.iterdir()) == ["model", "race.json", "race.jsonl"]
    ended = next(run for run in figures["runs"] if run["method"] == figures["winner"] and run["steps"] == 12)
    assert ended["loss"] < figures["loss_before"]
    model = AutoModelForCausalLM.from_pretrained(folder / "model")
    assert (type(model).__name__ == "LlamaForCausalLM") == (figures["winner"] == "lora")


def test_short_trainings_look_at_fewer_rows(given, tmp_path, monkeypatch):
    """Whole batches of them, the same for all, among them the first; the start looks at all."""
    monkeypatch.setattr("hf_growattn.training.race._FEWEST", 4)
    options = "--steps", 12, "--per_device_eval_batch_size", 2, *OPTIONS
    done = call("race", given / "model", given / "text.txt", "-o", tmp_path, *options)
    assert done.exit_code in (0, 3), done.output
    _, start, *runs = map(json.loads, (tmp_path / "race.jsonl").read_text().splitlines())
    rows = len(start["counts"])
    looked_at = [[bool(count) for count in run["counts"]] for run in [start, *runs]]
    whole, some = [True] * rows, [row // 2 % (rows // 4) == 0 for row in range(rows)]
    assert 12 <= rows < 16 and looked_at == [some if 0 < run["steps"] < 12 else whole for run in [start, *runs]]
    assert all(nats > 0 if count else nats == 0 for run in runs for nats, count in zip(run["nats"], run["counts"]))
    assert f"{3 + 2} x all held-out rows" in done.stderr


def test_a_budget_too_small_to_share_says_so(given, tmp_path):
    """At rank 1 of LoRA there is no third of it for growth; the mix is missing from the table."""
    model = AutoModelForCausalLM.from_pretrained(given / "model")
    of_a_rank = Budget.near(model, 1).of_a_rank
    options = ("--steps", 1, "--seeds", 1, *OPTIONS, "--budget", of_a_rank)
    done = call("race", given / "model", given / "text.txt", "-o", tmp_path / "small", *options)
    assert done.exit_code == 3 and "1/3 growth" not in done.stdout
    assert f"A mix of both needs a budget of {2 * of_a_rank:,}." in done.stderr
    assert all(Budget.near(model, 2 * of_a_rank).admits(METHODS[name]) for name in ("lora", "growth", "both"))


def test_a_race_goes_on_where_it_was(told, given, monkeypatch):
    """What ended is not run again; a race of other options is not mixed into it."""
    folder, done = told
    lines = (folder / "race.jsonl").read_text().splitlines()
    (folder / "race.jsonl").write_text("\n".join(lines[:4]) + "\n")
    again = call("race", given / "model", given / "text.txt", "-o", folder, "--steps", 12, *OPTIONS)
    assert again.exit_code == done.exit_code
    assert [re.sub(r"[+-]\d+%$", "", line) for line in again.stdout.splitlines()] == [  # how long a pass takes varies
        re.sub(r"[+-]\d+%$", "", line) for line in done.stdout.splitlines()
    ]
    kept = (folder / "race.jsonl").read_text().splitlines()
    assert kept[:4] == lines[:4] and len(kept) == len(lines)
    for options in (("--steps", 12, *OPTIONS, "--budget", "5%"), ("--steps", 24, *OPTIONS)):
        other = call("race", given / "model", given / "text.txt", "-o", folder, *options)
        assert other.exit_code == 1 and "holds another race" in other.stderr


def test_interrupted(given, tmp_path, monkeypatch):
    from hf_growattn.training import race

    trained = race._Trainings.__call__

    def interrupted(self, method, *others):
        if method != "lora":
            raise KeyboardInterrupt
        return trained(self, method, *others)

    monkeypatch.setattr(race._Trainings, "__call__", interrupted)
    done = call("race", given / "model", given / "text.txt", "-o", tmp_path / "out", "--steps", 4, *OPTIONS)
    assert done.exit_code == 130 and "LoRA on all linear layers" in done.stderr and "goes on in" in done.stderr
    _, start, *runs = map(json.loads, (tmp_path / "out" / "race.jsonl").read_text().splitlines())
    assert start["method"] == "start" and {run["method"] for run in runs} == {"lora"}
    assert len({run["rate"] for run in runs}) >= 2 and runs[-1]["steps"] == 4


def test_who_trains_for_longer_is_kept(given, tmp_path, monkeypatch):
    """The winner's model is that of its best training, and the same command has nothing left to do."""
    from hf_growattn.training import competing, race

    monkeypatch.setattr(competing, "_LARGER", ())  # with those more steps do not end lower
    saved, save_model = [], race.save_model
    monkeypatch.setattr(
        race, "save_model", lambda trainer, *rest: (saved.append(trainer.args), save_model(trainer, *rest))
    )
    monkeypatch.setattr(Contest, "open", lambda self, reference: ["lora", "growth"] if reference == "lora" else [])
    line = ("race", given / "model", given / "text.txt", "-o", tmp_path / "out", "--steps", 8, "--seeds", 1, *OPTIONS)
    done = call(*line)
    assert done.exit_code == 3 and "Trained for 12" in " ".join(done.stdout.split()), done.output
    runs = json.loads((tmp_path / "out" / "race.json").read_text())["runs"]
    assert {run["method"] for run in runs if run["steps"] == 12} == {"lora", "growth"}
    longest = min((run for run in runs if run["method"] == "lora"), key=lambda run: run["loss"])
    assert (
        longest["steps"] == 12 and [args.max_steps for args in saved if Path(args.output_dir).name == "lora"][-1] == 12
    )
    kept = (tmp_path / "out" / "race.jsonl").read_text()
    assert call(*line).stdout == done.stdout and (tmp_path / "out" / "race.jsonl").read_text() == kept


@pytest.mark.filterwarnings("ignore:`gradient_checkpointing` is deprecated:FutureWarning")  # TRL's own setting
def test_from_python(given, tmp_path):
    """The model that is given stays as it is."""
    model, tokenizer = (auto.from_pretrained(given / "model") for auto in (AutoModelForCausalLM, AutoTokenizer))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    words = (given / "text.txt").read_text().split()
    rows = Dataset.from_dict({"text": [" ".join(words[at : at + 24]) for at in range(0, len(words), 24)]})
    training = SFTConfig(str(tmp_path / "out"), max_length=16, packing=True, use_cpu=True, bf16=False, report_to=[])
    frozen = gc.get_freeze_count()
    contest = hf_growattn.race(model, tokenizer, rows, training, budget=0.2, steps=4, seeds=1, growth_batches=4)
    assert gc.get_freeze_count() == frozen
    assert contest.winner in ("lora", "growth", "both") and contest.sentences()[0] in " ".join(str(contest).split())
    assert type(model).__name__ == "LlamaForCausalLM" and all(p.requires_grad for p in model.parameters())
    assert all(value.equal(before[name]) for name, value in model.state_dict().items())


@pytest.mark.parametrize(
    "command, steps",
    [
        (["race"], 100),
        (["race", "--max_steps", 50], 100),
        (["race", "--steps", 7], 7),
        (["finetune", "--method", "auto"], 100),
        (["finetune", "--method", "auto", "--max_steps", 150], 30),
        (["finetune", "--method", "auto", "--max_steps", 9], 20),
        (["finetune", "--method", "auto", "--max_steps", 9, "--steps", 3], 3),
    ],
)
def test_a_race_before_a_short_training_is_short(command, steps, given, tmp_path, monkeypatch):
    """Where nothing is said of it."""
    asked = []

    def run(*args, **how):
        asked.append(how["steps"])
        raise ValueError("far enough")

    monkeypatch.setattr("hf_growattn.training.race.run_race", run)
    done = call(command[0], given / "model", given / "text.txt", "-o", tmp_path / "out", *command[1:], *OPTIONS)
    assert "far enough" in done.stderr and asked == [steps]


def test_a_race_of_no_steps_is_refused(given, tmp_path):
    done = call("race", given / "model", given / "text.txt", "-o", tmp_path / "out", "--steps", 0, *OPTIONS)
    assert done.exit_code == 1 and "steps must be a whole number, at least 1; got 0." in done.stderr


@pytest.mark.parametrize("method", ["lora", "growth", "both", "auto"])
def test_finetune_by_a_method(method, given, tmp_path, monkeypatch):
    monkeypatch.setattr(Contest, "finalists", property(lambda self: [self.winner]))
    output = tmp_path / "out"
    options = ["--method", method, "--max_steps", 12, *OPTIONS, *(["--steps", 8] if method == "auto" else [])]
    done = call("finetune", given / "model", given / "text.txt", "-o", output, *options)
    assert done.exit_code == 0, done.output
    figures = json.loads((output / "figures.json").read_text())
    chosen = json.loads((tmp_path / "out-race" / "race.json").read_text())["winner"] if method == "auto" else method
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "out-race"][: 2 if method == "auto" else 1]
    grew = chosen in ("growth", "both")
    assert ("growth" in figures["race"]) == (method == "auto")
    assert ("The race before this training told" in " ".join(done.stdout.split())) == (method == "auto")
    assert (figures["with_growth"] is not None) == grew == bool(figures["growths"])
    curve = (figures["with_growth"] or figures["without_growth"])["held_out"]
    assert curve[-1][0] == 12 and curve[-1][1] < curve[0][1]
    stock, trained = (AutoModelForCausalLM.from_pretrained(folder) for folder in (given / "model", output))
    assert (trained.num_parameters() > stock.num_parameters()) == grew
    assert trained.get_input_embeddings().weight.equal(stock.get_input_embeddings().weight)
    if chosen == "growth":  # what was there is there, to the bit
        assert trained.model.layers[0].mlp.up_proj.weight.equal(stock.model.layers[0].mlp.up_proj.weight)
        assert figures["growths"][0]["step"] == 0 and (output / "report.html").exists()


def auto(given, tmp_path, *options):
    how = ["--method", "auto", "--max_steps", 12, "--steps", 8, "--seeds", 1, *OPTIONS, *options]
    return call("finetune", given / "model", given / "text.txt", "-o", tmp_path / "out", *how)


@pytest.mark.parametrize("margin, kept, other", [(-9.0, "both", "lora"), (9.0, "lora", "both")])
def test_two_that_are_near_train_and_the_lower_one_is_kept(margin, kept, other, given, tmp_path, monkeypatch):
    monkeypatch.setattr(Contest, "finalists", property(lambda self: ["lora", "both"]))
    monkeypatch.setattr("hf_growattn.training.auto.MARGIN", margin)  # what is lower by more than that
    done = auto(given, tmp_path, "--compare", "--push_to_hub", "--hub_model_id", "me/mine")  # there is no Hub here
    assert done.exit_code == 0, done.output
    assert f"growattn push {tmp_path / 'out'} me/mine" in done.stderr
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", f"out-{other}", "out-race"]
    figures, others = (json.loads((tmp_path / name / "figures.json").read_text()) for name in ("out", f"out-{other}"))
    said = f"Kept: {METHODS[kept].title}."
    assert said in done.stdout and said in figures["race"]
    assert f"The other model is in {tmp_path}" in " ".join(done.stdout.split())
    assert "were near, so both train to the end" in others["race"] and "Kept" not in others["race"]
    of = {kept: figures, other: others}
    assert of["lora"]["with_growth"] is None and of["both"]["growths"] and not of["both"]["compared"]
    losses = {name: float(of[name][runs]["held_out"][-1][1]) for name, runs in
              (("lora", "without_growth"), ("both", "with_growth"))}  # fmt: skip
    ended = [json.loads(line) for line in (tmp_path / "out-race" / "ended.jsonl").read_text().splitlines()]
    assert [run["method"] for run in ended] == ["lora", "both"] and ended[1]["cache"] > ended[0]["cache"]
    for run in ended:  # what was saved is what was measured, row by row
        assert sum(run["nats"]) / sum(run["counts"]) == pytest.approx(losses[run["method"]], abs=1e-4)  # by batches
    sizes = {name: AutoModelForCausalLM.from_pretrained(tmp_path / folder).num_parameters()
             for name, folder in ((kept, "out"), (other, f"out-{other}"))}  # fmt: skip
    assert sizes["both"] > sizes["lora"]
    again = auto(given, tmp_path, "--resume_from_checkpoint", "True")
    assert again.exit_code == (1 if kept == "both" else 0)  # the models have changed places, or nothing is left to do
    assert ("is there already" in again.stderr) == (kept == "both") and (said in again.stdout) == (kept == "lora")


def ended_at(folder: Path) -> list[list[float]]:
    """Row by row, of the trainings that a race of two that are near led to."""
    return [json.loads(line)["nats"] for line in (folder / "out-race" / "ended.jsonl").read_text().splitlines()]


SAVED = ["--save_strategy", "steps", "--save_steps", 6]


@pytest.fixture(scope="module")
def unbroken(given, tmp_path_factory) -> list[list[float]]:
    """What two trainings end at that nobody stops."""
    folder = tmp_path_factory.mktemp("unbroken")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Contest, "finalists", property(lambda self: ["lora", "both"]))
        assert auto(given, folder, *SAVED).exit_code == 0
    return ended_at(folder)


@pytest.mark.parametrize("at", [1, 2])
def test_two_that_are_near_are_resumed_where_they_stopped(at, given, unbroken, tmp_path, monkeypatch):
    """In the first training or in the second one; what an earlier training has left beside the race does not count."""
    from hf_growattn.training import finetuning

    (tmp_path / "out-race").mkdir()
    (tmp_path / "out-race" / "ended.jsonl").write_text("{}\n")

    monkeypatch.setattr(Contest, "finalists", property(lambda self: ["lora", "both"]))
    train, trained = finetuning.train, []

    def stopped(trainer):
        trained.append(Path(trainer.args.output_dir).name)
        if len(trained) == at:
            trainer.add_callback(Stop())
        return train(trainer)

    class Stop(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            if state.global_step == 9:
                raise KeyboardInterrupt

    monkeypatch.setattr(finetuning, "train", stopped)
    done = auto(given, tmp_path, *SAVED)
    assert done.exit_code == 130 and "--resume_from_checkpoint True" in done.stderr, done.output
    assert ("LoRA on all linear layers is trained: " in done.stderr) == (at == 2)
    done = auto(given, tmp_path, *SAVED, "--resume_from_checkpoint", "True")
    assert done.exit_code == 0 and "Kept: " in done.stdout, done.output
    assert trained == [["out", "out", "out-both"], ["out", "out-both", "out-both"]][at - 1]
    assert ended_at(tmp_path) == unbroken and len(unbroken) == 2


def test_a_race_leads_to_both_that_are_near(told, given, tmp_path, monkeypatch):
    """By the command that it ends with, which does not run it again."""
    monkeypatch.setattr(Contest, "finalists", property(lambda self: ["lora", "both"]))
    monkeypatch.setattr(Contest, "winner", "lora")
    folder, trained = tmp_path / "my race", (told[0] / "race.jsonl").read_text()
    folder.mkdir()
    (folder / "race.jsonl").write_text(trained)
    done = call("race", given / "model", given / "text.txt", "-o", folder, *OPTIONS)
    assert done.exit_code == 3 and f"{trained.count('method') - 1} trainings ended before" in done.stderr
    last = done.stderr.splitlines()[-1]
    assert last.startswith("1/3 growth, 2/3 LoRA is near, and may end lower in a longer training. Train both")
    command = shlex.split(last.partition("growattn ")[2].replace("DIR", str(tmp_path / "new" / "out")))
    done = call(*command, "--max_steps", 8)
    assert done.exit_code == 0 and "Kept: " in done.stdout, done.output
    assert (folder / "race.jsonl").read_text() == trained
    assert {"out", "out-race"} < {path.name for path in (tmp_path / "new").iterdir()}
    for at, said in {folder: "holds another race, of other data or options (steps)", tmp_path: "holds no race"}.items():
        done = call(*command[:4], tmp_path / "other", *OPTIONS, "--steps", 4, "--method", "auto", "--race", at)
        assert done.exit_code == 1 and said in done.stderr


def test_a_place_that_is_taken_is_told_before_anything_trains(given, tmp_path, monkeypatch):
    monkeypatch.setattr(Contest, "finalists", property(lambda self: ["lora", "growth"]))
    (tmp_path / "out-growth").mkdir()
    done = auto(given, tmp_path, "--steps", 4)
    assert done.exit_code == 1 and "out-growth is there already" in done.stderr and not (tmp_path / "out").exists()


def test_growth_beside_lora_is_resumed_where_it_stopped(given, tmp_path, monkeypatch):
    monkeypatch.setattr(Method, "grown_share", lambda *_: 0.1)  # as in a wider model
    options = ["--method", "both", "--max_steps", 12, "--save_strategy", "steps", "--save_steps", 6, *OPTIONS]
    done = call("finetune", given / "model", given / "text.txt", "-o", tmp_path / "out", *options)
    assert done.exit_code == 0, done.output
    whole = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    checkpoint = tmp_path / "out" / "checkpoint-6"
    done = call("finetune", given / "model", given / "text.txt", "-o", tmp_path / "again", *options,
                "--resume_from_checkpoint", checkpoint)  # fmt: skip
    assert done.exit_code == 0, done.output
    resumed = AutoModelForCausalLM.from_pretrained(tmp_path / "again")
    assert all(value.equal(resumed.state_dict()[name]) for name, value in whole.state_dict().items())
    assert json.loads((tmp_path / "again" / "figures.json").read_text())["growths"]


def test_compare_shows_lora_too(given, tmp_path):
    options = ["--method", "growth", "--compare", "--max_steps", 8, *OPTIONS]
    done = call("finetune", given / "model", given / "text.txt", "-o", tmp_path / "out", *options)
    assert done.exit_code == 0, done.output
    figures = json.loads((tmp_path / "out" / "figures.json").read_text())
    assert "LoRA on all linear layers" in done.stdout and figures["lora"]["held_out"][-1][0] == 8
    assert figures["without_growth"] is None


@pytest.mark.parametrize(
    "options, said",
    [
        (["--method", "growth", "--grow_steps", "3"], "grows at the start or not at all"),
        (["--method", "growth", "--v_dims", "3"], "spends a --budget"),
        (["--method", "auto", "--use_peft"], "leave out --use_peft"),
        (["--method", "lora", "--compare"], "Drop one of them"),
        (["--method", "lora", "--race", "race"], "leave out --race"),
    ],
)
def test_methods_and_options_that_contradict_each_other(options, said, given, tmp_path):
    done = call("finetune", given / "model", given / "text.txt", "-o", tmp_path / "out", *options)
    assert done.exit_code == 2 and said in done.stderr and not (tmp_path / "out").exists()
