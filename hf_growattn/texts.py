"""Texts to train or to grow on, as rows of tokens: from a file, a folder, or a dataset of the Hub."""

import json
import random
from collections.abc import Iterable
from pathlib import Path

import torch
from tqdm.auto import tqdm

_SUFFIXES = (".txt", ".json", ".jsonl")
_FEWEST_BLOCKS = 20  # with fewer, neither training nor measuring means anything
_PIECE = 4096  # characters: small enough that a few batches see all parts of a text


def load_texts(data: str) -> list[str]:
    """Read the documents of a text.

    Args:
        data: a text file; a JSON or JSON lines file, whose entries have a "text"; a folder, of whose .txt files each is
            a document; or the Hub id of a dataset, of whose training split the column "text" is taken.

    Raises:
        ValueError: there is no such text, or none that can be read; the message names the fix.
        ImportError: a Hub id, and `datasets` is not installed.
    """
    path = Path(data)
    if path.is_dir():
        files = sorted(path.rglob("*.txt"))
        if not files:
            raise ValueError(f"There are no .txt files in {path}; put the text there as .txt, or name a file.")
        return [_read(file) for file in files]
    if path.is_file():
        return _entries(path) if path.suffix in (".json", ".jsonl") else [_read(path)]
    if path.suffix in _SUFFIXES or path.is_absolute():
        raise ValueError(f"There is no file or folder {data}; check the path of the text.")
    return _of_hub(data)


def _read(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{file} is not text in UTF-8 ({error.reason}); convert it first.") from error


def _entries(file: Path) -> list[str]:
    text = _read(file)
    try:
        listed = text.lstrip().startswith("[")
        entries = json.loads(text) if listed else [json.loads(line) for line in text.split("\n") if line.strip()]
    except json.JSONDecodeError as error:
        raise ValueError(
            f'{file} is not JSON ({error}); write one entry in a line, as in {{"text": "..."}}, or name the file .txt.'
        ) from error
    texts = [entry.get("text") if isinstance(entry, dict) else None for entry in entries]
    for entry, found in zip(entries, texts):
        if not isinstance(found, str):
            keys = list(entry) if isinstance(entry, dict) else type(entry).__name__
            raise ValueError(
                f'An entry of {file} has {keys}; each must have its text under "text"; '
                "of several parts write one, such as prompt and response with a line break between."
            )
    return texts


def _of_hub(dataset: str) -> list[str]:
    try:
        from datasets import load_dataset
    except ImportError as error:
        raise ImportError(
            f"There is no file or folder {dataset}. If it is a dataset of the Hub: pip install datasets."
        ) from error
    try:
        data = load_dataset(dataset, split="train")
    except Exception as error:  # of the client, of its HTTP library, or of the data: the next step is the same
        raise ValueError(
            f"{dataset} is no file or folder here, and cannot be read from the Hub. Check the name, and the network. "
            f"({type(error).__name__}: {error})"
        ) from error
    if "text" not in data.column_names:
        raise ValueError(f'{dataset} has the columns {data.column_names}; one of them must be called "text".')
    return data["text"]


def token_ids(texts: Iterable[str], tokenizer, most: int | None = None) -> list[int]:
    """Tokenize and join with the end-of-text token; stop after the text that reaches `most` tokens."""
    separator = [tokenizer.eos_token_id] if tokenizer.eos_token_id is not None else []
    ids: list[int] = []
    for text in tqdm(texts, desc="tokenizing", leave=False, disable=None):
        ids += tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"] + separator
        if most is not None and len(ids) >= most:
            break
    return ids


def blocks_of(texts: Iterable[str], tokenizer, block_size: int, most: int | None = None) -> torch.Tensor:
    """Tokenize, join with the end-of-text token and cut into blocks: (blocks, block_size).

    Args:
        texts: documents.
        tokenizer: the model's.
        block_size: tokens in a block.
        most: so many blocks, and no more is tokenized; by default all.

    Raises:
        ValueError: the texts are too short.
    """
    ids = token_ids(texts, tokenizer, None if most is None else most * block_size)
    count = min(len(ids) // block_size, most or len(ids))
    if count < _FEWEST_BLOCKS:
        raise ValueError(
            f"The text has {len(ids):,} tokens, too few for blocks of {block_size}: {_FEWEST_BLOCKS * block_size:,} at "
            "least are needed. Add text, or choose shorter blocks."
        )
    return torch.tensor(ids[: count * block_size]).view(count, block_size)


def check_length(block_size: int, model) -> None:
    """Check that a model reads so many tokens at once.

    Raises:
        ValueError: it does not.
    """
    longest = getattr(model.config, "max_position_embeddings", None)
    if longest and block_size > longest:
        raise ValueError(f"This model reads {longest:,} tokens at once: choose blocks of {longest:,} or fewer.")


def check_tokens(ids: torch.Tensor, model) -> None:
    """Check that a model knows all tokens.

    Raises:
        ValueError: they are of another model's tokenizer.
    """
    known = model.get_input_embeddings().num_embeddings
    if (largest := int(ids.max())) >= known:
        raise ValueError(
            f"The tokenizer has a token {largest:,}, and the model {known:,} tokens: they do not belong together. Save "
            "the model's own tokenizer beside it."
        )


def sampled_batches(
    texts: list[str], tokenizer, batches: int, batch_size: int, block_size: int, seed: int = 0
) -> list[torch.Tensor]:
    """Draw batches to grow on from all over the texts; fewer if there is less text.

    Only what is drawn is tokenized, so that a text may be long.

    Returns:
        Tensors of input_ids, (batch_size, block_size) each; smaller where the text does not fill two of them.

    Raises:
        ValueError: the texts are too short.
    """
    pieces = [text[start : start + _PIECE] for text in texts for start in range(0, len(text), _PIECE)]
    random.Random(seed).shuffle(pieces)
    rows = max(batches * batch_size, _FEWEST_BLOCKS)
    blocks = blocks_of(pieces, tokenizer, block_size, most=rows)[: batches * batch_size]
    blocks = blocks[torch.randperm(len(blocks), generator=torch.Generator().manual_seed(seed))]
    whole = len(blocks) // batch_size
    if whole >= 2:  # a loss is the mean over batches: in a small one each row would count more
        blocks = blocks[: whole * batch_size]
    return list(blocks.split(batch_size))
