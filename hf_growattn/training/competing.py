"""Which trainings a contest takes: learning rates, who goes on, with how many seeds, and who trains for longer.

It trains nothing itself, so it is the same for any model, task and loss.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence

from .contest import CONTESTS, SHORT, Contest, Run, paired
from .methods import METHODS, readable

_SMALLER = (1 / 3, 1 / 9)  # of the least learning rate: tried where no training got below the start
_LARGER = (3, 9)  # times the largest one: tried for as long as the largest is the best

Train = Callable[[str, float, int, int], Run | None]


def steps_of(methods: Iterable[str], steps: int) -> int:
    """How many steps a contest takes, growths apart, if its first learning rates do and one seed does."""
    short = max(steps // SHORT, 1)
    return sum(len(METHODS[method].rates) * short + steps for method in methods)


def compete(
    contest: Contest, train: Train, rates: Mapping[str, Sequence[float]], seeds: int, halving: bool = True
) -> None:
    """Let methods compete, in the order in which they are given: what has to be beaten comes first.

    A method tries its learning rates in short trainings. The best one goes on to a long training, with any that are
    near it, and the best of these counts. Two whose order is open then, and matters, train for longer; so do two if the
    lead of one falls. Otherwise who wins, and not by far, has to do so with the other seeds as well. All start anew, so
    that every schedule comes to its end.

    Args:
        contest: gets the runs; an interrupted contest is worth what it has.
        train: runs a method with a learning rate, for so many steps, with a seed; None if it has nothing to train.
        rates: the methods by name, and the learning rates that each of them tries first.
        seeds: how many.
        halving: whether who is surely behind is out, who cannot be told apart goes on, and one seed may do.
    """
    nothing_held = False
    for method, first in rates.items():
        runs = [] if nothing_held and METHODS[method].growth else _short(contest, train, method, first)
        if not runs:
            nothing_held |= method == "growth"  # with the old dims frozen, which leaves most for new ones to gain
            contest.out[method] = f"{METHODS[method].capital} is out: nothing that it could add holds on other rows."
            continue
        contest.runs += runs
        reference = next((name for name, others in CONTESTS.items() if method in others), None)
        if halving and reference and contest.hopeless(method, reference):
            behind = -paired(contest.of(method, contest.short)[:1], contest.of(reference, contest.short)[:1])[0]
            contest.out[method] = (
                f"{METHODS[method].capital} is out: {behind:.4f} nats behind after {contest.short} steps."
            )
            continue
        contest.runs += _long(contest, train, method)
    for reference in filter(contest.of, CONTESTS):
        if halving and (_overtime(contest, train, reference) or contest.clear(reference)):
            continue  # never both: with two seeds and overtime a race takes over a fifth of what it foretells
        _other_seeds(contest, train, reference, seeds, halving)


def _other_seeds(contest: Contest, train: Train, reference: str, seeds: int, halving: bool) -> None:
    """Long trainings with the other seeds, of a method and of what wins over it: it might by one seed alone."""
    others, winner = list(filter(contest.of, CONTESTS[reference])), contest.winner_over(reference)
    if halving and winner == reference:
        return
    going = [winner] if halving else others
    for method in others if seeds > 1 else ():
        if method not in going:
            behind = f"{paired(contest.of(winner), contest.of(method))[0]:.4f} nats behind {METHODS[winner].title}"
            contest.out[method] = f"{METHODS[method].capital} has one seed alone: it ended {behind}."
    for method in [reference, *going]:
        for seed in range(1, seeds):
            contest.runs += filter(None, [train(method, contest.of(method)[0].rate, contest.steps, seed)])


def _overtime(contest: Contest, train: Train, reference: str) -> list[Run]:
    """Longer trainings of those whose order is open; none where it is not."""
    open_between = [(method, contest.of(method)[0].rate) for method in contest.open(reference)]
    ended = [run for method, rate in open_between if (run := train(method, rate, contest.overtime, 0))]
    contest.runs += ended
    return ended


def _short(contest: Contest, train: Train, method: str, first: Sequence[float]) -> list[Run]:
    """Short trainings: with the first learning rates, smaller ones if none gets below the start, and larger ones."""
    runs: list[Run] = []

    def tried(rate: float) -> bool:
        run = train(method, rate, contest.short, 0)
        runs.extend([run] if run else [])
        return run is not None

    if not all(map(tried, first)):
        return []
    for part in _SMALLER:
        if max(map(contest.gained, runs)) <= 0:
            tried(readable(part * min(first)))
    for part in _LARGER:
        if min(runs, key=lambda run: run.loss).rate == max(run.rate for run in runs):
            tried(readable(part * max(first)))
    return runs


def _long(contest: Contest, train: Train, method: str) -> list[Run]:
    """The best of the long trainings with the best learning rates; with further ones, where these go wrong for long."""
    near = contest.near(method)
    others = [run.rate for run in contest.of(method, contest.short) if run.rate not in near]
    ended = [run for rate in near if (run := train(method, rate, contest.steps, 0))]
    while ended and others and contest.failed(ended):
        ended += filter(None, [train(method, others.pop(0), contest.steps, 0)])
    return sorted(ended, key=lambda run: run.loss)[:1]
