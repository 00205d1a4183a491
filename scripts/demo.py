"""The whole job in a few minutes, without a download: `bash scripts/demo.sh`.

A byte-level BPE and a small Llama with narrow heads are trained on the English that every CPython carries, its own
documentation. Half-way the model grows.
"""

import argparse
import tempfile
from pathlib import Path

import torch
from datasets import Dataset
from texts import english, train_tokenizer
from transformers import LlamaConfig, LlamaForCausalLM
from transformers import logging as transformers_logging

OPTIONS = """
--packing --packing_strategy wrapped --max_length 128 --per_device_train_batch_size 16 --per_device_eval_batch_size 16
--learning_rate 3e-3 --lr_scheduler_type cosine --warmup_steps 0.05 --weight_decay 0.01 --no_gradient_checkpointing
--eval_steps 0.0833 --logging_steps 0.05 --save_strategy no --budget 8%
"""


def main() -> None:
    """Train the tokenizer and the model, and fine-tune it as `growattn finetune` does."""
    from hf_growattn.cli.options import read_recipe
    from hf_growattn.training.finetuning import finetune

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", default="scripts/output/demo", help="folder for all that is made")
    parser.add_argument("--steps", type=int, default=300, help="training steps, growth half-way")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    transformers_logging.disable_progress_bar()
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
    torch.manual_seed(arguments.seed)
    model = LlamaForCausalLM(config)
    print(f"{len(texts)} articles, {model.num_parameters():,} parameters, heads {config.head_dim} wide.")
    chosen = f"--max_steps {arguments.steps} --seed {arguments.seed} --growth_batches {min(32, arguments.steps)}"
    with tempfile.TemporaryDirectory() as folder:
        start, data = Path(folder, "model"), Path(folder, "articles.parquet")
        model.save_pretrained(start)
        tokenizer.save_pretrained(start)
        Dataset.from_dict({"text": texts}).to_parquet(data)
        words = [str(start), str(data), "-o", arguments.output, *OPTIONS.split(), *chosen.split()]
        print(finetune(read_recipe("finetune", words))["summary"])


if __name__ == "__main__":
    main()
