"""What the rows of a benchmark say: the tables, the claim and the picture that all pages on the harness share.

A page is declared: its cells, a few sentences, and perhaps a picture of its own. `main_of` runs it as a command.
"""

import argparse
import math
import statistics
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path

import harness
import page
from harness import TUNING_SEED, Cell, Task, run_cells
from methods import LORA

# Student's t for 95 % of two sides, by degrees of freedom.
STUDENT = {1: 12.71, 2: 4.30, 3: 3.18, 4: 2.78, 5: 2.57, 6: 2.45, 7: 2.36, 8: 2.31, 9: 2.26}
# Figures that a page needs of a run; curves are for the picture.
KEPT = ("weights", "rank", "widths", "cache", "forward", "at_change", "seconds", "peak_bytes")


def spread(values: list[float], digits: int = 3) -> str:
    """Median and range; the value alone where there is one, or all are equal. Whole numbers have no digits."""
    if not values:
        return ""
    if all(float(value).is_integer() for value in values):
        digits = 0
    middle, *ends = (f"{value:.{digits}f}" for value in (statistics.median(values), min(values), max(values)))
    return middle if ends[0] == ends[1] else f"{middle} ({ends[0]} to {ends[1]})"


@dataclass
class Lead:
    """By how much a method is better than another, seed by seed.

    Attributes:
        values: one for each seed that both have; positive where the method is better.
    """

    values: list[float]

    @property
    def mean(self) -> float:
        """Over the seeds."""
        return statistics.fmean(self.values)

    @property
    def error(self) -> float:
        """Half the width of the mean's 95 % interval; infinite for one seed."""
        if len(self.values) < 2:
            return math.inf
        t = STUDENT.get(len(self.values) - 1, 1.96)
        return t * statistics.stdev(self.values) / len(self.values) ** 0.5

    @property
    def is_clear(self) -> bool:
        """Whether the interval leaves out zero."""
        return abs(self.mean) > self.error

    def __str__(self) -> str:
        return f"{self.mean:+.3f}" + (f" ± {self.error:.3f}" if math.isfinite(self.error) else "")


class Results:
    """The rows of a page, by task and method."""

    def __init__(self, cells: list[Cell], found: dict):
        self.tasks: dict[str, Task] = {cell.task.name: cell.task for cell in cells}
        self.methods = {cell.task.name: list(cell.methods) for cell in cells}
        self.found = found

    def rows(self, task: str, method: str, part: str = "rows") -> list[dict]:
        """The runs of a method on a task; a diverged one is left out."""
        of = [row for row in self.found[part] if (row["task"], row["method"]) == (task, method)]
        return [row for row in of if row[self.tasks[task].metric] is not None]

    def values(self, task: str, method: str, figure: str = "") -> list[float]:
        """A figure of each run, the metric by default."""
        name = figure or self.tasks[task].metric
        part = "rows" if method in self.methods[task] else "untrained"
        return [row[name] for row in self.rows(task, method, part) if row.get(name) is not None]

    def lead(self, task: str, method: str, other: str = LORA) -> Lead | None:
        """By how much a method is better than another on a task; None where they share no seed."""
        metric = self.tasks[task].metric
        sign = 1 if self.tasks[task].higher_is_better else -1
        theirs = {row["seed"]: row[metric] for row in self.rows(task, other)}
        both = [row for row in self.rows(task, method) if row["seed"] in theirs]
        return Lead([sign * (row[metric] - theirs[row["seed"]]) for row in both]) if both else None

    def untrained(self, task: str) -> list[str]:
        """The rows of a task that train nothing of the model."""
        return list(dict.fromkeys(row["method"] for row in self.found["untrained"] if row["task"] == task))

    def best(self, task: str, methods: list[str]) -> str:
        """The method with the best median."""
        sign = -1 if self.tasks[task].higher_is_better else 1
        ended = [method for method in methods if self.values(task, method)]
        return min(ended, key=lambda method: sign * statistics.median(self.values(task, method)))

    def table(self, more: dict[str, str] | None = None) -> str:
        """A line for each method on each task.

        Args:
            more: further figures of the measure to show, by their heads.
        """
        more = more or {}
        metrics = list(dict.fromkeys(task.metric for task in self.tasks.values()))
        head = ["task", "method", ", ".join(metrics), *more, f"lead over {LORA}", "rate", "weights trained"]
        lines = []
        for task, methods in self.methods.items():
            for method in [*methods, *self.untrained(task)]:
                lines.append(self._line(task, method, list(more.values())))
        return page.table([*head, "KV cache", "forward", "seconds"], lines)

    def _line(self, task: str, method: str, figures: list[str]) -> list[str]:
        cells = [task, method, f"**{spread(self.values(task, method))}**"]
        cells += [spread(self.values(task, method, figure)) for figure in figures]
        rows = self.rows(task, method)
        if not rows:
            return [*cells, *[""] * 6] if self.values(task, method) else [*cells[:2], "diverged", *cells[3:], *[""] * 6]
        lead = self.lead(task, method) if method != LORA else None
        tried = len(self.rows(task, method, "sweep"))
        rate = f"{rows[0]['rate']:.2g}" + (f" of {tried}" if tried else "")
        cells += [str(lead or ""), rate if rows[0]["weights"] else "", f"{rows[0]['weights']:,}"]
        costs = [f"{statistics.median(row['cache'] for row in rows):+.0%}"]
        costs.append(f"{statistics.median(row['forward'] for row in rows):.2f}")
        return [*cells, *costs, spread([row["seconds"] for row in rows], 0)]

    def sweep_table(self) -> str:
        """The metric of each method at each learning rate, on the tuning seed."""
        lines = []
        for task, methods in self.methods.items():
            for method in methods:
                metric = self.tasks[task].metric
                of = [row for row in self.found["sweep"] if (row["task"], row["method"]) == (task, method)]
                ends = [
                    f"{row['rate']:.2g}: " + ("diverged" if row[metric] is None else f"{row[metric]:.3f}")
                    for row in sorted(of, key=lambda row: row["rate"])
                ]
                if ends:
                    lines.append([task, method, ", ".join(ends)])
        return page.table(["task", "method", "learning rate: end"], lines)

    def claim(self, growing: list[str]) -> str:
        """For each task whether the best of some methods, which grow, is better than LoRA on all linear layers."""
        parts = []
        for task, methods in self.methods.items():
            ended = [method for method in growing if method in methods and self.lead(task, method)]
            if not ended:
                continue
            best = self.best(task, ended)
            lead = self.lead(task, best)
            verb = "ends level with"
            if lead.is_clear or len(lead.values) == 1:
                verb = "beats" if lead.mean > 0 else "loses to"
            better = [m for m in methods if m not in growing and m == self.best(task, [m, best])]
            others = f" Better than it: {', '.join(better)}." if better else ""
            parts.append(f"On {task}, {best} {verb} {LORA}, by {lead} in {self.tasks[task].metric}.{others}")
        return " ".join(parts)

    def figures(self) -> dict:
        """What the page's file keeps: the tasks, their methods, and a short row for each run."""
        measured = {name for row in self.found["rows"] for name, value in row.items() if isinstance(value, float)}
        names = ("task", "method", "seed", "rate", *KEPT, *sorted(measured - {*KEPT, "rate", "processor"}))
        return {
            "tasks": {name: without_folders(asdict(task)) for name, task in self.tasks.items()},
            "rows": [{name: _short(row[name]) for name in names if name in row} for row in self.found["rows"]],
            "curves": [{n: _short(row[n]) for n in ("task", "method", "seed", "curve")} for row in self.found["rows"]],
            "sweep": [
                {name: _short(row[name]) for name in ("task", "method", "rate", self.tasks[row["task"]].metric)}
                for row in self.found["sweep"]
            ],
            "untrained": self.found["untrained"],
        }


def without_folders(fields: dict) -> dict:
    """The same, with the names alone of files and folders of this machine."""
    return {
        name: Path(value).name if isinstance(value, str) and Path(value).is_absolute() else value
        for name, value in fields.items()
    }


def _short(value):
    """The same with floats at seven digits, which is more than a page prints."""
    if isinstance(value, list):
        return [_short(one) for one in value]
    return float(f"{value:.7g}") if isinstance(value, float) else value


def draw_leads(results: Results, plt):
    """A panel for each metric, a place for each task, a point with its range for each method: its lead over LoRA."""
    width = max(6.0, 1.6 * len(results.tasks) + 3)
    figure, panel = plt.subplots(figsize=(width, 4), layout="constrained")
    shown = list(dict.fromkeys(method for methods in results.methods.values() for method in methods))
    for number, method in enumerate(shown):
        leads = {
            place: results.lead(task, method)
            for place, task in enumerate(results.tasks)
            if method in results.methods[task] and method != LORA
        }
        points = {place: lead for place, lead in leads.items() if lead}
        if points:
            across = [place + (number - len(shown) / 2) * 0.7 / len(shown) for place in points]
            middles = [lead.mean for lead in points.values()]
            ranges = [
                [lead.mean - min(lead.values) for lead in points.values()],
                [max(lead.values) - lead.mean for lead in points.values()],
            ]
            panel.errorbar(across, middles, yerr=ranges, fmt="o", markersize=4, label=method)
    panel.axhline(0, color="0.6", linewidth=1)
    panel.set_xticks(range(len(results.tasks)), results.tasks, rotation=15, ha="right", fontsize=8)
    metrics = " or ".join(dict.fromkeys(task.metric for task in results.tasks.values()))
    panel.set_ylabel(f"better than {LORA}, {metrics}", fontsize=8)
    figure.legend(loc="outside right upper", fontsize=7)
    return figure


HOW = f"""Every method sees the same batches in the same order; a growth looks at the first of those that it then trains
on. Methods that do not train all weights train about equally
many, as whole ranks allow, unless the table says otherwise. AdamW without weight decay,
clipping at 1, a cosine down to zero. The learning rate of each method is swept by factors of 3 on seed {TUNING_SEED},
which is not reported, and beyond an end that is best; the table says which was taken, of how many. A lead is positive
where the method is better: the mean over seeds with its 95 % interval. The KV cache is that of a token; "forward" is
the CPU time of a pass with its loss; both stand against the model before. LoRA is merged for free."""


@dataclass
class Declared:
    """A page on the harness.

    Attributes:
        name: of its script and files.
        title: of the page.
        text: what the tasks and methods are, in Markdown.
        growing: the methods that the claim is about.
        more: further figures of the measure that the table shows, by their heads.
        claim, tables, draw: in place of the usual ones, made of the `Results`.
    """

    name: str
    title: str
    text: str
    growing: list[str]
    more: dict[str, str] = field(default_factory=dict)
    claim: Callable[[Results], str] | None = None
    tables: Callable[[Results], str] = lambda results: ""
    draw: Callable = draw_leads

    def page(self, results: Results) -> page.Page:
        """The page of what was found."""
        text = [f"{self.text.strip()}\n\n{HOW}", self.tables(results)]
        text.append(f"## Learning rates\n\n{results.sweep_table()}" if results.found["sweep"] else "")
        return page.Page(
            title=self.title,
            claim=self.claim(results) if self.claim else results.claim(self.growing),
            summary=results.table(self.more),
            text="\n\n".join(part for part in text if part),
            draw=lambda plt: self.draw(results, plt),
        )

    def run(self, cells: list[Cell], arguments: argparse.Namespace) -> None:
        """Run the cells, and write the page."""
        arguments.output.mkdir(parents=True, exist_ok=True)
        harness.MODELS = arguments.output / "pretrained_models"
        kept = arguments.output / f"{self.name}.jsonl"
        found = run_cells(cells, arguments.seeds, kept, arguments.processes, arguments.quick)
        results = Results(cells, found)
        seconds = sum(row["seconds"] for row in (*found["rows"], *found["sweep"]))
        page.publish(self.name, self.page(results), results.figures(), arguments.seeds, arguments.output, seconds)


def make_parser(description: str) -> argparse.ArgumentParser:
    """The options that all pages on the harness have."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--output", type=Path, default=page.RESULTS)
    parser.add_argument("--processes", type=int, default=1, help="runs at once, one thread each")
    parser.add_argument("--quick", action="store_true", help="tiny, one seed, one learning rate: shows that it runs")
    return parser


def parse(parser: argparse.ArgumentParser) -> argparse.Namespace:
    """The arguments; with `--quick` one seed."""
    arguments = parser.parse_args()
    if arguments.quick:
        arguments.seeds = arguments.seeds[:1]
    return arguments
