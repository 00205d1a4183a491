"""What a growth costs inside a Trainer: its time and its peak memory as multiples of one training step.

    OMP_NUM_THREADS=1 python scripts/bench/training_cost.py

A Llama with random weights, 1 and 2 processes (gloo on CPUs, NCCL on GPUs), with the same batch for each process. Time
is the median over the steps of one run; peak memory is what a fresh process holds at most, over what it held when
training began, in steps with a growth against steps without one.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from functools import partial
from pathlib import Path

import memory
import page
import torch
from runs import collect, spread
from torch.utils.data import Dataset
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments
from transformers import logging as transformers_logging

from hf_growattn import GrowthCallback, GrowthConfig, patch_model

STEPS, BATCH, LAYERS = 10, 2, 4


class Tokens(Dataset):
    """Random tokens."""

    def __init__(self, vocabulary: int, tokens: int):
        self.ids = torch.randint(vocabulary, (512, tokens), generator=torch.Generator().manual_seed(0))

    def __len__(self):
        return len(self.ids)

    def __getitem__(self, row: int) -> dict:
        return {"input_ids": self.ids[row], "labels": self.ids[row]}


def peak() -> int:
    """Bytes at most since `forget_peak`, on the GPU if there is one."""
    return torch.cuda.max_memory_allocated() if torch.cuda.is_available() else memory.peak()


def forget_peak() -> None:
    """Lower the mark to what is in memory now."""
    memory.forget_peak()
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()


class Stopwatch(TrainerCallback):
    """Times every step, and marks the memory; added before and after the growth it tells both apart."""

    def __init__(self):
        self.seconds, self.peaks = [], []

    def on_step_begin(self, args, state, control, **kwargs):
        """A step begins."""
        if state.global_step == 1:  # the first step makes the optimizer's state
            forget_peak()
            self.floor = peak()
        self.start = time.perf_counter()

    def on_step_end(self, args, state, control, **kwargs):
        """A step is over, a growth not yet begun."""
        self.seconds.append(time.perf_counter() - self.start)
        self.start = time.perf_counter()
        self.peaks.append(peak())


class AfterGrowth(TrainerCallback):
    """Says what the growth took since the stopwatch stopped."""

    def __init__(self, stopwatch: Stopwatch):
        self.stopwatch = stopwatch
        self.seconds = []

    def on_step_end(self, args, state, control, **kwargs):
        """The growth, if there was one, is over."""
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        self.seconds.append(time.perf_counter() - self.stopwatch.start)
        self.stopwatch.peaks[-1] = max(self.stopwatch.peaks[-1], peak())


def measure(options: argparse.Namespace) -> None:
    """One training of one process, whose figures go to a file."""
    transformers_logging.set_verbosity_error()
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=4096,
        hidden_size=options.width,
        intermediate_size=options.width * 8 // 3,
        num_hidden_layers=LAYERS,
        num_attention_heads=options.width // 64,
        head_dim=64,
        max_position_embeddings=options.tokens,
    )
    stopwatch = Stopwatch()
    callbacks = [stopwatch, AfterGrowth(stopwatch)]
    if options.grow:
        growth = GrowthCallback(GrowthConfig(qk_dims=8, v_dims=8), steps=[STEPS // 2], batches=options.batches)
        callbacks.insert(1, growth)
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            output_dir=folder,
            max_steps=STEPS,
            per_device_train_batch_size=BATCH,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
            use_cpu=not torch.cuda.is_available(),
        )
        model = patch_model(LlamaForCausalLM(config))
        Trainer(model, arguments, train_dataset=Tokens(config.vocab_size, options.tokens), callbacks=callbacks).train()
    figures = {
        "step": statistics.median(stopwatch.seconds[1:]),
        "growth": max(callbacks[-1].seconds),
        "bytes": max(stopwatch.peaks) - stopwatch.floor,
    }
    if int(os.environ.get("RANK", 0)) == 0:
        options.measure.write_text(json.dumps(figures))


def launched(processes: int, width: int, tokens: int, batches: int, grow: bool, **_) -> dict[str, float]:
    """Measure in fresh processes."""
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / "figures.json"
        launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={processes}"]
        command = [sys.executable, *(launcher if processes > 1 else []), __file__, "--measure", str(output)]
        command += ["--width", str(width), "--tokens", str(tokens), "--batches", str(batches)]
        one_thread = memory.TIDY | {"OMP_NUM_THREADS": "1"}  # each, for processes on one machine
        command += ["--grow"] if grow else []
        subprocess.run(command, check=True, env=one_thread, stdout=subprocess.DEVNULL)
        return json.loads(output.read_text())


def ratios(runs: list[dict], processes: int, batches: int) -> dict[str, list[float]]:
    """What a growth costs, by repeat: in steps, in steps for each batch that it measures, and in memory."""
    grown, plain = ([r for r in runs if r["processes"] == processes and r["grow"] == grow] for grow in (True, False))
    steps = [run["growth"] / run["step"] for run in grown]
    return {
        "step, s": [run["step"] for run in grown],
        "growth / step": steps,
        "growth / step and batch": [number / batches for number in steps],
        "peak with growth / without": [a["bytes"] / b["bytes"] for a, b in zip(grown, plain)],
    }


def draw(found: dict[int, dict[str, list[float]]], plt):
    """A panel for time and one for memory, a dot for each repeat."""
    names = ("growth / step and batch", "peak with growth / without")
    figure, panels = plt.subplots(1, 2, figsize=(7, 2.6), layout="constrained")
    for panel, name in zip(panels, names):
        for processes, values in found.items():
            panel.plot([str(processes)] * len(values[name]), values[name], "o")
        panel.set(xlabel="processes", ylabel=name)
        panel.set_ylim(bottom=0)
    return figure


def page_of(figures: dict) -> page.Page:
    """The page, out of its figures."""
    setting, runs = figures["setting"], figures["runs"]
    processes = dict.fromkeys(run["processes"] for run in runs)
    found = {number: ratios(runs, number, setting["batches"]) for number in processes}
    rows = [[number, *(spread(values, 2) for values in by_name.values())] for number, by_name in found.items()]
    claims = [
        f"with {number} process{'es' * (number > 1)} {spread(values['growth / step and batch'], 1)} training steps for "
        f"each batch that it measures, and {spread(values['peak with growth / without'], 2)} times their memory"
        for number, values in found.items()
    ]
    return page.Page(
        title="A growth inside a Trainer",
        claim=f"A growth takes {'; '.join(claims)}.",
        summary=page.table(["processes", *next(iter(found.values()))], rows),
        text=(
            f"Llama with random weights, {LAYERS} layers, d {setting['width']}, {BATCH} x {setting['tokens']} tokens "
            f"for each process and step, a growth of 8 dims of each kind on {setting['batches']} batches each, fp32, "
            f"AdamW; median (range) of {setting['repeats']} runs in fresh processes, on CPUs unless there is a GPU. A "
            "step is the median over a run. Memory is what a process holds at most over what it held when training "
            "began."
        ),
        draw=partial(draw, found),
    )


def main() -> None:
    """Measure, and write the page; or be one of its trainings."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--tokens", type=int, default=512, help="of a sequence")
    parser.add_argument("--batches", type=int, default=8, help="growth batches of each process")
    parser.add_argument("--processes", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--output", type=Path, default=page.RESULTS)
    parser.add_argument("--quick", action="store_true", help="a tiny model, one process: shows that it runs")
    parser.add_argument("--measure", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--grow", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.measure:
        measure(arguments)
        return
    setting = {"width": arguments.width, "tokens": arguments.tokens, "batches": arguments.batches}
    processes, repeats = arguments.processes, arguments.repeats
    if arguments.quick:
        setting, processes, repeats = {"width": 128, "tokens": 16, "batches": 2}, [1], 1
    jobs = [
        setting | {"processes": number, "repeat": repeat, "grow": grow}
        for number in processes
        for repeat in range(repeats)
        for grow in (True, False)
    ]
    arguments.output.mkdir(parents=True, exist_ok=True)
    runs = collect(launched, jobs, arguments.output / "training_cost.jsonl")
    figures = {
        "setting": setting | {"repeats": repeats},
        "runs": page.kept(runs, "processes", "repeat", "grow", "step", "growth", "bytes"),
    }
    page.publish("training_cost", figures, [0], arguments.output, sum(run["seconds"] for run in runs))


if __name__ == "__main__":
    main()
