"""What growth costs on a GPU: training step, prefill, decoding and a growth itself, on the shapes of Llama 1B and 8B.

    python scripts/bench/gpu.py

Weights are random, in bf16, and four layers of each shape are enough for ratios. Models take turns, and each turn gives
a ratio of times by the clock, after the device has finished. A second column has the time of the kernels alone, without
the gaps in which Python is late with the next one, as in a graph that was captured. Where there is no GPU the page says
that it was not run.
"""

import argparse
import math
import statistics
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import page
import torch
from alternating import format_spread, turns
from decoding import decoder
from torch import nn
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile
from tqdm.auto import tqdm
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, LlamaConfig, LlamaForCausalLM
from transformers.utils import is_flash_attn_2_available

from hf_growattn import Grower, GrowthConfig, patch_model
from hf_growattn.growable.attention import attentions
from hf_growattn.growable.growths import sync_config

VOCABULARY = 4096
DIMS = (6, 8)  # new ones of queries and keys, and of values; the second number is a multiple of 8
BATCHES = 8  # of a growth
GROWTH = ["model", "base", "batches", "training step", "growth, steps", "seconds", "memory"]
# The kinds of models that are compared with a stock one: new dims, and what a stock head is wider by.
KINDS = {"patched": (0, 0), **{f"grown by {dims}": (dims, 0) for dims in DIMS}, "stock, heads wider by 8": (0, 8)}


@dataclass(frozen=True)
class Shape:
    """Of a model, and of what it is given.

    Attributes:
        trained: rows and tokens of a training step.
        cached: rows and tokens that are in the cache before the next one is decoded; each is also a prefill.
        grown: rows and tokens of the batches of a growth.
        layers_grown: of the model that grows.
    """

    hidden_size: int
    heads: int
    key_value_heads: int
    intermediate_size: int
    layers: int = 4
    trained: tuple[int, int] = (2, 1024)
    cached: tuple[tuple[int, int], ...] = ((1, 2048), (1, 16384), (16, 2048), (16, 16384))
    grown: tuple[tuple[int, int], ...] = ((2, 1024),)
    layers_grown: int = 4

    def build(self, attention: str, wider: int = 0) -> nn.Module:
        """A Llama with random weights in bf16, and heads that are wider by some dims."""
        config = LlamaConfig(
            vocab_size=VOCABULARY,
            hidden_size=self.hidden_size,
            intermediate_size=self.intermediate_size,
            num_hidden_layers=self.layers,
            num_attention_heads=self.heads,
            num_key_value_heads=self.key_value_heads,
            head_dim=self.hidden_size // self.heads + wider,
            max_position_embeddings=2 * max(tokens for _, tokens in self.cached),
        )
        torch.manual_seed(0)
        with torch.device(device()):
            model = LlamaForCausalLM._from_config(config, dtype=torch.bfloat16, attn_implementation=attention)
        return model.eval()


SHAPES = {
    "Llama 1B": Shape(2048, 32, 8, 8192, grown=((2, 1024), (8, 2048)), layers_grown=16),
    "Llama 8B": Shape(4096, 32, 8, 14336),
}
TINY = Shape(64, 4, 2, 96, 2, trained=(2, 16), cached=((1, 32), (2, 32)), grown=((2, 16),), layers_grown=2)
CHECKPOINTED = 4096  # tokens of a batch, from which on layers are computed again in the backward pass


def device() -> str:
    """The accelerator, or the CPU for `--quick`."""
    return "cuda" if torch.cuda.is_available() else "cpu"


def device_name() -> str:
    """What the accelerator is called."""
    return torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"


def finished(action: Callable) -> Callable:
    """An action that ends when the device has done all that it was given."""

    def act() -> None:
        action()
        if torch.cuda.is_available():
            torch.cuda.synchronize()

    return act


def grow_by(model: nn.Module, dims: int) -> nn.Module:
    """Patch a model and give each head new dims with random weights; 0 only patches."""
    patch_model(model)
    for attention in attentions(model) if dims else []:
        part = attention.add_new_dims("growth_1", dims, dims)
        for weight in (part.in_projection.weight, part.out_projection.weight):
            nn.init.normal_(weight, std=0.02)
    sync_config(model)
    return model


def kernel_seconds(action: Callable) -> float:
    """The seconds that kernels run during a call."""
    with profile(activities=[ProfilerActivity.CUDA]) as found:
        action()
    return sum(event.device_time for event in found.events() if event.device_type == DeviceType.CUDA) / 1e6


def training_step(model: nn.Module, shape: Shape, size: tuple[int, int] | None = None) -> Callable:
    """Gradients of a batch of so many rows and tokens, and a step of AdamW at a rate of 0."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.0)
    ids = torch.randint(VOCABULARY, size or shape.trained, device=device())

    def step() -> None:
        model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def prefill(model: nn.Module, shape: Shape, rows: int, tokens: int) -> Callable:
    """The first pass of a generation, which fills the cache."""
    ids = torch.randint(VOCABULARY, (rows, tokens), device=device())
    return torch.no_grad()(lambda: model(input_ids=ids, use_cache=True, logits_to_keep=1))


def decoding(model: nn.Module, shape: Shape, rows: int, tokens: int) -> Callable:
    """One token, after a number of tokens that are in the cache."""
    return decoder(model, torch.randint(VOCABULARY, (rows, tokens), device=device()))


def actions_of(shape: Shape) -> dict[str, Callable]:
    """What is timed, by name; each makes a call out of a model."""
    found: dict[str, Callable] = {"training step": training_step}
    for rows, tokens in shape.cached:
        place = f"{rows} x {tokens:,}"
        if rows == 1:
            found[f"prefill of {place}"] = partial(prefill, rows=rows, tokens=tokens)
        found[f"decoding after {place}"] = partial(decoding, rows=rows, tokens=tokens)
    return found


def peak(action: Callable) -> int:
    """The most bytes that the device held during an action; 1 where there is none."""
    if not torch.cuda.is_available():
        action()
        return 1
    torch.cuda.reset_peak_memory_stats()
    action()
    return torch.cuda.max_memory_allocated()


def time_of_growth(model: Any, shape: Shape, size: tuple[int, int], compiled: bool = False) -> dict[str, Any]:
    """A growth by budget, in training steps of the same model, and its peak of memory as a share of that of a step."""
    batches = list(torch.randint(VOCABULARY, (BATCHES, *size), device=device()))
    if math.prod(size) >= CHECKPOINTED:
        model.gradient_checkpointing_enable()
    if compiled:
        model.compile()
    grower = Grower(model.train(), GrowthConfig(budget=0.01))
    actions = finished(training_step(model, shape, size)), finished(lambda: grower.measure(batches))
    actions[0]()  # which compiles it
    times = {action: [] for action in actions}
    for action in actions * 3:
        began = time.perf_counter()
        action()
        times[action].append(time.perf_counter() - began)
    step, growth = (statistics.median(times[action]) for action in actions)
    memory = [peak(action) for action in actions]
    place = {"batches": f"{size[0]} x {size[1]:,}", "compiled": compiled}
    return place | {"steps": growth / step, "memory": memory[1] / memory[0], "seconds": growth}


def quantized(shape: Shape, folder: Path) -> nn.Module:
    """A base in nf4, frozen, so that new dims alone are trained; ready for growth."""
    shape.build("sdpa").save_pretrained(folder)
    options = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.bfloat16)
    model = AutoModelForCausalLM.from_pretrained(folder, quantization_config=options, device_map=device())
    patch_model(model).requires_grad_(False)
    return grow_by(model, 8)


def measure(shapes: dict[str, Shape], seconds: float, least: int, folder: Path) -> list[dict]:
    """All figures, one entry for each model, implementation, kind and action."""
    implementations = ["sdpa", *(["flash_attention_2"] if is_flash_attn_2_available() else [])]
    jobs = [(name, attention, kind) for name in shapes for attention in implementations for kind in KINDS]
    found = []
    for name, attention, kind in tqdm(jobs, disable=None):
        shape, (dims, wider) = shapes[name], KINDS[kind]
        stock, ours = shape.build(attention), shape.build(attention, wider)
        if not wider:
            grow_by(ours, dims)
        of = {"model": name, "attention": attention, "kind": kind}
        for action, make in actions_of(shape).items():
            made = finished(make(ours, shape)), finished(make(stock, shape))
            row = of | {"action": action} | turns(*made, seconds, least)
            if torch.cuda.is_available() and make is not training_step:  # whose optimizer's kernels it counts twice
                row["kernels"] = kernel_seconds(made[0]) / kernel_seconds(made[1])
            found.append(row)
            del made
        del stock, ours
    for name, shape in shapes.items():
        grown = replace(shape, layers=shape.layers_grown)
        for size, compiled in product(shape.grown, (False, True)):
            growth = time_of_growth(grow_by(grown.build("sdpa"), 0), shape, size, compiled)
            found.append({"model": f"{name}, {grown.layers} layers", "kind": "growth", "base": "bf16"} | growth)
        if torch.cuda.is_available():
            growth = time_of_growth(quantized(shape, folder / "base"), shape, shape.trained)
            found.append({"model": f"{name}, {shape.layers} layers", "kind": "growth", "base": "nf4, frozen"} | growth)
    return found


def page_of(found: list[dict]) -> page.Page:
    """The page, out of its figures; without any it says that the script was not run."""
    if not found:
        return page.Page(
            title="Growth on a GPU",
            claim="Not run: no GPU was at hand. `python scripts/bench/gpu.py` takes about 6 minutes of one.",
            summary=page.table(["model", "attention", "kind", "action", "ratio to stock"], [["not run"] + [""] * 4]),
            text="",
            draw=draw_nothing,
        )
    timed = [entry for entry in found if "wall" in entry]
    rows = [
        [
            *(entry[name] for name in ("model", "attention", "kind", "action")),
            format_spread(entry["wall"]),
            f"{entry['kernels']:.3f}" if "kernels" in entry else "",
            f"{1000 * entry['wall']['stock_seconds']:.2f}",
        ]
        for entry in timed
    ]
    growths = [
        [
            *(e[name] for name in ("model", "base", "batches")),
            "compiled" if e["compiled"] else "eager",
            *(f"{e['steps']:.1f}", f"{e['seconds']:.2f}", f"{e['memory']:.2f}"),
        ]
        for e in found
        if e["kind"] == "growth"
    ]
    grown = [entry for entry in timed if entry["kind"].startswith("grown")]
    parts = [f"training step {_range(entry['wall']['ratio'] for entry in grown if entry['action'] == 'training step')}"]
    for action in ("prefill", "decoding"):
        of = [entry for entry in grown if entry["action"].startswith(action)]
        kernels = _range(entry.get("kernels", 1.0) for entry in of)
        parts.append(f"{action} {_range(entry['wall']['ratio'] for entry in of)} (kernels alone {kernels})")
    return page.Page(
        title="Growth on a GPU",
        claim=f"Times of grown models as multiples of a stock one's: {', '.join(parts)}.",
        summary=page.table(
            ["model", "attention", "kind", "action", "ratio to stock", "kernels alone", "stock, ms"], rows
        ),
        text=(
            f"On a {device_name()}. Median (quartiles) of the ratios of turns, by the clock, after the device has "
            "finished; the ratio of the time of kernels alone, of one call; and the median of the stock model. bf16, "
            "four layers of each shape, AdamW; rows x tokens; torch's own flash kernels, since cuDNN's, where they are "
            "the default, are planned anew for each length of the cache, which takes ten times as long as a token. "
            "Keys and values are padded to a multiple of 8, so that 6 new dims take the room of 8.\n\n"
            f"A growth by budget on {BATCHES} batches, rows x tokens, in training steps of the same model, compiled or "
            f"not, median of three; and its peak of memory as a share of that of a step. From {CHECKPOINTED:,} tokens "
            "on, layers are computed again in the backward pass.\n\n" + page.table(GROWTH, growths)
        ),
        draw=partial(draw, timed),
    )


def _range(ratios: Iterable[float]) -> str:
    ratios = list(ratios)
    return f"{min(ratios):.2f} to {max(ratios):.2f}"


def draw_nothing(plt):
    """An empty picture that says so."""
    figure, axes = plt.subplots(figsize=(5, 1))
    axes.text(0.5, 0.5, "not run", ha="center", va="center")
    axes.set_axis_off()
    return figure


def draw(timed: list[dict], plt):
    """Ratios with their quartiles, a line for each action, a panel for each model."""
    models = list(dict.fromkeys((entry["model"], entry["attention"]) for entry in timed))
    figure, panels = plt.subplots(1, len(models), figsize=(5 * len(models), 4), squeeze=False, layout="constrained")
    for panel, (model, attention) in zip(panels[0], models):
        entries = [entry for entry in timed if (entry["model"], entry["attention"]) == (model, attention)]
        actions = list(dict.fromkeys(entry["action"] for entry in entries))
        for place, kind in enumerate(dict.fromkeys(entry["kind"] for entry in entries)):
            of_kind = [entry for entry in entries if entry["kind"] == kind]
            middles = [entry["wall"]["ratio"] for entry in of_kind]
            low, high = zip(*(entry["wall"]["quartiles"] for entry in of_kind))
            errors = [[m - q for m, q in zip(middles, low)], [q - m for m, q in zip(middles, high)]]
            rows = [actions.index(entry["action"]) + 0.15 * (place - 1.5) for entry in of_kind]
            panel.errorbar(middles, rows, xerr=errors, fmt="o", capsize=2, label=kind)
        panel.axvline(1, color="0.6", linewidth=1)
        panel.set(title=f"{model}, {attention}", xlabel="time, ratio to stock", yticks=range(len(actions)))
        panel.set_yticklabels(actions)
        panel.invert_yaxis()
    figure.legend(*panels[0][0].get_legend_handles_labels(), loc="outside lower center", ncols=4, fontsize=8)
    return figure


def main() -> None:
    """Measure, and write the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=1.0, help="of each comparison")
    parser.add_argument("--output", type=Path, default=page.RESULTS)
    parser.add_argument("--quick", action="store_true", help="a tiny model on any device: shows that it runs")
    arguments = parser.parse_args()
    shapes, seconds, least = SHAPES, arguments.seconds, 5
    if arguments.quick:
        shapes, seconds, least = {"tiny": TINY}, 0.0, 2
    torch.backends.cuda.enable_cudnn_sdp(False)
    began = time.perf_counter()
    runs = arguments.quick or torch.cuda.is_available()
    found = measure(shapes, seconds, least, arguments.output) if runs else []
    page.publish("gpu", page_of(found), {"runs": found}, [0], arguments.output, time.perf_counter() - began)


if __name__ == "__main__":
    main()
