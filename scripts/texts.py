"""Texts, a tokenizer of them, and rows of tokens, for scripts that train by a loop of their own."""

from collections.abc import Iterable
from pathlib import Path
from pydoc_data import topics

import torch
from tokenizers import ByteLevelBPETokenizer
from transformers import PreTrainedTokenizerFast


def load_texts(data: str) -> list[str]:
    """The documents of a text file, of the .txt files of a folder, or of the column "text" of a Hub data set."""
    path = Path(data)
    if path.exists():
        files = sorted(path.rglob("*.txt")) if path.is_dir() else [path]
        return [file.read_text(encoding="utf-8") for file in files]
    from datasets import load_dataset

    return load_dataset(data, split="train")["text"]


def blocks_of(texts: Iterable[str], tokenizer, block_size: int) -> torch.Tensor:
    """Tokenize, join with the end-of-text token and cut into blocks: (blocks, block_size)."""
    separator = [tokenizer.eos_token_id] if tokenizer.eos_token_id is not None else []
    ids: list[int] = []
    for text in texts:
        ids += tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"] + separator
    count = len(ids) // block_size
    return torch.tensor(ids[: count * block_size]).view(count, block_size)


def english() -> list[str]:
    """The articles of the documentation that every CPython carries."""
    return [topics.topics[name] for name in sorted(topics.topics)]


def train_tokenizer(texts: list[str], size: int) -> PreTrainedTokenizerFast:
    """Train a byte-level BPE of the given size."""
    bpe = ByteLevelBPETokenizer()
    bpe.train_from_iterator(texts, vocab_size=size, special_tokens=["<|endoftext|>"], show_progress=False)
    return PreTrainedTokenizerFast(
        tokenizer_object=bpe._tokenizer, eos_token="<|endoftext|>", bos_token="<|endoftext|>"
    )
