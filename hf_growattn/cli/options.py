"""What the commands take: their options, declared as dataclasses, and the parsers of these."""

import argparse
import difflib
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import Field, dataclass, field, fields
from importlib.util import find_spec
from itertools import takewhile
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

from ..training.options import GrowthOptions, RaceOptions

DATA = "DATA..."  # what the commands that read data are given after the model
_NAMES = {
    "MODEL": "a folder or a Hub id of a stock or grown model; it is never changed",
    DATA: "text, chats, or prompts with completions: .txt, .jsonl, .csv or .parquet files, a folder, or the Hub id "
    "of a dataset; a text file is cut into blocks of --max_length tokens",
    "FOLDER": "a grown checkpoint",
    "REPO": "where to push it, as in you/your-model",
}
_TRL = (
    "TRL reads the data, so all options of its ScriptArguments, SFTConfig and ModelConfig work, too, such as "
    "--max_length, --per_device_train_batch_size, --learning_rate and --dataset_text_field. --config FILE reads "
    "options from YAML."
)


class UsageError(ValueError):
    """A command line that cannot be read; the message names the fix."""


def _option(help: str, default: Any, *aliases: str) -> Any:
    return field(default=default, metadata={"help": help, "aliases": aliases})


@dataclass
class ExportOptions:
    """The options of `export`."""

    output: str = _option("new folder to write; required", "", "-o")
    target: str | None = _option("a stock model type; unless set, the one that most libraries read", None)


@dataclass
class PushOptions:
    """The options of `push`."""

    form: Literal["native", "stock"] = _option(
        "native: as it grew; stock: an ordinary model, which needs no hf_growattn", "native"
    )
    base: str | None = _option("Hub id of the model that grew, if its config does not name it", None)
    private: bool = _option("make a new repository private", False)
    dry_run: str | None = _option("write everything into this new folder, and push nothing", None, "--dry-run")


def _select(kind: type, *names: str) -> list[Field]:
    return [item for item in fields(kind) if item.name in names]


_OUTPUT = _select(ExportOptions, "output")
_ONE_GROWTH = _select(GrowthOptions, "budget", "qk_dims", "v_dims", "growth_batches")
OPTIONS: dict[str, list[Field]] = {
    "inspect": [],
    "measure": _ONE_GROWTH,
    "grow": [*_OUTPUT, *_ONE_GROWTH],
    "race": [*_OUTPUT, *_select(GrowthOptions, "budget", "growth_batches"), *fields(RaceOptions)],
    "finetune": [*_OUTPUT, *fields(GrowthOptions)],
    "export": [*fields(ExportOptions)],
    "push": [*fields(PushOptions)],
}


def make_parser(command: str, names: Sequence[str], description: str) -> argparse.ArgumentParser:
    """A parser of the names and options of a command, but for those of TRL; it needs no torch."""
    parser = argparse.ArgumentParser(
        f"growattn {command}",
        usage=f"%(prog)s {' '.join(names)} [options]",
        description=description,
        epilog=_TRL if DATA in names else None,
        allow_abbrev=False,
    )
    for name in names:
        parser.add_argument(name.lower(), metavar=name, help=_NAMES[name])
    for item in OPTIONS[command]:
        settings: dict[str, Any] = {"help": item.metadata["help"], "default": item.default}
        if item.default:
            settings["help"] += f" (default: {item.default})"
        kinds = [item.type, *get_args(item.type)]  # of `list[int] | None`, the parts too
        if bool in kinds:
            settings["action"] = "store_true"
        for kind in kinds:
            if get_origin(kind) is Literal:
                settings["choices"] = get_args(kind)
            elif get_origin(kind) is list:
                settings["nargs"] = "+"
        parser.add_argument(*item.metadata.get("aliases", ()), f"--{item.name}", **settings)
    return parser


def read_recipe(command: str, words: Sequence[str]) -> Any:
    """The `Recipe` of a command that reads data: names first, then options, of which `--config` names a YAML file.

    Raises:
        ImportError: TRL is not installed.
        UsageError: an option is unknown, not one of this command, or out of its range; or a name is missing.
        SystemExit: a value is of the wrong kind.
    """
    if find_spec("trl") is None:
        raise ImportError("TRL reads the data: pip install 'hf_growattn[finetune]'.")
    from trl.scripts.utils import DatasetMixtureConfig, ScriptArguments, TrlParser
    from trl.trainer.model_config import ModelConfig

    from ..training.recipe import Recipe, Training

    groups = [GrowthOptions, RaceOptions, ScriptArguments, Training, ModelConfig, DatasetMixtureConfig]
    parser = TrlParser(groups, allow_abbrev=False, usage=f"growattn {command} MODEL {DATA} [options]")
    # The data and the method choose these if nobody does.
    parser.set_defaults(packing=None, packing_strategy=None, dtype=None, learning_rate=None)
    names = list(takewhile(lambda word: not word.startswith("-"), words))
    options = list(words[len(names) :])
    foreign = {f"--{item.name}" for item in (*fields(GrowthOptions), *fields(RaceOptions))}
    foreign -= {f"--{item.name}" for item in OPTIONS[command]}
    refused = [word for word in options if f"--{word[2:].partition('=')[0].replace('-', '_')}" in foreign]
    try:
        *parsed, unknown = parser.parse_args_and_config(options, return_remaining_strings=True)
    except (ValueError, OSError) as error:
        raise UsageError(str(error)) from error
    growth, race, script, training, model, mixture = parsed
    model.model_name_or_path = names[0] if names else model.model_name_or_path
    datasets = names[1:] or [script.dataset_name] * bool(script.dataset_name)
    if not model.model_name_or_path or not (datasets or mixture.datasets):
        raise UsageError("name MODEL and DATA first, then the options; or name both in a YAML file, by --config.")
    known = {f"--{item.name}" for group in groups for item in fields(group)}
    refuse_unknown([*refused, *unknown], known - foreign)
    return Recipe(model.model_name_or_path, datasets, growth, race, script, training, model, mixture)


def refuse_unknown(words: Sequence[str], known: Iterable[str]) -> None:
    """Refuse words of a command line; the known word nearest to the first one is suggested.

    Raises:
        UsageError: there are such words.
    """
    if words:
        near = difflib.get_close_matches(words[0].partition("=")[0], known, n=1)
        suggestion = f" Did you mean {near[0]}?" if near else ""
        raise UsageError(f"unknown: {' '.join(words)}.{suggestion}")


def check_new_folder(folder: str | None) -> None:
    """Check that a folder can be written and holds nothing yet.

    Raises:
        UsageError: it is a file, it holds something, it cannot be written, or nothing was named.
    """
    if not folder:
        raise UsageError("name the folder to write: --output DIR")
    path = Path(folder)
    if path.is_dir() and any(path.iterdir()):
        raise UsageError(f"{path} exists and is not empty; name a new folder.")
    parent = next(each for each in (path, *path.resolve().parents) if each.exists())
    try:  # os.access promises nothing for mounts and for root
        tempfile.TemporaryFile(dir=parent).close()
    except OSError as error:
        raise UsageError(f"nothing can be written in {parent} ({error.strerror}); name another folder.") from error
