"""Growing a model up: pretraining with narrow heads, grown on schedule, against full width from scratch at equal FLOPs.

    OMP_NUM_THREADS=1 python scripts/bench/growing_up.py --text my_text.txt

A small Llama and a byte-level BPE are trained from nothing on a text. Every row spends the same FLOPs, what its growths
measure and search among them, so that rows with narrow heads take more steps.
"""

import argparse
import dataclasses
import math
import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import page
import torch
from compared import grower
from runs import collect, spread
from tasks import forward_ratio, texts_of
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from hf_growattn import GrowthConfig, patch_model
from hf_growattn.growable.models import attentions

sys.path.insert(0, str(Path(__file__).parents[1]))
from texts import blocks_of, english, train_tokenizer

NARROW, GUIDED, RANDOM, FULL = "narrow throughout", "guided growth", "random growth", "full width from scratch"
UNROTATED = "full width from scratch, new dims unrotated"
ROWS = (NARROW, GUIDED, RANDOM, FULL, UNROTATED)
GROWN = {GUIDED: "whitened", RANDOM: "random"}  # by their estimators
RATES = (0.004, 0.008, 0.016, 0.032)  # and beyond, where the best is an end
TUNING_SEED = 100
TOKENS = 128  # of a block
BLOCKS: dict[str, torch.Tensor] = {}  # texts by name, for the processes that this one forks
VOCABULARY = 512


@dataclass(frozen=True)
class Setting:
    """Sizes of the model and of the training.

    Attributes:
        widths: of queries, keys and values of a head, from the start and after each growth.
        grown_at: share of the FLOPs after which each growth comes.
        full_steps: steps of the row with full width, whose FLOPs all rows spend.
        growth_rows: blocks in each of the growth batches.
        held_out: blocks that no row trains on.
    """

    d: int = 64
    mlp: int = 128
    layers: int = 3
    heads: int = 4
    widths: tuple[int, ...] = (4, 8, 16)
    grown_at: tuple[float, ...] = (0.3, 0.6)
    full_steps: int = 500
    batch_size: int = 8
    growth_batches: int = 8
    growth_rows: int = 2
    held_out: int = 256


QUICK = Setting(
    d=16,
    mlp=16,
    layers=1,
    heads=2,
    widths=(2, 4, 8),
    full_steps=24,
    batch_size=2,
    growth_batches=2,
    growth_rows=1,
    held_out=4,
)


def build(setting: Setting, width: int, seed: int) -> nn.Module:
    """A patched Llama with heads of one width."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=setting.d,
        intermediate_size=setting.mlp,
        num_hidden_layers=setting.layers,
        num_attention_heads=setting.heads,
        head_dim=width,
        max_position_embeddings=TOKENS,
        initializer_range=setting.d**-0.5,
        tie_word_embeddings=True,
        use_cache=False,
    )
    return patch_model(LlamaForCausalLM(config))


def widen(model: nn.Module, dims: int) -> None:
    """Widen all heads before training, as random as the rest."""
    for attention in attentions(model):
        attention.widen(qk_dims=dims, v_dims=dims)
        for role in ("query", "key", "value", "output"):
            attention.weight_of(role)[:, -dims:].normal_(std=model.config.initializer_range)
    model.sync_config()


def flops_of_a_pass(model: nn.Module) -> int:
    """FLOPs of one token's forward pass; the backward pass costs twice as many.

    Two for each weight, the tied embedding as the head's, and two for each entry of queries, keys and values at each of
    the (T + 1) / 2 tokens that a token sees on average.
    """
    widths = sum(model.config.num_attention_heads * (a.qk_head_dim + a.v_head_dim) for a in attentions(model))
    return 2 * model.num_parameters() + (TOKENS + 1) * widths


class Pretraining:
    """One row with one seed; `spent` counts its FLOPs."""

    def __init__(self, setting: Setting, text: str, row: str, seed: int, rate: float):
        self.setting, self.seed, self.rate, self.row = setting, seed, rate, row
        self.model = build(setting, setting.widths[-1 if row == FULL else 0], seed)
        if row == UNROTATED:
            widen(self.model, setting.widths[-1] - setting.widths[0])
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=rate, weight_decay=0.1, betas=(0.9, 0.95))
        self.generator = torch.Generator().manual_seed(1000 + seed)
        self.fresh, self.blocks = BLOCKS[text][: setting.held_out], BLOCKS[text][setting.held_out :]
        self.full_pass = flops_of_a_pass(build(setting, setting.widths[-1], seed))
        self.budget = 3 * self.full_pass * setting.batch_size * TOKENS * setting.full_steps
        self.spent = self.growing = self.steps = 0
        self.tokens = 0
        self.curve = []
        self.note()

    def batch(self, rows: int) -> dict[str, torch.Tensor]:
        """Random blocks."""
        ids = self.blocks[torch.randint(len(self.blocks), (rows,), generator=self.generator)]
        self.tokens += ids.numel()
        return {"input_ids": ids, "labels": ids}

    @torch.no_grad()
    def held_out(self, blocks: int) -> float:
        """Loss of some of the blocks that no row trains on."""
        parts = self.fresh[:blocks].split(32)
        return statistics.fmean(self.model(input_ids=part, labels=part).loss.item() for part in parts)

    def note(self) -> None:
        """Add the loss of a quarter of the held-out blocks to the curve."""
        self.curve.append((self.spent / self.budget, self.held_out(self.setting.held_out // 4)))

    def forward(self) -> float:
        """The time of a forward pass, against the model of the first width."""
        narrow = build(self.setting, self.setting.widths[0], self.seed).eval()
        return forward_ratio(self.model.eval(), narrow, {"input_ids": self.fresh[: self.setting.batch_size]}, turns=21)

    def train(self, share: float) -> None:
        """Train until a share of the FLOPs is spent, by a warm-up and a cosine over all of them."""
        step_cost = 3 * flops_of_a_pass(self.model) * self.setting.batch_size * TOKENS
        while self.spent + step_cost / 2 < share * self.budget:
            done = self.spent / self.budget
            rate = self.rate * min(1.0, (done + 0.002) / 0.03) * (0.5 + 0.5 * math.cos(math.pi * min(done, 1.0)))
            for group in self.optimizer.param_groups:
                group["lr"] = rate
            self.model(**self.batch(self.setting.batch_size)).loss.backward()
            nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.spent += step_cost
            self.steps += 1
            if self.spent / self.budget >= self.curve[-1][0] + 0.08:
                self.note()

    def grow(self, dims: int) -> dict:
        """Widen every head's queries, keys and values by the real Grower; its passes cost what full width costs."""
        config = GrowthConfig(qk_dims=dims, v_dims=dims, seed=self.seed)
        batches = [self.batch(self.setting.growth_rows) for _ in range(self.setting.growth_batches)]
        cost = 0

        def count(module, inputs, output):
            nonlocal cost
            cost += self.full_pass * inputs[0].shape[:-1].numel() * (3 if torch.is_grad_enabled() else 1)

        watch = self.model.lm_head.register_forward_hook(count)
        report = grower(self.model, config, self.optimizer, GROWN[self.row]).grow(batches)
        watch.remove()
        self.spent += cost
        self.growing += cost
        self.note()
        return dataclasses.asdict(report)


def measure(setting: dict, text: str, row: str, seed: int, rate: float) -> dict:
    """Train one row with one seed and learning rate."""
    pretraining = Pretraining(Setting(**setting), text, row, seed, rate)
    widths, reports = pretraining.setting.widths, []
    if row in GROWN:
        for share, old, new in zip(pretraining.setting.grown_at, widths, widths[1:]):
            pretraining.train(share)
            reports.append(pretraining.grow(new - old))
    pretraining.train(1.0)
    pretraining.note()
    return {
        "loss": pretraining.held_out(pretraining.setting.held_out),
        "curve": pretraining.curve,
        "budget": pretraining.budget,
        "flops": pretraining.spent,
        "growth_flops": pretraining.growing,
        "steps": pretraining.steps,
        "tokens": pretraining.tokens,
        "parameters": pretraining.model.num_parameters(),
        "forward": pretraining.forward(),
        "gains": [report["loss_before"] - report["loss_after"] for report in reports],
        **({"report": reports[0]} if row == GUIDED else {}),
    }


def of_row(runs: list[dict], row: str, key: str) -> list:
    """One figure of a row's runs."""
    return [run[key] for run in runs if run["row"] == row]


def claim(runs: list[dict]) -> str:
    """Who wins at equal FLOPs, with the rows that beat guided growth first."""
    losses = {row: of_row(runs, row, "loss") for row in ROWS}
    medians = {row: statistics.median(values) for row, values in losses.items()}
    noise = max(max(values) - min(values) for values in losses.values())
    listed = ", ".join(f"{row} {medians[row]:.3f}" for row in sorted(medians, key=medians.get))
    better = [row for row in sorted(medians, key=medians.get) if medians[row] < medians[GUIDED]]
    lost = f"Better than guided growth: {', '.join(better)}" if better else "No row is better than guided growth"
    return (
        f"{lost}. Held-out loss at equal FLOPs, best first: {listed}; the widest range over the seeds is {noise:.3f}. "
        f"Full width sees {min(of_row(runs, FULL, 'tokens')):,} tokens: this is the start of a training."
    )


def summary(runs: list[dict], widths: Sequence[int]) -> str:
    """The table that people read first."""
    least, cache = min(run["parameters"] for run in runs), widths[-1] / widths[0] - 1
    lines = []
    for row in ROWS:
        values = partial(of_row, runs, row)
        lines.append(
            [
                row,
                spread(values("loss")),
                f"{values('parameters')[0] - least:,}",
                spread([flops / 1e12 for flops in values("flops")]),
                spread([100 * part / flops for part, flops in zip(values("growth_flops"), values("flops"))], 1),
                f"{statistics.median(values('steps')):,.0f}",
                f"{statistics.median(values('tokens')):,.0f}",
                spread(values("seconds"), 0),
                spread([peak / 1e6 for peak in values("peak_bytes")], 0),
                f"{values('rate')[0]:g}",
                f"{0 if row == NARROW else cache:+.0%}",
                spread(values("forward"), 2),
            ]
        )
    head = ["row", "held-out loss", "added parameters", "TFLOPs", "of them growths, %", "steps", "tokens", "seconds"]
    return page.table([*head, "peak MB", "learning rate", "KV cache", "forward pass"], lines)


def text(setting: Setting, name: str, tokens: int, swept: list[dict], runs: list[dict]) -> str:
    """How it was done, and the sweep."""
    widths = " to ".join(map(str, setting.widths))
    shares = " and ".join(f"{share:.0%}" for share in setting.grown_at)
    gains = [spread(list(of_one), 4) for of_one in zip(*of_row(runs, GUIDED, "gains"))]
    rates = sorted({run["rate"] for run in swept})
    found = {(run["row"], run["rate"]): f"{run['loss']:.3f}" for run in swept}
    sweep = page.table(["row", *rates], [[row, *(found.get((row, rate), "") for rate in rates)] for row in ROWS])
    return f"""
## How

Llama, d = {setting.d}, {setting.layers} layers, {setting.heads} heads, MLP {setting.mlp} wide, tied embeddings, a
byte-level BPE of {VOCABULARY} tokens trained on the text ({name}, {tokens:,} tokens), sequences of
{TOKENS} tokens, {setting.batch_size} a step. Queries, keys and values of all heads and layers are grown from {widths}
after {shares} of the FLOPs, by `Grower` with the optimizer that training goes on with; full width from scratch is a
stock Llama of the last width, which rotates all of it; grown models rotate the dims that they began with, as does the
last row. A growth measures {setting.growth_batches} batches of
{setting.growth_rows} sequences and lowers their loss by {" and by ".join(gains)}.

FLOPs of training a token: 6 for each weight (the tied embedding once, as the head) and 6 for each entry of queries,
keys and values at each of the (T + 1) / 2 tokens seen on average. Every pass of a growth is counted, at the cost of
full width, three times where it has a backward pass. All rows stop at the FLOPs of {setting.full_steps} steps of full
width, to within a step; the learning rate warms up and falls to zero along a cosine of the FLOPs spent. Held-out loss
is that of {setting.held_out} blocks, medians (range) over the seeds; peak memory is over the imported libraries. KV
cache and the time of a forward pass stand against those of the first width.

## Learning rates

Held-out loss on seed {TUNING_SEED}, which is not among those reported; the best rate of each row was taken.

{sweep}
"""


def draw(runs: list[dict], plt):
    """Held-out loss over FLOPs; thin lines are single seeds."""
    figure, axes = plt.subplots(figsize=(8, 4.5), layout="constrained")
    for number, row in enumerate(ROWS):
        for index, run in enumerate(run for run in runs if run["row"] == row):
            shares, losses = zip(*run["curve"])
            flops = [share * run["budget"] / 1e12 for share in shares]
            label = row if index == 0 else None
            axes.plot(flops, losses, color=f"C{number}", alpha=0.7, linewidth=1.2, label=label)
    losses = [loss for run in runs for share, loss in run["curve"] if share > 0.15]
    axes.set(xlabel="TFLOPs spent", ylabel="held-out loss, nats a token", ylim=(min(losses) * 0.99, max(losses) * 1.01))
    axes.legend()
    return figure


def page_of(figures: dict) -> page.Page:
    """The page, out of its figures."""
    runs = figures["runs"]
    return page.Page(
        title="Growing a model up",
        claim=claim(runs),
        summary=summary(runs, figures["setting"]["widths"]),
        text=text(Setting(**figures["setting"]), figures["text"], figures["tokens"], figures["sweep"], runs),
        draw=partial(draw, runs),
    )


def main() -> None:
    """Sweep, run, and write the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--text", help="text file or Hub id; without it the English that CPython carries")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--processes", type=int, default=1, help="runs at once")
    parser.add_argument("--output", type=Path, default=page.RESULTS)
    parser.add_argument("--quick", action="store_true", help="a tiny model, one seed, one rate: shows that it runs")
    arguments = parser.parse_args()
    setting, seeds = Setting(), arguments.seeds
    if arguments.quick:
        setting, seeds = QUICK, seeds[:1]
    if arguments.text:
        name = "-".join(Path(arguments.text).parts[-2:])
        texts = texts_of(arguments.text, longest=4_000_000)
    else:
        name, texts = "pydoc_data.topics", english()
    blocks = blocks_of(texts, train_tokenizer(texts, VOCABULARY), TOKENS)
    BLOCKS[name] = blocks[torch.randperm(len(blocks), generator=torch.Generator().manual_seed(0))]

    arguments.output.mkdir(parents=True, exist_ok=True)
    kept = arguments.output / "growing_up.jsonl"
    shared = {"setting": json_of(setting), "text": name}
    swept, wanted = [], dict.fromkeys(ROWS, RATES[:1] if arguments.quick else RATES)
    while any(wanted.values()):
        jobs = [{**shared, "row": row, "seed": TUNING_SEED, "rate": rate} for row in wanted for rate in wanted[row]]
        swept += collect(measure, jobs, kept, arguments.processes)
        losses = {row: {run["rate"]: run["loss"] for run in swept if run["row"] == row} for row in ROWS}
        best = {row: min(of_row, key=of_row.get) for row, of_row in losses.items()}
        for row, rate in best.items():
            ends = {} if arguments.quick else {min(losses[row]): rate / 2, max(losses[row]): rate * 2}
            wanted[row] = [ends[rate]] if rate in ends else []
    jobs = [{**shared, "row": row, "seed": seed, "rate": best[row]} for seed in seeds for row in ROWS]
    runs = collect(measure, jobs, kept, arguments.processes)
    costs = ("budget", "flops", "growth_flops", "steps", "tokens", "parameters", "forward", "seconds", "peak_bytes")
    figures = shared | {
        "tokens": BLOCKS[name].numel(),
        "sweep": page.kept(swept, "row", "rate", "loss"),
        "runs": page.kept(runs, "row", "seed", "rate", "loss", "gains", *costs, "curve"),
    }
    page.publish("growing_up", figures, seeds, arguments.output, sum(run["seconds"] for run in swept + runs))


def json_of(setting: Setting) -> dict:
    """As JSON returns it, so that a kept run is known again."""
    return {name: list(value) if isinstance(value, tuple) else value for name, value in vars(setting).items()}


if __name__ == "__main__":
    main()
