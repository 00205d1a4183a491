"""Where width binds: the phone book of recall.py, over the width of queries and keys and the number of items.

    python scripts/bench/recall_map.py

In each cell a model of that width, trained on short books, is fine-tuned on long ones by LoRA on all linear layers, at
as many weights as growth adds and at full rank, and by growth by budget; each at the better of two learning rates.
"""

import argparse
import statistics
import tempfile
from dataclasses import asdict, replace
from functools import partial
from itertools import product
from pathlib import Path

import page
import recall
from recall_task import Setting
from runs import collect

EQUAL, FULL, GROWN = "LoRA on all linear layers", "LoRA on all linear layers, full rank", recall.BUDGET
WIDTHS, PAIRS, NAMES = (4, 6, 8, 16), (16, 32, 64), (64, 2048)
RATES = {EQUAL: (1e-2, 3e-2), FULL: (1e-3, 3e-3), GROWN: (1e-2, 3e-2)}  # around the best ones of recall.py
PAYS = 0.01  # of recall: a smaller lead is none that anyone would care for


def best_of(runs: list[dict], row: str) -> tuple[float, float]:
    """The mean recall of a row over seeds, at its best learning rate, and that rate."""
    by_rate: dict[float, list[float]] = {}
    for run in runs:
        if run["row"] == row:
            by_rate.setdefault(run["rate"], []).append(recall.end_of(run))
    rate = max(by_rate, key=lambda rate: statistics.fmean(by_rate[rate]))
    return statistics.fmean(by_rate[rate]), rate


def cell(runs: list[dict], width: int, pairs: int, names: int) -> dict:
    """What a cell shows: recall by row, and the leads of growth seed by seed."""
    found = {row: best_of(runs, row) for row in (recall.NONE, EQUAL, FULL, GROWN)}
    ends = {(run["row"], run["rate"], run["seed"]): recall.end_of(run) for run in runs}
    seeds = sorted({run["seed"] for run in runs})

    def leads(row: str) -> list[float]:
        return [ends[GROWN, found[GROWN][1], seed] - ends[row, found[row][1], seed] for seed in seeds]

    recalled = {row: value for row, (value, _) in found.items()}
    shown = {"equal": leads(EQUAL), "full": leads(FULL)}
    caches = {run["row"]: sum(map(sum, run["widths"])) for run in runs if run["row"] in (recall.NONE, GROWN)}
    told = {"recall": recalled, "leads": shown, "cache": caches[GROWN] / caches[recall.NONE] - 1}
    told["forward"] = statistics.median(run["forward"] for run in runs if run["row"] == GROWN)
    return {"width": width, "pairs": pairs, "names": names, **told}


def page_of(figures: dict) -> page.Page:
    """What the figures say."""
    cells = figures["cells"]
    rows = [
        [
            f"{one['width']}",
            f"{one['pairs']} of {one['names']:,}",
            *(f"{one['recall'][row]:.2f}" for row in (recall.NONE, EQUAL, FULL, GROWN)),
            *(page_lead(one["leads"][kind]) for kind in ("equal", "full")),
            f"{one['cache']:+.0%}",
            f"{one['forward']:.2f}",
        ]
        for one in cells
    ]
    head = ["queries, keys", "pairs of names", "before", EQUAL, FULL, "growth by budget"]
    head += ["lead at equal weights", "lead over full rank", "KV cache of growth", "forward"]
    pays = {
        kind: [one for one in cells if statistics.fmean(one["leads"][kind]) > PAYS and min(one["leads"][kind]) > 0]
        for kind in ("equal", "full")
    }
    first = max(cells, key=lambda one: statistics.fmean(one["leads"]["equal"]))
    claim = (
        f"Of {len(cells)} phone books growth recalls more than LoRA on all linear layers in {len(pays['equal'])} at "
        f"equal weights, and in {len(pays['full'])} against full rank, on every seed and by more than {PAYS}. Its lead "
        f"is largest with queries {first['width']} wide and {first['pairs']} of {first['names']:,} names: "
        f"{page_lead(first['leads']['equal'])} at equal weights, {page_lead(first['leads']['full'])} over full rank."
    )
    return page.Page(
        title="Where width binds: a map",
        claim=claim,
        summary=page.table(head, rows),
        text=(
            "The model and the data are those of recall.py, with other widths, pairs and names. Recall and leads are "
            "means over the seeds, with their range if there are several. Each row of each cell has the better of two "
            "learning rates: "
            + "; ".join(f"{row}, {' and '.join(map(str, rates))}" for row, rates in RATES.items())
            + ". The KV cache and the CPU time of a forward pass are those of growth by budget, against those before; "
            "LoRA is merged for free."
        ),
        draw=partial(draw, cells),
    )


def page_lead(leads: list[float]) -> str:
    """A mean and its range, if there are several."""
    if len(leads) == 1:
        return f"{leads[0]:+.2f}"
    return f"{statistics.fmean(leads):+.2f} ({min(leads):+.2f} to {max(leads):+.2f})"


def draw(cells: list[dict], plt):
    """A map for each number of names and each LoRA: the lead of growth, and the border where it ends."""
    names = sorted({one["names"] for one in cells})
    figure, panels = plt.subplots(2, len(names), figsize=(4.2 * len(names), 6), layout="constrained", squeeze=False)
    for (down, kind), (across, count) in product(enumerate(("equal", "full")), enumerate(names)):
        panel, shown = panels[down][across], [one for one in cells if one["names"] == count]
        widths, pairs = (sorted({one[key] for one in shown}) for key in ("width", "pairs"))
        lead = {(one["pairs"], one["width"]): statistics.fmean(one["leads"][kind]) for one in shown}
        grid = [[lead.get((row, width), 0.0) for width in widths] for row in pairs]
        image = panel.imshow(grid, origin="lower", cmap="RdBu", vmin=-0.3, vmax=0.3, aspect="auto")
        if len(widths) > 1 and len(pairs) > 1:
            panel.contour(grid, levels=[PAYS], colors="black", linewidths=1.2)
        for (y, row), (x, width) in product(enumerate(pairs), enumerate(widths)):
            panel.text(x, y, f"{lead.get((row, width), 0.0):+.2f}", ha="center", va="center", fontsize=8)
        panel.set_xticks(range(len(widths)), widths)
        panel.set_yticks(range(len(pairs)), pairs)
        against = "at equal weights" if kind == "equal" else "LoRA at full rank"
        panel.set(xlabel="width of queries and keys", ylabel="pairs in a book", title=f"{count:,} names, {against}")
    figure.colorbar(image, ax=panels, label="lead of growth in recall; black: where it ends", shrink=0.7)
    return figure


def main() -> None:
    """Run every cell, write the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1])
    parser.add_argument("--output", type=Path, default=page.RESULTS)
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--quick", action="store_true", help="two tiny cells: shows that it runs")
    arguments = parser.parse_args()
    quick, seeds = arguments.quick, arguments.seeds[:1] if arguments.quick else arguments.seeds
    arguments.output.mkdir(parents=True, exist_ok=True)
    kept, cells, seconds = arguments.output / "recall_map.jsonl", [], 0.0
    grid = product((4, 6), (4,), (16,)) if quick else product(WIDTHS, PAIRS, NAMES)
    for width, pairs, names in ((w, p, n) for w, p, n in grid if p <= n):
        setting = replace(recall.QUICK if quick else Setting(), head_dim=width, many=pairs, names=names)
        setting = replace(setting, asked=[pairs])
        shared = {"setting": asdict(setting)}
        jobs = [
            shared | {"row": row, "rate": rate, "seed": seed}
            for seed in seeds
            for row, rates in {recall.NONE: (0.0,), **RATES}.items()
            for rate in rates
        ]
        with tempfile.TemporaryDirectory() as folder:
            runs = collect(partial(recall.measure, Path(folder)), jobs, kept, arguments.processes)
        cells.append(cell(runs, width, pairs, names))
        seconds += sum(run["seconds"] for run in runs)
    page.publish("recall_map", {"cells": cells}, seeds, arguments.output, seconds)


if __name__ == "__main__":
    main()
