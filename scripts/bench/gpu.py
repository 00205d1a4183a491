"""What growth costs on a GPU: training step, prefill, decoding and a growth itself, on the shapes of Llama 1B and 8B.

    python scripts/bench/gpu.py

Weights are random, in bf16, and four layers of each shape are enough for ratios. Models take turns, and each turn gives
a ratio of times by the clock, after the device has finished. Where there is no GPU the page says that it was not run.
"""

import argparse
import inspect
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import page
import torch
from torch import nn
from tqdm.auto import tqdm
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, DynamicCache, LlamaConfig, LlamaForCausalLM
from transformers.utils import is_flash_attn_2_available

from hf_growattn import Grower, GrowthConfig, patch_model
from hf_growattn.growable.growths import attentions, sync_config

VOCABULARY = 4096
DIMS = (6, 8)  # new ones of queries and keys, and of values; the second number is a multiple of 8


@dataclass(frozen=True)
class Shape:
    """Of a model, and of what it is given."""

    hidden_size: int
    heads: int
    key_value_heads: int
    intermediate_size: int
    layers: int = 4
    trained: tuple[int, int] = (2, 1024)  # rows and tokens of a training step
    cached: tuple[int, ...] = (2048, 16384)

    def build(self, attention: str) -> nn.Module:
        """A Llama with random weights in bf16."""
        config = LlamaConfig(
            vocab_size=VOCABULARY,
            hidden_size=self.hidden_size,
            intermediate_size=self.intermediate_size,
            num_hidden_layers=self.layers,
            num_attention_heads=self.heads,
            num_key_value_heads=self.key_value_heads,
            max_position_embeddings=max(self.cached) + 1,
        )
        torch.manual_seed(0)
        with torch.device(device()):
            model = LlamaForCausalLM._from_config(config, dtype=torch.bfloat16, attn_implementation=attention)
        return model.eval()


SHAPES = {
    "Llama 1B": Shape(hidden_size=2048, heads=32, key_value_heads=8, intermediate_size=8192),
    "Llama 8B": Shape(hidden_size=4096, heads=32, key_value_heads=8, intermediate_size=14336),
}
TINY = Shape(64, 4, 2, 96, layers=2, trained=(2, 16), cached=(32,))


def device() -> str:
    """The accelerator, or the CPU for `--quick`."""
    return "cuda" if torch.cuda.is_available() else "cpu"


def synchronize() -> None:
    """Wait until the device has done all that it was given."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def grow_by(model: nn.Module, dims: int) -> nn.Module:
    """Patch a model and give each head new dims with random weights; 0 only patches."""
    patch_model(model)
    for attention in attentions(model) if dims else []:
        like = attention.empty_like()
        part = attention.add_part("growth_1", dims, dims, dtype=like.dtype, device=like.device)
        for weight in (part.inside.weight, part.outside.weight):
            nn.init.normal_(weight, std=0.02)
    sync_config(model)
    return model


def training_step(model: nn.Module, shape: Shape) -> Callable:
    """Gradients of a batch and a step of AdamW at a rate of 0."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.0)
    ids = torch.randint(VOCABULARY, shape.trained, device=device())

    def step() -> None:
        model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def prefill(model: nn.Module, shape: Shape, cached: int) -> Callable:
    """The first pass of a generation, which fills the cache."""
    ids = torch.randint(VOCABULARY, (1, cached), device=device())
    return torch.no_grad()(lambda: model(input_ids=ids, use_cache=True, logits_to_keep=1))


@torch.no_grad()
def decoding(model: nn.Module, shape: Shape, cached: int) -> Callable:
    """One token, after a number of tokens that are in the cache."""
    name = "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"
    cache = DynamicCache(config=model.config)
    given = {name: cache, "use_cache": True, "logits_to_keep": 1}
    model(input_ids=torch.randint(VOCABULARY, (1, cached), device=device()), **given)
    token = torch.randint(VOCABULARY, (1, 1), device=device())

    @torch.no_grad()
    def decode() -> None:
        model(input_ids=token, **given)
        cache.crop(-1)

    return decode


def actions_of(shape: Shape) -> dict[str, Callable]:
    """What is timed, by name; each makes a call out of a model."""
    found: dict[str, Callable] = {"training step": training_step}
    for cached in shape.cached:
        found[f"prefill of {cached:,}"] = partial(prefill, cached=cached)
        found[f"decoding after {cached:,}"] = partial(decoding, cached=cached)
    return found


def seconds_of(action: Callable) -> float:
    """Seconds by the clock of one call."""
    synchronize()
    began = time.perf_counter()
    action()
    synchronize()
    return time.perf_counter() - began


def ratio_of(ours: Callable, stock: Callable, turns: int) -> dict[str, float]:
    """The median ratio of two actions that take turns, with its quartiles, and the median seconds of the second."""
    ours(), stock()  # warm
    ratios, seconds = [], []
    for turn in range(turns):
        first, second = (ours, stock) if turn % 2 else (stock, ours)
        spent = {first: seconds_of(first), second: seconds_of(second)}
        ratios.append(spent[ours] / spent[stock])
        seconds.append(spent[stock])
    low, middle, high = statistics.quantiles(ratios, n=4)
    return {"ratio": middle, "low": low, "high": high, "stock_seconds": statistics.median(seconds)}


def time_of_growth(model: nn.Module, shape: Shape) -> dict[str, float]:
    """A growth by budget on eight batches, in training steps, and its peak of memory as a share of that of a step."""
    step = training_step(model, shape)
    step()
    peaks = []
    batches = list(torch.randint(VOCABULARY, (8, *shape.trained), device=device()))
    grower = Grower(model, GrowthConfig(budget=0.01))
    seconds = []
    for action in (step, lambda: grower.measure(batches)):
        if torch.cuda.is_available():
            torch.cuda.reset_peak_memory_stats()
        seconds.append(seconds_of(action))
        peaks.append(torch.cuda.max_memory_allocated() if torch.cuda.is_available() else 1)
    return {"steps": seconds[1] / seconds[0], "memory": peaks[1] / peaks[0]}


def quantized_growth(shape: Shape, folder: Path) -> dict[str, float]:
    """The same on a base in nf4, which trains new dims alone."""
    shape.build("sdpa").save_pretrained(folder)
    options = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.bfloat16)
    model = AutoModelForCausalLM.from_pretrained(folder, quantization_config=options, device_map=device())
    patch_model(model).requires_grad_(False)
    began = time.perf_counter()
    report = Grower(model, GrowthConfig(budget=0.01)).grow(
        list(torch.randint(VOCABULARY, (8, *shape.trained), device=device()))
    )
    synchronize()
    return {"seconds": time.perf_counter() - began, "added": report.added_parameters}


def measure(shapes: dict[str, Shape], turns: int, folder: Path) -> list[dict]:
    """All figures, one entry for each model, implementation, kind and action."""
    implementations = ["sdpa", *(["flash_attention_2"] if is_flash_attn_2_available() else [])]
    jobs = [(name, attention) for name in shapes for attention in implementations]
    found = []
    for name, attention in tqdm(jobs, disable=None):
        shape = shapes[name]
        for kind, dims in (("patched", 0), *((f"grown by {dims}", dims) for dims in DIMS)):
            stock, ours = shape.build(attention), grow_by(shape.build(attention), dims)
            for action, make in actions_of(shape).items():
                figures = ratio_of(make(ours, shape), make(stock, shape), turns)
                found.append({"model": name, "attention": attention, "kind": kind, "action": action, **figures})
            del stock, ours
        growth = time_of_growth(grow_by(shape.build(attention), 0), shape)
        found.append({"model": name, "attention": attention, "kind": "growth", **growth})
    if torch.cuda.is_available():
        name = next(iter(shapes))
        growth = quantized_growth(shapes[name], folder / "base")
        found.append({"model": name, "attention": "sdpa", "kind": "growth on nf4", **growth})
    return found


def page_of(found: list[dict]) -> page.Page:
    """The page, out of its figures; without any it says that the script was not run."""
    if not found:
        return page.Page(
            title="Growth on a GPU",
            claim="Not run: no GPU was at hand. `python scripts/bench/gpu.py` takes at most 8 minutes of one.",
            summary=page.table(["model", "attention", "kind", "action", "ratio to stock"], [["not run"] + [""] * 4]),
            text="",
            draw=draw_nothing,
        )
    timed = [entry for entry in found if "ratio" in entry]
    rows = [
        [e["model"], e["attention"], e["kind"], e["action"], f"{e['ratio']:.3f} ({e['low']:.3f} to {e['high']:.3f})"]
        for e in timed
    ]
    growths = [e for e in found if e["kind"] == "growth"]
    steps = ", ".join(f"{e['model']} with {e['attention']} {e['steps']:.0f}" for e in growths)
    memory = ", ".join(f"{e['memory']:.2f}" for e in growths)
    grown = [e["ratio"] for e in timed if e["kind"].startswith("grown")]
    return page.Page(
        title="Growth on a GPU",
        claim=f"Of a grown model an action takes {min(grown):.2f} to {max(grown):.2f} times as long as of a stock one.",
        summary=page.table(["model", "attention", "kind", "action", "ratio to stock"], rows),
        text=(
            "Median (quartiles) of the ratios of turns, by the clock, after the device has finished; bf16, four layers "
            f"of each shape, AdamW. A growth on eight batches, in training steps: {steps}. Its peak of memory as a "
            f"share of that of a step: {memory}."
        ),
        draw=partial(draw, timed),
    )


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
            middles = [entry["ratio"] for entry in of_kind]
            errors = [[e["ratio"] - e["low"] for e in of_kind], [e["high"] - e["ratio"] for e in of_kind]]
            rows = [actions.index(entry["action"]) + 0.2 * (place - 1) for entry in of_kind]
            panel.errorbar(middles, rows, xerr=errors, fmt="o", capsize=2, label=kind)
        panel.axvline(1, color="0.6", linewidth=1)
        panel.set(title=f"{model}, {attention}", xlabel="time, ratio to stock", yticks=range(len(actions)))
        panel.set_yticklabels(actions)
        panel.invert_yaxis()
        panel.legend(fontsize=7)
    return figure


def main() -> None:
    """Measure, and write the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=12, help="of each comparison")
    parser.add_argument("--output", type=Path, default=page.RESULTS)
    parser.add_argument("--quick", action="store_true", help="a tiny model on any device: shows that it runs")
    arguments = parser.parse_args()
    shapes, turns = SHAPES, arguments.turns
    if arguments.quick:
        shapes, turns = {"tiny": TINY}, 2
    began = time.perf_counter()
    runs = arguments.quick or torch.cuda.is_available()
    found = measure(shapes, turns, arguments.output) if runs else []
    page.publish("gpu", page_of(found), {"runs": found}, [0], arguments.output, time.perf_counter() - began)


if __name__ == "__main__":
    main()
