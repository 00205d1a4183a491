"""What a growth takes of each rank under FSDP2: memory and time on 1, 2 and 4 processes, and on paper for large models.

OMP_NUM_THREADS=1 python scripts/bench/large.py
"""

import argparse
import json
import os
import subprocess
import sys
from functools import partial
from pathlib import Path

import page
from runs import collect

ROOT = Path(__file__).parents[2]
FULL = dict(width=384, batches=8, rows=1, tokens=32, budget=0.02)
QUICK = dict(width=64, batches=4, rows=2, tokens=16, budget=0.05)
# hidden_size, layers and weights in billions, as Llama has them.
ON_PAPER = {"1B": (2048, 16, 1.2), "8B": (4096, 32, 8.0), "70B": (8192, 80, 70.6)}
RANKS, BATCHES, TOKENS = 8, 16, 8192  # of the growth on paper: tokens of one batch
GATHERED, FLOPS = 50e9, 400e12  # what is assumed of a device: bytes it receives, and operations, in a second
EVALUATIONS, FEW = 10, 4  # of a search at most, each of so many batches at most


def launched(ranks: int, **job) -> dict:
    """One run on so many processes."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(ranks)]
    command += [str(Path(__file__).with_name("large_run.py")), json.dumps(job)]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    output = subprocess.run(command, check=True, env=environment, stdout=subprocess.PIPE, text=True).stdout
    return json.loads(output.splitlines()[-1])


def statistics_of(width: int, layers: int) -> float:
    """Bytes that each rank holds: of each layer a moment and its two roots, (d + 1) x (d + 1) in fp32."""
    return layers * 3 * 4 * (width + 1) ** 2


def on_paper(width: int, layers: int, weights: float) -> tuple[float, float, float]:
    """Of a growth: bytes of statistics, bytes that a rank receives, and seconds by the slower of both."""
    number, mine = weights * 1e9, BATCHES / RANKS
    few = min(mine, FEW)
    # Passes: moments, the search and all batches again; then the probe and what the optimizer's state is scaled by.
    there, back = 2 * mine + EVALUATIONS * few, 2.5 * mine + few
    received = (there + 2 * back) * 2 * number * (RANKS - 1) / RANKS + statistics_of(width, layers) / 3 * 2
    seconds = max(received / GATHERED, (there * 2 + back * 4) * number * TOKENS / FLOPS)
    return statistics_of(width, layers), received, seconds


def draw(runs: list[dict], plt):
    """Memory of a rank by their number."""
    figure, panel = plt.subplots(figsize=(6, 3), layout="constrained")
    for name, label in (("share", "weights and states"), ("step", "a training step"), ("growth", "a growth")):
        points = [(run["ranks"], max(rank[name] for rank in run["of_ranks"]) / 2**20) for run in runs if run["memory"]]
        panel.plot(*zip(*points), marker="o", label=label)
    panel.set(xlabel="ranks", ylabel="MiB of a rank", ylim=0)
    panel.legend()
    return figure


def page_of(figures: dict) -> page.Page:
    """The page, out of its figures."""
    runs, width = figures["runs"], figures["runs"][0]["width"]
    memory, times = ([run for run in runs if run["memory"] == kind] for kind in (True, False))
    rows = []
    for held, timed in zip(memory, times):
        share, step, growth = (
            max(rank[name] for rank in held["of_ranks"]) / 2**20 for name in ("share", "step", "growth")
        )
        seconds = [max(rank[name] for rank in timed["of_ranks"]) for name in ("step", "growth")]
        figures_of = (f"{share:.1f}", f"{step:.1f}", f"{growth:.1f}", f"{seconds[0]:.2f}", f"{seconds[1]:.1f}")
        rows.append([held["ranks"], *figures_of, f"{timed['of_ranks'][0]['loss']:.5f}"])
    large = []
    for name, (wide, layers, weights) in ON_PAPER.items():
        held, received, seconds = on_paper(wide, layers, weights)
        figures_of = f"{16 * weights / RANKS:.0f}", f"{held / 1e9:.1f}", f"{received / 1e9:.0f}", f"{seconds:.0f}"
        large.append([name, wide, layers, *figures_of])
    statistics = statistics_of(width, 4) / 2**20
    return page.Page(
        title="A growth under FSDP2, rank by rank",
        claim=(
            "What a growth needs beside the weights does not shrink with the number of ranks as those do: each rank "
            f"holds the statistics of all layers ({statistics:.0f} MiB here, {large[1][4]} GB for 8B, {large[2][4]} GB "
            "for 70B). The last is most of a device's memory: grow fewer layers at a time there."
        ),
        summary=page.table(
            ["ranks", "share, MiB", "a step, MiB", "a growth, MiB", "a step, s", "a growth, s", "loss after"],
            rows,
        ),
        text=(
            f"A Llama with random weights, hidden_size {width}, 4 layers, fp32, AdamW; {runs[0]['batches']} batches, "
            "shared out over the ranks. Memory is the peak of what torch allocates on the worst rank, beside its share "
            "of weights and states. Seconds are of the clock, for processes of one thread by gloo on one machine: more "
            "of them than it has cores wait for each other, so the times show that it runs, not how it scales. "
            "Each rank splits its own batches in the halves that judge each other, so the growths differ.\n\n"
            f"On paper, {RANKS} ranks, {BATCHES} batches of {TOKENS:,} tokens, passes in bf16; the share of "
            "a rank is 16 bytes for each of its weights, with gradients and states. Statistics are a moment of each "
            "layer's input and its two roots, (d + 1) x (d + 1) in fp32. Seconds are those of the slower of receiving "
            f"({GATHERED / 1e9:.0f} GB/s are assumed) and computing ({FLOPS / 1e12:.0f} Tflop/s), without the "
            "eigenvalues of the moments, some 20 d^3 operations a layer in fp32, which every rank computes.\n\n"
            + page.table(
                ["weights", "d", "layers", "share, GB", "statistics, GB", "received, GB", "seconds"],
                large,
            )
        ),
        draw=partial(draw, runs),
    )  # fmt: skip


def main() -> None:
    """Run what is missing, and write the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=page.RESULTS)
    parser.add_argument("--quick", action="store_true", help="a tiny model on two ranks: shows that it runs")
    options = parser.parse_args()
    size, ranks = (QUICK, (2,)) if options.quick else (FULL, (1, 2, 4))
    jobs = [{"ranks": number, "memory": memory} | size for memory in (True, False) for number in ranks]
    options.output.mkdir(parents=True, exist_ok=True)
    runs = collect(launched, jobs, options.output / "large.jsonl")
    names = ("ranks", "memory", "width", "batches", "of_ranks")
    page.publish("large", {"runs": page.kept(runs, *names)}, [0], options.output, sum(run["seconds"] for run in runs))


if __name__ == "__main__":
    main()
