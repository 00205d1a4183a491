"""The options of the commands: a dataclass for each, and the parser of those that read data."""

import difflib
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from itertools import takewhile
from pathlib import Path
from typing import Any, Literal

from ..training.options import GrowthOptions, RaceOptions

USAGE_ERROR = 2
_SHARED = ("budget", "growth_batches")
_WIDTHS = ("qk_dims", "v_dims")
# The commands that read data, and the options of growth and races that each of them takes.
TAKEN = {
    "measure": (*_SHARED, *_WIDTHS),
    "grow": (*_SHARED, *_WIDTHS),
    "race": (*_SHARED, *(option.name for option in fields(RaceOptions))),
    "finetune": tuple(option.name for option in fields(GrowthOptions)),
}


class UsageError(Exception):
    """A command line that cannot be read; the message names the fix."""


def option(help: str, default: Any, *aliases: str) -> Any:
    """A field of a dataclass of options."""
    return field(default=default, metadata={"help": help, "aliases": list(aliases)})


@dataclass
class InspectOptions:
    """The options of `inspect`."""


@dataclass
class ExportOptions:
    """The options of `export`."""

    output: str = option("new folder to write", "", "-o")
    target: str | None = option("a stock model type; unless set, the one that most libraries read", None)


@dataclass
class PushOptions:
    """The options of `push`."""

    form: Literal["native", "stock"] = option(
        "native: as it grew. stock: an ordinary model, which needs no hf_growattn", "native"
    )
    base: str | None = option("Hub id of the model that grew, if its config does not name it", None)
    private: bool = option("make a new repository private", False)
    dry_run: str | None = option("write everything into this new folder, card included, and push nothing", None)


def parse_options(kind: Any, words: Sequence[str]) -> Any:
    """The options of a command that reads no data.

    Raises:
        UsageError: an option is unknown.
        SystemExit: a value is of the wrong kind.
    """
    from transformers import HfArgumentParser

    parser = HfArgumentParser([kind], allow_abbrev=False, add_help=False, usage="growattn COMMAND [names] [options]")
    options, unknown = parser.parse_args_into_dataclasses(
        list(words), return_remaining_strings=True, look_for_args_file=False
    )
    if unknown:
        refuse_unknown(unknown, [item.name for item in fields(kind)])
    return options


def read_recipe(command: str, words: Sequence[str]) -> Any:
    """The `Recipe` of a command that reads data: names first, then options, of which `--config` names a YAML file.

    Raises:
        UsageError: an option is unknown, not one of this command, or out of its range; or a name is missing.
        SystemExit: a value is of the wrong kind, or all options were asked for.
    """
    from trl.scripts.utils import DatasetMixtureConfig, ScriptArguments, TrlParser
    from trl.trainer.model_config import ModelConfig

    from ..training.recipe import Recipe, Training

    groups = [GrowthOptions, RaceOptions, ScriptArguments, Training, ModelConfig, DatasetMixtureConfig]
    parser = TrlParser(groups, allow_abbrev=False, usage=f"growattn {command} MODEL DATA... [options]")
    # The data and the method choose these if nobody does.
    parser.set_defaults(packing=None, packing_strategy=None, dtype=None, learning_rate=None)
    if "--help_all" in words:
        parser.parse_args(["--help"])
    names = list(takewhile(lambda word: not word.startswith("-"), words))
    options = list(words[len(names) :])
    known = {item.name for group in groups for item in fields(group)} | {"config"}
    foreign = {item.name for group in groups[:2] for item in fields(group)} - set(TAKEN[command])
    refused = [word for word in options if word.startswith("--") and option_name(word) in foreign]
    if refused:
        refuse_unknown(refused, sorted(known - foreign))
    try:
        growth, race, script, training, model, mixture, unknown = parser.parse_args_and_config(
            options, return_remaining_strings=True
        )
    except (ValueError, OSError) as error:
        raise UsageError(str(error)) from error
    if unknown:
        refuse_unknown(unknown, sorted(known - foreign))
    model.model_name_or_path = names[0] if names else model.model_name_or_path
    datasets = names[1:] or [script.dataset_name] * bool(script.dataset_name)
    if not model.model_name_or_path or not (datasets or mixture.datasets):
        raise UsageError("name MODEL and DATA first, then the options; or name both in a YAML file, by --config")
    return Recipe(model.model_name_or_path, datasets, growth, race, script, training, model, mixture)


def option_name(word: str) -> str:
    """The name of an option, without dashes and value."""
    return word.lstrip("-").partition("=")[0].replace("-", "_")


def refuse_unknown(unknown: Sequence[str], known: Sequence[str]) -> None:
    """Refuse options that a command does not have.

    Raises:
        UsageError: always; it names the nearest option.
    """
    first = unknown[0]
    if not first.startswith("-"):
        raise UsageError(f"unexpected: {' '.join(unknown)}; name MODEL and DATA first, then the options.")
    near = difflib.get_close_matches(option_name(first), known, n=1)
    suggestion = f" Did you mean --{near[0]}?" if near else ""
    raise UsageError(f"unknown: {' '.join(unknown)}.{suggestion}")


def check_new_folder(folder: str | None) -> None:
    """Check that a folder can be written and holds nothing yet.

    Raises:
        UsageError: it is a file, it holds something, it cannot be written, or nothing was named.
    """
    if not folder:
        raise UsageError("name the folder to write: --output DIR")
    path = Path(folder)
    if path.is_file():
        raise UsageError(f"{path} is a file; name a new folder.")
    if path.is_dir() and any(path.iterdir()):
        raise UsageError(f"{path} exists and is not empty; name a new folder.")
    parent = next(each for each in (path, *path.resolve().parents) if each.exists())
    try:  # os.access promises nothing for mounts and for root
        tempfile.TemporaryFile(dir=parent).close()
    except OSError as error:
        raise UsageError(f"nothing can be written in {parent} ({error.strerror}); name another folder.") from error
