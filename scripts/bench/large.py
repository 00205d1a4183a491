"""What a growth takes of each rank under FSDP2: memory and time on 1, 2 and 4 processes, and on paper for large models.

OMP_NUM_THREADS=1 python scripts/bench/large.py --model path/to/smollm2
"""

import argparse
import json
import subprocess
import sys
from functools import partial
from pathlib import Path

import memory
import page
from runs import collect

ROOT = Path(__file__).parents[2]
RANDOM = "a Llama with random weights"
FULL = dict(width=384, batches=8, rows=1, tokens=32, budget=0.02)
PRETRAINED = dict(width=0, batches=8, rows=1, tokens=64, budget=0.006)
QUICK = dict(width=64, batches=4, rows=2, tokens=16, budget=0.05)
# hidden_size, layers and weights in billions, as Llama has them.
ON_PAPER = {"1B": (2048, 16, 1.2), "8B": (4096, 32, 8.0), "70B": (8192, 80, 70.6)}
RANKS, BATCHES, TOKENS = 8, 16, 8192  # of the growth on paper: tokens of one batch
GATHERED, FLOPS = 50e9, 400e12  # what is assumed of a device: bytes it receives, and operations, in a second
ROOTS_READ = 47  # of a layer: two kinds, three passes of a probe and two trials
EVALUATIONS, FEW = 10, 4  # of a search at most, each of so many batches at most


def launched(sources: dict[str, str], ranks: int, model: str, **job) -> dict:
    """One run on so many processes."""
    job["model"] = sources.get(model)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(ranks)]
    command += [str(Path(__file__).with_name("large_run.py")), json.dumps(job)]
    environment = memory.TIDY | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    output = subprocess.run(command, check=True, env=environment, stdout=subprocess.PIPE, text=True).stdout
    return json.loads(output.splitlines()[-1])


def statistics_of(width: int, layers: int, ranks: int) -> float:
    """The most bytes of them on a rank: its rows of the two roots of each layer, and all of one layer's moment."""
    return (2 * layers / ranks + 3) * 4 * (width + 1) ** 2


def on_paper(width: int, layers: int, weights: float) -> tuple[float, float, float]:
    """Of a growth: bytes of statistics, bytes that a rank receives, and seconds by the slower of both."""
    number, mine = weights * 1e9, BATCHES / RANKS
    few = min(mine, FEW)
    # Passes: moments, the search and all batches again; then the probe and what the optimizer's state is scaled by.
    there, back = 2 * mine + EVALUATIONS * few, 2.5 * mine + few
    moments = layers * 4 * (width + 1) ** 2
    received = (there + 2 * back) * 2 * number * (RANKS - 1) / RANKS + 2 * (2 * mine + ROOTS_READ) * moments
    seconds = max(received / GATHERED, (there * 2 + back * 4) * number * TOKENS / FLOPS)
    return statistics_of(width, layers, RANKS), received, seconds


def peak_of(run: dict, name: str) -> float:
    """Of the worst rank."""
    return max(rank[name] for rank in run["of_ranks"])


def draw(runs: list[dict], plt):
    """Memory of a rank by their number, a panel for each model."""
    models = list(dict.fromkeys(run["model"] for run in runs))
    figure, panels = plt.subplots(1, len(models), figsize=(5 * len(models), 3), layout="constrained", squeeze=False)
    for panel, model in zip(panels[0], models):
        held = [run for run in runs if run["memory"] and run["model"] == model]
        for name, label in (("share", "weights and states"), ("step", "a training step"), ("growth", "a growth")):
            panel.plot(*zip(*[(run["ranks"], peak_of(run, name) / 2**20) for run in held]), marker="o", label=label)
        panel.set(xlabel="ranks", ylabel="MiB of a rank", ylim=0)
        panel.set_title(model, fontsize=9)
    panels[0, 0].legend()
    return figure


def page_of(figures: dict) -> page.Page:
    """The page, out of its figures."""
    runs, rows = figures["runs"], []
    held_by, timed_by = ([run for run in runs if run["memory"] == kind] for kind in (True, False))
    for held, timed in zip(held_by, timed_by):
        mebibytes = [f"{peak_of(held, name) / 2**20:.1f}" for name in ("share", "step", "growth")]
        seconds = f"{peak_of(timed, 'step'):.2f}", f"{peak_of(timed, 'growth'):.1f}"
        rows.append([held["model"], held["ranks"], *mebibytes, *seconds, f"{timed['of_ranks'][0]['loss']:.5f}"])
    large = []
    for name, (wide, layers, weights) in ON_PAPER.items():
        held, received, seconds = on_paper(wide, layers, weights)
        figures_of = f"{16 * weights / RANKS:.0f}", f"{held / 1e9:.1f}", f"{received / 1e9:.0f}", f"{seconds:.0f}"
        large.append([name, wide, layers, *figures_of])
    last = held_by[-1]
    above = (peak_of(last, "growth") - peak_of(last, "step")) / 2**20
    return page.Page(
        title="A growth under FSDP2, rank by rank",
        claim=(
            f"On {last['ranks']} ranks a growth of {last['model']} takes {abs(above):.0f} MiB "
            f"{'more' if above > 0 else 'less'} than a training step on the worst rank, beside its share of weights "
            f"and states. On paper {RANKS} ranks hold statistics of {large[1][4]} GB each for 8B, and of "
            f"{large[2][4]} GB for 70B."
        ),
        summary=page.table(
            ["model", "ranks", "share, MiB", "a step, MiB", "a growth, MiB", "a step, s", "a growth, s", "loss after"],
            rows,
        ),
        text=(
            f"fp32, AdamW; {runs[0]['batches']} batches, "
            "shared out over the ranks. The weights that are random are those of 4 layers of hidden_size "
            f"{FULL['width']}. Memory is the peak of the process on the worst rank, beside its share "
            "of weights and states. Seconds are of the clock, for processes of one thread by gloo on one machine: more "
            "of them than it has cores wait for each other, so the times show that it runs, not how it scales. "
            "Each rank splits its own batches in the halves that judge each other, so the growths differ.\n\n"
            f"On paper, {RANKS} ranks, {BATCHES} batches of {TOKENS:,} tokens, passes in bf16; the share of "
            "a rank is 16 bytes for each of its weights, with gradients and states. Statistics are the moment of each "
            "layer's input, (d + 1) x (d + 1) in fp64, and then its two roots in fp32; each rank keeps some rows, "
            "and all gather one when it is read, and while its roots are taken. Seconds are those of the "
            f"slower of receiving ({GATHERED / 1e9:.0f} GB/s are assumed) and computing ({FLOPS / 1e12:.0f} Tflop/s), "
            "without the eigenvalues of the moments, some 20 d^3 operations a layer in fp32, which every rank "
            "computes.\n\n"
            + page.table(
                ["weights", "d", "layers", "share, GB", "statistics, GB", "received, GB", "seconds"],
                large,
            )
        ),
        draw=partial(draw, runs),
    )


def main() -> None:
    """Run what is missing, and write the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="path or Hub id of a pretrained Llama, to be run as well")
    parser.add_argument("--output", type=Path, default=page.RESULTS)
    parser.add_argument("--quick", action="store_true", help="a tiny model on two ranks: shows that it runs")
    options = parser.parse_args()
    sizes, ranks = {RANDOM: QUICK if options.quick else FULL}, (2,) if options.quick else (1, 2, 4)
    sources = {Path(options.model).name: options.model} if options.model else {}
    sizes |= dict.fromkeys(sources, PRETRAINED)
    jobs = [
        {"ranks": number, "memory": memory, "model": model} | size
        for memory in (True, False)
        for model, size in sizes.items()
        for number in ranks
    ]
    options.output.mkdir(parents=True, exist_ok=True)
    runs = collect(partial(launched, sources), jobs, options.output / "large.jsonl")
    names = ("model", "ranks", "memory", "batches", "of_ranks")
    page.publish("large", {"runs": page.kept(runs, *names)}, [0], options.output, sum(run["seconds"] for run in runs))


if __name__ == "__main__":
    main()
