"""Texts, a tokenizer of them, and rows of tokens, for scripts that train by a loop of their own."""

import json
from collections.abc import Iterable
from pathlib import Path
from pydoc_data import topics

import torch
from tokenizers import ByteLevelBPETokenizer
from transformers import PreTrainedTokenizerFast


def load_texts(data: str) -> list[str]:
    """The documents of a file: one of a text, and one of each row of JSON or of JSON lines, with all its strings."""
    content = Path(data).read_text(encoding="utf-8")
    if data.endswith((".json", ".jsonl")):
        rows = json.loads(content) if data.endswith(".json") else map(json.loads, content.splitlines())
        return ["\n".join(strings_of(row)) for row in rows]
    return [content.replace("<unk>", "unk")]  # WikiText's literal would become a special token


def strings_of(value) -> list[str]:
    """All strings in a value of JSON that are not empty."""
    if isinstance(value, (dict, list)):
        parts = value.values() if isinstance(value, dict) else value
        return [text for part in parts for text in strings_of(part)]
    return [value] if value and isinstance(value, str) else []


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
