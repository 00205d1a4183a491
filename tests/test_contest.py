"""What a contest says of trainings, and which it asks for; nothing is trained here."""

import json
import math
from dataclasses import replace
from itertools import product

import pytest
import torch

from hf_growattn.training.competing import compete, steps_of
from hf_growattn.training.contest import MARGIN, SURE, Contest, Run, paired
from hf_growattn.training.methods import METHODS

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
            loss = loss.get(rate, math.inf) - (rate - 1) ** 2
        off = self.wobble * (1 if method == "growth" else -1)
        return (
            None if loss is None else run(method, loss + (rate - 1) ** 2 + seed * self.wobble, rate, steps, seed, off)
        )


def raced(seeds=2, halving=True, **losses) -> tuple[Contest, Given]:
    """A contest over 40 steps; of each method what it ends at after 10, after all, and after half as many again."""
    lengths = (10, 40, 60)
    trains = Given({(method, steps): loss for method, ends in losses.items() for steps, loss in zip(lengths, ends)})
    contest = Contest(40, run("start", 4.0))
    compete(contest, trains, dict.fromkeys(losses, (1.0, 1.5)), seeds, halving)
    return contest, trains


def test_a_lead_that_is_sure_and_lasts_wins():
    contest, trains = raced(lora=(3.5, 3.2), growth=(3.4, 3.1))
    assert contest.winner == "growth" and contest.options_of(contest.winner) == {
        "method": "growth",
        "learning_rate": 1.0,
    }
    assert contest.lead("growth", "lora").mean == pytest.approx(0.1)
    assert "Growth pays: growth ends 0.1000" in str(contest) and "KV cache 50% larger" in str(contest)
    # Two rates for a quarter of the steps, then the better one on every seed.
    assert [asked[1:] for asked in trains.asked if asked[0] == "lora"] == [
        (1.0, 10, 0),
        (1.5, 10, 0),
        (1.0, 40, 0),
        (1.0, 40, 1),
    ]
    assert sum(asked[2] for asked in trains.asked) == steps_of(("lora", "growth"), 40) + 2 * 40


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
    assert f"Growth pays: {METHODS[winner].title} ends" in said and ("Trained for 60" in said) == longer
    assert {asked[0] for asked in trains.asked if asked[2] == 60} == ({"growth", "both"} if longer else set())


@pytest.mark.parametrize("lead, wobble", [(0.05, 0.04), (0.013, 0.004)])
@pytest.mark.parametrize("after, winner", [((3.1, 3.0), "growth"), ((3.1, 3.095), "lora"), ((3.0, 3.1), "lora")])
def test_who_may_win_trains_for_longer(lead, wobble, after, winner):
    """A lead that may be nothing, or less than what is worth having: after half as many steps again it is."""
    contest = Contest(40, run("start", 4.0))
    ends = {("lora", 10): 3.5, ("lora", 40): 3.2, ("growth", 10): 3.5, ("growth", 40): 3.2 - lead}
    ends |= {("lora", 60): after[0], ("growth", 60): after[1]}
    trains = Given(ends)

    def wobbling(method, rate, steps, seed):
        trains.wobble = wobble if steps == 40 else 0.001
        return trains(method, rate, steps, seed)

    compete(contest, wobbling, dict.fromkeys(("lora", "growth"), (1.0, 1.5)), 1)
    assert contest.lead("growth", "lora").steps == 60 and contest.winner == winner
    assert contest.lead("growth", "lora").mean == pytest.approx(after[0] - after[1])
    assert "After 40 steps it was open which of these ends lowest. Trained for 60, " in " ".join(str(contest).split())
    mean, error = paired(contest.of("growth"), contest.of("lora"))
    assert mean > MARGIN > mean - error
    assert (mean > SURE * error) == (lead == 0.013)


@pytest.mark.parametrize(
    "methods, finalists",
    [
        (dict(growth=(3.5, 3.25)), ["lora", "growth"]),  # behind by a sixteenth of what LoRA gained
        (dict(growth=(3.5, 3.29)), ["lora"]),  # by more than a tenth
        (dict(growth=(3.5, 3.195)), ["lora", "growth"]),  # a tie
        (dict(growth=(3.45, 3.15)), ["lora", "growth"]),  # which wins, and has the larger KV cache
        (dict(growth=(3.4, 3.0)), ["growth"]),
        (dict(growth=(3.4, 3.0), both=(3.4, 3.05)), ["both", "growth"]),
        (dict(growth=(3.5, 3.25), both=(3.5, 3.24)), ["lora", "both"]),  # the nearest one alone
        (dict(growth=(3.5, 3.24), both=(3.5, 3.245)), ["lora", "growth"]),  # by however little
        (dict(growth=(3.5, 3.22), both=(3.5, 3.245)), ["lora", "growth"]),
        (dict(growth=(3.5, None)), ["lora"]),
    ],
)
def test_who_is_near_the_winner_may_end_lower(methods, finalists):
    contest, _ = raced(lora=(3.5, 3.2), **methods)
    assert contest.finalists == finalists and contest.winner in finalists


def test_a_winner_by_far_needs_one_seed():
    """Not where others that win are near it: then a longer training tells more."""
    contest, trains = raced(lora=(3.5, 3.2), growth=(3.0, 2.5), both=(3.4, 3.1))
    assert contest.winner == "growth" and not [asked for asked in trains.asked if asked[3] == 1]
    assert [len(contest.of(name)) for name in ("lora", "growth", "both")] == [1, 1, 1]
    contest, _ = raced(lora=(3.5, 3.2), growth=(3.0, 2.85), both=(3.4, 3.1))  # under a tenth of the loss at the start
    assert contest.winner == "growth" and len(contest.of("growth")) == 2
    for loss, seeds in ((3.9, 1), (3.8, 2)):  # LoRA gained less than half as much, or more
        contest, _ = raced(lora=(3.95, loss), growth=(3.8, 3.65))
        assert contest.winner == "growth" and len(contest.of("growth")) == seeds
    contest, trains = raced(lora=(3.5, 3.2), growth=(3.0, 2.5, 2.4), both=(3.0, 2.505, 2.45))
    assert contest.winner == "growth" and len(contest.of("growth", 60)) == len(contest.of("both", 60)) == 1
    assert not [asked for asked in trains.asked if asked[3] == 1]


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
        # Ahead by .2 after 10 steps, by .05 after 40 and by .02 after 60: by 200 nothing of that is left.
        ((3.5, 3.2, 3.1), (3.3, 3.15, 3.08), "Growth does not pay for long: growth ends 0.0200"),
        ((3.5, 3.2), (None, None), "Growth is out: nothing that it could add holds"),
    ],
)
def test_what_is_no_lasting_lead_goes_to_lora(lora, growth, said):
    contest, _ = raced(lora=lora, growth=growth)
    assert contest.winner == "lora" and said in str(contest)
    assert json.loads(json.dumps(contest.figures()))["winner"] == "lora"


def test_a_lead_that_fades_is_looked_at_again():
    """What LoRA, which starts from nothing, makes up at first says little of what it makes up later."""
    contest, trains = raced(lora=(3.5, 3.2, 3.1), growth=(3.3, 3.15, 3.06))
    assert contest.lead("growth", "lora").lasting and contest.winner == "growth"
    assert not [asked for asked in trains.asked if asked[3] == 1]


def test_noise_is_no_lead():
    contest = Contest(40, run("start", 4.0))
    for method, sign in (("lora", -1), ("growth", 1)):
        for steps, loss in ((10, 3.5), (40, 3.2 if method == "lora" else 3.1)):
            contest.runs.append(run(method, loss, steps=steps, wobble=0.2 * sign))
    assert contest.lead("growth", "lora").error > 0.05 and contest.winner == "lora" and "A tie" in str(contest)
    assert "to win" not in str(contest)


def test_a_lead_that_is_there_and_too_small_says_what_it_takes():
    """Else a reader sees .013 ± .004 called a tie, and wonders why."""
    contest = Contest(40, run("start", 4.0))
    for method, sign in (("lora", -1), ("growth", 1)):
        for steps, loss in ((10, 3.5), (40, 3.2 if method == "lora" else 3.187)):
            contest.runs.append(run(method, loss, steps=steps, wobble=0.004 * sign))
    lead = contest.lead("growth", "lora")
    assert 0.003 < lead.error < 0.006 and contest.winner == "lora"
    (said,) = contest.sentences()
    assert said.startswith("A tie: growth ends 0.0130 ± 0.00")
    assert "LoRA on all linear layers; to win, it has to lead by 0.01 and a standard error. A tie goes to" in said


def test_short_trainings_are_judged_on_some_rows_alone():
    """Those may be harder than the others, and show another lead: only like is compared with like."""

    def measured(method, steps, short=False):
        """A start, and trainings that gain 2 on all rows; growth leads by 0.2 on the first two, by 0.1 in all."""
        gain, lead = 0.0 if method == "start" else 2.0, 0.2 if method == "growth" else 0.0
        losses = [9 - gain - lead, 9 - gain - lead, 3 - gain, 3 - gain]
        counts = [*COUNTS[:2], 0, 0] if short else COUNTS
        nats = [count * loss for count, loss in zip(counts, losses)]
        return replace(run(method, 0.0, steps=steps), nats=nats, counts=counts)

    contest = Contest(40, measured("start", 0))
    trainings = list(product(("lora", "growth"), (10, 40)))
    contest.runs = [measured(*of) for of in trainings]
    on_all = contest.lead("growth", "lora"), contest.gained(contest.of("lora", 10)[0])
    contest.runs = [measured(*of, short=of[1] == 10) for of in trainings]
    on_some = contest.lead("growth", "lora"), contest.gained(contest.of("lora", 10)[0])
    assert on_all[1] == pytest.approx(2.0) and on_some[1] == pytest.approx(2.0)
    assert on_some[0].mean == on_some[0].later == on_all[0].later == pytest.approx(0.2 * 12 / 22)
    assert on_some[0].early == pytest.approx(0.2) and not contest.failed(contest.of("lora"))
    assert [kept["rows"] for kept in contest.figures()["runs"]] == [2, 4, 2, 4]


def test_the_hopeless_do_not_go_on():
    contest, trains = raced(lora=(3.5, 3.2), growth=(3.95, 3.0))
    assert contest.winner == "lora" and "Growth is out: 0.4500 nats behind after 10 steps." in str(contest)
    assert ("growth", 1.0, 40, 0) not in trains.asked
    contest, _ = raced(lora=(3.5, 3.2), growth=(3.6, 3.0))  # behind, but not by so much: it turns out to win
    assert contest.winner == "growth"


def test_a_growth_that_wins_has_to_win_with_all_seeds():
    """And LoRA beside it; nobody trains for the sake of who does not win."""

    def seeds_of(contest):
        return {name: len(contest.of(name)) for name in METHODS if contest.of(name)}

    contest, _ = raced(lora=(3.5, 3.2), growth=(3.4, 3.3), both=(3.4, 3.1))
    assert seeds_of(contest) == {"lora": 2, "growth": 1, "both": 2} and contest.winner == "both"
    assert "Growth has one seed alone: it ended 0.2000 nats behind 1/3 growth, 2/3 LoRA." in contest.sentences()
    contest, _ = raced(lora=(3.5, 3.2), growth=(3.4, 3.1), both=(3.45, 3.15))  # it wins as well, behind
    assert seeds_of(contest) == {"lora": 2, "growth": 2, "both": 1} and contest.winner == "growth"
    for lead in (-0.05, 0.005):  # LoRA wins
        contest, _ = raced(lora=(3.5, 3.2), growth=(3.5, 3.2 - lead), both=(3.4, 3.25))
        assert seeds_of(contest) == {"lora": 1, "growth": 1, "both": 1} and contest.winner == "lora"
        assert "one seed alone" not in str(contest)
    contest, _ = raced(halving=False, lora=(3.5, 3.2), growth=(3.4, 3.3), both=(3.4, 3.25))
    assert seeds_of(contest) == {"lora": 2, "growth": 2, "both": 2}
    contest, _ = raced(halving=False, lora=(3.5, 3.2), growth=(None, None))
    assert seeds_of(contest) == {"lora": 2}


def test_a_second_seed_may_take_a_verdict_back():
    """A lead of .04 with one seed, and none with the other: an error over seeds, and a tie."""
    contest = Contest(40, run("start", 4.0))

    def trains(method, rate, steps, seed):
        ends = {10: 3.5, 40: 3.2} if method == "lora" or seed else {10: 3.46, 40: 3.16}
        return run(method, ends[steps], rate, steps, seed)

    compete(contest, trains, dict.fromkeys(("lora", "growth"), (1.0,)), 2)
    assert contest.winner == "lora" and "A tie: growth ends 0.0200" in str(contest)


def test_what_holds_nowhere_is_not_looked_for_again():
    """Growth with all of the budget finds nothing: neither would a third of it, beside LoRA or all weights."""
    ends = {"lora": (3.5, 3.2), "growth": (None, None), "both": (3.4, 3.0), "full": (3.0, 2.8), "full+growth": (2.9, 2)}
    contest, trains = raced(**ends)
    assert {asked[0] for asked in trains.asked} == {"lora", "growth", "full"}
    assert set(contest.out) == {"growth", "both", "full+growth"}
    contest, trains = raced(**ends | {"growth": (3.6, 3.3), "both": (None, None)})  # the other way round it may
    assert set(contest.out) == {"both"} and contest.of("full+growth")


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


@pytest.mark.parametrize(
    "best, tried",
    [(1.0, [1.0, 1.5]), (1.5, [1.0, 1.5, 4.5]), (4.5, [1.0, 1.5, 4.5, 14.0]), (99, [1.0, 1.5, 4.5, 14.0])],
)
def test_larger_rates_are_tried_while_the_largest_is_best(best, tried):
    contest, asked = Contest(40, run("start", 4.0)), []

    def trains(method, rate, steps, seed):
        asked.append((method, rate, steps))
        return run(method, math.nan if rate > best else 3.5 - rate / 100, rate, steps, seed)

    compete(contest, trains, {"lora": (1.0, 1.5)}, 1)
    assert [rate for _, rate, steps in asked if steps == 10] == tried
    assert contest.of("lora")[0].rate == max(rate for rate in tried if rate <= best)


def test_a_rate_that_goes_wrong_after_a_while_gives_way_to_the_next():
    """The larger one is far ahead after the short training, and ends where it began, or nowhere."""
    for end in (4.1, math.nan):
        contest, trains = raced(seeds=1, lora=({1.0: 3.9, 1.5: 3.2}, {1.0: 3.1, 1.5: end}))
        assert [asked[1] for asked in trains.asked if asked[2] == 40] == [1.5, 1.0]
        assert contest.of("lora")[0].rate == 1.0 and contest.loss("lora") == pytest.approx(3.1)
    for end, asked in ((4.006, [1.5]), (4.1, [1.5, 1.0]), (math.nan, [1.5, 1.0])):  # next to nothing was to lose
        contest, trains = raced(seeds=1, lora=({1.0: 4.1, 1.5: 3.995}, {1.0: 3.99, 1.5: end}))
        assert [rate for _, rate, steps, _ in trains.asked if steps == 40] == asked


def test_all_weights_have_a_contest_of_their_own():
    contest, _ = raced(lora=(3.5, 3.2), growth=(3.6, 3.3), full=(3.0, 2.8), **{"full+growth": (2.9, 2.7)})
    assert contest.winner == "full+growth" and contest.options_of(contest.winner)["method"] == "full"
    contest, _ = raced(lora=(3.5, 3.2), growth=(3.6, 3.3), full=(3.0, 2.8), **{"full+growth": (3.0, 2.8)})
    assert contest.options_of(contest.winner) == {"method": "full", "max_growths": 0, "learning_rate": 1.0}


def test_the_error_of_a_lead_is_the_jackknifes():
    generator = torch.Generator().manual_seed(0)
    counts = torch.randint(5, 60, (400,), generator=generator).tolist()
    nats = [[3 * n + n**0.5 * x for n, x in zip(counts, torch.randn(400, generator=generator).tolist())] for _ in "ab"]
    one, other = (replace(run("lora", 3.0), nats=own, counts=counts) for own in nats)
    mean, error = paired([one], [other])
    without = [(sum(nats[1]) - nats[1][i] - sum(nats[0]) + nats[0][i]) / (sum(counts) - counts[i]) for i in range(400)]
    spread = math.sqrt(399 * torch.tensor(without, dtype=torch.float64).var(correction=0).item())
    assert mean == pytest.approx(other.loss - one.loss) and error == pytest.approx(spread, rel=0.02)  # first order
