"""Does a growth hold on text that it has not seen? Grow on random batches, measure on fresh ones, for several seeds.

    python scripts/fresh_batches.py --model path/to/llama --dataset my_text.txt

Nothing is trained: the figures are those of the growth alone.
"""

import argparse
import statistics

import torch
from finetune import blocks_of, held_out_loss, load_texts
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers import logging as transformers_logging

from hf_growattn import Grower, GrowthConfig, patch_model


def main() -> None:
    """Read the command line, grow once for each seed, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="path or Hub id")
    parser.add_argument("--dataset", required=True, help="text file, folder of text files, or Hub id")
    parser.add_argument("--qk-dims", type=int, default=8)
    parser.add_argument(
        "--batches", type=int, default=32, help="batches to grow on, and as many fresh ones to measure on"
    )
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--block-size", type=int, default=128)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    arguments = parser.parse_args()
    transformers_logging.disable_progress_bar()
    tokenizer = AutoTokenizer.from_pretrained(arguments.model)
    blocks = blocks_of(load_texts(arguments.dataset), tokenizer, arguments.block_size)
    rows = arguments.batches * arguments.batch_size
    if len(blocks) < 2 * rows:
        raise SystemExit(f"The text has {len(blocks)} blocks; {2 * rows} are needed. Lower --batches.")
    print("seed | growth batches: before -> after | fresh batches: before -> after | lower by | seconds")
    lower = []
    for seed in arguments.seeds:
        model = patch_model(AutoModelForCausalLM.from_pretrained(arguments.model))
        chosen = blocks[torch.randperm(len(blocks), generator=torch.Generator().manual_seed(seed))[: 2 * rows]]
        fresh = chosen[rows:]
        before = held_out_loss(model, fresh, arguments.batch_size)
        report = Grower(model, GrowthConfig(arguments.qk_dims, seed=seed)).grow(
            chosen[:rows].split(arguments.batch_size)
        )
        after = held_out_loss(model, fresh, arguments.batch_size)
        lower.append(before - after)
        print(
            f"{seed:4} | {report.loss_before:.4f} -> {report.loss_after:.4f} | {before:.4f} -> {after:.4f} | "
            f"{lower[-1]:.4f} | {sum(report.seconds.values()):.1f}"
        )
    print(f"Fresh loss lower by {statistics.median(lower):.4f} (median; {min(lower):.4f} to {max(lower):.4f}).")


if __name__ == "__main__":
    main()
