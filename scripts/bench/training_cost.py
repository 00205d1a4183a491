"""What a growth costs inside a Trainer: its time and its peak memory as multiples of one training step.

    python scripts/bench/training_cost.py

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
from pathlib import Path

import memory
import torch
from torch.utils.data import Dataset
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments
from transformers import logging as transformers_logging

from hf_growattn import GrowthCallback, GrowthConfig, patch_model

STEPS, BATCH, TOKENS = 10, 2, 512


class Tokens(Dataset):
    """Random tokens."""

    def __init__(self, vocabulary: int):
        self.ids = torch.randint(vocabulary, (512, TOKENS), generator=torch.Generator().manual_seed(0))

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


def measure(width: int, batches: int, grow: bool, output: Path) -> None:
    """One training of one process, whose figures go to `output`."""
    transformers_logging.set_verbosity_error()
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=4096,
        hidden_size=width,
        intermediate_size=width * 8 // 3,
        num_hidden_layers=4,
        num_attention_heads=width // 64,
        head_dim=64,
        max_position_embeddings=TOKENS,
    )
    stopwatch = Stopwatch()
    callbacks = [stopwatch, AfterGrowth(stopwatch)]
    if grow:
        growth = GrowthCallback(GrowthConfig(qk_dims=8, v_dims=8), steps=[STEPS // 2], batches=batches)
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
        Trainer(model, arguments, train_dataset=Tokens(4096), callbacks=callbacks).train()
    figures = {
        "step": statistics.median(stopwatch.seconds[1:]),
        "growth": max(callbacks[-1].seconds),
        "bytes": max(stopwatch.peaks) - stopwatch.floor,
    }
    if int(os.environ.get("RANK", 0)) == 0:
        output.write_text(json.dumps(figures))


def launched(processes: int, width: int, batches: int, grow: bool) -> dict[str, float]:
    """Measure in fresh processes."""
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / "figures.json"
        launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={processes}"]
        command = [sys.executable, *(launcher if processes > 1 else []), __file__, "--measure", str(output)]
        command += ["--width", str(width), "--batches", str(batches), *(["--grow"] if grow else [])]
        one_thread = memory.TIDY | {"OMP_NUM_THREADS": "1"}  # each, for processes on one machine
        subprocess.run(command, check=True, env=one_thread, stdout=subprocess.DEVNULL)
        return json.loads(output.read_text())


def main() -> None:
    """Print the table, or run one of its trainings."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--batches", type=int, default=8, help="growth batches of each process")
    parser.add_argument("--processes", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--measure", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--grow", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.measure:
        measure(arguments.width, arguments.batches, arguments.grow, arguments.measure)
        return
    print(
        f"Llama, 4 layers, d {arguments.width}, {BATCH} x {TOKENS} tokens for each process, growth of 8 dims of each "
        f"kind on {arguments.batches} batches each, fp32, seed 0; median of {arguments.repeats} runs (range).\n"
    )
    print("| processes | step, s | growth / step | growth / step and batch | peak with growth / without |")
    print("|---|---|---|---|---|")
    for processes in arguments.processes:
        rows = []
        for _ in range(arguments.repeats):
            grown, plain = (launched(processes, arguments.width, arguments.batches, grow) for grow in (True, False))
            steps = grown["growth"] / grown["step"]
            rows.append((grown["step"], steps, steps / arguments.batches, grown["bytes"] / plain["bytes"]))
        cells = [f"{statistics.median(c):.2f} ({min(c):.2f} to {max(c):.2f})" for c in zip(*rows)]
        print(f"| {processes} | " + " | ".join(cells) + " |", flush=True)


if __name__ == "__main__":
    main()
