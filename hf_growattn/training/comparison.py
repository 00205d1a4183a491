"""What a race compares: the runs, the rule, the table and the sentence. It trains nothing."""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from statistics import fmean, stdev
from typing import Any

from ..report.words import MARGIN, format_table
from .methods import METHODS

SURE = 2  # standard errors that a lead must exceed
SHORT = 4  # how many times shorter the trainings are that choose a learning rate
_COLUMNS = ("trained by", "learning rate", "held-out loss", "lead over LoRA", "weights", "KV cache, bytes a token")


@dataclass(frozen=True)
class Run:
    """A training that ended, as a line of JSON keeps it."""

    method: str  # one of `METHODS`, or "start" before any training
    rate: float
    steps: int
    seed: int
    nats: list[float] = field(repr=False)  # the loss of each held-out row, over its tokens; empty if it diverged
    counts: list[int] = field(repr=False)  # the number of these tokens
    weights: int  # that trained
    cache: int  # bytes that keys and values of a token take

    @property
    def loss(self) -> float:
        """Nats a token; infinite if the training diverged."""
        return sum(self.nats) / sum(self.counts) if self.nats else math.inf


def compare_runs(own: Sequence[Run], other: Sequence[Run]) -> tuple[float, float]:
    """How much lower `own` ends than `other`, paired by seed and row, and the standard error."""
    pairs = [(a, b) for a in own for b in other if a.seed == b.seed]
    if not all(a.nats for a, _ in pairs):
        return -math.inf, 0.0
    if not all(b.nats for _, b in pairs):
        return math.inf, 0.0
    leads = [b.loss - a.loss for a, b in pairs]
    mean = fmean(leads)
    counts = pairs[0][0].counts
    squares = 0.0
    for row, count in enumerate(counts):
        lower = fmean(b.nats[row] - a.nats[row] for a, b in pairs)
        squares += (lower - mean * count) ** 2
    over_rows = math.sqrt(squares * len(counts) / max(len(counts) - 1, 1)) / sum(counts)
    over_seeds = stdev(leads) / math.sqrt(len(leads)) if len(leads) > 1 else 0.0
    return mean, math.hypot(over_rows, over_seeds)


@dataclass
class Race:
    """The trainings so far, and the result."""

    steps: int  # of the long trainings
    start: Run  # the model before training
    runs: list[Run] = field(default_factory=list)
    rank: int = 0  # of LoRA with the whole budget
    width: int = 0  # the model's hidden_size

    def runs_of(self, method: str) -> list[Run]:
        """The long trainings of a method, by seed."""
        return [run for run in self.runs if run.method == method and run.steps == self.steps]

    @property
    def rates(self) -> dict[str, float]:
        """The learning rate chosen for each method whose long training ended."""
        return {name: self.runs_of(name)[0].rate for name in METHODS if self.runs_of(name)}

    @property
    def challenger(self) -> str | None:
        """The best method but LoRA after its first seed; None if nothing grew."""
        others = [name for name in self.rates if name != "lora"]
        return min(others, key=lambda name: self.runs_of(name)[0].loss, default=None)

    @property
    def lead(self) -> tuple[float, float]:
        """How much lower the challenger ends than LoRA, and the standard error."""
        if not self.challenger:
            return -math.inf, 0.0
        return compare_runs(self.runs_of(self.challenger), self.runs_of("lora"))

    @property
    def winner(self) -> str:
        """The challenger if it leads by more than the margin and two standard errors; otherwise LoRA."""
        lead, error = self.lead
        return self.challenger if self.challenger and lead > max(MARGIN, SURE * error) else "lora"

    @property
    def verdict(self) -> str:
        """The result in one sentence."""
        if not self.challenger:
            return "LoRA wins: no growth was found that helps on other rows."
        lead, error = self.lead
        title = METHODS[self.challenger].title
        if math.isinf(lead):
            return f"LoRA wins: {title} diverged." if lead < 0 else f"{title} wins: LoRA diverged."
        gap = f"{abs(lead):.4f} ± {error:.4f} nats a token"
        if self.winner != "lora":
            wider = self.runs_of(self.winner)[0].cache / self.start.cache - 1
            return f"{title} wins: it is {gap} lower than LoRA, with a KV cache {wider:.0%} larger."
        if lead <= 0:
            return f"LoRA wins: {title} is {gap} higher."
        return f"LoRA wins: {title} is {gap} lower, but must lead by more than {MARGIN} and two standard errors."

    def table(self) -> str:
        """A row for each method that ended, the lowest loss first."""
        rows = [["before training", "", f"{self.start.loss:.4f}", "", "", f"{self.start.cache:,}"]]
        losses = {name: fmean(run.loss for run in self.runs_of(name)) for name in self.rates}
        for name in sorted(losses, key=losses.__getitem__):
            runs, lead = self.runs_of(name), ""
            if name != "lora":
                lead = "{:+.4f} ± {:.4f}".format(*compare_runs(runs, self.runs_of("lora")))
            sizes = [f"{runs[0].weights:,}", f"{runs[0].cache:,}"]
            rows.append([METHODS[name].title, f"{runs[0].rate:.2g}", f"{losses[name]:.4f}", lead, *sizes])
        return format_table(_COLUMNS, rows)

    def __str__(self) -> str:
        return f"{self.table()}\n{self.verdict}"

    def figures(self) -> dict:
        """The result as valid JSON, in which null stands for a lead without bound."""
        lead, error = self.lead
        return {
            "winner": self.winner,
            "verdict": self.verdict,
            "rates": self.rates,
            "lead": lead if math.isfinite(lead) else None,
            "error": error,
        }


def compete(race: Race, train: Callable, methods: Iterable[str], rates: Sequence[float], seeds: int) -> None:
    """Choose learning rates, train every method with the best one, then LoRA and its challenger with further seeds.

    `train` returns the `Run` of a method, a learning rate, a number of steps and a seed, or None if nothing grew. Runs
    that the race already has are not trained again.
    """

    def run(*setting) -> Any:
        for kept in race.runs:
            if (kept.method, kept.rate, kept.steps, kept.seed) == setting:
                return kept
        trained = train(*setting)
        race.runs += [trained] if trained else []
        return trained

    short = race.steps // SHORT
    for method in methods:
        tried = [run(method, rate, short, 0) for rate in rates]
        if None in tried:  # nothing grew
            continue
        best = _best_rate(tried)
        tried.append(run(method, 3 * best if best == max(rates) else best / 3, short, 0))
        run(method, _best_rate(tried), race.steps, 0)
    finalists = ["lora", race.challenger] if race.challenger else []
    for seed in range(1, seeds):
        for method in finalists:
            run(method, race.rates[method], race.steps, seed)


def _best_rate(runs: list[Run]) -> float:
    return min(runs, key=lambda run: run.loss).rate
