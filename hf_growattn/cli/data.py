"""The text that `growattn measure` and `race` read, as the rows that TRL's SFTTrainer makes of it."""

import functools
import glob
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from datasets import Dataset, load_dataset
from transformers import LlamaConfig, LlamaForCausalLM
from trl.trainer.sft_config import SFTConfig
from trl.trainer.sft_trainer import SFTTrainer

from ..interop.checkpoints import load_config, load_tokenizer

# By suffix of files that hold data, the loader of datasets that reads them.
_LOADERS = {".txt": "text", ".json": "json", ".jsonl": "json", ".csv": "csv", ".parquet": "parquet"}
_FEWEST = 20  # rows: with fewer, neither training nor measuring means anything
_HELD_OUT = 128  # rows at most
SEED = 42  # of the order of the rows, and of a growth's random inputs
_COMPARED_ON = 256  # rows at most, of those held out or of a test split


@dataclass(frozen=True)
class TextData:
    """Data for a model to read, and how it reads them.

    Attributes:
        model: a folder or a Hub id, whose tokenizer reads.
        names: files of one kind, one folder, or one Hub id.
        max_length: tokens of a row at most; None for 1,024, or what the model reads at once if that is less.
        batch_size: rows of a batch.
        subset, split: of a data set of the Hub, to train on. One called "test" is held out, or a part of the other.
        text_field: the column of plain text.
    """

    model: str
    names: list[str]
    max_length: int | None = None
    batch_size: int = 8
    subset: str | None = None
    split: str = "train"
    text_field: str = "text"

    @property
    def title(self) -> str:
        """What to call the data."""
        return ", ".join(self.names)

    @functools.cached_property  # it looks through folders
    def loaders(self) -> set[str]:
        """The loaders of datasets that read the files."""
        paths = [Path(name) for name in self.names]
        files = [file for path in paths for file in (path.rglob("*") if path.is_dir() else [path])]
        return {_LOADERS[file.suffix] for file in files if file.suffix in _LOADERS}

    @property
    def is_plain_text(self) -> bool:
        """Whether the data are text files, which are cut into blocks of `max_length` tokens."""
        return self.loaders == {"text"}

    def training(self) -> SFTConfig:
        """The options by which SFTTrainer makes rows of the data."""
        return SFTConfig(
            tempfile.gettempdir(),  # where nothing is written: it never trains
            max_length=self.max_length,
            packing=self.is_plain_text,
            packing_strategy="wrapped" if self.is_plain_text else "bfd",
            dataset_text_field=self.text_field,
            bf16=False,
            report_to=[],
        )


def load_data(data: TextData) -> tuple[Dataset, Dataset | None]:
    """The rows of the data, and those of their test split."""
    paths = [Path(name) for name in data.names]
    if any((path / "config.json").is_file() for path in paths):
        raise ValueError("it is the folder of a model: name MODEL first, then DATA")
    if len(data.loaders) > 1:  # datasets would read the most frequent kind alone
        raise ValueError("files of several kinds cannot be read together: write them as one")
    options: dict[str, Any] = {"sample_by": "document"} if data.is_plain_text else {}
    if all(path.suffix in _LOADERS for path in paths):
        splits = load_dataset(*data.loaders, data_files=[glob.escape(name) for name in data.names], **options)
    elif len(data.names) == 1:
        splits = load_dataset(data.names[0], data.subset, **options)
    else:
        raise ValueError("name files, or one folder or Hub id alone")
    return splits[data.split], splits.get("test")


class Prepared(NamedTuple):
    """Rows of data as the model reads them, to train on and held-out ones, and what makes batches of them."""

    data: TextData
    train: Dataset
    test: Dataset
    collate: Callable[[list[dict]], dict]

    def draw_batches(self, count: int, seed: int = SEED) -> list[dict]:
        """Batches from all over the rows to train on; two at least."""
        drawn = first_rows(self.train, count * self.data.batch_size, seed)
        return self._batches(drawn, min(self.data.batch_size, -(-len(drawn) // 2) or 1))

    def held_out_batches(self) -> list[dict]:
        """Batches of held-out rows, small enough to be many: the error of a race is that over them."""
        rows = first_rows(self.test, _COMPARED_ON, seed=0)
        return self._batches(rows, max(min(self.data.batch_size, len(rows) // _FEWEST), 1))

    def _batches(self, rows: Dataset, size: int) -> list[dict]:
        listed: list[Any] = list(rows)
        batches = [self.collate(listed[start : start + size]) for start in range(0, len(listed), size)]
        return [{name: value for name, value in batch.items() if torch.is_tensor(value)} for batch in batches]


def prepare_rows(data: TextData, train: Dataset, test: Dataset | None, tokenizer) -> Prepared:
    """Tokenize, mask and pack data as SFTTrainer does; without a test split, a tenth is held out."""
    config = LlamaConfig(vocab_size=3, hidden_size=2, intermediate_size=1, num_attention_heads=1, num_hidden_layers=1)
    trainer = SFTTrainer(
        LlamaForCausalLM(config),
        data.training(),
        train_dataset=train,
        eval_dataset=test,
        processing_class=tokenizer,
    )
    rows = _drop_unpredicted(trainer.train_dataset)
    if test is not None:
        return Prepared(data, rows, _drop_unpredicted(trainer.eval_dataset), trainer.data_collator)
    if len(rows) < _FEWEST:
        raise ValueError(
            f"The data give {len(rows)} rows of at most {data.max_length} tokens, too few to hold any out. Add data, "
            f"or choose a shorter --max-length: at least {_FEWEST} rows are needed."
        )
    parts = rows.train_test_split(min(max(len(rows) // 10, 8), _HELD_OUT), seed=SEED)
    return Prepared(data, parts["train"], parts["test"], trainer.data_collator)


def _drop_unpredicted(rows: Any) -> Dataset:
    """The rows of which any token is predicted; packing may leave one without."""
    return rows.filter(lambda row: any(label != -100 for label in row["labels"][1:]))


def first_rows(rows: Dataset, count: int, seed: int) -> Dataset:
    """The first rows in the seed's order; all rows if there are fewer."""
    return rows.shuffle(seed=seed).select(range(min(count, len(rows))))


def read_rows(data: TextData, count: int | None = None) -> Prepared:
    """Rows to train on and held-out ones, of `count` rows of data or all."""
    config = load_config(data.model).get_text_config()
    tokenizer = load_tokenizer(data.model)
    longest = getattr(config, "max_position_embeddings", None) or sys.maxsize
    max_length = min(1024, longest) if data.max_length is None else data.max_length
    if not 2 <= max_length <= longest:
        raise ValueError(f"This model reads {longest:,} tokens at once: choose --max-length from 2 to {longest}.")
    data, columns = replace(data, max_length=max_length), ""
    try:
        rows, test = load_data(data)
        columns = f". The columns are {', '.join(rows.column_names)}."
        prepared = prepare_rows(data, first_rows(rows, count, SEED) if count else rows, test, tokenizer)
    except Exception as error:
        cause = error.__cause__ or error  # datasets wraps what its readers say
        message = f"{cause}{columns}" if isinstance(cause, KeyError) else str(cause) or "there are no rows"
        raise ValueError(
            f"{data.title} cannot be read by TRL. {type(cause).__name__}: {message} (See --text-field, --subset "
            "and --split. What TRL reads otherwise can be raced in Python, by hf_growattn.race.)"
        ) from error
    largest = max(map(max, prepared.test["input_ids"]))
    if largest >= config.vocab_size:
        raise ValueError(
            f"The tokenizer has a token {largest:,}, which the model does not know: save the model's own tokenizer in "
            "its folder."
        )
    return prepared
