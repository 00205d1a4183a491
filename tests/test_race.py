"""The race: its rule on made-up runs, and races of a model that reads vectors, and of one that reads text."""

import copy
import json
import math
import re
import signal
from functools import cache, partial
from itertools import count
from types import SimpleNamespace

import pytest
import torch
from conftest import ROOT
from families import build, lm_batches
from test_comparison import OPTIONS, run_of
from torch import nn
from torch.nn.functional import cross_entropy, pad
from tqdm.auto import tqdm
from transformers import LlamaConfig, LlamaModel

from hf_growattn import Method, race
from hf_growattn.measure.halves import digest
from hf_growattn.report.comparison import TITLES, RaceResult
from hf_growattn.training import race as module

FEATURES, ROWS = 16, 8


class Matcher(nn.Module):
    """Names the row of which the last one is a copy; each head compares two of the sixteen features."""

    def __init__(self):
        super().__init__()
        sizes = dict(hidden_size=32, intermediate_size=8, num_hidden_layers=1, num_attention_heads=4, head_dim=2)
        ends = dict(bos_token_id=None, eos_token_id=None)
        self.body, self.head = LlamaModel(LlamaConfig(vocab_size=2, **sizes, **ends)), nn.Linear(32, ROWS)
        attention, mlp = self.body.layers[0].self_attn, self.body.layers[0].mlp
        with torch.no_grad():
            for part in (self.head, mlp.down_proj, *attention.children()):
                part.weight.zero_()
            for index in range(ROWS):
                attention.q_proj.weight[index, index] = attention.k_proj.weight[index, index] = 2.0
                attention.v_proj.weight[index, FEATURES + index] = 3.0
                attention.o_proj.weight[FEATURES + ROWS + index, index] = 3.0
                self.head.weight[index, FEATURES + ROWS + index] = 1.0

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        """(batch, rows, features and names) -> (batch, names)."""
        places = torch.zeros(rows.shape[:2], dtype=torch.long)
        states = self.body(
            inputs_embeds=pad(rows, (0, ROWS)), position_ids=places, attention_mask=torch.ones_like(places)
        )
        return self.head(states.last_hidden_state[:, -1])


def loss(model, batch):
    return cross_entropy(model(batch[0]), batch[1])


_drawn = count()


def another_matcher() -> Matcher:
    """One with other weights at each call, which no seed of a race decides."""
    model = Matcher()
    model.body.norm.weight.data += next(_drawn)
    return model


def to_match(count: int, seed: int) -> list[tuple]:
    """Batches of rows with names, and of a copy of one, to be named."""
    generator, batches = torch.Generator().manual_seed(seed), []
    for _ in range(count):
        rows = torch.randn(32, ROWS, FEATURES, generator=generator)
        names = torch.randint(ROWS, (32,), generator=generator)
        asked = pad(rows[torch.arange(32), names], (0, ROWS))
        given = torch.cat([rows, torch.eye(ROWS).expand(32, ROWS, ROWS)], -1)
        batches.append((torch.cat([given, asked[:, None]], 1), names))
    return batches


def to_classify(count: int, seed: int) -> list[tuple]:
    """The same rows; the class is a function of the last one."""
    classes = torch.randn(FEATURES, ROWS, generator=torch.Generator().manual_seed(9))
    return [(rows, (rows[:, -1, :FEATURES] @ classes).argmax(-1)) for rows, _ in to_match(count, seed)]


def hold(batches=to_match, make_model=Matcher, train=2, held_out=3, loss=loss, **options) -> RaceResult:
    """A short race on batches drawn from two seeds."""
    usual = dict(budget=0.4, steps=8, seeds=1, growth_batches=8, modules_to_save=["head"])
    return race(make_model, batches(40, train), batches(8, held_out), loss, **usual | options)


@pytest.mark.parametrize("batches, winner", [(to_match, "growth"), (to_classify, "lora")])
def test_growth_wins_where_rows_are_matched_and_lora_where_they_are_classified(batches, winner):
    result = hold(batches, steps=100)
    assert result.winner == winner, result
    model, groups = result.method.prepare(Matcher(), batches(40, 2), loss)
    held = [p for group in groups for p in group["params"]]
    assert {*held} == {p for p in model.parameters() if p.requires_grad} and len({*held}) == len(held)
    assert sum(p.numel() for p in held) == result.runs_of(winner)[0].weights + 33 * ROWS  # and the head
    assert {group["lr"] for group in groups} == {result.rates[winner]}


def test_the_lines_of_the_readme_race_a_module_of_the_users_own():
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    (code,) = (block for block in blocks if "race(" in block)
    train, held_out = to_match(20, 2), to_match(4, 3)
    names = {"make_model": Matcher, "loss": loss, "train_batches": train, "held_out_batches": held_out}
    for ours, short in (("budget=0.15", "budget=0.4"), ("steps=100", "steps=8"), ('"read_in", "classifier"', '"head"')):
        assert ours in code
        code = code.replace(ours, short)
    assert f"(optimizer, {module._WARMUP * 100:.0f}, 100)" in code  # the race's own schedule
    exec(code, names)
    loss(names["model"], train[0]).backward()
    names["optimizer"].step()
    names["schedule"].step()


def test_every_row_trains_equally_many_weights_or_says_why():
    result = hold(budget=0.8, methods=("lora", "growth", "mix", "random", "all", "all_growth"), seeds=2)
    weights = {run.method: run.weights for run in result.runs}
    assert {*weights} == {"lora", "growth", "mix", "random", "all", "all_growth"} and not result.missing
    budget, text = result.options["budget"], result.table()
    assert weights["lora"] == budget and weights["random"] == weights["growth"] < weights["all"] < weights["all_growth"]
    for name in ("growth", "mix", "random"):
        is_said = f"trains {weights[name]:,} of {budget:,} weights" in text
        assert is_said == (weights[name] < 0.97 * budget) and weights[name] <= budget
    assert "all weights trains" not in text  # nobody expects it to train as few
    seeds = {name: len(result.runs_of(name)) for name in weights}
    assert seeds["lora"] == seeds["random"] == seeds["all"] == seeds[result.challenger] == 2
    (other,) = {"growth", "mix"} - {result.challenger}
    assert seeds[other] == 1 and f"{TITLES[other]} was behind with the first of 2 seeds, and did not" in text
    leads = [float(line.split("±")[0].split()[-1]) for line in text.splitlines() if re.search(r"\d ± \d", line)]
    assert leads == sorted(leads, reverse=True)
    assert result.runs_of("growth")[0].cache > result.start.cache == result.runs_of("lora")[0].cache


def test_a_method_that_cannot_be_had_is_named_with_its_reason():
    text = str(hold(budget=280))
    assert (
        "Not trained: 1/3 growth, 2/3 LoRA, since the budget buys LoRA of rank 1, too little to share with growth"
        in text
    )
    batches = [(x[:, -1, :FEATURES], y) for x, y in to_classify(40, 2)]
    linear = nn.Sequential(nn.Linear(FEATURES, 8))
    result = race(partial(copy.deepcopy, linear), batches[4:], batches[:4], loss, steps=4, seeds=1, budget=0.5)
    assert result.winner == "lora" and "Sequential has no transformers model in it" in result.missing["growth"]
    assert "neither growth nor a mix" in result.verdict and json.dumps(result.figures(), allow_nan=False)


def test_what_always_trains_trains_in_every_method():
    model = Matcher()
    for name in ("lora", "growth", "mix", "random"):
        trained, groups = Method(name, 0.8, 1.0, ["head"], 8).prepare(Matcher(), to_match(8, 2), loss)
        optimizer = torch.optim.SGD(groups)
        loss(trained, to_match(1, 5)[0]).backward()
        optimizer.step()
        assert not torch.equal(trained.state_dict()[saved_head(trained)], model.head.weight), name
    with pytest.raises(ValueError, match="'heads' is no module of Matcher"):
        hold(modules_to_save=["heads"])


def saved_head(model: nn.Module) -> str:
    names = [name for name in model.state_dict() if name.endswith(("head.weight", "modules_to_save.default.weight"))]
    return names[-1]


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A finished race: its folder and result."""
    folder = tmp_path_factory.mktemp("race") / "out"
    return folder, hold(output=folder)


def copied(folder, to, runs: int):
    """A folder with the first runs of a race, after its identity and the start."""
    to.mkdir()
    lines = (folder / "race.jsonl").read_text().splitlines(keepends=True)
    (to / "race.jsonl").write_text("".join(lines[: 2 + runs]))
    return to


def test_the_same_call_continues_a_killed_race_and_trains_nothing_twice(finished, tmp_path, monkeypatch):
    folder, result = finished
    kept = (folder / "race.jsonl").read_text()
    killed = copied(folder, tmp_path / "killed", len(result.runs) - 1)
    with (killed / "race.jsonl").open("a") as file:
        file.write('{"method": "lo')
    assert str(hold(output=killed)) == str(result) and (killed / "race.jsonl").read_text() == kept
    more = hold(output=killed, seeds=2)
    assert [run.seed for run in more.runs_of("lora")] == [run.seed for run in more.runs_of(more.challenger)] == [0, 1]
    monkeypatch.setattr(module._Trainings, "train", lambda *_: pytest.fail("this run is in the file"))
    assert str(hold(output=folder)) == str(result) and (folder / "race.jsonl").read_text() == kept
    result.save(tmp_path)
    assert json.loads((tmp_path / "race.json").read_text())["winner"] == result.winner


def other_model() -> nn.Module:
    model = Matcher()
    nn.init.zeros_(model.head.weight)
    return model


@pytest.mark.parametrize(
    "named, other",
    [
        ("model", {"make_model": other_model}),
        ("train_batches", {"train": 4}),
        ("held_out_batches", {"held_out": 4}),
        ("loss", {"loss": lambda model, batch: 2 * loss(model, batch)}),
        ("steps", {"steps": 12}),
        ("budget", {"budget": 0.8}),
    ],
)
def test_another_race_is_refused_by_name(named, other, finished, monkeypatch):
    folder, _ = finished
    kept = (folder / "race.jsonl").read_text()
    monkeypatch.setattr(module._Trainings, "train", lambda *_: pytest.fail("a run of another race"))
    with pytest.raises(ValueError, match=rf"holds a race that differs in .*\b{named}\b.*Name a new folder"):
        hold(output=folder, **other)
    assert (folder / "race.jsonl").read_text() == kept


def test_ctrl_c_says_where_runs_are_kept(finished, tmp_path, monkeypatch):
    stopped = copied(finished[0], tmp_path / "stopped", runs=4)  # all of LoRA
    monkeypatch.setattr(module._Trainings, "train", lambda *_: signal.raise_signal(signal.SIGINT))
    with pytest.raises(KeyboardInterrupt, match=rf"continues in {stopped}(.|\n)*LoRA on all linear layers"):
        hold(output=stopped)


def test_a_diverged_run_is_kept_and_loses(tmp_path):
    diverges = hold(loss=lambda model, batch: loss(model, batch) / (1 - model.training), output=tmp_path)
    assert all(run.loss == math.inf for run in diverges.runs) and diverges.winner == "lora"
    for line in (tmp_path / "race.jsonl").read_text().splitlines():
        json.loads(line, parse_constant=pytest.fail)  # of NaN and Infinity


@pytest.mark.parametrize(
    "options, said",
    [
        ({"budget": 15}, "a budget of 15 weights buys nothing: LoRA of rank 1 takes"),
        ({"budget": 1.5}, "budget must be a whole number"),
        ({"make_model": cache(Matcher)}, "the same model twice"),
        ({"make_model": another_matcher}, "gave other weights than at its first call"),
        ({"held_out": 2}, "A held-out batch is among those to train on"),
        ({"loss": lambda *_: torch.tensor(torch.nan)}, "The loss of a held-out batch is not finite before training"),
        ({"loss": lambda *_: 1.5}, "A loss must be a tensor of one number, and that of batch 0 is a float"),
        ({"modules_to_save": "head"}, r"modules_to_save must be a list of names, such as \['head'\]"),
    ],
)
def test_what_would_make_a_verdict_untrue_is_refused(options, said):
    with pytest.raises(ValueError, match=said):
        hold(steps=4, seeds=1, **options)


def test_held_out_rows_that_a_training_sees_are_warned_of():
    def regrouped(count: int, seed: int) -> list[dict]:
        """Of seed 3, half of each batch is from another batch of seed 2."""
        batches = [{"rows": rows, "names": names} for rows, names in to_match(count, seed)]
        for batch, (rows, names) in zip(batches, to_match(40, 2)[1:] if seed == 3 else ()):
            batch["rows"][:16], batch["names"][:16] = rows[:16], names[:16]
        return batches

    with pytest.warns(UserWarning, match="128 of 256 held-out rows are also in the batches to train on"):
        hold(regrouped, loss=lambda model, batch: loss(model, (batch["rows"], batch["names"])), steps=4)


def test_batches_are_told_apart_by_every_number():
    large = torch.zeros(3000)
    assert digest([large]) == digest([large.clone()]) != digest([large.index_fill(0, torch.tensor([1500]), 1.0)])


@pytest.mark.parametrize("options", [{"steps": 3}, {"seeds": 0}, {"batches": lambda *_: to_match(1, 0)}])
def test_numbers_out_of_range_are_refused(options):
    with pytest.raises(ValueError, match="at least 4 steps, 1 seed, 2 batches"):
        hold(**options)


def test_held_out_losses_are_those_without_dropout():
    model, held_out = build("gpt2-2"), lm_batches(3, seed=2)
    assert model.config.attn_pdrop > 0
    with torch.no_grad():
        expected = [model(**batch).loss.item() for batch in held_out]
    result = race(lambda: build("gpt2-2").train(), lm_batches(4), held_out, budget=0.3, steps=4, seeds=1)
    assert result.start.losses == pytest.approx(expected)


@pytest.mark.parametrize("best, tried", [(4.0, [0.5, 1.5, 4.5]), (0.9, [0.5, 1.5, 0.5 / 3]), (1.4, [0.5, 1.5, 4.5])])
def test_learning_rates_go_beyond_the_better_end(best, tried):
    """And a second pass, which has all runs, trains nothing."""
    asked = []

    def train(name, rate, steps, seed):
        asked.append((name, rate, steps, seed))
        return run_of(name, [abs(rate - best), 1.0], seed, rate, steps)

    result = RaceResult(8, run_of("start", [9.0, 9.0], steps=0), OPTIONS)
    trainings = SimpleNamespace(width=1, train=train, bar=tqdm(disable=True))
    for _ in range(2):
        module._compete(result, trainings, ["lora", "growth", "mix"], seeds=3)
    for name in ("lora", "growth", "mix"):
        assert [rate for method, rate, steps, _ in asked if (method, steps) == (name, 2)] == tried
    assert result.rates["lora"] == min(tried, key=lambda rate: abs(rate - best))
    further = [(name, seed) for name, _, steps, seed in asked if steps == 8 and seed]
    assert further == [("lora", 1), ("growth", 1), ("lora", 2), ("growth", 2)]


def test_epochs_go_on_in_another_order_and_seeds_differ():
    order = {seed: module.order_batches([*range(5)], seed, 12) for seed in (0, 1)}
    assert order[0][:5] == [0, 1, 2, 3, 4] != order[1][:5] and order[0][5:10] != [0, 1, 2, 3, 4]
    assert all(sorted(each[:5]) == sorted(each[5:10]) == [0, 1, 2, 3, 4] for each in order.values())


def test_each_seed_begins_with_other_batches_and_adapters():
    trainings = module._Trainings(Matcher, to_match(20, 2), to_match(2, 3), loss, 0.8, OPTIONS | {"growth_batches": 4})
    method = Method("mix", 0.8, growth_batches=4)
    starts = []
    for seed in (0, 0, 1):
        model, _ = trainings._prepare(method, seed)
        starts.append({name: value.clone() for name, value in model.state_dict().items()})
        trainings._prepared = () if len(starts) == 1 else trainings._prepared
    (drawn,) = [name for name in starts[0] if name.endswith("q_proj.lora_A.default.weight")]
    grown = next(name for name in starts[0] if "extra.growths" in name)
    for name in (drawn, grown):
        assert torch.equal(starts[0][name], starts[1][name]) and not starts[0][name].equal(starts[2][name]), name


def test_new_dims_of_a_mix_train_at_a_rate_of_their_own(monkeypatch):
    rates, stock = [], torch.optim.AdamW
    monkeypatch.setattr("hf_growattn.training.methods.share_of_new_dims", lambda width: 0.1)
    monkeypatch.setattr(torch.optim, "AdamW", lambda groups: rates.append([g["lr"] for g in groups]) or stock(groups))
    hold(steps=4, methods=["mix"])
    of_mix = [each for each in rates if len(each) == 2]
    assert len(of_mix) == 4 and all(new == pytest.approx(0.1 * lora) for lora, new in of_mix)


def test_each_training_begins_with_the_buffers_of_the_model():
    model, starts = Matcher(), []
    model.register_buffer("steps", torch.zeros(()))

    def count(model, batch):
        starts.append(model.steps.item())
        model.steps += 1
        return loss(model, batch)

    made = partial(copy.deepcopy, model)
    trainings = module._Trainings(made, to_match(4, 2), to_match(2, 3), count, 0.8, OPTIONS)
    with tqdm(disable=True) as trainings.bar:
        trainings.begin(4, None)
        for rate in (1e-3, 2e-3):
            starts.clear()
            trainings.train("lora", rate, 4, 0)
            assert starts[0] == 0
