"""What growth is worth where rank is what is missing: the nearest neighbour (Amsel, Yehudai, Bruna 2024).

    OMP_NUM_THREADS=1 python scripts/bench/nearest_neighbour.py

Return the nearest of N points on a sphere to a query on it. One head as wide as the data does it; narrow heads would
have to be very many. Every row sees as many queries, and has the learning rate and schedule that suit it best on a seed
that is not reported.
"""

import argparse
import statistics
import tempfile
from dataclasses import asdict
from functools import partial
from pathlib import Path

import page
import runs
from nearest import LORA, SCHEDULES, Row, Setting, forward_of, measure

TUNING_SEED = 9
SCRATCH, RANDOM = "full rank from scratch", "random growth"
# Each guided row, and the random one that grows at the same time.
GUIDED = {"guided growth": RANDOM, "guided growth after a quarter": f"{RANDOM} after a quarter"}
COMPARED = {SCRATCH, *GUIDED, *GUIDED.values()}  # by the aims: their learning rates lie closer
COLUMNS = ["row", "heads", "width of q and k", "parameters (added)", "batches", "learning rate, schedule"]
COLUMNS += ["before the change", "after it", "at the end", "KV cache", "forward pass", "time, s", "peak, MB"]
COSTS = ("first_seconds", "seconds", "peak_bytes")


def main_rows(setting: Setting, batches: int = 256) -> dict[str, Row]:
    """All rows by name; a growth measures so many batches."""
    d, r, few = setting.d, setting.r, setting.d // setting.r
    half, quarter = GUIDED
    return {
        "stay at r": Row(few, r),
        "more heads, same parameters": Row(few * 2 * d // (d + r), r),
        SCRATCH: Row(few, d),
        "LoRA on q,k, base frozen": Row(few, r, "q,k", frozen=True),
        "LoRA on q,k,v,o, base trained": Row(few, r, "q,k,v,o"),
        RANDOM: Row(few, r, "random"),
        "gradient growth, not whitened": Row(few, r, "gradient", batches=batches),
        half: Row(few, r, "whitened", batches=batches),
        quarter: Row(few, r, "whitened", first=0.25, batches=batches),
        GUIDED[quarter]: Row(few, r, "random", first=0.25),
    }


def heads_rows(setting: Setting, batches: int = 128) -> dict[str, Row]:
    """Narrow heads in the numbers of the theory."""
    d, r = setting.d, setting.r
    heads = {"H = d / r": d // r, "H = d^1.5 / r": round(d**1.5) // r, "H = d^2 / r": d * d // r}
    some = (SCRATCH, RANDOM, next(iter(GUIDED)))
    every = main_rows(setting, batches)
    return {name: Row(number, r) for name, number in heads.items()} | {name: every[name] for name in some}


MAIN, SMALL = Setting(), Setting(d=16, points=8, r=2, steps=1200)
TABLES = ((MAIN, main_rows(MAIN)), (SMALL, heads_rows(SMALL)))
TINY = Setting(d=8, points=4, queries=4, r=2, steps=8, held_out=2)
QUICK = ((TINY, main_rows(TINY, 2)), (TINY, heads_rows(TINY, 2)))


def best_of(done: list[dict]) -> dict:
    """The best run."""
    return min(done, key=lambda run: run["error"])


class Tuning:
    """All runs of a setting: every row tuned on one seed, then trained on the others.

    Args:
        setting: the task.
        rows: by name.
        rates: learning rates to begin with; a single one is not tuned.
        kept: the file that keeps the runs.
        folder: for what the runs share.
    """

    def __init__(self, setting: Setting, rows: dict[str, Row], rates: list[float], kept: Path, folder: Path):
        self.setting, self.rows, self.rates, self.kept = setting, rows, rates, kept
        self.measure = partial(measure, folder=folder)

    def collected(self, name: str, seed: int, choices: list[dict]) -> list[dict]:
        """The runs of a row."""
        job = {"setting": asdict(self.setting), "row": asdict(self.rows[name]), "seed": seed}
        return runs.collect(self.measure, [job | choice for choice in choices], self.kept)

    def tuned(self, name: str) -> list[dict]:
        """One schedule with ever more learning rates until the best is none of the outermost; then the others."""
        (first, *others), rates = SCHEDULES, self.rates
        while True:
            done = self.collected(name, TUNING_SEED, [{"learning_rate": r, "schedule": first} for r in rates])
            best = best_of(done)["learning_rate"]
            if len(rates) == 1:
                return done
            if rates[0] < best < rates[-1]:
                break
            rates = [round(best / 2, 6), *rates] if best == rates[0] else [*rates, best * 2]
        if name in COMPARED:
            finer = [round(best * factor, 6) for factor in (0.7, 1.4)]
            done += self.collected(name, TUNING_SEED, [{"learning_rate": r, "schedule": first} for r in finer])
        best = best_of(done)["learning_rate"]
        return done + self.collected(name, TUNING_SEED, [{"learning_rate": best, "schedule": s} for s in others])

    def run(self, seeds: list[int]) -> tuple[dict, float]:
        """Everything: what the page needs, and the seconds of all runs."""
        tuning, found = {name: self.tuned(name) for name in self.rows}, {}
        for seed in seeds:
            for name in self.rows:
                best = {key: best_of(tuning[name])[key] for key in ("learning_rate", "schedule")}
                found.setdefault(name, []).extend(self.collected(name, seed, [best]))
        needed = ("seed", "before", "at_change", "error", "rank", "width", "parameters", *COSTS, "curve")
        figures = {
            "setting": asdict(self.setting),
            "rows": {name: asdict(row) for name, row in self.rows.items()},
            "tuning": {n: page.kept(done, "learning_rate", "schedule", "error") for n, done in tuning.items()},
            "runs": {name: page.kept(done, *needed) for name, done in found.items()},
            "forward": {n: forward_of(self.setting, row.heads, found[n][0]["width"]) for n, row in self.rows.items()},
        }
        done = [run for of_row in (*tuning.values(), *found.values()) for run in of_row]
        return figures, sum(run["seconds"] for run in done)


class Table:
    """The figures of a setting, as `Tuning` leaves them."""

    def __init__(self, figures: dict):
        self.setting, self.tuning, self.runs = Setting(**figures["setting"]), figures["tuning"], figures["runs"]
        self.rows = {name: Row(**row) for name, row in figures["rows"].items()}
        self.forward = figures["forward"]

    def errors(self, name: str) -> list[float]:
        """At the end, one for each seed."""
        return [run["error"] for run in self.runs[name]]

    def ratios(self, name: str, other: str) -> list[float]:
        """Of the errors at the end of two rows, one for each seed."""
        return [own / its for own, its in zip(self.errors(name), self.errors(other))]

    def summary(self) -> str:
        """A line for each row."""
        lines = []
        for name, row in self.rows.items():
            of_row, choice, d = self.runs[name], best_of(self.tuning[name]), self.setting.d
            parameters = of_row[0]["parameters"]
            added = parameters - 2 * row.heads * (row.width + d) * d
            measured = 1 if row.change == "random" else row.batches
            seconds = [run["first_seconds"] + run["seconds"] for run in of_row]
            lines.append(
                [
                    name,
                    row.heads,
                    " to ".join(map(str, dict.fromkeys((row.width, of_row[0]["width"])))),
                    f"{parameters:,}" + (f" ({added:,})" if added else ""),
                    f"{self.setting.steps - measured:,}" + (f" + {measured}" if measured else ""),
                    f"{choice['learning_rate']:g}, {choice['schedule']}",
                    runs.spread([run["before"] for run in of_row if "before" in run]),
                    runs.spread([run["at_change"] for run in of_row if "at_change" in run]),
                    f"**{runs.spread(self.errors(name))}**",
                    f"{row.heads * (of_row[0]['width'] + d) / (d // self.setting.r * (self.setting.r + d)) - 1:+.0%}",
                    f"{self.forward[name]:.2f}",
                    runs.spread(seconds, 0),
                    runs.spread([run["peak_bytes"] / 1e6 for run in of_row], 0),
                ]
            )
        return page.table(COLUMNS, lines)

    def sweep(self) -> str:
        """What the tuning seed said."""
        lines = [
            [name, f"{run['learning_rate']:g}", run["schedule"], f"{run['error']:.3f}"]
            for name, done in self.tuning.items()
            for run in done
        ]
        return page.table(["row", "learning rate", "schedule", "error at the end"], lines)


def reach(table: Table, name: str, other: str, aim: float) -> page.Reach:
    """Whether a row ends at most at a share of another's error: on every seed, on none, or undecided."""
    ratios = table.ratios(name, other)
    verdict = "reached" if max(ratios) <= aim else "missed" if min(ratios) > aim else "undecided"
    words = f"Nearest neighbour, {name}: at most {aim} times the error of {other}"
    return page.Reach(words, f"{runs.spread(ratios, 2)} times", verdict)


def lora_reach(table: Table, name: str) -> page.Reach:
    """Whether the worst seed of a row is better than the best one of every row with LoRA."""
    rows = [row for row, what in table.rows.items() if what.change in LORA]
    best = min(rows, key=lambda row: statistics.median(table.errors(row)))
    apart = [max(table.errors(name)) < min(table.errors(row)) for row in rows]
    verdict = "reached" if all(apart) else "undecided" if any(apart) else "missed"
    words = f"Nearest neighbour, {name}: better than every peft row, well outside seed noise"
    measured = f"{runs.spread(table.errors(name))}; best peft row ({best}) {runs.spread(table.errors(best))}"
    return page.Reach(words, measured, verdict)


def medians(table: Table) -> dict[str, float]:
    """Each row's error at the end."""
    return {name: statistics.median(table.errors(name)) for name in table.rows}


def claim(table: Table, small: Table) -> str:
    """Who wins and who loses, from the figures."""
    median = medians(table)
    best = min(median, key=median.get)
    parts = [f"The lowest error is that of {best} ({median[best]:.3f})."]
    for name, chance in GUIDED.items():
        better = [f"{other} ({e:.3f})" for other, e in median.items() if e < median[name] and other not in GUIDED]
        whole = f"{name[0].upper()}{name[1:]} ends at {median[name]:.3f}"
        ratio = {other: statistics.median(table.ratios(name, other)) for other in (SCRATCH, chance)}
        lora = min(e for other, e in median.items() if table.rows[other].change in LORA)
        parts.append(
            f"{whole}: {ratio[SCRATCH]:.2f} times the error of {SCRATCH}, "
            f"{ratio[chance]:.2f} times that of {chance}, {median[name] / lora:.2f} times that of the best LoRA; "
            f"{'better: ' + ', '.join(better) if better else 'no row without guided growth is better'}."
        )
    ends = ", ".join(f"{name} {error:.3f}" for name, error in medians(small).items())
    ratio = statistics.median(small.ratios(next(iter(GUIDED)), SCRATCH))
    parts.append(f"In a smaller setting (d = {small.setting.d}, r = {small.setting.r}): {ends};")
    return " ".join([*parts, f"guided growth there has {ratio:.2f} times the error of {SCRATCH}."])


def draw_curves(tables: list[Table], plt):
    """Held-out error over steps: the median of the seeds and their range."""
    figure, panels = plt.subplots(1, len(tables), figsize=(7.5 * len(tables), 6), layout="constrained", squeeze=False)
    for table, panel in zip(tables, panels[0]):
        for name, of_row in table.runs.items():
            steps = [point[0] for point in of_row[0]["curve"]]
            errors = [sorted(point[1] for point in points) for points in zip(*(run["curve"] for run in of_row))]
            (line,) = panel.plot(steps, [statistics.median(values) for values in errors], label=name)
            panel.fill_between(
                steps, [v[0] for v in errors], [v[-1] for v in errors], color=line.get_color(), alpha=0.2
            )
        title = f"d = {table.setting.d}, N = {table.setting.points}, r = {table.setting.r}"
        panel.set(xlabel="steps", ylabel="held-out mean square error", ylim=(0, None), title=title)
        panel.legend(fontsize="small", loc="upper center", bbox_to_anchor=(0.5, -0.12), ncols=3)
    return figure


def text(main: Table, small: Table) -> str:
    """How it was done, and the other tables."""
    setting, other = main.setting, small.setting
    lora = ", ".join(f"{name}: {of[0]['rank']}" for name, of in main.runs.items() if "rank" in of[0])
    held_out = setting.held_out * setting.sequences * setting.queries
    return f"""N points and a query on the sphere of radius sqrt(d); d = {setting.d}, N = {setting.points}. The model is
one stock SmolLM3 layer without rotation, its MLP zeroed and no final norm; queries and keys start r = {setting.r} wide,
values are d wide. A sequence has {setting.queries} queries, which see the points and not one another. Mean square error
of a coordinate on {held_out:,} held-out queries, median (range) over the seeds; time with other work on the machine.
The picture has two batches of them for most of its points, all of them at the change and at the end.

AdamW without weight decay; a batch has {setting.sequences} sequences, all fresh. With the batches that a growth
measures ("+" in the table), every row sees {setting.steps:,} of them. Growth widens queries and keys to d. LoRA gets as
many parameters as that adds (rank of {lora}); q, k, v, o are all linear layers that there are, since the MLP, one unit
wide, is zeroed. The KV cache of a token and the time of a forward pass (of a batch, without a cache) stand against
heads that stay at r; LoRA is merged for free. What changes the model comes after half of the steps unless the row says
otherwise. Every row has a learning rate and schedule of its own, the best of those below on seed {TUNING_SEED}: first
learning rates with one cosine over all steps, further ones for as long as the best is the largest or the smallest, for
guided growth, random growth and "{SCRATCH}" also two in between, then the best with a cosine for each phase.

## Narrow heads in the numbers of the theory

The same, smaller: d = {other.d}, N = {other.points}, r = {other.r}, {other.steps:,} batches. Above, d^1.5 / r and
d^2 / r would be 64 and 512 heads, too slow here.

{small.summary()}

## Learning rates

{main.sweep()}

The smaller setting:

{small.sweep()}
"""


def page_of(figures: dict) -> page.Page:
    """The page, out of its figures."""
    table, small = tables = [Table(of) for of in figures["tables"]]
    aims = [(name, other, aim) for name in GUIDED for other, aim in ((SCRATCH, 0.75), (GUIDED[name], 0.5))]
    return page.Page(
        title="Nearest neighbour",
        claim=claim(table, small),
        summary=table.summary(),
        text=text(table, small),
        draw=partial(draw_curves, tables),
        reaches=[*(reach(table, *aim) for aim in aims), *(lora_reach(table, name) for name in GUIDED)],
    )


def main() -> None:
    """Run the rows, then write the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a few steps of tiny models: shows that it runs")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2], help=f"tuning takes seed {TUNING_SEED}")
    parser.add_argument("--output", type=Path, default=page.RESULTS)
    arguments = parser.parse_args()
    tables, rates, seeds = TABLES, [3e-3, 6e-3, 1.2e-2], arguments.seeds
    if arguments.quick:
        tables, rates, seeds = QUICK, rates[:1], seeds[:1]
    arguments.output.mkdir(parents=True, exist_ok=True)
    kept = arguments.output / "nearest_neighbour.jsonl"
    with tempfile.TemporaryDirectory() as folder:
        done = [Tuning(*of, rates, kept, Path(folder)).run(seeds) for of in tables]
    figures, seconds = {"tables": [of for of, _ in done]}, sum(seconds for _, seconds in done)
    page.publish("nearest_neighbour", figures, [TUNING_SEED, *seeds], arguments.output, seconds)


if __name__ == "__main__":
    main()
