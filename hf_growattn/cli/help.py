"""The help of the command line, as text."""

import textwrap
from collections.abc import Sequence
from dataclasses import MISSING, fields
from types import NoneType
from typing import Any, Literal, NamedTuple, get_args, get_origin

from ..training.options import GrowthOptions, RaceOptions
from .options import TAKEN, ExportOptions, InspectOptions, PushOptions

_COLUMNS = 100
_EXIT_CODES = (
    "Exit codes: 0 done; 1 failed, the message says why; 2 wrong usage; 3 nothing grew, or growth did not win; "
    "130 interrupted, nothing is half-written."
)
_DATA_HELP = (
    "DATA are .txt, .jsonl, .csv or .parquet files, a folder, or the Hub id of a dataset: text, chats, or prompts with "
    "completions. TRL reads them, so all options of its ScriptArguments, SFTConfig and ModelConfig work, such as "
    "--max_length, --per_device_train_batch_size, --learning_rate and --dataset_text_field. --config FILE reads "
    "options from YAML, and --help_all lists every one. A text file is cut into blocks of --max_length tokens."
)


class Command(NamedTuple):
    """What the help of a command says.

    Attributes:
        names: the names that come before the options.
        summary: one sentence, shown in the list of commands.
        details: more sentences, for the command's own help.
        options: its dataclasses of options.
    """

    names: str
    summary: str
    details: str
    options: list[type]


COMMANDS = {
    "inspect": Command(
        "MODEL",
        "Show how wide the heads are, and how much of that they use.",
        "The effective rank counts the directions that a head uses; it is at most the width.",
        [InspectOptions],
    ),
    "measure": Command(
        "MODEL DATA...",
        "Measure where width holds the model back on your data.",
        "A growth is tried on the loss that finetune would train, then taken back. Nothing is changed or written. This "
        "does not compare growth with LoRA: race does.",
        [GrowthOptions],
    ),
    "grow": Command(
        "MODEL DATA... -o DIR",
        "Widen heads once where that lowers the loss, and save the model.",
        "DIR gets the model, its tokenizer, the figures for a model card, and report.html. If no growth helps on data "
        "that it was not chosen from, nothing is written.",
        [GrowthOptions],
    ),
    "race": Command(
        "MODEL DATA... -o DIR",
        "Find out whether growth beats LoRA on your data.",
        "LoRA on all linear layers, growth, and a third of growth with LoRA train for a short while: the same number "
        "of weights on the same rows, each with the best of a few learning rates. Growth wins if it leads by more "
        "than 0.01 nats a token and by more than two standard errors; otherwise LoRA does, which costs nothing at "
        "inference. DIR keeps every run as it ends, so the same command continues after an interruption.",
        [GrowthOptions, RaceOptions],
    ),
    "finetune": Command(
        "MODEL DATA... -o DIR",
        "Train with TRL's SFTTrainer, and grow on the way.",
        "By default all weights train, and attention grows once, half-way. --method trains something else. A tenth of "
        "the data is held out unless they have a test split. For several devices: torchrun --nproc_per_node 2 -m "
        "hf_growattn finetune ...",
        [GrowthOptions],
    ),
    "export": Command(
        "FOLDER -o DIR",
        "Write a grown model as an ordinary one, which needs no hf_growattn.",
        "All heads become as wide as the widest, rounded up to a multiple of 8.",
        [ExportOptions],
    ),
    "push": Command(
        "FOLDER REPO",
        "Push a grown model with its card to the Hub.",
        "The push is one commit. --dry-run writes the files and the card into a folder instead.",
        [PushOptions],
    ),
}


def format_help() -> str:
    """The list of commands."""
    rows = [f"  {name:<10}{command.summary}" for name, command in COMMANDS.items()]
    return "\n".join(
        [
            "Usage: growattn COMMAND ...",
            "",
            "Find out whether the attention of a language model is too narrow for your data, and widen it there.",
            "",
            *rows,
            "",
            "MODEL is a folder or a Hub id of a stock or grown model; it is never changed.",
            "growattn COMMAND --help explains a command. --json prints JSON alone, --debug shows where an error came "
            "from, --version the version.",
            _EXIT_CODES,
        ]
    )


def format_command_help(name: str) -> str:
    """How to call a command, what it does, and its options."""
    command = COMMANDS[name]
    parts = [f"Usage: growattn {name} {command.names} [options]", f"{command.summary} {command.details}"]
    if name in TAKEN:
        parts.append(_DATA_HELP)
    options = format_options(command.options, TAKEN.get(name, ()))
    if options:
        parts.append(f"Options:\n{options}")
    parts.append(_EXIT_CODES)
    return "\n\n".join(part if part.startswith("Options") else textwrap.fill(part, 100) for part in parts)


def format_options(groups: Sequence[type], taken: Sequence[str] = ()) -> str:
    """Options with their values, meaning and defaults, as text; all of them, or those named in `taken`."""
    lines = []
    for item in (item for group in groups for item in fields(group)):
        if taken and item.name not in taken:
            continue
        names = ", ".join([*item.metadata.get("aliases", ()), f"--{item.name}"])
        text = item.metadata["help"]
        if item.default not in (None, False, "", MISSING):
            text += f" (default: {item.default})"
        lines.append(f"  {names} {_value_name(item.type)}".rstrip())
        lines.append(textwrap.fill(text, _COLUMNS, initial_indent=" " * 6, subsequent_indent=" " * 6))
    return "\n".join(lines)


def _value_name(kind: Any) -> str:
    """The value of an option as help writes it: nothing for a flag, the choices, or its kind."""
    alternatives = [each for each in get_args(kind) if each is not NoneType]
    if NoneType in get_args(kind):
        kind = alternatives[0]
    if get_origin(kind) is Literal:
        return "|".join(get_args(kind))
    if get_origin(kind) is list:
        return f"{_value_name(get_args(kind)[0])} ..."
    return "" if kind is bool else {str: "TEXT", int: "NUMBER"}.get(kind, "VALUE")
