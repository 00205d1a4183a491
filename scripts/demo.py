"""The whole job in three minutes, without a download: `bash scripts/demo.sh`.

A byte-level BPE and a small Llama with narrow heads are made from the English that every CPython carries, its own
documentation. `growattn finetune` then trains all weights, and widens heads half-way; more of its options may follow.
"""

import argparse
import sys
from pathlib import Path

import torch
from texts import english, train_tokenizer
from transformers import LlamaConfig, LlamaForCausalLM

from hf_growattn.cli.commands import main as growattn

OPTIONS = """
--max_length 128 --per_device_train_batch_size 16 --per_device_eval_batch_size 16 --learning_rate 3e-3
--lr_scheduler_type cosine --warmup_steps 0.05 --weight_decay 0.01 --gradient_checkpointing False
--logging_steps 0.05 --save_strategy no --budget 0.08
"""


def main() -> None:
    """Make the model and the text, and fine-tune."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default="scripts/output/demo", help="new folder for all that is made")
    parser.add_argument("--steps", type=int, default=120, help="training steps, growth half-way")
    arguments, more = parser.parse_known_args()
    texts = english()
    tokenizer = train_tokenizer(texts, 1024)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=3,
        num_attention_heads=8,
        head_dim=4,
        max_position_embeddings=128,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        tie_word_embeddings=True,
    )
    torch.manual_seed(0)
    model = LlamaForCausalLM(config)
    print(f"{len(texts)} articles, {model.num_parameters():,} parameters, heads {config.head_dim} wide.", flush=True)
    arguments.output.mkdir(parents=True, exist_ok=True)
    base, text, grown = (arguments.output / name for name in ("base", "python_topics.txt", "grown"))
    model.save_pretrained(base)
    tokenizer.save_pretrained(base)
    text.write_text("\n\n".join(texts), encoding="utf-8")
    words = ["finetune", base, text, "-o", grown, "--max_steps", arguments.steps, *OPTIONS.split(), *more]
    sys.exit(growattn([*map(str, words)]))


if __name__ == "__main__":
    main()
