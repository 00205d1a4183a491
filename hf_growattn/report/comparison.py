"""What a race compares: the runs, the rule, the table and the sentence. It trains nothing."""

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from .words import format_table

MARGIN = 0.01  # of the loss, nats a token on text: a smaller lead does not count
SURE = 2  # standard errors that a lead must exceed
_EQUAL = 0.03  # of LoRA's weights: a larger difference is said
TITLES = {
    "lora": "LoRA on all linear layers",
    "growth": "growth",
    "mix": "1/3 growth, 2/3 LoRA",
    "random": "new dims in random directions",
    "all": "all weights",
    "all_growth": "all weights and growth",
}
_COLUMNS = ("trained by", "learning rate", "held-out loss", "lead over LoRA", "weights", "KV cache, bytes a token")


@dataclass(frozen=True)
class Run:
    """A training that ended, as a line of JSON keeps it."""

    method: str  # the name of a `Method`, or "start" before any training
    rate: float
    steps: int
    seed: int
    losses: list[float] = field(repr=False)  # of each held-out batch; empty if it diverged
    weights: int  # that trained, without those of modules_to_save
    cache: int  # bytes that keys and values of a token take

    @property
    def loss(self) -> float:
        """The mean; infinite if the training diverged."""
        return fmean(self.losses) if self.losses else math.inf


def compare_runs(own: Sequence[Run], other: Sequence[Run]) -> tuple[float, float]:
    """How much lower `own` ends than `other`, paired by seed and held-out batch, and the standard error."""
    pairs = [(a, b) for a in own for b in other if a.seed == b.seed]
    if not all(a.losses for a, _ in pairs):
        return -math.inf, 0.0
    if not all(b.losses for _, b in pairs):
        return math.inf, 0.0
    of_batches = [fmean(leads) for leads in zip(*([y - x for x, y in zip(a.losses, b.losses)] for a, b in pairs))]
    of_seeds = [b.loss - a.loss for a, b in pairs]
    error = math.hypot(*(stdev(leads) / math.sqrt(len(leads)) for leads in (of_batches, of_seeds) if len(leads) > 1))
    return fmean(of_seeds), error


@dataclass
class RaceResult:
    """The trainings of a race, who won, and the method to train by.

    Attributes:
        steps: of the long trainings.
        start: the model before training.
        options: of each `Method`: the weights of LoRA as the budget, modules_to_save, and growth_batches.
        runs: all trainings that ended.
        missing: why a method could not be had, by its name.
        method: the winner as a `Method`: `method.prepare(make_model(), batches, loss)` gives what to train. Its
            learning rate is the best one for a schedule as in the race; a constant rate should be lower.
    """

    steps: int
    start: Run
    options: dict[str, Any]
    runs: list[Run] = field(default_factory=list)
    missing: dict[str, str] = field(default_factory=dict)
    method: Any = None

    def runs_of(self, method: str) -> list[Run]:
        """The long trainings of a method, by seed."""
        return [run for run in self.runs if run.method == method and run.steps == self.steps]

    @property
    def rates(self) -> dict[str, float]:
        """The learning rate chosen for each method whose long training ended."""
        return {name: self.runs_of(name)[0].rate for name in TITLES if self.runs_of(name)}

    @property
    def challenger(self) -> str | None:
        """Growth or the mix, whichever ends lower with the first seed; None if neither could be had."""
        others = [name for name in ("growth", "mix") if name in self.rates]
        return min(others, key=lambda name: self.runs_of(name)[0].loss, default=None)

    @property
    def lead(self) -> tuple[float, float]:
        """How much lower the challenger ends than LoRA, and the standard error."""
        if not self.challenger:
            return -math.inf, 0.0
        return compare_runs(self.runs_of(self.challenger), self.runs_of("lora"))

    @property
    def winner(self) -> str:
        """The challenger if it leads by more than the margin and two standard errors; otherwise "lora"."""
        lead, error = self.lead
        return self.challenger if self.challenger and lead > max(MARGIN, SURE * error) else "lora"

    @property
    def verdict(self) -> str:
        """The result in a sentence, and whether the race leaves it open that growth or the mix leads."""
        if not self.challenger:
            return "LoRA wins: neither growth nor a mix could be had."
        lead, error = self.lead
        title = "the mix" if self.challenger == "mix" else TITLES[self.challenger]
        if math.isinf(lead):
            return f"LoRA wins: {title} diverged." if lead < 0 else f"The winner is {title}: LoRA diverged."
        gap = f"{abs(lead):.4f} ± {error:.4f}"
        if self.winner != "lora":
            before, after = self.start.cache, self.runs_of(self.winner)[0].cache
            cost = f", with a KV cache {after / before - 1:.0%} larger" if before else ""
            return f"The winner is {title}: its held-out loss is {gap} lower than LoRA's{cost}."
        may_lead = lead + SURE * error > MARGIN
        open_end = f" More held-out batches or seeds may show that {title} leads." if may_lead else ""
        if lead <= 0:
            return f"LoRA wins: its held-out loss is {gap} lower than that of {title}.{open_end}"
        needed = f"by more than {MARGIN}" if lead > SURE * error else "by more than two standard errors"
        return f"LoRA wins: the held-out loss of {title} is {gap} lower, and must be lower {needed}.{open_end}"

    def table(self) -> str:
        """A row for each method, the largest lead first, and remarks on some of them."""
        rows = [["before training", "", f"{self.start.loss:.4f}", "", "", f"{self.start.cache:,}"]]
        leads = {name: compare_runs(self.runs_of(name), self.runs_of("lora")) for name in self.rates}
        for name in sorted(leads, key=lambda name: -leads[name][0]):
            runs, lead = self.runs_of(name), "" if name == "lora" else "{:+.4f} ± {:.4f}".format(*leads[name])
            loss, sizes = fmean(run.loss for run in runs), [f"{runs[0].weights:,}", f"{runs[0].cache:,}"]
            rows.append([TITLES[name], f"{runs[0].rate:.2g}", f"{loss:.4f}", lead, *sizes])
        rows += [[TITLES[name], "", "not trained", "", "", ""] for name in self.missing]
        shown = len(_COLUMNS) if self.start.cache else len(_COLUMNS) - 1  # encoders keep no keys and values
        table = format_table(_COLUMNS[:shown], [row[:shown] for row in rows])
        return "\n".join([table.rstrip("\n"), *self._remarks()])

    def _remarks(self) -> list[str]:
        """What errors are, whether anything was learned, and which methods lack, or differ in seeds or in weights."""
        budget = self.options["budget"]
        said = ["A lead is over trainings with the same seeds, a loss over all seeds. ± is one standard error."]
        worse = [name for name in self.rates if fmean(run.loss for run in self.runs_of(name)) >= self.start.loss]
        if worse:
            names = " and ".join(TITLES[name] for name in worse)
            said.append(f"Not below the loss before training: {names}. Train longer before you trust this.")
        said += [f"Not trained: {TITLES[name]}, since {why}." for name, why in self.missing.items()]
        seeds = len(self.runs_of("lora"))
        for name in self.rates:
            runs = self.runs_of(name)
            if len(runs) < seeds:
                said.append(
                    f"{TITLES[name]} was behind with the first of {seeds} seeds, and did not train with more: its lead "
                    "is of that seed alone, and does not count."
                )
            weights = runs[0].weights
            if not name.startswith("all") and abs(weights - budget) > _EQUAL * budget:
                more = "further new dims would not fit, or not lower the loss"
                said.append(f"{TITLES[name]} trains {weights:,} of {budget:,} weights: {more}.")
        return said

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
            "not_trained": self.missing,
            **self.options,
            "steps": self.steps,
            "start": vars(self.start),
            "runs": [vars(run) for run in self.runs],
        }

    def save(self, path: str | Path) -> None:
        """Write the figures to a JSON file, or as race.json into a folder."""
        path = Path(path)
        file = path if path.suffix == ".json" else path / "race.json"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(self.figures(), allow_nan=False, indent=1) + "\n")
