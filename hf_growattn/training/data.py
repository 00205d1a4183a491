"""The one door for data: what SFTTrainer makes of files, folders and Hub ids is what trains, grows and is evaluated."""

import contextlib
import copy
import glob
import json
import tempfile
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

from datasets import Dataset, IterableDataset, Value, concatenate_datasets, load_dataset
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedConfig
from trl.chat_template_utils import get_training_chat_template
from trl.scripts.utils import DatasetMixtureConfig
from trl.trainer.sft_trainer import SFTTrainer

from .recipe import Recipe, Training

Rows: TypeAlias = Any  # a Dataset or an IterableDataset
_TABLES = {".csv": "csv", ".tsv": "csv", ".json": "json", ".jsonl": "json", ".parquet": "parquet", ".arrow": "arrow"}
_FEWEST = 20  # rows: with fewer, neither training nor measuring means anything
_HELD_OUT = 128  # rows at most
_EMPTY = "{} is empty: put data there, or name another file."
_LONG = "sequence-length-is-longer-than-the-specified-maximum"  # what transformers calls an alarm that it gives once
_PIECE = 4096  # characters: small enough that a few batches see all parts of a text


class Data:
    """What a recipe names, not yet tokenized: the rows of its splits, and what to call it.

    Args:
        recipe: its `script`, `data` and `mixture` say what to read, its `training` in which columns.

    Raises:
        ValueError: there are no such data, or none that can be read; the message names the fix.
    """

    def __init__(self, recipe: Recipe):
        self.name, training, script = recipe.dataset, recipe.training, recipe.script
        self.documents = False  # whether each row is a whole text file
        names = "train", "test"
        if recipe.mixture.datasets:
            splits = self._mixed(recipe.mixture, training.seed)
        else:
            names = script.dataset_train_split, script.dataset_test_split
            how = dict(name=script.dataset_config, revision=recipe.data.dataset_revision)
            splits = self._read(self.name, **how, streaming=script.dataset_streaming)
            renamed = dict(pair.split("=", 1)[::-1] for pair in recipe.data.dataset_columns or ())
            splits = {split: rows.rename_columns(renamed) for split, rows in splits.items()} if renamed else splits
        if names[0] not in splits or (names[1] not in splits and names[1] != "test"):
            raise ValueError(
                f"{self.name} has the splits {', '.join(splits)}: name them by --dataset_train_split and "
                "--dataset_test_split."
            )
        self.train, self.test = splits[names[0]], splits.get(names[1])
        if training.packing is None:
            training.packing = self.documents
        training.packing_strategy = training.packing_strategy or ("wrapped" if self.documents else "bfd")
        for name, rows in zip(names, (self.train, self.test)):
            if rows is not None:
                self._check(name, rows, training)

    def _mixed(self, mixture: DatasetMixtureConfig, seed: int) -> dict[str, Rows]:
        """As TRL's get_dataset, but of all that `_read` reads, and split alike on every process."""
        parts, shares = [], [part.fraction for part in mixture.datasets]
        for part in mixture.datasets:
            how = dict(name=part.name, data_dir=part.data_dir, data_files=part.data_files, split=part.split)
            rows = self._read(part.path, **how, streaming=mixture.streaming)
            rows = rows.select_columns(part.columns) if part.columns else rows
            for name, feature in (rows.features or {}).items():
                rows = rows.cast_column(name, Value("string")) if feature == Value("large_string") else rows
            parts.append(rows)
        if any(shares):
            if None in shares or mixture.streaming:
                raise ValueError("Give every one of the datasets a fraction or none, and none where they are streamed.")
            total = min(len(rows) / (share or 1) for rows, share in zip(parts, shares))
            parts = [rows.select(range(round((share or 0) * total))) for rows, share in zip(parts, shares)]
        rows, size = concatenate_datasets(parts), mixture.test_split_size
        return rows.train_test_split(size, seed=seed) if size else {"train": rows}

    def _read(self, name: str, /, **options) -> Any:
        if not name.strip():  # Path("") would be the folder that one is in
            raise ValueError("The name of the data is empty: name a file, a folder or a dataset of the Hub.")
        how: dict[str, Any] = {"path": name} | options
        place, suffix = Path(name), Path(name).suffix.lower()
        if place.is_dir():
            files = sorted(path for path in place.rglob("*") if path.is_file())
            texts = [glob.escape(str(path)) for path in files if path.suffix.lower() == ".txt"]
            if not any(path.suffix.lower() in _TABLES for path in files):
                if not texts:
                    raise ValueError(
                        f"There are no .txt, .jsonl, .csv or .parquet files in {name}; put the data there."
                    )
                how |= dict(path="text", data_files=texts, sample_by="document")
        elif place.is_file() and suffix in _TABLES:
            how |= dict(path=_TABLES[suffix], data_files=glob.escape(name)) | (
                {"sep": "\t"} if suffix == ".tsv" else {}
            )
        elif place.is_file() and suffix in (".xls", ".xlsx", ".ods", ".feather"):
            raise ValueError(f"{name} is a table of another program: save it as .csv or .parquet.")
        elif place.is_file():
            if not place.stat().st_size:
                raise ValueError(_EMPTY.format(name))
            how |= dict(path="text", data_files=glob.escape(name), sample_by="document")
        elif suffix in (".txt", *_TABLES) or place.is_absolute():
            raise ValueError(f"There is no file or folder {name}; check the path of the data.")
        self.documents = how["path"] == "text"
        with _told(name):
            return load_dataset(**{key: value for key, value in how.items() if value is not None})

    def _check(self, split: str, rows: Rows, training: Training) -> None:
        first = next(iter(rows), None)
        if first is None:
            raise ValueError(f"The split {split} of {self.name} is empty: put data there, or name another split.")
        text, chat = training.dataset_text_field, {"messages", "conversations"} & first.keys()
        used = ["prompt", "completion"] if {"prompt", "completion"} <= first.keys() else [*chat][:1] or [text]
        if "input_ids" in first:
            used = ["input_ids"]
        if not {*used} <= first.keys():
            raise ValueError(
                f"{self.name} has no column {text}, but {', '.join(first)}. Training reads one with text "
                "(--dataset_text_field COLUMN), messages of a chat, or prompt and completion (--dataset_columns "
                "prompt=COLUMN completion=COLUMN)."
            )
        for name in used:
            absent = rows.data.column(name).null_count if isinstance(rows, Dataset) else 0
            if absent or not isinstance(first[name], str | list):
                raise ValueError(
                    f"{self.name} has {absent or 'numbers, not text,'} {'empty rows ' if absent else ''}in the column "
                    f"{name}{_first_without(self.name, name)}: every row needs a text there. Drop the others."
                )

    def drawn_from(self) -> IterableDataset:
        """The rows to train on, shuffled and not yet tokenized; of whole texts, pieces."""
        rows = self.train
        if self.documents and isinstance(rows, Dataset):
            rows = rows.map(_pieces, batched=True, batch_size=1)
        shuffled = rows.shuffle(seed=0)
        return shuffled.to_iterable_dataset() if isinstance(shuffled, Dataset) else shuffled


def _pieces(rows: dict[str, list]) -> dict[str, list]:
    (text,) = rows["text"]
    return {"text": [text[start : start + _PIECE] for start in range(0, len(text), _PIECE)]}


@contextlib.contextmanager
def _told(name: str) -> Iterator[None]:
    """Tell in one line why data cannot be read, and what to do."""
    try:
        yield
    except Exception as error:  # of the client, of its HTTP library, of pandas or arrow
        cause = error
        while cause.__cause__ is not None:
            cause = cause.__cause__
        told = f"{type(cause).__name__}: {' '.join(str(cause).split())}"
        if not Path(name).exists():
            told = (
                f"{name} is not a file or folder here, and did not load from the Hub. Check the name and the network. "
                f"({told})"
            )
        elif isinstance(cause, UnicodeDecodeError):
            told = f"{name} is not text in UTF-8 ({cause.reason}); convert it first, a table to .csv or .parquet."
        elif isinstance(cause, KeyError):
            told = (
                f"{name} has rows without {cause}{_first_without(name, cause.args[0])}: every row needs a text there."
            )
        elif isinstance(cause, StopIteration) or "corresponds to no data" in told:
            told = _EMPTY.format(name)
        elif "Expected" in told and "fields in line" in told:
            told = f"{name} cannot be read: {told}. Put a text that has commas of its own in quotes."
        else:
            told = _broken_line(name) or f"{name} cannot be read. {told}"
        raise ValueError(told) from error


def _broken_line(name: str) -> str | None:
    """Where a file of JSON is broken; None if it is not, or is none."""
    if Path(name).suffix.lower() not in (".json", ".jsonl"):
        return None
    text = Path(name).read_text(encoding="utf-8")
    lines = [text] if text.lstrip().startswith("[") else text.split("\n")
    flaws = (_flaw(line, number) for number, line in enumerate(lines, 1) if line.strip())
    return next((f"{name} {flaw}; write one entry in a line." for flaw in flaws if flaw), None)


def _flaw(text: str, number: int) -> str | None:
    try:
        entries = json.loads(text)
    except json.JSONDecodeError as error:
        return f"is not JSON in line {number + error.lineno - 1:,}: {error.msg}, column {error.colno}"
    entries = entries if isinstance(entries, list) else [entries]
    odd = next((at for at, entry in enumerate(entries, number) if not isinstance(entry, dict)), None)
    return None if odd is None else f'has in entry {odd:,} no object, such as {{"text": "..."}}'


def _first_without(name: str, column: str) -> str:
    """The first line of a file of JSON lines that has nothing in a column."""
    if Path(name).suffix.lower() != ".jsonl" or not Path(name).is_file():
        return ""
    lines = enumerate(Path(name).read_text(encoding="utf-8").split("\n"), 1)
    return next(
        (f", first in line {at:,}" for at, line in lines if line.strip() and json.loads(line).get(column) is None), ""
    )


class Prepared(NamedTuple):
    """Rows as the model reads them, and what makes a batch of some."""

    train: Rows
    test: Rows | None
    collate: Callable[[list[dict]], dict]


def prepare_rows(train: Rows, test: Rows | None, tokenizer, training: Training) -> Prepared:
    """Tokenize, mask and pack data as SFTTrainer does, without the model.

    Raises:
        ValueError: the tokenizer lacks what these data need; the message names the fix.
    """
    if tokenizer.eos_token is None and training.eos_token is None:
        raise ValueError("The tokenizer has no token that ends a text: name one that it knows by --eos_token TOKEN.")
    chat = any(isinstance(value, list) and value and isinstance(value[0], dict) for value in next(iter(train)).values())
    if chat and tokenizer.chat_template is None and training.chat_template_path is None:
        raise ValueError(
            "The data are chats, and the tokenizer has no chat template: name one by --chat_template_path, a .jinja "
            "file or a model that has one."
        )
    if chat and training.assistant_only_loss and training.chat_template_path is None:
        try:
            get_training_chat_template(tokenizer)
        except ValueError as error:
            raise ValueError(
                "--assistant_only_loss needs a chat template that marks the replies by {% generation %}, and TRL knows "
                "no such form of this tokenizer's. Name one by --chat_template_path FILE.jinja, or leave "
                "--assistant_only_loss out: then the loss is that of whole chats."
            ) from error
    tokenizer = copy.deepcopy(tokenizer)
    tokenizer.deprecation_warnings[_LONG] = True  # rows are cut: nothing longer than the model reads reaches it
    sizes: dict[str, Any] = dict(vocab_size=1, hidden_size=2, intermediate_size=1, num_attention_heads=1)
    config = LlamaConfig(**sizes, num_hidden_layers=1, bos_token_id=None, eos_token_id=None)
    trainer = SFTTrainer(
        LlamaForCausalLM(config),
        unused(training),
        train_dataset=train,
        eval_dataset=test,
        processing_class=tokenizer,
    )
    made: list[Any] = [trainer.train_dataset, trainer.eval_dataset]
    train, test = (None if rows is None else rows.filter(_predicts) for rows in made)
    return Prepared(train, test, trainer.data_collator)


def unused(training: Training) -> Training:
    """Options of a training for a trainer that never trains."""
    options = copy.copy(training)
    options.eval_strategy, options.report_to, options.push_to_hub = "no", [], False
    options.max_steps, options.output_dir = 1, tempfile.gettempdir()  # a stream needs the one, Trainer makes the other
    return options


def _predicts(row: dict) -> bool:
    """Whether any token of a row is to be predicted; of what packing leaves over, perhaps none."""
    return any(label != -100 for label in row["labels"][1:])


def split_rows(prepared: Prepared, training: Training) -> tuple[Rows, Rows]:
    """What `prepare_rows` made: rows to train on and held-out ones; a tenth, where none are given.

    Raises:
        ValueError: there are too few rows to hold any out.
    """
    rows, held_out, _ = prepared
    if isinstance(held_out, IterableDataset):
        held_out = Dataset.from_list(list(held_out.take(_HELD_OUT)))
    if held_out is not None:
        return rows, held_out
    if isinstance(rows, IterableDataset):
        held_out = Dataset.from_list(list(rows.take(_HELD_OUT)))
        check_count(len(held_out), training)
        return rows.skip(_HELD_OUT), held_out
    check_count(len(rows), training)
    parts = rows.train_test_split(min(max(len(rows) // 10, 8), _HELD_OUT), seed=training.seed)
    return parts["train"], parts["test"]


def check_count(count: int, training: Training) -> None:
    """Refuse data that are too few to hold any out, or to judge a growth on."""
    if count < _FEWEST:
        raise ValueError(
            f"The data give {count} {'row' if count == 1 else 'rows'} of at most {training.max_length} tokens, too few "
            f"to hold any out: at least {_FEWEST} are needed. Add data, or choose a shorter --max_length."
        )


def drawn(data: Data, tokenizer, training: Training, batches: int) -> tuple[list[dict], list[list[int]]]:
    """Draw batches from all over the data, as training would see them; fewer if there are less.

    Only what is drawn is tokenized, so that data may be large.

    Returns:
        What the collator of SFTTrainer made of the rows, and their input_ids.

    Raises:
        ValueError: as for `prepare_rows`, or there are too few rows.
    """
    made, size = prepare_rows(data.drawn_from(), None, tokenizer, training), training.per_device_train_batch_size
    rows: list[dict] = list(islice(made.train, max(batches * size, _FEWEST)))
    check_count(len(rows), training)
    rows = rows[: batches * size]
    if len(rows) >= 2 * size:  # a loss is the mean over batches: in a small one each row would count more
        rows = rows[: len(rows) // size * size]
    return make_batches(rows, made.collate, training), [row["input_ids"] for row in rows]


def first_rows(rows: Rows, count: int, seed: int) -> Dataset:
    """So many rows in an order of the seed's, or all there are."""
    if isinstance(rows, IterableDataset):
        return Dataset.from_list(list(rows.shuffle(seed=seed).take(count)))
    return rows.shuffle(seed=seed).select(range(min(count, len(rows))))


def make_batches(rows: Rows, collate: Callable[[list[dict]], dict], training: Training) -> list[dict]:
    """Make batches of rows, two at least, on the device of the training."""
    rows = list(rows)
    size = min(training.per_device_train_batch_size, -(-len(rows) // 2) or 1)
    made = [collate(rows[start : start + size]) for start in range(0, len(rows), size)]
    return [{key: getattr(v, "to", lambda _, v=v: v)(training.device) for key, v in batch.items()} for batch in made]


def check_length(training: Training, config: PreTrainedConfig) -> None:
    """Cut rows to what a model reads at once.

    Raises:
        ValueError: longer ones were asked for.
    """
    longest = getattr(config.get_text_config(), "max_position_embeddings", None)
    if longest and (training.max_length or longest) > longest:
        if training.max_length != Training.max_length:
            raise ValueError(f"This model reads {longest:,} tokens at once: choose --max_length {longest} or less.")
        training.max_length = longest


def check_tokens(rows: Iterable[list[int]], config: PreTrainedConfig) -> None:
    """Check that a model knows all tokens of some rows.

    Raises:
        ValueError: they are of another model's tokenizer.
    """
    known = config.get_text_config().vocab_size
    largest = max(map(max, rows))
    if largest >= known:
        raise ValueError(
            f"The tokenizer has a token {largest:,}, and the model {known:,} tokens: they do not belong together. Save "
            "the model's own tokenizer beside it."
        )
