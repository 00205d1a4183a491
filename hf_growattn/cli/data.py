"""What `growattn measure` and `race` were asked to read, and the rows that TRL's SFTTrainer makes of it."""

import copy
import glob
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
from datasets import Dataset, load_dataset
from transformers import LlamaConfig, LlamaForCausalLM, set_seed
from trl.scripts.utils import DatasetMixtureConfig, ScriptArguments, get_dataset
from trl.trainer.model_config import ModelConfig
from trl.trainer.sft_config import SFTConfig
from trl.trainer.sft_trainer import SFTTrainer

from ..grow.plan import GrowthConfig
from ..interop.checkpoints import load_config, load_tokenizer

# By suffix of files that hold data, the loader of datasets that reads them.
_LOADERS = {".txt": "text", ".json": "json", ".jsonl": "json", ".csv": "csv", ".parquet": "parquet"}
_FEWEST = 20  # rows: with fewer, neither training nor measuring means anything
_HELD_OUT = 128  # rows at most
_COMPARED_ON = 256  # rows at most, of those held out or of a test split


@dataclass
class Training(SFTConfig):
    """SFTConfig that takes its folder by -o."""

    output_dir: str = field(default="", metadata={"help": "new folder to write", "aliases": ["-o", "--output"]})


class Recipe(NamedTuple):
    """A model, data, and the options of a command by groups."""

    model_name: str
    datasets: list[str]
    growth: Any  # the command's own options, one of the classes in `options`
    script: ScriptArguments
    training: Training
    model: ModelConfig
    mixture: DatasetMixtureConfig

    @property
    def dataset(self) -> str:
        """What to call the data."""
        return ", ".join(self.datasets or [part.path for part in self.mixture.datasets])

    def growth_config(self) -> GrowthConfig:
        """What to grow."""
        budget = self.growth.budget
        if budget >= 1 and budget % 1 == 0:  # a number of weights
            budget = int(budget)
        return GrowthConfig(budget=budget, seed=self.training.seed)


def load_data(recipe: Recipe) -> tuple[Dataset, Dataset | None]:
    """The rows of a recipe's data, and those of its test split; sets packing unless the recipe does."""
    names, training, script = recipe.datasets, recipe.training, recipe.script
    if script.dataset_streaming or recipe.mixture.streaming:
        raise ValueError("rows are drawn from all over the data, so they cannot be streamed")
    paths = [Path(name) for name in names]
    files = [file for path in paths for file in (path.rglob("*") if path.is_dir() else [path])]
    if any((path / "config.json").is_file() for path in paths):
        raise ValueError("it is the folder of a model: name MODEL first, then DATA")
    loaders = {_LOADERS[file.suffix] for file in files if file.suffix in _LOADERS}
    if len(loaders) > 1:  # datasets would read the most frequent kind alone
        raise ValueError("files of several kinds cannot be read together; list them in a YAML file, under datasets")
    is_text = loaders == {"text"}
    options: dict[str, Any] = {"sample_by": "document"} if is_text else {}
    if not names:
        set_seed(training.seed)  # by which TRL splits a mixture
        splits = get_dataset(recipe.mixture)
    elif all(path.suffix in _LOADERS for path in paths):
        splits = load_dataset(loaders.pop(), data_files=[glob.escape(name) for name in names], **options)
    elif len(names) == 1:
        splits = load_dataset(names[0], script.dataset_config, **options)
    else:
        raise ValueError("name files, or one folder or Hub id alone; list others in a YAML file, under datasets")
    if training.packing is None:
        training.packing = is_text
    training.packing_strategy = training.packing_strategy or ("wrapped" if is_text else "bfd")
    train, test = script.dataset_train_split, script.dataset_test_split
    has_test = test in splits or test != "test"  # which is the default, and may be missing
    return splits[train], splits[test] if has_test else None


class Prepared(NamedTuple):
    """Rows as the model reads them, to train on and held-out ones, and what makes batches of them."""

    train: Dataset
    test: Dataset
    collate: Callable[[list[dict]], dict]
    training: SFTConfig

    def draw_batches(self, count: int, seed: int) -> list[dict]:
        """Batches from all over the rows to train on, of an optimizer step each; two at least."""
        size = self.training.per_device_train_batch_size * self.training.gradient_accumulation_steps
        drawn = first_rows(self.train, count * size, seed)
        return self._batches(drawn, min(size, -(-len(drawn) // 2) or 1))

    def held_out_batches(self) -> list[dict]:
        """Batches of held-out rows, small enough to be many: the error of a race is that over them."""
        rows = first_rows(self.test, _COMPARED_ON, seed=0)
        return self._batches(rows, max(min(self.training.per_device_eval_batch_size, len(rows) // _FEWEST), 1))

    def _batches(self, rows: Dataset, size: int) -> list[dict]:
        listed: list[Any] = list(rows)
        batches = [self.collate(listed[start : start + size]) for start in range(0, len(listed), size)]
        return [{name: value for name, value in batch.items() if torch.is_tensor(value)} for batch in batches]


def prepare_rows(train: Dataset, test: Dataset | None, tokenizer, training: SFTConfig) -> Prepared:
    """Tokenize, mask and pack data as SFTTrainer does; without a test split, a tenth is held out."""
    config = LlamaConfig(vocab_size=3, hidden_size=2, intermediate_size=1, num_attention_heads=1, num_hidden_layers=1)
    trainer = SFTTrainer(
        LlamaForCausalLM(config),
        _without_training(training),
        train_dataset=train,
        eval_dataset=test,
        processing_class=copy.deepcopy(tokenizer),
    )
    rows = _drop_unpredicted(trainer.train_dataset)
    if test is not None:
        return Prepared(rows, _drop_unpredicted(trainer.eval_dataset), trainer.data_collator, training)
    if len(rows) < _FEWEST:
        raise ValueError(
            f"The data give {len(rows)} rows of at most {training.max_length} tokens, too few to hold any out. Add "
            f"data, or choose a shorter --max_length: at least {_FEWEST} rows are needed."
        )
    parts = rows.train_test_split(min(max(len(rows) // 10, 8), _HELD_OUT), seed=training.seed)
    return Prepared(parts["train"], parts["test"], trainer.data_collator, training)


def _drop_unpredicted(rows: Any) -> Dataset:
    """The rows of which any token is predicted; packing may leave one without."""
    return rows.filter(lambda row: any(label != -100 for label in row["labels"][1:]))


def _without_training(training: SFTConfig) -> SFTConfig:
    """Options of a training for a trainer that never trains."""
    options = copy.copy(training)
    options.eval_strategy, options.report_to, options.push_to_hub = "no", [], False
    options.output_dir = tempfile.gettempdir()  # Trainer makes it
    return options


def first_rows(rows: Dataset, count: int, seed: int) -> Dataset:
    """The first rows in the seed's order; all rows if there are fewer."""
    return rows.shuffle(seed=seed).select(range(min(count, len(rows))))


def read_rows(recipe: Recipe, count: int | None = None) -> Prepared:
    """Rows to train on and held-out ones, of `count` rows of data or all."""
    name, training, revision = recipe.model_name, recipe.training, recipe.model.model_revision
    config, tokenizer = load_config(name, revision=revision), load_tokenizer(name, revision=revision)
    longest = getattr(config.get_text_config(), "max_position_embeddings", None) or sys.maxsize
    if training.max_length == type(training).max_length:  # TRL's default: nobody chose it
        training.max_length = min(training.max_length or longest, longest)
    if training.max_length is not None and not 2 <= training.max_length <= longest:
        raise ValueError(f"This model reads {longest:,} tokens at once: choose --max_length from 2 to {longest}.")
    columns = ""
    try:
        data, test = load_data(recipe)
        columns = f". The columns are {', '.join(data.column_names)}."
        if count:
            data = first_rows(data, count, training.seed)
        rows = prepare_rows(data, test, tokenizer, training)
    except Exception as error:
        cause = error.__cause__ or error  # datasets wraps what its readers say
        message = f"{cause}{columns}" if isinstance(cause, KeyError) else str(cause) or "there are no rows"
        raise ValueError(
            f"{recipe.dataset} cannot be read by TRL. {type(cause).__name__}: {message} "
            "(See TRL's --dataset_text_field, --dataset_train_split, --dataset_test_split, --chat_template_path and "
            "--eos_token.)"
        ) from error
    largest = max(map(max, rows.test["input_ids"]))
    if largest >= config.get_text_config().vocab_size:
        raise ValueError(
            f"The tokenizer has a token {largest:,}, which the model does not know: save the model's own tokenizer in "
            "its folder."
        )
    return rows
