"""Fine-tune a causal language model on a text with transformers' Trainer, and grow its attention on the way.

    python scripts/finetune.py --model gpt2 --dataset my_text.txt --output_dir grown --compare
    torchrun --nproc_per_node 2 scripts/finetune.py --model gpt2 --dataset my_text.txt --bf16 --grow_every 100

`--model` is a path or Hub id, `--dataset` a text file, a folder of text files or a Hub id. Every option of Trainer
works: optimizers, schedulers, precision, checkpoints and trackers. The trained model is saved, reloaded in a fresh
process to compare logits, and left with `report.html`, `growth.png` and `figures.json`. `growattn finetune` does the
same where the library is installed.
"""

import sys

from hf_growattn.finetuning import main

OUTPUT = "scripts/output/finetune"  # unless another one is named

if __name__ == "__main__":
    usage = "finetune.py --model MODEL --dataset DATASET [options]; --help lists them"
    try:
        main(["--output_dir", OUTPUT, *sys.argv[1:]], usage, __doc__)
    except (ValueError, ImportError) as error:
        sys.exit(f"Error: {error}")
