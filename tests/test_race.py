"""The race: what a contest says of trainings, and real ones through the command line."""

import json
import math
from dataclasses import replace
from pathlib import Path

import encoders
import families
import pytest
import torch
from datasets import Dataset
from families import save_with_text
from test_cli import call
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import SFTConfig

import hf_growattn
from hf_growattn import patch_model
from hf_growattn.training.contest import Contest, Run, compete, paired, steps_of
from hf_growattn.training.methods import METHODS, Budget, started, trained_weights

OPTIONS = "--max_length 16 --growth_batches 4 --budget 20% --per_device_train_batch_size 4".split()
COUNTS = [4, 8, 4, 6]


def run(method: str, loss: float, rate=1.0, steps=0, seed=0, wobble=0.0) -> Run:
    """A training whose held-out rows end at a loss, each a little off it."""
    offs = (1, -0.5, 1.5, -1)  # together nothing, by COUNTS
    nats = [count * loss + wobble * count * off for count, off in zip(COUNTS, offs)]
    return Run(method, rate, steps, seed, nats, COUNTS, 100, 96 if "growth" in method else 64, 1.0)


class Given:
    """Trains nothing: ends where it is told to, and notes what it was asked."""

    def __init__(self, losses: dict, wobble=0.001):
        self.losses, self.wobble, self.asked = losses, wobble, []

    def __call__(self, method, rate, steps, seed):
        self.asked.append((method, rate, steps, seed))
        loss = self.losses[method, steps]
        if isinstance(loss, dict):
            loss = loss[rate] - (rate - 1) ** 2
        off = self.wobble * (1 if method == "growth" else -1)
        return (
            None if loss is None else run(method, loss + (rate - 1) ** 2 + seed * self.wobble, rate, steps, seed, off)
        )


def raced(seeds=2, halving=True, **losses) -> tuple[Contest, Given]:
    """A contest over 40 steps; of each method what it ends at after 10, after all, and after twice as many."""
    lengths = (10, 40, 80)
    trains = Given({(method, steps): loss for method, ends in losses.items() for steps, loss in zip(lengths, ends)})
    contest = Contest(40, run("start", 4.0))
    compete(contest, trains, dict.fromkeys(losses, (1.0, 1.5)), seeds, halving)
    return contest, trains


def test_a_lead_that_is_sure_and_lasts_wins():
    contest, trains = raced(lora=(3.5, 3.2), growth=(3.4, 3.1))
    assert contest.winner == "growth" and contest.choice == {"method": "growth", "learning_rate": 1.0}
    assert contest.lead("growth", "lora").mean == pytest.approx(0.1)
    assert "Growth pays: growth ends 0.1000" in str(contest) and "KV cache 50% larger" in str(contest)
    # Two rates for a quarter of the steps, then the better one on every seed.
    assert [asked[1:] for asked in trains.asked if asked[0] == "lora"] == [
        (1.0, 10, 0),
        (1.5, 10, 0),
        (1.0, 40, 0),
        (1.0, 40, 1),
    ]
    assert sum(asked[2] for asked in trains.asked) == steps_of(("lora", "growth"), 40, 2)


@pytest.mark.parametrize(
    "both, winner, longer",
    [
        ((3.41, 3.105, 3.0), "both", True),  # level, then below
        ((3.41, 3.105, 3.055), "both", True),  # level to the end
        ((3.45, 3.13, 3.055), "both", True),  # the lead of the larger cache falls fast
        ((3.41, 3.105, 3.09), "growth", True),  # level, then behind
        ((3.41, 3.095, 3.07), "growth", True),  # the same, though it was below
        ((3.42, 3.13), "growth", False),
        ((3.42, 3.21), "growth", False),  # it does not win
    ],
)
def test_two_that_win_and_cannot_be_told_apart_train_for_longer(both, winner, longer):
    """If that does not tell them apart, a tie goes to the smaller cache."""
    contest, trains = raced(lora=(3.5, 3.2), growth=(3.4, 3.1, 3.05), both=both)
    assert contest.winner == winner
    said = " ".join(str(contest).split())
    assert f"Growth pays: {METHODS[winner].title} ends" in said and ("Trained for 80" in said) == longer
    assert {asked[0] for asked in trains.asked if asked[2] == 80} == ({"growth", "both"} if longer else set())


@pytest.mark.parametrize("after, winner", [((3.1, 3.0), "growth"), ((3.1, 3.095), "lora"), ((3.0, 3.1), "lora")])
def test_who_may_win_trains_for_longer(after, winner):
    """A lead that is large enough, but not sure: over twice as many steps it is, or it is not."""
    contest = Contest(40, run("start", 4.0))
    ends = {("lora", 10): 3.5, ("lora", 40): 3.2, ("growth", 10): 3.5, ("growth", 40): 3.15}
    ends |= {("lora", 80): after[0], ("growth", 80): after[1]}
    trains = Given(ends)

    def wobbling(method, rate, steps, seed):
        trains.wobble = 0.04 if steps == 40 else 0.001
        return trains(method, rate, steps, seed)

    compete(contest, wobbling, dict.fromkeys(("lora", "growth"), (1.0, 1.5)), 1)
    assert contest.lead("growth", "lora").steps == 80 and contest.winner == winner
    assert contest.lead("growth", "lora").mean == pytest.approx(after[0] - after[1])
    assert "After 40 steps these could not be told apart. Trained for 80, " in " ".join(str(contest).split())


def test_a_winner_by_far_needs_one_seed():
    """Not where others that win are near it: then a second seed tells more."""
    contest, trains = raced(lora=(3.5, 3.2), growth=(3.0, 2.5), both=(3.4, 3.1))
    assert contest.winner == "growth" and not [asked for asked in trains.asked if asked[3] == 1]
    assert [len(contest.of(name)) for name in ("lora", "growth", "both")] == [1, 1, 1]
    contest, _ = raced(lora=(3.5, 3.2), growth=(3.0, 2.85), both=(3.4, 3.1))  # under a tenth of the loss at the start
    assert contest.winner == "growth" and len(contest.of("growth")) == 2
    contest, _ = raced(lora=(3.5, 3.2), growth=(3.0, 2.5, 2.4), both=(3.0, 2.505, 2.45))
    assert contest.winner == "growth" and len(contest.of("growth")) == len(contest.of("both")) == 2


def test_a_few_steps_tell_nothing_of_growth():
    """However large the lead: after 4 steps LoRA has hardly begun."""
    for steps, winner in ((4, "lora"), (19, "lora"), (20, "growth")):
        contest = Contest(steps, run("start", 4.0))
        ends = {("lora", steps // 4): 3.9, ("lora", steps): 3.5, ("growth", steps // 4): 3.0, ("growth", steps): 2.5}
        compete(contest, Given(ends), dict.fromkeys(("lora", "growth"), (1.0,)), 2)
        assert contest.winner == winner and ("Too short to tell: growth ends 1.0000" in str(contest)) == (steps < 20)


@pytest.mark.parametrize(
    "lora, growth, said",
    [
        ((3.5, 3.2), (3.5, 3.195), "A tie: growth ends 0.0050"),
        ((3.5, 3.2), (3.45, 3.25), "Growth does not pay: LoRA on all linear layers ends 0.0500"),
        # Ahead by .2 after 10 steps and by .05 after 40: by 200 nothing of that is left.
        ((3.5, 3.2), (3.3, 3.15), "Growth does not pay for long: growth ends 0.0500"),
        ((3.5, 3.2), (None, None), "Growth is out: nothing that it could add holds"),
    ],
)
def test_what_is_no_lasting_lead_goes_to_lora(lora, growth, said):
    contest, _ = raced(lora=lora, growth=growth)
    assert contest.winner == "lora" and said in str(contest)
    assert json.loads(json.dumps(contest.figures()))["winner"] == "lora"


def test_noise_is_no_lead():
    contest = Contest(40, run("start", 4.0))
    for method, sign in (("lora", -1), ("growth", 1)):
        for steps, loss in ((10, 3.5), (40, 3.2 if method == "lora" else 3.1)):
            contest.runs.append(run(method, loss, steps=steps, wobble=0.2 * sign))
    assert contest.lead("growth", "lora").error > 0.05 and contest.winner == "lora" and "A tie" in str(contest)


def test_the_hopeless_do_not_go_on():
    contest, trains = raced(lora=(3.5, 3.2), growth=(3.95, 3.0))
    assert contest.winner == "lora" and "Growth is out: 0.4500 nats behind after 10 steps." in str(contest)
    assert ("growth", 1.0, 40, 0) not in trains.asked
    contest, _ = raced(lora=(3.5, 3.2), growth=(3.6, 3.0))  # behind, but not by so much: it turns out to win
    assert contest.winner == "growth"


def test_who_is_surely_behind_has_one_seed():
    """Behind LoRA, or behind what beats it at no larger a cache; then nobody trains on for its sake."""

    def seeds_of(contest):
        return {name: len(contest.of(name)) for name in METHODS if contest.of(name)}

    contest, _ = raced(lora=(3.5, 3.2), growth=(3.4, 3.3), both=(3.4, 3.1))
    assert seeds_of(contest) == {"lora": 2, "growth": 1, "both": 2} and contest.winner == "both"
    assert "Growth has one seed alone: it ended 0.1000 nats behind LoRA on all linear layers." in contest.sentences()
    contest, _ = raced(lora=(3.5, 3.2), growth=(3.4, 3.15), both=(3.4, 3.1))
    assert seeds_of(contest) == {"lora": 2, "growth": 1, "both": 2}
    assert "Growth has one seed alone: it ended 0.0500 nats behind 1/3 growth, 2/3 LoRA." in contest.sentences()
    contest, _ = raced(lora=(3.5, 3.2), growth=(3.4, 3.1), both=(3.4, 3.15))  # behind, but cheaper
    assert seeds_of(contest) == {"lora": 2, "growth": 2, "both": 2}
    contest, _ = raced(lora=(3.5, 3.2), growth=(3.4, 3.3), both=(3.4, 3.25))
    assert seeds_of(contest) == {"lora": 1, "growth": 1, "both": 1} and contest.winner == "lora"
    contest, _ = raced(halving=False, lora=(3.5, 3.2), growth=(3.4, 3.3), both=(3.4, 3.25))
    assert seeds_of(contest) == {"lora": 2, "growth": 2, "both": 2}


def test_rates_that_are_near_each_other_both_go_on():
    contest, trains = raced(
        lora=({1.0: 3.5, 1.5: 3.56}, {1.0: 3.2, 1.5: 3.0}), growth=({1.0: 3.5, 1.5: 3.52}, {1.0: 3.1, 1.5: 2.9})
    )
    assert [asked[1:] for asked in trains.asked if asked[0] == "lora" and asked[2] == 40] == [
        (1.0, 40, 0),
        (1.0, 40, 1),
    ]
    assert [asked[1:] for asked in trains.asked if asked[0] == "growth" and asked[2] == 40] == [
        (1.0, 40, 0),
        (1.5, 40, 0),
        (1.5, 40, 1),
    ]
    lead = contest.lead("growth", "lora")
    assert contest.winner == "growth" and contest.rate == 1.5
    assert lead.mean == pytest.approx(0.3) and lead.early == pytest.approx(-0.02)  # of the rate that counts
    assert len(contest.of("growth")) == 2  # the other rate's training counts nowhere


def test_rates_that_are_too_large_are_not_the_end():
    """Where no training gets below the start, smaller learning rates are tried."""
    contest = Contest(40, run("start", 4.0))
    asked = []

    def trains(method, rate, steps, seed):
        asked.append((method, rate, steps))
        return run(method, 3.5 - steps / 100 if method == "lora" or rate < 0.5 else 5.0, rate, steps, seed)

    compete(contest, trains, dict.fromkeys(("lora", "growth"), (1.0, 1.5)), 1)
    assert [rate for method, rate, steps in asked if method == "growth" and steps == 10] == [1.0, 1.5, 0.33]
    assert contest.of("growth")[0].rate == 0.33 and not contest.out


def test_all_weights_have_a_contest_of_their_own():
    contest, _ = raced(lora=(3.5, 3.2), growth=(3.6, 3.3), full=(3.0, 2.8), **{"full+growth": (2.9, 2.7)})
    assert contest.winner == "full+growth" and contest.choice["method"] == "full"
    contest, _ = raced(lora=(3.5, 3.2), growth=(3.6, 3.3), full=(3.0, 2.8), **{"full+growth": (3.0, 2.8)})
    assert contest.choice == {"method": "full", "max_growths": 0, "learning_rate": 1.0}


def test_the_error_of_a_lead_is_the_jackknifes():
    generator = torch.Generator().manual_seed(0)
    counts = torch.randint(5, 60, (400,), generator=generator).tolist()
    nats = [[3 * n + n**0.5 * x for n, x in zip(counts, torch.randn(400, generator=generator).tolist())] for _ in "ab"]
    one, other = (replace(run("lora", 3.0), nats=own, counts=counts) for own in nats)
    mean, error = paired([one], [other])
    without = [(sum(nats[1]) - nats[1][i] - sum(nats[0]) + nats[0][i]) / (sum(counts) - counts[i]) for i in range(400)]
    spread = math.sqrt(399 * torch.tensor(without, dtype=torch.float64).var(correction=0).item())
    assert mean == pytest.approx(other.loss - one.loss) and error == pytest.approx(spread, rel=0.02)  # first order


@pytest.mark.parametrize("variant", ["llama-2", "gpt2-2", "bert"])
def test_every_method_trains_as_many_weights(variant):
    """LoRA exactly the budget, growth at most that; neither moves the rest of the base."""
    build = encoders.build if variant in encoders.ENCODERS else families.build
    stock = build(variant)
    budget = Budget.near(patch_model(build(variant)), 0.3)
    assert budget.rank >= 3
    ids = torch.randint(0, stock.config.vocab_size, (4, 4, 16), generator=torch.Generator().manual_seed(0))
    batches = [{"input_ids": rows, "labels": rows} for rows in ids]
    for name in ("lora", "growth", "both"):
        model, report = started(patch_model(build(variant)), METHODS[name], budget, batches, seed=0)
        weights = trained_weights(model)
        if name == "lora":
            assert weights == budget.weights and report is None
        assert weights <= budget.weights
        optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
        model(**batches[0]).loss.backward()
        optimizer.step()
        embeddings = model.get_input_embeddings().weight
        assert embeddings.equal(stock.get_input_embeddings().weight) and not embeddings.requires_grad
    whole, _ = started(patch_model(build(variant)), METHODS["full"], budget, [], seed=0)
    assert trained_weights(whole) == whole.num_parameters()


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
    assert "steps of" in done.stderr and "minutes" in done.stderr  # before it starts
    assert f"--method {figures['winner']} --learning_rate {figures['rate']}" in done.stderr
    assert "--steps" not in done.stderr and "--budget 20%" in done.stderr  # which training has no use for
    weights = {run["weights"] for run in figures["runs"] if run["method"] == "lora"}
    assert len(weights) == 1 and all(run["weights"] <= max(weights) for run in figures["runs"])
    assert sorted(path.name for path in folder.iterdir()) == ["model", "race.json", "race.jsonl"]
    ended = next(run for run in figures["runs"] if run["method"] == figures["winner"] and run["steps"] == 12)
    assert ended["loss"] < figures["loss_before"]
    model = AutoModelForCausalLM.from_pretrained(folder / "model")
    assert (type(model).__name__ == "LlamaForCausalLM") == (figures["winner"] == "lora")


def test_a_race_goes_on_where_it_was(told, given, monkeypatch):
    """What ended is not run again; a race of other options is not mixed into it."""
    folder, done = told
    lines = (folder / "race.jsonl").read_text().splitlines()
    (folder / "race.jsonl").write_text("\n".join(lines[:4]) + "\n")
    again = call("race", given / "model", given / "text.txt", "-o", folder, "--steps", 12, *OPTIONS)
    assert again.exit_code == done.exit_code and again.stdout == done.stdout
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
    assert len((tmp_path / "out" / "race.jsonl").read_text().splitlines()) == 5  # setting, start, 2 rates, a seed


def test_who_trains_for_longer_is_kept(given, tmp_path, monkeypatch):
    """The winner's model is that of its best training, and the same command has nothing left to do."""
    from hf_growattn.training import race

    saved, save = [], race.save
    monkeypatch.setattr(race, "save", lambda trainer, *rest: (saved.append(trainer.args), save(trainer, *rest)))
    monkeypatch.setattr(Contest, "open", lambda self, reference: ["lora", "growth"] if reference == "lora" else [])
    line = ("race", given / "model", given / "text.txt", "-o", tmp_path / "out", "--steps", 8, "--seeds", 1, *OPTIONS)
    done = call(*line)
    assert done.exit_code == 3 and "Trained for 16" in " ".join(done.stdout.split()), done.output
    runs = json.loads((tmp_path / "out" / "race.json").read_text())["runs"]
    assert {run["method"] for run in runs if run["steps"] == 16} == {"lora", "growth"}
    longest = min((run for run in runs if run["method"] == "lora"), key=lambda run: run["loss"])
    assert (
        longest["steps"] == 16 and [args.max_steps for args in saved if Path(args.output_dir).name == "lora"][-1] == 16
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
    contest = hf_growattn.race(model, tokenizer, rows, training, budget=0.2, steps=4, seeds=1, growth_batches=4)
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
def test_finetune_by_a_method(method, given, tmp_path):
    output = tmp_path / "out"
    options = ["--method", method, "--max_steps", 12, *OPTIONS, *(["--steps", 8] if method == "auto" else [])]
    done = call("finetune", given / "model", given / "text.txt", "-o", output, *options)
    assert done.exit_code == 0, done.output
    figures = json.loads((output / "figures.json").read_text())
    chosen = json.loads((tmp_path / "out-race" / "race.json").read_text())["winner"] if method == "auto" else method
    grew = chosen in ("growth", "both")
    assert ("growth" in figures["race"]) == (method == "auto")
    assert ("The race before this training told" in " ".join(done.stdout.split())) == (method == "auto" and grew)
    assert (figures["with_growth"] is not None) == grew == bool(figures["growths"])
    curve = (figures["with_growth"] or figures["without_growth"])["held_out"]
    assert curve[-1][0] == 12 and curve[-1][1] < curve[0][1]
    stock, trained = (AutoModelForCausalLM.from_pretrained(folder) for folder in (given / "model", output))
    assert (trained.num_parameters() > stock.num_parameters()) == grew
    assert trained.get_input_embeddings().weight.equal(stock.get_input_embeddings().weight)
    if chosen == "growth":  # what was there is there, to the bit
        assert trained.model.layers[0].mlp.up_proj.weight.equal(stock.model.layers[0].mlp.up_proj.weight)
        assert figures["growths"][0]["step"] == 0 and (output / "report.html").exists()


def test_growth_beside_lora_is_resumed_where_it_stopped(given, tmp_path):
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
    ],
)
def test_methods_and_options_that_contradict_each_other(options, said, given, tmp_path):
    done = call("finetune", given / "model", given / "text.txt", "-o", tmp_path / "out", *options)
    assert done.exit_code == 2 and said in done.stderr and not (tmp_path / "out").exists()
