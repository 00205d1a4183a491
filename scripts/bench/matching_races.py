"""Tasks of the matching page in races: who wins, how fast, and whether longer races agree.

OMP_NUM_THREADS=1 python scripts/bench/matching_races.py --encoder path/to/minilm --pairs instructions.json
"""

import argparse
import statistics
import time
from dataclasses import replace
from functools import partial
from pathlib import Path

import harness
import page
import torch
from matching_task import CLASSIFY, EMBEDDINGS, MATCH, Records
from races import OUTCOME, is_right, lead_of, outcome, wins
from results import make_parser, parse

from hf_growattn import race
from hf_growattn.training.comparison import MARGIN, SURE, RaceResult
from hf_growattn.training.race import SHORT

DEFAULT = 400  # steps of a race
LENGTHS = (DEFAULT // 4, DEFAULT)
LONGEST = 1000
HELD_OUT = 64  # episodes
MINUTES = 6  # that a race of the default length may take


def run_race(task: Records, steps: int, kept: Path) -> tuple[RaceResult, float]:
    """A race of some steps, and its seconds; runs that the folder has are not trained again."""
    began = time.perf_counter()
    result = race(
        lambda: task.model(0),
        [task.batch(0, step) for step in range(steps)],
        list(task.held_out_batches(0)),
        task.loss,
        budget=task.budget(task.model(0)),
        steps=steps,
        growth_batches=task.growth_batches,
        output=kept / f"{task.name} {steps}",
    )
    return result, time.perf_counter() - began


def measure(task: Records, lengths: tuple[int, ...], most: int, kept: Path) -> list[dict]:
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
    return page.Page(
        title="Matching records in races",
        claim=f"Races on tasks of the matching page are right in {', '.join(parts)}. The default is {DEFAULT} steps.",
        summary=table_of(rows),
        text=f"""`hf_growattn.race` trains here, with its own settings: 2 seeds, learning rates that are tried for one
{SHORT}th of the steps, and its rule: growth, or a third of growth with LoRA, whichever ends lower, wins if it leads
LoRA on all linear layers by more than {MARGIN} nats and by more than {SURE} standard errors; otherwise LoRA wins. As on
the page of races, one is right if its winner also ends lower in a race of {rows[0]["long_steps"]} steps, or if it is
LoRA and growth leads by less than {MARGIN} nats there. The model is that of the matching page, with heads 8 wide. A
growth spends the whole budget, with no LoRA on read-in and head. Seconds are those on the wall, on one core.""",
        draw=partial(draw, rows),
        reaches=[reach_of(row) for row in of.get(DEFAULT, [])],
    )


def reach_of(row: dict) -> page.Reach:
    """Whether growth or the mix wins where rows are matched, and LoRA where they are classified, in time."""
    aim, is_match = "growth or the mix wins", row["task"].startswith(MATCH)
    aim = aim if is_match else "LoRA wins"
    reached = wins(row) == is_match and row["seconds"] <= 60 * MINUTES
    measured = f"{outcome(row)[3]}, {row['seconds'] / 60:.1f} minutes"
    return page.Reach(f"{row['task']}: {aim}, within {MINUTES} minutes", measured, "reached" if reached else "missed")


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
    mnist = Records(table="mnist", components=64, held_out=HELD_OUT)
    tasks = [mnist, replace(mnist, kind=CLASSIFY)]
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
    torch.set_num_threads(1)
    arguments.output.mkdir(parents=True, exist_ok=True)
    harness.MODELS = arguments.output / "pretrained_models"
    tasks, lengths, most = make_tasks(arguments) if not arguments.quick else [], LENGTHS, LONGEST
    if arguments.quick:
        sizes = {"growth_batches": 2, "d": 16, "width": 4, "episodes": 2, "held_out": 4, "pretraining": 4, "layers": 1}
        tasks = [Records(kind=MATCH, components=8, rows=16, asked=4, labels=16, **sizes)]
        lengths, most = (SHORT,), 2 * SHORT
    rows = [row for task in tasks for row in measure(task, lengths, most, arguments.output / "matching_races")]
    seconds = sum(row["seconds"] for row in rows) + sum({row["task"]: row["long_seconds"] for row in rows}.values())
    page.publish("matching_races", make_page(rows), {"races": rows}, [0, 1], arguments.output, seconds)


if __name__ == "__main__":
    main()
