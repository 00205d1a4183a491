"""Compare the winner of a race with the winner of trainings five times as long.

    OMP_NUM_THREADS=1 python scripts/bench/races.py --model a/llama --text a.txt b.txt --pretrain stories.jsonl

A pair is a model and its data: the given models and small Llamas on the given texts, and models with narrow heads on
phone books and nearest neighbours. Each pair races, and then races again with five times as many steps, which shows
whether the first result was right. Leads of older pairs, raced by earlier code, are kept in results/races.json.
"""

import argparse
import hashlib
import json
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import harness
import page
import torch
from harness import Task, collect, digest_of_files, source_of
from neighbour_task import NextNeighbour
from recall_task import PhoneBook
from text_task import READ, OnText, OnTextNarrow, tiny_llama

from hf_growattn import race
from hf_growattn.report.comparison import MARGIN, SURE, TITLES, RaceResult, compare_runs
from hf_growattn.training.methods import weights_of_rank_one

LONGER = 5  # times as many steps
RANK = 3  # of LoRA on all linear layers, whose weights are the budget
WIDTHS = (6, 10, 24)  # of the heads of small Llamas
OUTCOME = ("against LoRA", "lead in the race", "lead in the long race", "winner", "right or wrong")


@dataclass(frozen=True)
class Pair:
    """A model and data to race on, for `collect`.

    Attributes:
        task: gives both.
        steps, seeds: of the race.
        growth_batches: that a growth looks at.
        held_out: rows to compare on.
    """

    task: Task
    steps: int = 20
    seeds: int = 2
    growth_batches: int = 6
    held_out: int = 128

    def key(self) -> str:
        """A digest of the model, the data and the sizes; rows name the commit of the code."""
        files = [digest_of_files(path) for path in self.task.files()]
        given = {"kind": type(self.task).__name__, "source": source_of(self.task), "files": files, **asdict(self)}
        return hashlib.sha256(json.dumps(given, sort_keys=True).encode()).hexdigest()[:16]

    def held_out_batches(self) -> list[dict]:
        """Batches to compare on, small ones: the error of a race is that over them."""
        if isinstance(self.task, OnText):
            return self.task.tested(0)
        size = len(self.task.batch(1, 0)["input_ids"])
        return [self.task.batch(1, step) for step in range(-(-self.held_out // size))]


def measure(pair: Pair) -> dict:
    """The race of a pair and the long one, in the figures that the page needs."""
    torch.set_num_threads(1)
    pair.task.model(0)  # pretrains it, which is no part of a race
    short, short_seconds = run(pair, pair.steps)
    long, long_seconds = run(pair, LONGER * pair.steps)
    name = short.challenger or long.challenger
    row: dict = {"key": pair.key(), "pair": pair.task.name, "on_text": isinstance(pair.task, OnText)}
    row["commit"], row["challenger"] = page.commit(), name
    row["lead"], row["error"] = lead_of(short, name)
    row["long"], row["long_error"] = lead_of(long, name)
    row |= {"rates": short.rates, "long_rates": long.rates}
    return harness.finite(row | {"seconds": short_seconds, "long_seconds": long_seconds})


def lead_of(result: RaceResult, name: str | None) -> tuple[float | None, float | None]:
    """How much lower a method ends than LoRA, and the standard error; None for both where it found nothing to grow."""
    runs = result.runs_of(name or "")
    return compare_runs(runs, result.runs_of("lora")) if runs else (None, None)


def run(pair: Pair, steps: int) -> tuple[RaceResult, float]:
    """A race of some steps, and its processor time."""
    task, began = pair.task, time.process_time()
    result = race(
        lambda: task.model(0),
        [task.batch(0, step) for step in range(steps)],
        pair.held_out_batches(),
        task.loss,
        budget=RANK * weights_of_rank_one(task.model(0), {}),
        steps=steps,
        seeds=pair.seeds,
        growth_batches=pair.growth_batches,
    )
    return result, time.process_time() - began


def wins(pair: dict) -> bool:
    """Whether growth, or the mix with LoRA, wins by the rule."""
    lead = pair["lead"]
    return lead is not None and lead > MARGIN and lead > SURE * pair["error"]


def is_right(pair: dict) -> bool:
    """Whether the winner also ends lower in the long trainings; LoRA is right up to a lead of the margin."""
    long = pair["long"] or 0.0  # of no growth
    return long > 0 if wins(pair) else long < MARGIN


class Score:
    """The results of the rule on some pairs."""

    def __init__(self, pairs: list[dict]):
        self.count = len(pairs)
        self.right = sum(map(is_right, pairs))
        grown = [pair["long"] or 0.0 for pair in pairs if wins(pair)]
        others = [pair["long"] or 0.0 for pair in pairs if not wins(pair)]
        self.grown = len(grown)
        # How much higher the winner ends at most in the long trainings, where growth wins and where LoRA wins.
        self.wrong = max(0.0, -min(grown, default=0.0))
        self.missed = max(0.0, max(others, default=0.0))

    def cells(self) -> list[str]:
        """Its row of the table."""
        return [str(self.count), str(self.grown), str(self.right), f"{self.wrong:.3f}", f"{self.missed:.3f}"]


def make_page(figures: dict) -> page.Page:
    """The page of recorded and new pairs."""
    recorded, new = figures["recorded"], figures["new"]
    held_out = [pair for pair in recorded if pair["held_out"]]
    groups = {
        "recorded": recorded,
        "recorded, held out": held_out,
        "new": new,
        "new, texts": [pair for pair in new if pair["on_text"]],
        "new, phone books and nearest neighbours": [pair for pair in new if not pair["on_text"]],
    }
    scores = {name: Score(pairs) for name, pairs in groups.items() if pairs}
    whole, latest, setting = scores["recorded"], scores["new"], figures["setting"]
    share = sum(pair["seconds"] for pair in new) / sum(pair["long_seconds"] for pair in new)
    head = [
        "pairs",
        "number",
        "growth wins",
        "right",
        "growth wins, but ends higher by at most",
        "LoRA wins, but ends higher by at most",
    ]
    return page.Page(
        title="What a race tells",
        claim=f"A race is right in {whole.right} of {whole.count} recorded pairs of a model and data, and in "
        f"{latest.right} of {latest.count} new pairs: its winner also ends lower in trainings {LONGER} times as long. "
        f"Where LoRA wins a race, it ends at most {max(whole.missed, latest.missed):.3f} nats higher there; where "
        f"growth wins, it ends at most {max(whole.wrong, latest.wrong):.3f} nats higher.",
        summary=page.table(head, [[name, *score.cells()] for name, score in scores.items()]),
        text=f"""## How it was measured

Growth, or a third of growth with LoRA, whichever ends lower, wins if it leads LoRA by more than {MARGIN} nats and by
more than {SURE:g} standard errors; otherwise LoRA wins. A race is right if its winner also ends lower in trainings
{LONGER} times as long, or if it is LoRA and growth leads by less than {MARGIN} nats there. All methods train as many
weights as LoRA of rank {RANK} on all linear layers.

{figures["recorded_from"]} Of these pairs, {len(held_out)} are held out: they were named before any of their results
was read, and no earlier rule was made with them. The present rule was chosen with the leads of all recorded pairs. The
new pairs were made after the rule and the code were final, and none that ran is left out.

The new pairs race for {setting["steps"]} steps with {setting["seeds"]} seeds and {setting["growth_batches"]} growth
batches. Both races choose their learning rates themselves. The small Llamas are pretrained for {READ} steps on the text
of `--pretrain`. Times are processor seconds, and include growth and the choice of learning rates; all races together
took {share:.2f} of the time of the long ones. A lead is in nats a token, with its standard error. "36 of 640 names" is
a phone book, and "nearest of 30 tokens" a search among points.

## New pairs

{new_table(new)}""",
        draw=lambda plt: draw({name: groups[name] for name in ("recorded", "new")}, plt),
    )


def outcome(pair: dict) -> list[str]:
    """What a race says and whether it is right, under `OUTCOME`."""
    title = TITLES[pair["challenger"]] if pair["challenger"] else "nothing grew"
    leads = [(pair["lead"], pair["error"]), (pair["long"], pair["long_error"])]
    shown = ["" if lead is None else f"{lead:+.3f} ± {error:.3f}" for lead, error in leads]
    return [title, *shown, title if wins(pair) else "LoRA", "right" if is_right(pair) else "wrong"]


def new_table(pairs: list[dict]) -> str:
    """A row for each new pair, the largest lead after the long trainings first."""
    rows = []
    for pair in sorted(pairs, key=lambda pair: pair["long"] or 0.0, reverse=True):
        rates = f"{pair['rates']['lora']:.2g}, {pair['long_rates']['lora']:.2g}"
        share = f"{pair['seconds'] / pair['long_seconds']:.2f}"
        rows.append([pair["pair"], *outcome(pair), rates, f"{pair['seconds']:.0f}", share, pair["commit"]])
    head = [
        "model and data",
        *OUTCOME,
        "LoRA's learning rate in both",
        "seconds",
        "share of the long race's seconds",
        "commit",
    ]
    return page.table(head, rows)


def draw(groups: dict[str, list[dict]], plt):
    """The lead in the race against that in the long trainings."""
    figure, panel = plt.subplots(figsize=(6.4, 5.0), layout="constrained")
    for name, pairs in groups.items():
        shown = [pair for pair in pairs if pair["lead"] is not None and pair["long"] is not None]
        points = [pair["lead"] for pair in shown], [pair["long"] for pair in shown]
        errors = [SURE * pair["error"] for pair in shown]
        panel.errorbar(*points, xerr=errors, fmt="o", markersize=4, label=f"{name} pairs")
    panel.axhline(0, color="0.6", linewidth=1)
    panel.axvline(0, color="0.6", linewidth=1)
    panel.set_xscale("symlog", linthresh=0.02)  # most leads are small, and some are of several nats
    panel.set_yscale("symlog", linthresh=0.02)
    panel.set(xlabel="lead in the race, nats, ± two standard errors", ylabel=f"lead in a race {LONGER} times as long")
    figure.legend(loc="outside lower center", ncols=2, fontsize=8)
    return figure


def make_pairs(arguments: argparse.Namespace) -> list[Pair]:
    """The pairs that the options name, and the tasks."""
    if arguments.quick:
        model = tiny_llama(arguments.output / "tiny", 300)
        task = OnText(source=model, batch_size=2, block_size=16, held_out=8)
        return [Pair(task, steps=4, seeds=1, growth_batches=2)]
    tasks: list[Task] = [PhoneBook(head_dim=width, names=640, many=36, pairs=128) for width in (4, 8)]
    tasks += [NextNeighbour(head_dim=width, points=30, sequences=4) for width in (6, 14)]
    sizes = dict(batch_size=4, block_size=64, held_out=128)
    for text in arguments.text:
        tasks += [OnText(source=model, path=text, **sizes) for model in arguments.model]
        narrow = dict(source=arguments.model[0], path=text, known=arguments.pretrain)
        tasks += [OnTextNarrow(head_dim=width, **narrow, **sizes) for width in WIDTHS]
    return [Pair(task) for task in tasks]


def main() -> None:
    """Run the pairs and write the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", nargs="+", help="paths or Hub ids of causal LMs")
    parser.add_argument("--text", nargs="+", help="text files, also of JSON rows, or Hub ids")
    parser.add_argument("--pretrain", help="the text that small Llamas are pretrained on")
    parser.add_argument("--output", type=Path, default=page.RESULTS)
    parser.add_argument("--quick", action="store_true", help="one tiny pair: shows that it runs")
    arguments = parser.parse_args()
    if not (arguments.quick or (arguments.model and arguments.text and arguments.pretrain)):
        parser.error("--model, --text and --pretrain are needed, or --quick")
    arguments.output.mkdir(parents=True, exist_ok=True)
    harness.MODELS = arguments.output / "pretrained_models"
    pairs = make_pairs(arguments)
    page.commit()  # now: there may be another one before the last pair ends
    new = collect(pairs, arguments.output / "races.jsonl", run=measure)
    kept = json.loads((page.RESULTS / "races.json").read_text())["figures"]
    setting = {name: value for name, value in asdict(pairs[0]).items() if name != "task"}
    figures = {"setting": setting, **{name: kept[name] for name in ("recorded_from", "recorded")}, "new": new}
    seconds = sum(row["seconds"] + row["long_seconds"] for row in new)
    page.publish("races", make_page(figures), figures, list(range(pairs[0].seeds)), arguments.output, seconds)


if __name__ == "__main__":
    main()
