"""What the commands take: their options, declared as dataclasses, and the parsers of these."""

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass
from importlib.util import find_spec
from inspect import formatannotation
from itertools import chain, takewhile
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from .. import __version__

DATA = "DATA..."  # what the commands that read data are given after the model
_NAMES = {
    "MODEL": "a folder or a Hub id of a stock or grown model; it is never changed",
    DATA: "text, chats, or prompts with completions: .txt, .jsonl, .csv or .parquet files, a folder, or the Hub id "
    "of a dataset; a text file is cut into blocks of --max_length tokens",
    "FOLDER": "a grown checkpoint",
}
_TRL = (
    "TRL reads the data, so the options of its ScriptArguments, SFTConfig and ModelConfig that say how to read data, "
    "make batches and load the model work, too, such as --max_length, --per_device_train_batch_size, "
    "--dataset_text_field and --load_in_4bit. --config FILE reads options from YAML."
)
_ABOUT = "Find out whether the attention of a language model is too narrow for your data, and widen it there."
_END = (
    "growattn COMMAND --help explains a command. --json prints JSON alone, --debug shows where an error came from. "
    "Exit codes: 0 done; 1 failed, the message says why; 2 wrong usage; 3 no growth helps, or none won; 130 "
    "interrupted, nothing is half-written."
)

_CHOSEN_LATER = ("packing", "packing_strategy", "dtype")  # options that the data and the command choose if nobody does


class UsageError(ValueError):
    """A command line that cannot be read; the message names the fix."""


def option(help: str, default: Any = None, *aliases: str) -> Any:
    """A field of options; no percent signs in help: argparse would fill them in."""
    return field(default=default, metadata={"help": help, "aliases": aliases})


@dataclass
class BudgetOptions:
    """How much to add, by a growth or by LoRA."""

    budget: float = option("the most weights to add, as a share of the model's weights or as a number", 0.02)
    growth_batches: int = option("how many training batches to measure on, on each device", 16)


@dataclass
class RaceOptions(BudgetOptions):
    """How long and how often a race trains."""

    steps: int = option("steps of each training; learning rates are tried for a quarter of them", 100)
    seeds: int = option("how often LoRA and its best challenger train, each time on batches in another order", 2)


@dataclass
class OutputOptions:
    """Where a command writes."""

    output: str = option("new folder to write; required", "", "-o")


# What a command takes: names, then groups of options, of which the last one is parsed along with TRL's for data.
OPTIONS: dict[str, tuple[tuple[str, ...], tuple[type, ...]]] = {
    "measure": (("MODEL", DATA), (BudgetOptions,)),
    "race": (("MODEL", DATA), (OutputOptions, RaceOptions)),
    "export": (("FOLDER",), (OutputOptions,)),
}


def read_command(words: Sequence[str], descriptions: Mapping[str, str]) -> Any:
    """What a command line says: a `Recipe` if the command reads data, otherwise a namespace. Help needs no torch."""
    names, _ = OPTIONS.get("".join(words[:1]), ((), ()))
    if DATA in names and not {"-h", "--help"}.intersection(words):
        return read_recipe(words[0], words[1:])
    parser = argparse.ArgumentParser("growattn", description=_ABOUT, epilog=_END)
    parser.add_argument("--version", action="version", version=f"growattn {__version__}")
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    for command, (names, groups) in OPTIONS.items():
        text, more = descriptions[command], _TRL if DATA in names else None
        title = text.partition("\n")[0]
        part = commands.add_parser(command, help=title, description=text, epilog=more, allow_abbrev=False)
        for name in names:
            part.add_argument(name.lower(), metavar=name, help=_NAMES[name])
        for item in chain.from_iterable(map(fields, groups)):
            action = "store_true" if item.type is bool else "store"
            default = f" (default: {item.default})" if item.default else ""
            flags = [*item.metadata["aliases"], f"--{item.name}"]
            part.add_argument(*flags, action=action, default=item.default, help=item.metadata["help"] + default)
    return parser.parse_args(words)


def read_recipe(command: str, words: Sequence[str]) -> Any:
    """The `Recipe` of a command that reads data: names first, then options, of which `--config` names a YAML file."""
    if find_spec("trl") is None:
        raise ImportError("TRL reads the data: pip install 'trl>=1.14' datasets.")
    from trl.scripts.utils import DatasetMixtureConfig, ScriptArguments, TrlParser
    from trl.trainer.model_config import ModelConfig
    from yaml import YAMLError

    from .data import Recipe, Training

    groups = [OPTIONS[command][1][-1], ScriptArguments, Training, ModelConfig, DatasetMixtureConfig]
    parser = TrlParser(groups, allow_abbrev=False, usage=f"growattn {command} MODEL {DATA} [options]")
    parser.set_defaults(**dict.fromkeys(_CHOSEN_LATER), bf16=False)  # TRL does not train here
    names = list(takewhile(lambda word: not word.startswith("-"), words))
    options = list(words[len(names) :])
    try:
        growth, script, training, model, mixture = parser.parse_args_and_config(options)
    except (OSError, TypeError, YAMLError) as error:  # no YAML file, or one with something else in it
        raise UsageError(f"--config cannot be read: {' '.join(str(error).split())}.") from error
    except ValueError as error:
        raise UsageError(f"{error}. Name MODEL and DATA first, then the options.") from error
    check_types(growth, script, training, model, mixture)
    for name in ("per_device_train_batch_size", "gradient_accumulation_steps"):
        if getattr(training, name) < 1:
            raise UsageError(f"{name} must be at least 1, and is {getattr(training, name)}.")
    model.model_name_or_path = names[0] if names else model.model_name_or_path
    datasets = names[1:] or [script.dataset_name] * bool(script.dataset_name)
    if not model.model_name_or_path or not (datasets or mixture.datasets):
        raise UsageError("name MODEL and DATA first, then the options; or name both in a YAML file, by --config.")
    return Recipe(model.model_name_or_path, datasets, growth, script, training, model, mixture)


def check_types(*groups: Any) -> None:
    """Raise a UsageError for an option of another type than it is declared: what YAML says is not parsed as words."""
    for group in groups:
        hints = get_type_hints(type(group))
        for item in fields(group):
            value, hint = getattr(group, item.name), hints[item.name]
            if not (_is_of_type(value, hint) or (value is None and item.name in _CHOSEN_LATER)):
                raise UsageError(f"{item.name} must be of type {formatannotation(hint)}, and is {value!r:.80}.")
            if isinstance(value, list):
                check_types(*filter(is_dataclass, value))


def _is_of_type(value: Any, hint: Any) -> bool:
    """Whether a value has a declared type; one that YAML does not know was made by the options themselves."""
    kind, parts = get_origin(hint) or hint, get_args(hint)
    if kind in (Union, UnionType):
        return any(_is_of_type(value, part) for part in parts)
    if kind is Literal:
        return value in parts
    if kind is list:  # TRL takes a single name for a list of one
        return all(
            _is_of_type(each, part) for each in (value if isinstance(value, list) else [value]) for part in parts
        )
    if kind is float and type(value) is int:
        return True
    return kind in (Any, type(value)) or type(value) not in (bool, int, float, str, list, dict, NoneType)


def check_new_folder(folder: str | None) -> None:
    """Check that a folder was named, and holds nothing yet."""
    if not folder:
        raise UsageError("name the folder to write: --output DIR")
    path = Path(folder)
    if path.is_file() or (path.is_dir() and any(path.iterdir())):
        raise UsageError(f"{path} exists and is not empty; name a new folder.")
