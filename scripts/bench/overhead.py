"""What a patched and a grown model cost against stock ones: forward, training step, decoding, memory, save and load.

    OMP_NUM_THREADS=1 python scripts/bench/overhead.py

Both models of a comparison live in one process and take turns; each turn gives a ratio, and the tables show the median
ratio with its quartiles, by CPU time of the process and by the clock: where other processes compete for the machine,
CPU time disturbs less. Where two models have the same parameters they share them, so that only the code differs. The
first comparison, a stock model and its twin, shows the noise of the method itself.
"""

import argparse
import gc
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import decoding
import page
import torch
from alternating import error, format_spread, turns
from peak_memory import peak_of_tensors
from torch import nn
from tqdm.auto import tqdm
from transformers import AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM
from transformers import logging as transformers_logging
from transformers.pytorch_utils import Conv1D

from hf_growattn import patch_model
from hf_growattn.growable.attention import attentions
from hf_growattn.growable.growths import sync_config

BATCH, VOCABULARY = 1, 512  # short turns: what else the machine does then hits both models alike
HEAD, GROWN = 64, 80

# Our model and the stock one that it is compared with, by the names of `build`.
COMPARISONS = {
    "twin / stock": ("stock", "stock"),
    "patched / stock": ("patched", "stock"),
    "grown / as wide": ("grown", "as wide"),
}


@dataclass(frozen=True)
class Size:
    """Of a model and of its inputs."""

    width: int
    layers: int = 1
    tokens: int = 128


def llama(size: Size, head_dim: int) -> nn.Module:
    """A Llama with random weights."""
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=size.width,
        intermediate_size=size.width * 8 // 3,
        num_hidden_layers=size.layers,
        num_attention_heads=size.width // HEAD,
        head_dim=head_dim,
        max_position_embeddings=size.tokens,
    )
    return LlamaForCausalLM(config)


def gpt2(size: Size, head_dim: int) -> nn.Module:
    """A GPT-2 with random weights; its stock code computes heads of another width too, but no config asks for them."""
    config = GPT2Config(
        vocab_size=VOCABULARY,
        n_embd=size.width,
        n_layer=size.layers,
        n_head=size.width // HEAD,
        n_positions=size.tokens,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        bos_token_id=None,
        eos_token_id=None,
    )
    model = GPT2LMHeadModel(config)
    if head_dim != HEAD:
        heads = config.n_head * head_dim
        for block in model.transformer.h:
            block.attn.head_dim, block.attn.split_size = head_dim, heads
            block.attn.c_attn, block.attn.c_proj = Conv1D(3 * heads, size.width), Conv1D(size.width, heads)
    return model


FAMILIES = {"Llama": llama, "GPT-2": gpt2}


def build(family: Callable, kind: str, size: Size) -> nn.Module:
    """A model: stock, "as wide" (stock, with heads as wide as the grown ones), patched or grown."""
    model = family(size, GROWN if kind == "as wide" else HEAD)
    if kind in ("patched", "grown"):
        patch_model(model)
    if kind == "grown":
        for attention in attentions(model):
            part = attention.add_new_dims("growth_1", GROWN - HEAD, GROWN - HEAD)
            for weight in (part.in_projection.weight, part.out_projection.weight):
                nn.init.normal_(weight, std=0.02)
        sync_config(model)
    return model.eval()


def share(model: nn.Module, other: nn.Module) -> None:
    """Let a model use the parameters of another one, if all of them have the same shapes."""
    mine, theirs = (dict(m.named_parameters(remove_duplicate=False)) for m in (model, other))
    if {name: p.shape for name, p in mine.items()} == {name: p.shape for name, p in theirs.items()}:
        for name, parameter in theirs.items():
            module, _, leaf = name.rpartition(".")
            setattr(model.get_submodule(module), leaf, parameter)


def forward(model: nn.Module, ids: torch.Tensor, folder: Path) -> Callable:
    """Logits of a batch."""

    @torch.no_grad()
    def compute() -> None:
        model(input_ids=ids, use_cache=False)

    return compute


def training_step(model: nn.Module, ids: torch.Tensor, folder: Path) -> Callable:
    """Gradients of a batch and a step of AdamW, which moves nothing at this rate, but computes as at any other."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.0)

    def step() -> None:
        model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def save(model: nn.Module, ids: torch.Tensor, folder: Path) -> Callable:
    """A checkpoint of the model."""
    return lambda: model.save_pretrained(folder)


def load(model: nn.Module, ids: torch.Tensor, folder: Path) -> Callable:
    """The model again, from what `save` wrote."""
    return lambda: AutoModelForCausalLM.from_pretrained(folder)


# What makes each, its share of the time, and whether memory is counted.
ACTIONS = {
    "forward": (forward, 0.2, True),
    "training step": (training_step, 0.5, True),
    "save": (save, 0.15, False),
    "load": (load, 0.1, False),
}


def compare(family: Callable, size: Size, kinds: tuple[str, str], seconds: float, least: int, seed: int) -> dict:
    """All actions of one pair of models."""
    torch.manual_seed(seed)
    models = [build(family, kind, size) for kind in kinds]
    share(*models)
    ids = torch.randint(VOCABULARY, (BATCH, size.tokens))
    figures = {}
    with tempfile.TemporaryDirectory() as folder:
        for name, (action, part, holds) in ACTIONS.items():
            if name == "load" and "as wide" in kinds and family is gpt2:
                continue  # no stock config has these widths
            both = [action(model, ids, Path(folder, str(place))) for place, model in enumerate(models)]
            figures[name] = turns(*both, seconds * part, least)
            if holds:
                ours, stock = map(peak_of_tensors, both)
                figures[name]["memory"] = {"ratio": ours / stock}
    return figures


def rows_of(figures: dict, cell: Callable[[dict], str]) -> list[list[str]]:
    """A row for each model and comparison, a cell for each action that was measured."""
    return [
        [model, comparison, *(cell(actions[name]) if name in actions else "" for name in ACTIONS)]
        for model, comparisons in figures.items()
        for comparison, actions in comparisons.items()
    ]


def summary(figures: dict) -> str:
    """Ratios by CPU time with their errors, and that of memory."""
    rows = rows_of(figures, lambda a: f"{a['cpu']['ratio']:.3f} +- {error(a['cpu'], a['turns']):.3f}")
    names = ("forward", "training step")
    held = ["{:.3f}, {:.3f}".format(*(figures[m][c][name]["memory"]["ratio"] for name in names)) for m, c, *_ in rows]
    return page.table(["model", "ratio", *ACTIONS, "memory"], [[*row, cell] for row, cell in zip(rows, held)])


def tables(figures: dict, size: Size) -> str:
    """What was measured, how, and the spreads."""
    head = ["model", "ratio", *(f"{name} ({_turns(figures, name)} turns)" for name in ACTIONS)]
    text = [
        "Above: median ratio of CPU time over the turns, with two standard errors, and the ratio of the most bytes of "
        "tensors at a time, on top of the weights, in a forward pass and in a training step.\n\n"
        f"{size.layers} layer, heads {HEAD} wide, {BATCH} x {size.tokens} tokens, {VOCABULARY} words, fp32, sdpa, no "
        "dropout; a training step with AdamW. Grown means "
        f"{GROWN - HEAD} new dims of queries, keys and values in each head, in modules of their own. Models are so "
        "small that Python weighs more than in those of every day, and that turns are short.\n\n"
        "- twin / stock: two stock models. What differs from 1 here is the noise of the method.\n"
        "- patched / stock: after `patch_model`, not grown. Same weights in memory.\n"
        f"- grown / as wide: of Llama, a stock model with `head_dim={GROWN}`, and so as many weights. No config asks "
        "for such a GPT-2, but its stock code computes it once its projections are as wide; that one cannot be "
        "loaded.\n",
    ]
    for title, clock in (("CPU time", "cpu"), ("the clock", "wall")):
        rows = rows_of(figures, lambda a, clock=clock: format_spread(a[clock]))
        text.append(f"Ratio by {title}, median (quartiles over the turns):\n\n{page.table(head, rows)}\n")
    return "\n".join(text)


def _turns(figures: dict, action: str) -> str:
    present = [a[action] for comparisons in figures.values() for a in comparisons.values() if action in a]
    counts = [actions["turns"] for actions in present]
    return f"{min(counts)} to {max(counts)}"


def claim(figures: dict) -> str:
    """From where to where the ratios of both comparisons go, over the models."""
    parts = []
    for comparison in ("patched / stock", "grown / as wide"):
        of = [comparisons[comparison] for comparisons in figures.values()]
        ranges = []
        for name in ACTIONS:
            values = [actions[name]["cpu"]["ratio"] for actions in of if name in actions]
            ranges.append(f"{name} {min(values):.3f} to {max(values):.3f}")
        most = max(actions["training step"]["memory"]["ratio"] for actions in of)
        parts.append(f"{comparison}: {', '.join(ranges)}; memory of a training step at most {most:.3f}.")
    return f"Ratios of CPU time, over the models. {' '.join(part[0].upper() + part[1:] for part in parts)}"


def draw(figures: dict, plt):
    """Ratios by CPU time with their errors, a row of panels for each family, a colour for each comparison."""
    shape = len(FAMILIES), len(figures) // len(FAMILIES)
    size = 4 * shape[1], 3 * shape[0]
    figure, grid = plt.subplots(*shape, figsize=size, layout="constrained", sharey=True, squeeze=False)
    panels = list(grid.T.flat)
    for panel, (model, comparisons) in zip(panels, figures.items()):
        for place, (comparison, actions) in enumerate(comparisons.items()):
            middles = [action["cpu"]["ratio"] for action in actions.values()]
            errors = [error(action["cpu"], action["turns"]) for action in actions.values()]
            rows = [row + 0.2 * (1 - place) for row, name in enumerate(ACTIONS) if name in actions]
            panel.errorbar(middles, rows, xerr=errors, fmt="o", markersize=4, capsize=2, label=comparison)
        panel.axvline(1, color="0.6", linewidth=1)
        panel.set(title=model, xlabel="CPU time, ratio", yticks=range(len(ACTIONS)), yticklabels=list(ACTIONS))
    panels[0].invert_yaxis()
    panels[0].legend(fontsize=7)
    return figure


def page_of(figures: dict) -> page.Page:
    """The page, out of its figures."""
    models = figures["models"]
    return page.Page(
        title="Patched and grown models against stock ones",
        claim=claim(models),
        summary=summary(models),
        text=tables(models, Size(**figures["size"])) + "\n" + decoding.table(figures["decoding"]),
        draw=partial(draw, models),
    )


def main() -> None:
    """Measure, and write the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--widths", type=int, nargs="+", default=[256, 512, 1024], help="hidden sizes")
    parser.add_argument("--seconds", type=float, default=30.0, help="of all actions of one comparison")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path, default=page.RESULTS)
    parser.add_argument("--quick", action="store_true", help="tiny models and few turns: shows that it runs")
    arguments = parser.parse_args()
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    sizes, lengths = [Size(width) for width in arguments.widths], [256, 2048, 8192]
    seconds, least = arguments.seconds, 5
    if arguments.quick:
        sizes, lengths = [Size(64, tokens=16)], [8]
        seconds, least = 0.0, 2
    models: dict[str, dict] = {}
    jobs = [(family, size, kind) for size in sizes for family in FAMILIES for kind in COMPARISONS]
    began = time.perf_counter()
    gc.freeze()  # what imports leave is no garbage, and looking through it takes long
    for family, size, kind in tqdm(jobs, disable=None):
        found = compare(FAMILIES[family], size, COMPARISONS[kind], seconds, least, arguments.seed)
        models.setdefault(f"{family}, d {size.width}", {})[kind] = found
    figures = {"size": asdict(sizes[0]), "models": models}
    figures["decoding"] = decoding.measure(lengths, seconds / 3, least)
    page.publish("overhead", page_of(figures), figures, [arguments.seed], arguments.output, time.perf_counter() - began)


if __name__ == "__main__":
    main()
