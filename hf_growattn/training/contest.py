"""A contest between ways to train: who leads by how much, what that leaves open, and what it says.

It trains nothing itself, so it is the same for any model, task and loss.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from statistics import fmean, stdev

from ..report.words import MARGIN, SURE, gap_text, lines_of, printed, settled
from .methods import METHODS

SHORT = 4  # how many times shorter the trainings are that choose a learning rate, and show where a lead is going
_NEAR_RATE = 0.05  # of what the best learning rate gained: those that are behind by less go on, too
_NEAR = 0.1  # of what the winner gained: methods that are behind by less may end lower
TELLING = 20  # steps at least before growth can win: LoRA starts from nothing, and growth from a search
LONGER = 5  # how many times longer the training will be that a lead has to last for
_HELD = 0.5  # of what the short trainings gained: a long one that gained less has lost its way
_HOPELESS = 0.5  # of what the other gained: who is behind by more is dropped, or beaten with one seed
_FAR = 0.1  # of the loss before training: nobody is dropped for less, and who leads by more wins with one seed, too
_OVERTIME = 1.5  # how many times longer those train that the long trainings cannot tell apart
CONTESTS = {"lora": ("growth", "both"), "full": ("full+growth",)}  # what has to be beaten, and by whom


@dataclass(frozen=True)
class Run:
    """A training that ended.

    Attributes:
        method, rate, steps, seed: which one; the name is one of `METHODS`, or "start" for no training.
        nats: for each held-out row the loss of all its tokens, or whatever else is to be low.
        counts: for each held-out row how many tokens that is the sum of; 0 where it was not measured.
        weights: how many trained.
        cache: bytes of a token's keys and values.
        seconds: how long it took, with its growth.
        forward: how long a forward pass takes once it is merged, over what it took before; None if nobody timed it.
    """

    method: str
    rate: float
    steps: int
    seed: int
    nats: list[float] = field(repr=False)
    counts: list[int] = field(repr=False)
    weights: int
    cache: int
    seconds: float
    forward: float | None = None

    @property
    def loss(self) -> float:
        """Of a token; without bound where the training lost all sense."""
        loss = sum(self.nats) / sum(self.counts)
        return math.inf if math.isnan(loss) else loss

    def on_rows_of(self, other: "Run") -> "Run":
        """The same, on those of its rows that another one was measured on."""
        nats = [nats if count else 0.0 for nats, count in zip(self.nats, other.counts)]
        return replace(self, nats=nats, counts=other.counts)


@dataclass(frozen=True)
class Lead:
    """By how much one method ends below another, nats a token; below 0 it is behind.

    Attributes:
        mean, error: of the lead at the end, and its standard error over rows and seeds.
        early: the lead after the shorter training, from one seed.
        later: what is to be expected of a longer training; a lead that grew counts no more than it was. What was lost
            since the short training is lost again with as many times more steps; after overtime a lead is taken for a
            head start, which falls as one over the steps.
        lasting: whether that is worth having; after overtime, which is nearer to it, whether it is there at all.
        steps, shorter: of the trainings that were compared, and of the shorter ones.
    """

    mean: float
    error: float
    early: float
    later: float
    lasting: bool
    steps: int
    shorter: int

    @property
    def sure(self) -> bool:
        """Whether it is a lead that is there, is worth having by an error more than that, and will last."""
        return self.mean > SURE * self.error and self.mean - self.error > MARGIN and self.lasting

    @property
    def fading(self) -> bool:
        """Whether it is there, and will not last."""
        return settled(self.mean, self.error) > 0 and not self.lasting


def paired(own: Sequence[Run], other: Sequence[Run]) -> tuple[float, float]:
    """How much lower `own` ends than `other`, seed by seed and row by row, and the standard error of that."""
    pairs = [(a, b) for a in own for b in other if a.seed == b.seed]
    leads = [b.loss - a.loss for a, b in pairs]
    counts, mean = pairs[0][0].counts, fmean(leads)
    measured = sum(map(bool, counts))
    rows = [fmean(b.nats[row] - a.nats[row] for a, b in pairs) for row in range(len(counts))]
    beside = sum((nats - mean * count) ** 2 for nats, count in zip(rows, counts))
    over_rows = math.sqrt(beside * measured / max(measured - 1, 1)) / sum(counts)
    over_seeds = stdev(leads) / math.sqrt(len(leads)) if len(leads) > 1 else 0.0
    return mean, math.hypot(over_rows, over_seeds)


@dataclass
class Contest:
    """The trainings so far, and what they say.

    Attributes:
        steps: of the long trainings.
        start: the model before any training.
        runs: all that ended.
        out: why methods did not go on, by name.
    """

    steps: int
    start: Run
    runs: list[Run] = field(default_factory=list)
    out: dict[str, str] = field(default_factory=dict)

    @property
    def short(self) -> int:
        """Steps of the short trainings."""
        return max(self.steps // SHORT, 1)

    @property
    def overtime(self) -> int:
        """Steps of the trainings of those that the long ones cannot tell apart."""
        return round(_OVERTIME * self.steps)

    def of(self, method: str, steps: int | None = None) -> list[Run]:
        """The trainings of a method, by seed, the best first; the long ones unless other steps are told."""
        found = [run for run in self.runs if run.method == method and run.steps == (steps or self.steps)]
        return sorted(found, key=lambda run: (run.seed, run.loss))

    def loss(self, method: str, steps: int | None = None) -> float:
        """The mean over seeds."""
        return fmean(run.loss for run in self.of(method, steps))

    def lead(self, method: str, over: str) -> Lead:
        """How much lower a method ends than another one, in the longest trainings of both. Both must have ended."""
        longest = all(self.of(name, self.overtime) for name in (method, over))
        steps, shorter = (self.overtime, self.steps) if longest else (self.steps, self.short)
        own, others = self.of(method, steps), self.of(over, steps)
        mean, error = paired(own, others)
        before = self._alike(own[0], shorter), self._alike(others[0], shorter)
        after = [[runs[0].on_rows_of(before[0][0])] for runs in (own, others)]
        early, end = paired(*before)[0], LONGER * self.steps
        lost = min(paired(*after)[0] - early, 0.0)
        if longest:
            again = (1 / steps - 1 / end) / (1 / shorter - 1 / steps)
        else:
            again = math.log(end / steps) / math.log(max(steps / shorter, _OVERTIME))
        later = mean + again * lost
        return Lead(mean, error, early, later, later > (0 if longest else MARGIN), steps, shorter)

    def failed(self, runs: Sequence[Run]) -> bool:
        """Whether long trainings of a method all lost what its short ones had gained: too large a learning rate.

        By more than the margin: where next to nothing was gained, there is nothing to lose.
        """
        gained = self.gained(self.of(runs[0].method, self.short)[0])
        return _HELD * gained - max(map(self.gained, runs)) > MARGIN

    def gained(self, run: Run) -> float:
        """How far a training ended below the model before any, on the rows that it was measured on."""
        return self.start.on_rows_of(run).loss - run.loss

    def _alike(self, run: Run, steps: int) -> list[Run]:
        """Trainings that differ in how long they took."""
        return [r for r in self.of(run.method, steps) if (r.rate, r.seed) == (run.rate, run.seed)]

    def near(self, method: str) -> list[float]:
        """The learning rates that gained nearly as much as the best one in the short trainings, the best one first."""
        tried = self.of(method, self.short)
        gains = list(map(self.gained, tried))
        return [run.rate for run, gain in zip(tried, gains) if gain >= (1 - _NEAR_RATE) * gains[0] or run is tried[0]]

    def hopeless(self, method: str, reference: str) -> bool:
        """Whether a method is so far behind after the short training that it need not go on."""
        own, other = (self.of(name, self.short)[:1] for name in (method, reference))
        if not other:
            return False
        lead, error = paired(own, other)
        return -lead > max(_HOPELESS * self.gained(other[0]), 2 * SURE * error, _FAR * self.start.loss)

    def _reached(self, method: str) -> tuple[int, int]:
        """How far a method came: its trainings in overtime, and its long ones."""
        return len(self.of(method, self.overtime)), len(self.of(method))

    def challenger(self, reference: str) -> str | None:
        """The best of those that came furthest of the ones that have to beat a method; None if none ended.

        A tie between two that do beat it goes to the smaller KV cache, as a tie with LoRA goes to none at all.
        """
        furthest = max(map(self._reached, CONTESTS[reference]))
        steps = self.overtime if furthest[0] else self.steps
        ended = [name for name in CONTESTS[reference] if self._reached(name) == furthest and any(furthest)]
        ended.sort(key=lambda name: self.loss(name, steps))
        for name in ended[1:]:
            smaller = self.of(name)[0].cache < self.of(ended[0])[0].cache
            if smaller and self.lead(name, reference).sure and not self.lead(ended[0], name).sure:
                return name
        return ended[0] if ended else None

    def _rivals(self, challenger: str, reference: str) -> list[str]:
        """The others that came as far as the challenger."""
        others = [name for name in CONTESTS[reference] if name != challenger]
        return [name for name in others if self._reached(name) == self._reached(challenger)]

    def clear(self, reference: str) -> bool:
        """Whether one seed is enough, as somebody wins by far."""
        challenger = self.challenger(reference)
        if challenger is None:
            return False
        lead, rivals = self.lead(challenger, reference), self._rivals(challenger, reference)
        most = min(_HOPELESS * self.gained(self.of(challenger)[0]), _FAR * self.start.loss)
        far = lead.mean > max(2 * SURE * lead.error, most)
        return lead.sure and far and all(settled(*paired(self.of(challenger), self.of(n))) > 0 for n in rivals)

    def open(self, reference: str) -> list[str]:
        """Whose order the long trainings leave open, though much depends on it: two that win, or who may win."""
        challenger = self.challenger(reference)
        if challenger is None or self.steps < TELLING:
            return []
        lead = self.lead(challenger, reference)
        if not lead.sure:
            return [reference, challenger] if lead.mean > MARGIN else []
        winning = [name for name in self._rivals(challenger, reference) if self.lead(name, reference).sure]
        both_ways = {name: (self.lead(name, challenger), self.lead(challenger, name)) for name in winning}
        level = [name for name, leads in both_ways.items() if not any(lead.sure for lead in leads)]
        return [challenger, *level] if level else []

    def winner_over(self, reference: str) -> str:
        """Who wins against a method; a tie, or what is too short to tell, goes to the method."""
        challenger = self.challenger(reference)
        leads = challenger is not None and self.steps >= TELLING and self.lead(challenger, reference).sure
        return challenger if challenger and leads else reference

    @property
    def winner(self) -> str:
        """The method to go on with. All weights were only asked to train if somebody can pay for it."""
        best, whole = self.winner_over("lora"), self.winner_over("full") if self.of("full") else None
        return whole if whole and paired(self.of(whole), self.of(best))[0] > MARGIN else best

    @property
    def finalists(self) -> list[str]:
        """Who may end lowest in a longer training: the winner, and the next one where it is near; small caches first.

        A race sees no more than its own steps: who is a little behind then may be ahead in the end.
        """
        winner, caches = self.winner, {name: self.of(name)[0].cache for name in METHODS if self.of(name)}
        leads = {name: self.lead(name, winner).mean for name in caches if name != winner}
        gained = self.start.loss - self.loss(winner)
        near = sorted((name for name in leads if -leads[name] <= _NEAR * gained), key=leads.__getitem__)
        return sorted([winner, *near[-1:]], key=caches.__getitem__)

    @property
    def rate(self) -> float:
        """The winner's learning rate."""
        return self.of(self.winner)[0].rate

    def options_of(self, name: str) -> dict:
        """The options of `finetune` that train by a method, at the learning rate that was the best."""
        method, _, grown = name.partition("+")
        plain = {"max_growths": 0} if method == "full" and not grown else {}
        return {"method": method, **plain, "learning_rate": self.of(name)[0].rate}

    def sentences(self) -> list[str]:
        """What the contest says, in words."""
        said = []
        for reference in filter(self.of, CONTESTS):
            said.append(self._sentence(reference))
            said += [self.out[name] for name in CONTESTS[reference] if name in self.out]
            said += self._of_overtime(reference)
        return said

    def _of_overtime(self, reference: str) -> list[str]:
        """What the longer trainings of two that the long ones could not tell apart gave, if there were any."""
        ended = [name for name in (reference, *CONTESTS[reference]) if self.of(name, self.overtime)]
        if len(ended) < 2:
            return []
        first, *others = sorted(ended, key=lambda name: self.loss(name, self.overtime))
        leads = {name: self.lead(first, name) for name in others}
        gaps = [f"{gap_text(lead.mean, lead.error)} below {METHODS[name].title}" for name, lead in leads.items()]
        return [
            f"After {self.steps} steps it was open which of these ends lowest. Trained for {self.overtime}, "
            f"{METHODS[first].title} ends {' and '.join(gaps)}."
        ]

    def _sentence(self, reference: str) -> str:
        challenger, title = self.challenger(reference), METHODS[reference].title
        if challenger is None:
            return f"Train by {title}: no growth came to the end."
        lead, name = self.lead(challenger, reference), METHODS[challenger].title
        gap = gap_text(lead.mean, lead.error)
        wider = self.of(challenger)[0].cache / self.start.cache - 1
        if settled(lead.mean, lead.error) > 0 and self.steps < TELLING:
            return (
                f"Too short to tell: {name} ends {gap} below {title}, but {self.steps} steps show who is faster at "
                f"first, and not who ends lower. Race for {TELLING} steps at least."
            )
        if lead.sure:
            return f"Growth pays: {name} ends {gap} below {title}, for a KV cache {wider:.0%} larger."
        if settled(lead.mean, lead.error) < 0:
            return f"Growth does not pay: {title} ends {gap} below {name}, and costs nothing at inference."
        if lead.fading:
            return (
                f"Growth does not pay for long: {name} ends {gap} below {title}, but led by {lead.early:.4f} after "
                f"{lead.shorter} steps. Trained for {LONGER * self.steps}, {title} is expected to end as low, and it "
                "costs nothing at inference."
            )
        side = "below" if lead.mean > 0 else "above"
        wins = f"; to win, it has to lead by {MARGIN} and a standard error" if lead.mean > SURE * lead.error else ""
        goes = f"A tie goes to {title}, which costs nothing at inference."
        return f"A tie: {name} ends {gap} {side} {title}{wins}. {goes}"

    def table(self) -> str:
        """A row for each method that ended, the lowest loss first."""
        rows = [["before training", f"{self.start.loss:.4f}", "", "", f"{self.start.cache:,}", ""]]
        ended = [name for name in METHODS if self.of(name)]
        for name in sorted(ended, key=self.loss):
            first, lora = self.of(name)[0], name == "lora" or not self.of("lora")
            beside = "" if lora else "{:+.4f} ± {:.4f}".format(*paired(self.of(name), self.of("lora")))
            forward = "" if first.forward is None else f"{first.forward - 1:+.0%}"
            figures = beside, f"{first.weights:,}", f"{first.cache:,}", forward
            rows.append([METHODS[name].title, f"{self.loss(name):.4f}", *figures])
        columns = [
            "trained by",
            "held-out loss",
            "lead over LoRA",
            "weights trained",
            "KV cache, bytes a token",
            "forward pass",
        ]
        return printed(columns, rows)

    def __str__(self) -> str:
        return self.table() + "\n".join(map(lines_of, self.sentences()))

    def figures(self) -> dict:
        """Everything as what `json.dumps` takes."""
        leads = {
            name: vars(self.lead(name, reference)) | {"over": reference}
            for reference, names in CONTESTS.items()
            for name in names
            if self.of(name) and self.of(reference)
        }
        kept = []
        for run in self.runs:
            figures = {name: value for name, value in vars(run).items() if name not in ("nats", "counts")}
            kept.append(figures | {"loss": run.loss, "rows": sum(map(bool, run.counts))})
        said = {}
        if self.of("lora"):
            said = {"winner": self.winner, "rate": self.rate, "finalists": self.finalists}
        return {
            **said,
            "verdict": " ".join(self.sentences()),
            "steps": self.steps,
            "loss_before": self.start.loss,
            "leads": leads,
            "out": self.out,
            "runs": kept,
        }
