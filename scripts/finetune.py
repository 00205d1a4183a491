"""Fine-tune a causal language model on a text, and grow its attention on the way.

    python scripts/finetune.py --model gpt2 --dataset my_text.txt --output grown

`--model` is a path or Hub id, `--dataset` a text file, a folder of text files or a Hub id. The model trains for half of
`--steps`, grows on fresh training batches, trains on, is saved, and is reloaded in a fresh process to compare logits.
"""

import argparse
import copy
import json
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path

import torch
from accelerate import Accelerator
from datasets import load_dataset
from tqdm.auto import tqdm
from transformers import AutoModelForCausalLM, AutoTokenizer, get_cosine_schedule_with_warmup
from transformers import logging as transformers_logging

from hf_growattn import Grower, GrowthConfig, GrowthReport, patch_model


@dataclass
class Settings:
    """How to train, and when and how much to grow."""

    steps: int
    batch_size: int
    learning_rate: float
    growth: GrowthConfig
    growth_batches: int
    seed: int
    evaluate_every: int


@dataclass
class Run:
    """What a training gave: the model, its held-out loss by step, and the growth, if there was one."""

    model: torch.nn.Module
    held_out: dict[int, float] = field(default_factory=dict)
    report: GrowthReport | None = None


def blocks_of(texts: list[str], tokenizer, block_size: int) -> torch.Tensor:
    """Tokenize, join with the end-of-text token and cut into blocks: (blocks, block_size)."""
    separator = [tokenizer.eos_token_id] if tokenizer.eos_token_id is not None else []
    ids: list[int] = []
    for text in tqdm(texts, desc="tokenizing", leave=False, disable=None):
        ids += tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"] + separator
    count = len(ids) // block_size
    if count < 20:
        raise SystemExit(
            f"The text has {len(ids)} tokens, too few for blocks of {block_size}; add text or shorten them."
        )
    return torch.tensor(ids[: count * block_size]).view(count, block_size)


def load_texts(dataset: str) -> list[str]:
    """Read a text file, a folder of text files, or the column "text" of a Hub dataset's training split."""
    path = Path(dataset)
    if path.is_dir():
        files = sorted(str(file) for file in path.rglob("*.txt"))
        if not files:
            raise SystemExit(f"No .txt files in {path}.")
        return load_dataset("text", data_files=files, split="train", sample_by="document")["text"]
    if path.is_file():
        kind = "json" if path.suffix in (".json", ".jsonl") else "text"
        options = {} if kind == "json" else {"sample_by": "document"}
        data = load_dataset(kind, data_files=str(path), split="train", **options)
    else:
        data = load_dataset(dataset, split="train")
    if "text" not in data.column_names:
        raise SystemExit(f'{dataset} has the columns {data.column_names}; one of them must be called "text".')
    return data["text"]


@torch.no_grad()
def held_out_loss(model, blocks: torch.Tensor, batch_size: int) -> float:
    """Mean loss over held-out blocks, in nats a token; dropout off."""
    training = model.training
    model.eval()
    device = next(model.parameters()).device
    losses = [model(input_ids=b, labels=b).loss.item() * len(b) for b in blocks.to(device).split(batch_size)]
    model.train(training)
    return sum(losses) / len(blocks)


def train(model, training: torch.Tensor, held_out: torch.Tensor, settings: Settings, grow: bool) -> Run:
    """Train under accelerate, growing half-way if asked; the same seed draws the same batches either way."""
    accelerator = Accelerator()
    torch.manual_seed(settings.seed)
    order = torch.randint(len(training), (settings.steps, settings.batch_size))
    fresh = torch.randint(len(training), (settings.growth_batches, settings.batch_size))
    optimizer = torch.optim.AdamW(model.parameters(), lr=settings.learning_rate, weight_decay=0.01)
    scheduler = get_cosine_schedule_with_warmup(optimizer, settings.steps // 20, settings.steps)
    model, optimizer, scheduler = accelerator.prepare(model, optimizer, scheduler)
    run = Run(accelerator.unwrap_model(model))
    label = "with growth" if grow else "without growth"
    for step in tqdm(range(settings.steps), desc=f"training {label}", disable=None):
        if grow and step == settings.steps // 2:
            run.held_out[step] = held_out_loss(model, held_out, settings.batch_size)
            run.report = Grower(model, settings.growth, optimizer, accelerator).grow([training[rows] for rows in fresh])
            after = held_out_loss(model, held_out, settings.batch_size)
            tqdm.write(f"{run.report}\nHeld-out loss {run.held_out[step]:.4f} -> {after:.4f} at the growth.")
            run.held_out[step] = after
        model.train()
        batch = training[order[step]].to(accelerator.device)
        accelerator.backward(model(input_ids=batch, labels=batch).loss)
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        if (step + 1) % settings.evaluate_every == 0 or step + 1 == settings.steps:
            run.held_out[step + 1] = held_out_loss(model, held_out, settings.batch_size)
    return run


RELOAD = """
import sys, torch, hf_growattn
from transformers import AutoModelForCausalLM
sample = torch.load(sys.argv[2], weights_only=True)
with torch.no_grad():
    logits = AutoModelForCausalLM.from_pretrained(sys.argv[1]).eval()(sample["input_ids"]).logits
print((logits.float() - sample["logits"].float()).abs().max().item())
"""


@torch.no_grad()
def save_and_reload(model, tokenizer, sample: torch.Tensor, output: Path) -> float:
    """Save, load in a fresh process, and return the largest difference of the logits."""
    model.save_pretrained(output)
    tokenizer.save_pretrained(output)
    model = copy.deepcopy(model).cpu().eval()
    kept = output / "sample.pt"
    torch.save({"input_ids": sample, "logits": model(sample).logits}, kept)
    command = [sys.executable, "-c", RELOAD, str(output), str(kept)]
    difference = float(subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()[-1])
    kept.unlink()
    return difference


def picture(grown: Run, plain: Run | None, path: Path) -> None:
    """Draw the held-out loss by step, the lead of the grown model, and what each layer promised, into one PNG."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, panels = plt.subplots(1, 3 if plain else 2, figsize=(13 if plain else 9, 3.6), layout="constrained")
    curves, layers = panels[0], panels[-1]
    growth = max(grown.held_out) // 2
    if plain:
        curves.plot(*zip(*sorted(plain.held_out.items())), label="without growth", color="tab:gray")
        steps = sorted(grown.held_out.keys() & plain.held_out.keys())
        panels[1].plot(steps, [plain.held_out[s] - grown.held_out[s] for s in steps], marker=".", color="tab:blue")
        panels[1].axhline(0, color="tab:gray", linewidth=1)
        panels[1].axvline(growth, color="tab:blue", linestyle=":", linewidth=1)
        panels[1].set(xlabel="step", ylabel="nats a token", title="Lead of the grown model, held out")
    curves.plot(*zip(*sorted(grown.held_out.items())), label="with growth", color="tab:blue")
    curves.axvline(growth, color="tab:blue", linestyle=":", linewidth=1)
    curves.set(xlabel="step", ylabel="nats a token", title="Held-out loss, growth half-way")
    curves.legend()
    report = grown.report
    index = range(len(report.layers))
    layers.bar(index, [layer.in_sample_gain for layer in report.layers], color="tab:gray", label="on its batches")
    layers.bar(index, [layer.predicted_gain for layer in report.layers], color="tab:blue", label="validated")
    layers.set_xticks(index, [f"{layer.layer} {layer.kind[0]}\n{layer.starvation:.2f}" for layer in report.layers])
    layers.set(xlabel="layer, patterns or messages, starvation", ylabel="nats a token", title="First-order gain")
    layers.legend()
    figure.savefig(path, dpi=110)
    plt.close(figure)


def compare_and_save(model, tokenizer, blocks: torch.Tensor, settings: Settings, output: Path, compare: bool) -> Run:
    """Train with growth, and without it where asked; save the grown model, its picture and its figures."""
    shuffled = blocks[torch.randperm(len(blocks), generator=torch.Generator().manual_seed(settings.seed))]
    count = min(max(len(blocks) // 10, 8), 128)
    held_out, training = shuffled[:count], shuffled[count:]
    twin = copy.deepcopy(model) if compare else None
    grown = train(patch_model(model), training, held_out, settings, grow=True)
    plain = train(twin, training, held_out, settings, grow=False) if compare else None
    output.mkdir(parents=True, exist_ok=True)
    difference = save_and_reload(grown.model, tokenizer, held_out[:2], output)
    picture(grown, plain, output / "growth.png")
    figures = {
        "grown": grown.held_out,
        "plain": plain and plain.held_out,
        "predicted_gain": grown.report.predicted_gain,
    }
    (output / "figures.json").write_text(json.dumps(figures, indent=2))
    last = settings.steps
    print(f"Held-out loss after {last} steps, with growth: {grown.held_out[last]:.4f}.")
    if plain is not None:
        print(f"Held-out loss after {last} steps, without:     {plain.held_out[last]:.4f}.")
    print(f"Reloaded in a fresh process: largest difference of the logits {difference:.2e}.")
    print(f"Checkpoint and picture: {output} (growth.png).")
    if difference > 1e-5 and grown.model.dtype == torch.float32:
        raise SystemExit("The reloaded model computes something else: this is a bug, please report it.")
    return grown


def main() -> None:
    """Read the command line and run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="path or Hub id of a Llama- or GPT-2-style causal LM")
    parser.add_argument("--dataset", required=True, help="text file, folder of text files, or Hub id")
    parser.add_argument(
        "--output", type=Path, default=Path("scripts/output/finetune"), help="folder for the checkpoint"
    )
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--block-size", type=int, default=128, help="tokens in one row of a batch")
    parser.add_argument("--learning-rate", type=float, default=2e-4)
    parser.add_argument("--budget", type=float, default=0.02, help="weights to add at most, as a share of the model's")
    parser.add_argument("--qk-dims", type=int, default=0, help="instead: dims to add to each head's queries and keys")
    parser.add_argument("--v-dims", type=int, default=0, help="instead: dims to add to each head's values")
    parser.add_argument("--growth-batches", type=int, default=16, help="training batches to measure and grow on")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--compare", action="store_true", help="train once more without growth, and show both curves")
    arguments = parser.parse_args()
    transformers_logging.disable_progress_bar()
    tokenizer = AutoTokenizer.from_pretrained(arguments.model)
    model = AutoModelForCausalLM.from_pretrained(arguments.model)
    if arguments.qk_dims or arguments.v_dims:
        growth = GrowthConfig(qk_dims=arguments.qk_dims, v_dims=arguments.v_dims, seed=arguments.seed)
    else:
        growth = GrowthConfig(budget=arguments.budget, seed=arguments.seed)
    settings = Settings(
        steps=arguments.steps,
        batch_size=arguments.batch_size,
        learning_rate=arguments.learning_rate,
        growth=growth,
        growth_batches=arguments.growth_batches,
        seed=arguments.seed,
        evaluate_every=max(arguments.steps // 10, 1),
    )
    blocks = blocks_of(load_texts(arguments.dataset), tokenizer, arguments.block_size)
    compare_and_save(model, tokenizer, blocks, settings, arguments.output, arguments.compare)


if __name__ == "__main__":
    main()
