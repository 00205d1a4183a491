"""Data as TRL and datasets read them, and the rows that SFTTrainer makes of them to train, grow and race on."""

import contextlib
import copy
import glob
import tempfile
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import torch
from datasets import Dataset, IterableDataset, concatenate_datasets, load_dataset
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedConfig, set_seed
from trl.scripts.utils import get_dataset
from trl.trainer.sft_config import SFTConfig
from trl.trainer.sft_trainer import SFTTrainer

from .recipe import Recipe, Training

Rows: TypeAlias = Any  # a Dataset or an IterableDataset
# By suffix of files that hold data, the loader of datasets that reads them.
_LOADERS = {".txt": "text", ".json": "json", ".jsonl": "json", ".csv": "csv", ".tsv": "csv", ".parquet": "parquet"}
_COLUMNS = {"input_ids", "messages", "conversations", "prompt"}  # what TRL reads, apart from a column of text
_FEWEST = 20  # rows: with fewer, neither training nor measuring means anything
_HELD_OUT = 128  # rows at most
_LONG = "sequence-length-is-longer-than-the-specified-maximum"  # transformers' name of a warning


class Data(NamedTuple):
    """Rows that are not yet tokenized, with `test` None without such a split; `is_text` if each row is a file."""

    train: Rows
    test: Rows | None
    is_text: bool


def load_data(recipe: Recipe) -> Data:
    """The data of a recipe, all of its files, folders and Hub ids; sets packing unless the recipe does.

    Raises:
        ValueError: they cannot be read or joined, or have no column to train on.
    """
    training, name = recipe.training, recipe.dataset
    train, test = recipe.script.dataset_train_split, recipe.script.dataset_test_split
    is_text = bool(recipe.datasets) and all(map(_is_text, recipe.datasets))
    with explain_errors(name):
        if recipe.datasets:
            splits = _join([_load(part, recipe) for part in recipe.datasets])
        else:
            set_seed(training.seed)  # by which TRL splits a mixture
            splits = get_dataset(recipe.mixture)
        if train not in splits or (test not in splits and test != "test"):
            raise ValueError(
                f"it has the splits {', '.join(map(str, splits))}; see --dataset_train_split, --dataset_test_split"
            )
        columns = splits[train].column_names or []  # a stream may not know them
        if columns and not {training.dataset_text_field, *_COLUMNS} & {*columns}:
            raise ValueError(
                f"it has the columns {', '.join(columns)}; name that of the text by --dataset_text_field, or call them "
                "messages, or prompt and completion"
            )
    if training.packing is None:
        training.packing = is_text
    training.packing_strategy = training.packing_strategy or ("wrapped" if is_text else "bfd")
    return Data(splits[train], splits.get(test), is_text)


def _load(name: str, recipe: Recipe) -> dict[str, Rows]:
    """The splits of a file, a folder or a dataset of the Hub."""
    path, script = Path(name), recipe.script
    if not name.strip():
        raise ValueError("the name of the data is empty")
    if path.suffix in _LOADERS and not path.exists():
        raise ValueError(f"there is no file or folder {name!r}")
    how: dict[str, Any] = {"path": name, "name": script.dataset_config, "streaming": script.dataset_streaming}
    suffixes = _find_suffixes(path)
    if len(suffixes) > 1:  # datasets would read the most frequent kind and drop the others
        raise ValueError(f"{name} holds {', '.join(sorted(suffixes))} files, which cannot be joined")
    if path.is_file():
        how |= {"path": _LOADERS.get(path.suffix, "text"), "data_files": glob.escape(name)}
        if path.suffix == ".tsv":
            how["sep"] = "\t"
    if _is_text(name):
        how["sample_by"] = "document"
        if not all(map(_is_text, recipe.datasets)):
            raise ValueError("text files and tables cannot be joined")
    return load_dataset(**how)


def _find_suffixes(path: Path) -> set[str]:
    files = path.rglob("*") if path.is_dir() else [path]
    return {file.suffix for file in files if file.is_file()} & {*_LOADERS}


def _is_text(name: str) -> bool:
    return _find_suffixes(Path(name)) == {".txt"}


def _join(parts: list[dict[str, Rows]]) -> dict[str, Rows]:
    """The splits of several data in one, those of the same name one after the other."""
    splits = {}
    for split in dict.fromkeys(split for part in parts for split in part):
        found = [part[split] for part in parts if split in part]
        columns = {", ".join(sorted(rows.column_names or [])) for rows in found}
        if len(columns) > 1:  # datasets would fill the others with nothing
            raise ValueError(f"different columns cannot be joined: {' / '.join(sorted(columns))}")
        splits[split] = concatenate_datasets(found) if len(found) > 1 else found[0]
    return splits


@contextlib.contextmanager
def explain_errors(name: str) -> Iterator[None]:
    """Put into one line what TRL and datasets say about bad data.

    Raises:
        ValueError: instead of any error; it begins with the name of the data.
    """
    try:
        yield
    except Exception as error:
        cause: BaseException = error
        while cause.__cause__ is not None:  # datasets wraps what its readers say
            cause = cause.__cause__
        kind = "" if type(cause) is ValueError else f"{type(cause).__name__}: "
        raise ValueError(f"{name} cannot be read: {kind}{' '.join(str(cause).split())}") from error


class Prepared(NamedTuple):
    """Rows as the model reads them, and the function that makes a batch of some."""

    train: Rows
    test: Rows | None
    collate: Callable[[list[dict]], dict]


def prepare_rows(train: Rows, test: Rows | None, tokenizer, training: SFTConfig) -> Prepared:
    """Tokenize, mask and pack data as SFTTrainer does, without the model.

    Raises:
        ValueError: the tokenizer has no token that ends a text.
    """
    if tokenizer.eos_token is None and training.eos_token is None:
        raise ValueError("The tokenizer has no token that ends a text: name one that it knows by --eos_token TOKEN.")
    tokenizer = copy.deepcopy(tokenizer)
    tokenizer.deprecation_warnings[_LONG] = True  # rows are cut: nothing longer than the model reads reaches it
    sizes: dict[str, Any] = dict(vocab_size=1, hidden_size=2, intermediate_size=1, num_attention_heads=1)
    config = LlamaConfig(**sizes, num_hidden_layers=1, bos_token_id=None, eos_token_id=None)
    trainer = SFTTrainer(
        LlamaForCausalLM(config),
        without_training(training),
        train_dataset=train,
        eval_dataset=test,
        processing_class=tokenizer,
    )
    made: list[Any] = [trainer.train_dataset, trainer.eval_dataset]
    train, test = (None if rows is None else rows.filter(_has_labels) for rows in made)
    return Prepared(train, test, trainer.data_collator)


def without_training(training: SFTConfig) -> SFTConfig:
    """Options of a training for a trainer that never trains."""
    options = copy.copy(training)
    options.eval_strategy, options.report_to, options.push_to_hub = "no", [], False
    options.max_steps, options.output_dir = 1, tempfile.gettempdir()  # a stream needs the one, Trainer makes the other
    return options


def _has_labels(row: dict) -> bool:
    """Whether any token of a row is predicted; packing may leave a row without."""
    return any(label != -100 for label in row["labels"][1:])


def split_rows(prepared: Prepared, training: SFTConfig) -> tuple[Rows, Rows]:
    """Rows to train on and held-out ones: a tenth, unless the data have a test split.

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
        _check_count(len(held_out), training)
        return rows.skip(_HELD_OUT), held_out
    _check_count(len(rows), training)
    parts = rows.train_test_split(min(max(len(rows) // 10, 8), _HELD_OUT), seed=training.seed)
    return parts["train"], parts["test"]


def _check_count(count: int, training: SFTConfig) -> None:
    if count < _FEWEST:
        raise ValueError(
            f"The data give {count} {'row' if count == 1 else 'rows'} of at most {training.max_length} tokens, too few "
            f"to hold any out: at least {_FEWEST} are needed. Add data, or choose a shorter --max_length."
        )


def draw_batches(data: Data, tokenizer, training: SFTConfig, count: int) -> tuple[list[dict], list[list[int]]]:
    """Batches from all over the data, as training would see them, and the input_ids of their rows.

    Raises:
        ValueError: as for `prepare_rows`, or there are too few rows.
    """
    rows, size = data.train, training.per_device_train_batch_size
    wanted = max(count * size, _FEWEST)
    if not (data.is_text and isinstance(rows, Dataset)):
        rows = first_rows(rows, 16 * wanted, training.seed)  # more than packing leaves, and not all of large data
    prepared = prepare_rows(rows, None, tokenizer, training)
    _check_count(len(prepared.train), training)
    drawn: list[Any] = list(first_rows(prepared.train, count * size, training.seed))
    if len(drawn) >= 2 * size:  # a loss is the mean over batches: in a small one each row would count more
        drawn = drawn[: len(drawn) // size * size]
    return make_batches(drawn, prepared.collate, training), [row["input_ids"] for row in drawn]


def first_rows(rows: Rows, count: int, seed: int) -> Dataset:
    """The first rows in the seed's order; all rows if there are fewer."""
    if isinstance(rows, IterableDataset):
        return Dataset.from_list(list(rows.shuffle(seed=seed).take(count)))
    return rows.shuffle(seed=seed).select(range(min(count, len(rows))))


def make_batches(rows: Rows, collate: Callable[[list[dict]], dict], training: SFTConfig) -> list[dict]:
    """Batches of rows, two at least, on the device of the training."""
    rows = list(rows)
    size = min(training.per_device_train_batch_size, -(-len(rows) // 2) or 1)
    batches = [collate(rows[start : start + size]) for start in range(0, len(rows), size)]
    return [_move_batch(batch, training.device) for batch in batches]


def _move_batch(batch: dict, device: torch.device) -> dict:
    return {key: value.to(device) if torch.is_tensor(value) else value for key, value in batch.items()}


def check_length(training: SFTConfig, config: PreTrainedConfig) -> None:
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
    largest = max(max(row) for row in rows)
    if largest >= known:
        raise ValueError(
            f"The tokenizer has a token {largest:,}, and the model knows {known:,} tokens: save the model's own "
            "tokenizer in its folder."
        )
