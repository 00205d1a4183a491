"""What a growth's verdict is worth: how often it keeps dims on noise, and whether the fall it prints is true.

OMP_NUM_THREADS=1 python scripts/bench/verdict.py
"""

import argparse
import math
import statistics
import sys
import time
from pathlib import Path

import page
import torch
from tqdm.auto import tqdm
from transformers import LlamaConfig, LlamaForCausalLM

from hf_growattn import Grower, GrowthConfig, GrowthReport, patch_model

sys.path.insert(0, str(Path(__file__).parent.parent))
from texts import blocks_of, english, train_tokenizer

BUDGET = 0.05
COUNTS = (4, 8, 16)  # batches of a growth
FRESH = 200  # rows that neither training nor growth has seen
Z = 1.96  # standard errors at 95 %


def make_model(vocabulary: int, seed: int) -> LlamaForCausalLM:
    """A Llama with 8 heads, 8 wide, and random weights."""
    torch.manual_seed(seed)
    sizes = {"vocab_size": vocabulary, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2}
    return LlamaForCausalLM(LlamaConfig(num_attention_heads=8, num_key_value_heads=4, **sizes))


@torch.no_grad()
def losses_of(model, rows: torch.Tensor) -> torch.Tensor:
    """The loss of each row, (rows,)."""
    model.eval()
    return torch.stack([model(input_ids=row[None], labels=row[None]).loss for row in rows])


def grow(model, batches: torch.Tensor, fresh: torch.Tensor) -> tuple[GrowthReport, float, float]:
    """Find new dims and keep them by word: the report, and the mean fall of the loss of fresh rows with its error."""
    before = losses_of(model, fresh)
    growth = Grower(model, GrowthConfig(budget=BUDGET)).find(batches)
    report = growth.report
    growth.keep()
    falls = (before - losses_of(model, fresh)).double()
    return report, falls.mean().item(), Z * falls.std().item() / math.sqrt(len(falls))


def run_noise(seeds: int) -> list[dict]:
    """Growths on uniform random tokens, where nothing can be learned."""
    rows = []
    for count in COUNTS:
        for seed in tqdm(range(seeds), desc=f"noise, {count} batches", leave=False, disable=None):
            model = patch_model(make_model(97, seed))
            batches, fresh = torch.randint(97, (count, 4, 32)), torch.randint(97, (160, 32))
            report, fall, _ = grow(model, batches, fresh)
            rows.append({"batches": count, "seed": seed, "kept": report.holds, "fresh": fall})
    return rows


def run_text(seeds: int, steps: int) -> list[dict]:
    """Growths of a small model that was trained on English for a while, on more of the same."""
    tokenizer = train_tokenizer(english(), 512)
    blocks = blocks_of(english(), tokenizer, 64)
    blocks = blocks[torch.randperm(len(blocks), generator=torch.Generator().manual_seed(0))]
    held_out, training = blocks[:FRESH], blocks[FRESH:]
    trained = make_model(len(tokenizer), 0)
    optimizer = torch.optim.AdamW(trained.parameters(), lr=3e-3)
    for step in tqdm(range(steps), desc="training", leave=False, disable=None):
        batch = training[torch.randint(len(training), (8,), generator=torch.Generator().manual_seed(step))]
        trained(input_ids=batch, labels=batch).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    rows = []
    for count in COUNTS:
        for seed in tqdm(range(seeds), desc=f"text, {count} batches", leave=False, disable=None):
            model = make_model(len(tokenizer), 0)
            model.load_state_dict(trained.state_dict())
            chosen = torch.randperm(len(training), generator=torch.Generator().manual_seed(seed))[: 4 * count]
            report, fall, error = grow(patch_model(model), training[chosen].view(count, 4, -1), held_out)
            printed = {"printed": report.fall, "printed_error": report.error}
            rows.append({"batches": count, "seed": seed, "kept": report.holds, "fresh": fall, "error": error} | printed)
    return rows


def agrees(row: dict) -> bool:
    """Whether the printed fall is that of fresh rows, within the errors of both."""
    return abs(row["printed"] - row["fresh"]) <= math.hypot(row["printed_error"], row["error"])


def make_page(noise: list[dict], text: list[dict]) -> page.Page:
    """The page of both."""
    kept = sum(row["kept"] for row in noise)
    worse = sum(row["kept"] and row["fresh"] < 0 for row in noise)
    grown, true = sum(row["kept"] for row in text), sum(map(agrees, text))
    lines = []
    for count in COUNTS:
        on_noise = [row for row in noise if row["batches"] == count]
        on_text = [row for row in text if row["batches"] == count]
        falls = [f"{statistics.median(row[name] for row in on_text):.4f}" for name in ("printed", "fresh")]
        parts = [f"{sum(row['kept'] for row in rows)} of {len(rows)}" for rows in (on_noise, on_text)]
        lines.append([count, *parts, *falls, f"{sum(map(agrees, on_text))} of {len(on_text)}"])
    columns = ["batches", "kept on noise", "kept on text", "printed fall, median", "fall of fresh rows, median"]
    return page.Page(
        title="What the verdict of a growth is worth",
        claim=f"On random tokens, {kept} of {len(noise)} growths are kept, and {worse} of these raise the loss of "
        f"fresh rows. On English text, {grown} of {len(text)} are kept, and the printed fall is that of fresh rows "
        f"within the errors of both, at 95 %, in {true} of {len(text)}.",
        summary=page.table([*columns, "printed fall is true"], lines),
        text=f"""A Llama with two layers and 8 heads, 8 wide, grows by {BUDGET:.0%} of its weights on batches of 4 rows.
Random tokens are drawn uniformly, and the model has random weights. English is the documentation of CPython; the model
was trained on it before, for {text[0]["steps"]} steps. {FRESH} fresh rows were seen by neither training nor growth.""",
        draw=lambda plt: draw(text, plt),
    )


def draw(text: list[dict], plt):
    """The printed fall against that of fresh rows."""
    figure, panel = plt.subplots(figsize=(5, 4.5), layout="constrained")
    for count in COUNTS:
        rows = [row for row in text if row["batches"] == count]
        points = [row["fresh"] for row in rows], [row["printed"] for row in rows]
        errors = [row["printed_error"] for row in rows]
        panel.errorbar(*points, yerr=errors, fmt="o", capsize=2, label=f"{count} batches")
    panel.axline((0, 0), slope=1, color="0.6", linewidth=1)
    panel.set(xlabel="fall of the loss of fresh rows, nats", ylabel="printed fall, nats, and its error at 95 %")
    panel.legend()
    return figure


def main() -> None:
    """Run the growths and write the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=page.RESULTS)
    parser.add_argument("--quick", action="store_true", help="few growths: shows that it runs")
    arguments = parser.parse_args()
    seeds, steps = (2, 10) if arguments.quick else (20, 600)
    began = time.perf_counter()
    noise = run_noise(seeds)
    text = [row | {"steps": steps} for row in run_text(seeds, steps)]
    seconds = time.perf_counter() - began
    figures = {"noise": noise, "text": text}
    page.publish("verdict", make_page(noise, text), figures, list(range(seeds)), arguments.output, seconds)


if __name__ == "__main__":
    main()
