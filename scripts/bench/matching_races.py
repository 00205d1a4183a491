"""Tasks of the matching page in races: whether a race tells who ends lower in trainings five times as long.

OMP_NUM_THREADS=1 python scripts/bench/matching_races.py --encoder path/to/minilm --pairs instructions.json

`growattn race` reads text, and these tasks are vectors. So the trainings are the harness's; the methods, their learning
rates, the seeds and the rule are the race's own.
"""

import argparse
import statistics
from dataclasses import replace
from functools import partial
from pathlib import Path

import harness
import page
from harness import Job, Task
from matching_task import CLASSIFY, EMBEDDINGS, MATCH, Records
from methods import NOTHING, Method
from races import LONGER, OUTCOME, is_right, lead_of, outcome
from results import make_parser, parse
from torch import nn
from torch.nn.functional import cross_entropy

from hf_growattn.training.comparison import MARGIN, SHORT, SURE, Race, Run, compete
from hf_growattn.training.methods import METHODS, RATES
from hf_growattn.training.options import RaceOptions

DEFAULT = RaceOptions().steps
LENGTHS = (DEFAULT // 5, DEFAULT // 2, DEFAULT, 2 * DEFAULT)  # steps of the long trainings of a race
HELD_OUT = 64  # episodes


class RacedRecords(Records):
    """Records in context, with the loss of each held-out episode, as a race compares them."""

    def measure(self, model: nn.Module, seed: int) -> dict:
        """The usual figures, and the summed loss and the number of rows asked for of each episode."""
        nats, counts = [], []
        for batch in self.held_out_batches(0):  # the same for all seeds
            losses = cross_entropy(self.logits(model, batch).transpose(1, 2), batch["labels"], reduction="none")
            nats += losses.sum(1).tolist()
            counts += (batch["labels"] >= 0).sum(1).tolist()
        return {**super().measure(model, seed), "nats": nats, "counts": counts}


def run_race(task: Task, steps: int, kept: Path) -> tuple[Race, float]:
    """A race of some steps, and its processor time; runs that the file has are not trained again."""
    seconds = 0.0

    def train(method: str, rate: float, steps: int, seed: int) -> Run | None:
        nonlocal seconds
        adds = Method(library=method, rates=(rate,)) if method in METHODS else NOTHING
        (row,) = harness.collect([Job(replace(task, steps=steps), method, adds, rate, seed)], kept)
        seconds += row["processor"]
        if method in METHODS and not row["weights"]:
            return None
        nats = [] if None in row["nats"] else row["nats"]
        return Run(method, rate, steps, seed, nats, row["counts"], row["weights"], int(row["kept"]))

    start = train("start", 0.0, 0, 0)
    race = Race(steps, start)
    compete(race, train, METHODS, [rate / task.d for rate in RATES], RaceOptions().seeds)
    return race, seconds


def measure(task: Task, lengths: tuple[int, ...], most: int, kept: Path) -> list[dict]:
    """A row for each length of a race, next to the race that is longest."""
    long, long_seconds = run_race(task, most, kept)
    rows = []
    for steps in lengths:
        race, seconds = run_race(task, steps, kept)
        name = race.challenger or long.challenger
        row = {"task": task.name, "steps": steps, "challenger": name, "rates": race.rates, "seconds": seconds}
        row["lead"], row["error"] = lead_of(race, name)
        row["long"], row["long_error"] = lead_of(long, name)
        row |= {"long_rates": long.rates, "long_steps": long.steps, "long_seconds": long_seconds}
        rows.append(harness.finite(row))
    return rows


def make_page(rows: list[dict]) -> page.Page:
    """The page of all races."""
    of = {steps: [row for row in rows if row["steps"] == steps] for steps in sorted({row["steps"] for row in rows})}
    right = {steps: sum(map(is_right, several)) for steps, several in of.items()}
    parts = [f"{count} of {len(of[steps])} with {steps} steps" for steps, count in right.items()]
    verdict, wrong = "None misleads.", [row for row in rows if not is_right(row)]
    if wrong:
        tasks = " and ".join(dict.fromkeys(row["task"] for row in wrong))
        most = max(abs(row["long"] or 0.0) for row in wrong)
        verdict = f"Those that mislead are on {tasks}, where their winners end at most {most:.3f} nats higher."
    return page.Page(
        title="Matching records in races",
        claim=f"Races on tasks of the matching page are right in {', '.join(parts)}. {verdict} The default of "
        f"`growattn race` is {DEFAULT} steps.",
        summary=table_of(rows),
        text=f"""A race reads text, and these tasks are vectors; so the harness of the benchmarks trains here. Methods,
learning rates, {RaceOptions().seeds} seeds, and the rule are those of `growattn race`: growth, or a third of growth
with LoRA, whichever ends lower, wins if it leads LoRA on all linear layers by more than {MARGIN} nats and by more than
{SURE} standard errors; otherwise LoRA wins. Learning rates are tried for one {SHORT}th of the steps. As on the page of
races, one is right if its winner also ends lower in a race of {rows[0]["long_steps"]} steps, or if it is LoRA and
growth leads by less than {MARGIN} nats there. The model is that of the matching page, with heads 8 wide. A growth
spends the whole budget, with no LoRA on read-in and head. Seconds are processor time.""",
        draw=partial(draw, rows),
        reaches=[
            page.Reach(
                f"Races of {DEFAULT} steps on matching and classifying: all right",
                f"{right[DEFAULT]} of {len(of[DEFAULT])}",
                "missed" if right[DEFAULT] < len(of[DEFAULT]) else "reached",
            )
        ]
        if DEFAULT in of
        else [],
    )


def table_of(rows: list[dict]) -> str:
    """A line for each race."""
    lines = [[row["task"], row["steps"], *outcome(row), f"{row['seconds']:.0f}"] for row in rows]
    return page.table(["task", "steps", *OUTCOME, "seconds"], lines)


def draw(rows: list[dict], plt):
    """The lead in races by their length, and that in the long race as a broken line."""
    figure, panel = plt.subplots(figsize=(7, 4), layout="constrained")
    for number, task in enumerate(dict.fromkeys(row["task"] for row in rows)):
        shown = [row for row in rows if row["task"] == task and row["lead"] is not None]
        if not shown:
            continue
        errors = [SURE * row["error"] for row in shown]
        places, color = [row["steps"] for row in shown], f"C{number}"
        panel.errorbar(
            places, [row["lead"] for row in shown], yerr=errors, marker="o", capsize=3, label=task, color=color
        )
        long = [row["long"] for row in shown if row["long"] is not None]
        if long:
            panel.axhline(statistics.fmean(long), color=color, linewidth=1, linestyle="--")
    panel.axhline(0, color="0.6", linewidth=1)
    panel.set_xscale("log", base=2)
    panel.xaxis.set_major_formatter("{x:.0f}")
    panel.set(xlabel="steps of the race", ylabel="lead over LoRA, nats, ± two standard errors")
    figure.legend(loc="outside lower center", ncols=2, fontsize=8)
    return figure


def make_tasks(arguments: argparse.Namespace) -> list[Records]:
    """Rows to match and to classify, and embeddings where the options name them."""
    mnist = RacedRecords(table="mnist", components=64, warmup=0.2, held_out=HELD_OUT)
    tasks = [mnist, replace(mnist, kind=CLASSIFY), replace(mnist, table="digits", components=8)]
    if arguments.encoder and arguments.pairs:
        given = {"encoder": arguments.encoder, "pairs": arguments.pairs}
        tasks.append(replace(mnist, table=EMBEDDINGS, components=0, **given))
    return tasks


def main() -> None:
    """Run the races and write the page."""
    parser = make_parser(__doc__)
    parser.add_argument("--encoder", default="", help="path or Hub id of an encoder of sentences")
    parser.add_argument("--pairs", default="", help="file of questions and answers to embed")
    arguments = parse(parser)
    arguments.output.mkdir(parents=True, exist_ok=True)
    harness.MODELS = arguments.output / "pretrained_models"
    if arguments.quick:
        sizes = {"growth_batches": 2, "d": 16, "width": 4, "episodes": 2, "held_out": 2, "pretraining": 4, "layers": 1}
        tasks = [RacedRecords(kind=MATCH, components=8, rows=16, asked=4, labels=16, **sizes)]
        lengths, most = (SHORT,), 2 * SHORT
    else:
        tasks, lengths, most = make_tasks(arguments), LENGTHS, LONGER * DEFAULT
    kept = arguments.output / "matching_races.jsonl"
    rows = [row for task in tasks for row in measure(task, lengths, most, kept)]
    seconds = sum(row["seconds"] for row in rows) + sum({row["task"]: row["long_seconds"] for row in rows}.values())
    page.publish("matching_races", make_page(rows), {"races": rows}, [0, 1], arguments.output, seconds)


if __name__ == "__main__":
    main()
