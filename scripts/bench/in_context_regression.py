"""In-context linear regression (draft 002; Garg et al. 2022): narrow heads grown in the middle of training.

    OMP_NUM_THREADS=1 python scripts/bench/in_context_regression.py

A GPT-2 sees points x and values w^T x of a linear function that it never saw, and predicts the value of the next x.
It trains with narrow heads for one phase; then every row goes on from the same weights in its own way: as it is, grown
by the gradient or at random, or with peft's LoRA at the parameters that growth adds. Beside them: wide heads from the
start, and least squares.
"""

import argparse
import dataclasses
import statistics
import time
from functools import partial
from pathlib import Path

import memory
import page
from in_context_task import CHANGES, GUIDED, LORA, RANDOM, SCRATCH, STAY, Setting, Training, forward_of, least_squares
from runs import collect, spread
from torch import nn
from transformers import get_constant_schedule_with_warmup, get_cosine_schedule_with_warmup

TUNING_SEED = 100
SHOWN = (5, 10, 15, 20, 25)  # numbers of examples in the page's table, besides the most
ROWS = (*CHANGES, SCRATCH)


def measure(setting: dict, seed: int, wide: bool, first_rate: float, rates: dict[str, list[float]]) -> dict:
    """Train phase one, and from there phase two once for each row and rate.

    Args:
        setting: of the task.
        seed: of the weights and the data.
        wide: start with wide heads.
        first_rate: learning rate of phase one.
        rates: those of phase two, for each of the `CHANGES`.
    """
    begun = time.perf_counter()
    first = Training(Setting(**setting), wide, seed, first_rate)
    steps = first.setting.steps
    first.train(steps, first_rate, partial(get_constant_schedule_with_warmup, num_warmup_steps=steps // 10))
    first.note(first.setting.held_out)
    phase_one, rows = time.perf_counter() - begun, []
    for name, several in rates.items():
        for rate in several:
            memory.forget_peak()
            floor, begun = memory.peak(), time.perf_counter()
            training = first.copy()
            noted = CHANGES[name](training)
            training.note(training.setting.held_out)
            at_start = training.curve[-1][1]
            left = 2 * steps - training.step
            schedule = partial(get_cosine_schedule_with_warmup, num_warmup_steps=0, num_training_steps=left)
            training.train(left, rate, schedule)
            errors = training.errors(training.setting.held_out)
            rows.append(
                {"row": SCRATCH if wide else name, "rate": rate, "first_rate": first_rate, "seed": seed}
                | {"phase_one": first.curve[-1][1], "at_start": at_start, "error": statistics.fmean(errors)}
                | {"errors": errors, "curve": training.curve, "seconds": phase_one + time.perf_counter() - begun}
                | {"peak_bytes": memory.peak() - floor, "parameters": parameters(training.model), **noted}
            )
    return {"rows": rows}


def parameters(model: nn.Module) -> int:
    """Those that phase two trains or keeps, without the unused embeddings."""
    return sum(p.numel() for name, p in model.named_parameters() if "wte" not in name and "wpe" not in name)


def best(rows: list[dict], name: str) -> dict:
    """The row's run with the lowest error."""
    return min((row for row in rows if row["row"] == name), key=lambda row: row["error"])


def beyond(rows: list[dict], name: str) -> list[float]:
    """A learning rate beyond the row's best one, if that is the largest or the smallest of several."""
    tried, lowest = {row["rate"] for row in rows if row["row"] == name}, best(rows, name)["rate"]
    further = {max(tried): 2 * lowest, min(tried): lowest / 2} if len(tried) > 1 else {}
    return [further[lowest]] if lowest in further else []


def run_all(
    setting: Setting, seeds: list[int], rates: list[float], kept: Path, processes: int
) -> tuple[list, list, float]:
    """Sweep the learning rates on a seed of their own, then run every row; return both, and the seconds of all."""

    def jobs(of_seeds: list[int], wide: bool, first_rate: float, of_rows: dict[str, list[float]]) -> list[dict]:
        shared = {"setting": dataclasses.asdict(setting), "wide": wide, "first_rate": first_rate, "rates": of_rows}
        return [{**shared, "seed": seed} for seed in of_seeds]

    def collected(these: list[dict]) -> list[dict]:
        runs = collect(measure, these, kept, processes)
        seconds.extend(run["seconds"] for run in runs)
        return [row for run in runs for row in run["rows"]]

    seconds: list[float] = []
    first_rates, swept = {}, []
    for wide, name in ((False, STAY), (True, SCRATCH)):
        wanted = list(rates)
        while wanted:
            swept += collected([job for rate in wanted for job in jobs([TUNING_SEED], wide, rate, {STAY: [rate]})])
            wanted = beyond(swept, name)
        first_rates[wide] = best(swept, name)["rate"]
    others = {name: rates for name in CHANGES if name != STAY}
    while others:
        swept += collected(jobs([TUNING_SEED], False, first_rates[False], others))
        others = {name: further for name in others if (further := beyond(swept, name))}
    chosen = {name: [best(swept, name)["rate"]] for name in CHANGES}
    final = jobs(seeds, False, first_rates[False], chosen) + jobs(
        seeds, True, first_rates[True], {STAY: [first_rates[True]]}
    )
    return swept, collected(final), sum(seconds)


def verdict(found: list[dict]) -> tuple[str, str]:
    """Whether guided growth is better than every LoRA row by more than twice the wider of the ranges; and in words."""
    ranges = {name: [row["error"] for row in found if row["row"] == name] for name in (GUIDED, *LORA)}
    rival = min(LORA, key=lambda name: statistics.median(ranges[name]))
    ours, theirs = ranges[GUIDED], ranges[rival]
    lead = statistics.median(theirs) - statistics.median(ours)
    noise = max(max(values) - min(values) for values in (ours, theirs))
    words = f"guided growth {spread(ours)}, the best peft row ({rival}) {spread(theirs)}"
    words += f", seed by seed above it by {spread([b - a for a, b in zip(ours, theirs)])}"
    if len(ours) < 3:
        return words, "undecided"
    if lead > 2 * noise:
        return words, "reached"
    return words, "missed" if lead < noise else "undecided"


def claim(found: list[dict]) -> str:
    """Who wins and who loses, from the medians."""
    medians = {name: statistics.median(row["error"] for row in found if row["row"] == name) for name in ROWS}
    order = sorted(medians, key=medians.get)
    listed = ", ".join(f"{name} {medians[name]:.3f}" for name in order)
    place = order.index(GUIDED)
    return (
        "Held-out error of in-context linear regression with narrow heads, over all numbers of examples, best first: "
        f"{listed}. "
        + (f"Better than guided growth: {', '.join(order[:place])}." if place else "No row beats guided growth.")
    )


def summary(found: list[dict], setting: Setting, forward: float) -> str:
    """The table that people read first."""
    base = next(row["parameters"] for row in found if row["row"] == STAY)
    lines = []
    for name in ROWS:
        rows = [row for row in found if row["row"] == name]
        lines.append(
            [
                name,
                f"{rows[0]['parameters'] - base:,}",
                f"{2 * setting.steps:,}",
                *(spread([row[key] for row in rows]) for key in ("at_start", "error")),
                f"{cache(name, setting):+.0%}",
                f"{forward if cache(name, setting) else 1:.2f}",
                spread([row["seconds"] for row in rows], 0),
                spread([row["peak_bytes"] / 1e6 for row in rows], 0),
                f"{rows[0]['first_rate']:g}, {rows[0]['rate']:g}",
            ]
        )
    head = ["row", "added parameters", "steps, measured batches among them", "error as phase two starts"]
    costs = ["seconds", "peak MB", "learning rates"]
    return page.table([*head, "error at the end", "KV cache", "forward pass", *costs], lines)


def cache(name: str, setting: Setting) -> float:
    """By how much a row's keys and values are wider than those of narrow heads."""
    wider = setting.wide - setting.narrow if name in (GUIDED, RANDOM, SCRATCH) else 0
    return wider / (2 * setting.narrow)


def by_examples(found: list[dict], setting: Setting, exact: list[list[float]]) -> str:
    """Error by number of examples, with that of least squares for each seed."""
    counts = [count for count in SHOWN if count < setting.points - 1] + [setting.points - 1]
    lines = []
    for name in (*CHANGES, SCRATCH, "least squares"):
        curves = exact if name == "least squares" else [row["errors"] for row in found if row["row"] == name]
        lines.append([name, *(spread([curve[count] for curve in curves]) for count in counts)])
    return page.table(["examples", *counts], lines)


def text(setting: Setting, swept: list[dict], found: list[dict], exact: list[list[float]]) -> str:
    """How it was done, and the further tables."""
    starved = [starvation for row in found for starvation in row.get("starvation", [])]
    rates = sorted({row["rate"] for row in swept})
    ends = {(row["row"], row["rate"]): f"{row['error']:.3f}" for row in swept}
    lines = [[name, *(ends.get((name, rate), "") for rate in rates)] for name in ROWS]
    sweep = page.table(["row", *(f"{rate:g}" for rate in rates)], lines)
    ranks = ", ".join(f"{rank} ({name})" for name, rank in {r["row"]: r["rank"] for r in found if "rank" in r}.items())
    return f"""
## How

y = w^T x in {setting.dims} dims, x and w Gaussian, drawn afresh for every sequence; values have unit variance, so that
an error is the squared error over the number of dims. {setting.points} points a sequence, two tokens each:
(x, 0, query) and (x, y, example), read in by a trained linear map; predictions at the queries, which see all examples
before them.
Garg et al. have x and y in tokens of their own, 12 layers, and a curriculum of inputs of ever more dims; one token for
both and {setting.layers} layers learn within minutes on a CPU, without a curriculum. Otherwise a stock GPT-2,
d = {setting.d}, H = d / r = {setting.d // setting.narrow} heads, r = {setting.narrow}, without position embeddings.
Growth, and "{SCRATCH}", have queries and keys {setting.wide} wide in every head; values stay {setting.narrow} wide.

Two phases of {setting.steps} steps of {setting.batch_size} sequences, AdamW without decay: phase one warms up to a
constant rate, phase two falls to zero along a cosine. All rows but the last share phase one, to the bit, and all
weights train unless the row says frozen. Growth measures {setting.growth_batches} batches, which count as steps of
phase two. GPT-2 has queries, keys and values in one matrix, so peft's LoRA on q, k is LoRA on q, k, v; the ranks that
have the parameters that growth adds are {ranks}, alpha = rank.

Errors are of {setting.held_out:,} held-out sequences, medians (range) over the seeds. Peak memory is phase two's, over
what the process held before it; seconds are of both phases. The KV cache of a token and the time of a forward pass (of
a batch, without a cache) stand against narrow heads; LoRA is merged for free. Before phase two the error is
{spread([row["phase_one"] for row in found if row["row"] == STAY])}; a growth takes
{spread([row["growth_seconds"] for row in found if row["row"] == GUIDED], 1)} s and finds starvation
{spread(starved, 2)}.

## Error by number of examples

{by_examples(found, setting, exact)}

## Learning rates

Error on seed {TUNING_SEED}, which is not among those reported, by the rate of phase two; "{STAY}" and "{SCRATCH}" have
the same rate in phase one, the others the best of "{STAY}". The best rate of each row was taken; where it was the
largest or the smallest, one beyond it was tried.

{sweep}
"""


def draw_page(found: list[dict], exact: list[list[float]], plt):
    """Error over training, and over the number of examples."""
    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4.5), layout="constrained")
    for name in ROWS:
        rows = [row for row in found if row["row"] == name]
        style = "--" if name in LORA else "-"
        steps = [step for step, _ in rows[0]["curve"]]
        middle = [statistics.median(values) for values in zip(*([error for _, error in row["curve"]] for row in rows))]
        (line,) = left.plot(steps, middle, style, label=name)
        by_count = [statistics.median(values) for values in zip(*(row["errors"] for row in rows))]
        right.plot(by_count, style, color=line.get_color())
    right.plot([statistics.median(values) for values in zip(*exact)], "k:", label="least squares")
    left.set(xlabel="steps", ylabel="held-out squared error / dims")
    right.set(xlabel="examples in context", ylim=(0, 1.2))
    left.legend(fontsize=8)
    right.legend(fontsize=8)
    return figure


QUICK = Setting(dims=3, points=6, d=8, narrow=2, wide=4, steps=6, batch_size=4, growth_batches=2, held_out=16)


def page_of(figures: dict) -> page.Page:
    """The page, out of its figures."""
    setting, swept, found, exact = (figures[name] for name in ("setting", "sweep", "runs", "least_squares"))
    setting = Setting(**setting)
    measured, judged = verdict(found)
    aim = "In-context regression with narrow heads: better than every peft row by more than twice the seeds' range"
    return page.Page(
        title="In-context linear regression",
        claim=claim(found),
        summary=summary(found, setting, figures["forward"]),
        text=text(setting, swept, found, exact),
        draw=partial(draw_page, found, exact),
        reaches=[page.Reach(aim, measured, judged)],
    )


def main() -> None:
    """Sweep, run, and write the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--rates", type=float, nargs="+", default=[1.5e-3, 3e-3, 6e-3], help="learning rates to sweep")
    parser.add_argument("--processes", type=int, default=1, help="runs at once")
    parser.add_argument("--output", type=Path, default=page.RESULTS)
    parser.add_argument("--quick", action="store_true", help="a tiny task, one seed, one rate: shows that it runs")
    arguments = parser.parse_args()
    setting, seeds, rates = Setting(), arguments.seeds, arguments.rates
    if arguments.quick:
        setting, seeds, rates = QUICK, seeds[:1], rates[:1]
    arguments.output.mkdir(parents=True, exist_ok=True)
    kept = arguments.output / "in_context_regression.jsonl"
    swept, found, seconds = run_all(setting, seeds, rates, kept, arguments.processes)
    ends = ("phase_one", "at_start", "error", "errors", "growth_seconds", "starvation", "seconds", "peak_bytes")
    figures = {
        "setting": dataclasses.asdict(setting),
        "sweep": page.kept(swept, "row", "rate", "error"),
        "runs": page.kept(found, "row", "seed", "first_rate", "rate", "rank", "parameters", *ends, "curve"),
        "forward": forward_of(setting),
        "least_squares": [least_squares(setting, seed, setting.held_out) for seed in seeds],
    }
    page.publish("in_context_regression", figures, seeds, arguments.output, seconds)


if __name__ == "__main__":
    main()
