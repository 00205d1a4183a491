"""What a growth costs: time of its passes against the same passes without probes, of solving, and peak memory.

    python scripts/bench/cost.py

Random weights; one forward and backward pass of a training step is the yardstick, measured in turns with the probed
one. Peak memory is that of a fresh process each, over what model and optimizer state take.
"""

import argparse
import contextlib
import copy
import subprocess
import sys
import time
from collections.abc import Callable

import torch
from memory import TIDY, forget_peak, peak
from tasks import spread
from transformers import LlamaConfig, LlamaForCausalLM
from transformers import logging as transformers_logging

from hf_growattn import Grower, GrowthConfig, blocks, gradients, patch_model
from hf_growattn.blocks import measure_moments
from hf_growattn.gradients import SKETCH_PASSES, sketched_gradients
from hf_growattn.modeling import attentions
from hf_growattn.probe import MESSAGES, PATTERNS, backward, mean_loss, undisturbed

LAYERS, BATCH, TOKENS = 2, 2, 512


def build(width: int):
    """A Llama with heads 64 wide and random weights, and a batch."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=4096,
        hidden_size=width,
        intermediate_size=width * 8 // 3,
        num_hidden_layers=LAYERS,
        num_attention_heads=max(width // 64, 1),
        head_dim=64,
        max_position_embeddings=TOKENS,
    )
    ids = torch.randint(0, 4096, (BATCH, TOKENS))
    return patch_model(LlamaForCausalLM(config)).train(), {"input_ids": ids, "labels": ids}


def memory(mode: str, width: int, dims: int) -> int:
    """Peak bytes over model and optimizer state of training steps or of a whole growth, in this fresh process."""
    tiny, short = build(128)
    Grower(tiny, GrowthConfig(qk_dims=1, v_dims=1)).grow([{key: value[:, :32] for key, value in short.items()}])
    model, batch = build(width)  # libraries are loaded and warm by now
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    model(**{key: value[:1, :16] for key, value in batch.items()}).loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    forget_peak()
    before = peak()
    if mode == "training":
        for _ in range(4):  # the allocator's habits show after a few
            model(**batch).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    else:
        Grower(model, GrowthConfig(qk_dims=dims, v_dims=dims), optimizer).grow([batch, batch])
    return peak() - before


def timed(action: Callable[[], None]) -> float:
    """Seconds of one call."""
    start = time.perf_counter()
    action()
    return time.perf_counter() - start


@contextlib.contextmanager
def clocked(module, name: str):
    """Count the seconds spent in a function of a module, wherever the module calls it."""
    original, spent = getattr(module, name), [0.0]

    def counting(*args, **kwargs):
        start = time.perf_counter()
        result = original(*args, **kwargs)
        spent[0] += time.perf_counter() - start
        return result

    setattr(module, name, counting)
    try:
        yield spent
    finally:
        setattr(module, name, original)


def compare(width: int, dims: int, repeats: int) -> dict[str, list[float]]:
    """Seconds of the passes of a growth's measurement, of the same without probes, and of all linear algebra."""
    model, batch = build(width)
    layers, seconds = attentions(model), {"probed": [], "plain": [], "training": [], "solving": [], "growth": []}

    def plain_passes() -> None:
        """One forward pass and three there and back for each half, weights frozen as they are under the probe."""
        embeddings = model.get_input_embeddings()
        hook = embeddings.register_forward_hook(lambda module, args, output: output.requires_grad_())
        with undisturbed(model):
            mean_loss(model, [batch, batch])
            for _ in range(SKETCH_PASSES):
                backward(model, [batch, batch])
        hook.remove()

    def training_passes() -> None:
        """The same with gradients of all weights, as a training step has them."""
        mean_loss(model, [batch, batch])
        for _ in range(2 * SKETCH_PASSES):
            model(**batch).loss.backward()
        model.zero_grad(set_to_none=True)

    def measured() -> None:
        with undisturbed(model):
            found, _ = measure_moments(model, layers, [PATTERNS, MESSAGES], [batch, batch], 0.05)
            sketched_gradients(model, found, ([batch], [batch]), dims, 16, 0)

    for repeat in range(repeats + 1):
        plain, training = timed(plain_passes), timed(training_passes)
        with clocked(blocks, "batch_loss") as forward, clocked(gradients, "backward") as there_and_back:
            total = timed(measured)
        probed = forward[0] + there_and_back[0]
        start = time.perf_counter()
        report = Grower(copy.deepcopy(model), GrowthConfig(qk_dims=dims, v_dims=dims)).grow([batch, batch])
        growth = time.perf_counter() - start
        if repeat:  # the first warms up
            solving = total - probed + report.seconds["solving"]
            for name, value in zip(seconds, (probed, plain, training, solving, growth)):
                seconds[name].append(value)
    return seconds


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--widths", type=int, nargs="+", default=[320, 512, 768])
    parser.add_argument("--dims", type=int, default=8)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--memory", nargs=2, metavar=("MODE", "WIDTH"), help="print one peak, and nothing else")
    arguments = parser.parse_args()
    transformers_logging.set_verbosity_error()
    if arguments.memory:
        print(memory(arguments.memory[0], int(arguments.memory[1]), arguments.dims))
        return
    print(
        f"Llama, {LAYERS} layers, heads 64 wide, batches of {BATCH} x {TOKENS}, {arguments.dims} dims of each kind, "
        f"fp32, seed 0, {torch.get_num_threads()} threads; median of {arguments.repeats} (range).\n"
    )
    print(
        "| width | passes / same without probes | / same of training | solving, share of a growth | peak / training |"
    )
    print("|---|---|---|---|---|")
    for width in arguments.widths:
        seconds = compare(width, arguments.dims, arguments.repeats)
        cells = [
            spread([a / b for a, b in zip(seconds[one], seconds[other])])
            for one, other in (("probed", "plain"), ("probed", "training"), ("solving", "growth"))
        ]
        command = [sys.executable, __file__, "--dims", str(arguments.dims), "--memory"]
        peaks = [
            int(subprocess.run([*command, mode, str(width)], check=True, stdout=subprocess.PIPE, env=TIDY).stdout)
            for mode in ("growth", "training")
        ]
        print(f"| {width} | " + " | ".join(cells) + f" | {peaks[0] / peaks[1]:.2f} |", flush=True)


if __name__ == "__main__":
    main()
