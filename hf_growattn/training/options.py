"""What growing, reading data and evaluating are told beyond TRL's own options, for every command; without torch.

So that help is there at once.
"""
# ruff: noqa: RUF009  an _option is a field of a dataclass

from dataclasses import dataclass, field, fields
from types import NoneType
from typing import Any, Literal, get_args, get_origin

SFT_DOCS = "https://huggingface.co/docs/trl/sft_trainer"


def parse_budget(text: str) -> int | float:
    """A budget as people write it: 1%, 0.01 or 20000.

    Raises:
        ValueError: it is no number, or out of range.
    """
    try:
        value = float(text.rstrip("%")) / 100 if text.endswith("%") else float(text)
    except ValueError:
        raise ValueError(f"The budget {text!r} is not a number; write 1%, 0.01 or 20000.") from None
    share = text.endswith("%") or value < 1
    inside = 0 < value < 1 if share else value.is_integer()
    if not inside:
        raise ValueError(
            f"The budget {text!r} is out of range; write a share of the model's weights between 0 and 1, such as 1% or "
            "0.01, or a whole number of weights, such as 20000."
        )
    return value if share else int(value)


def _option(help: str, default: Any = None, **more) -> Any:  # no percent signs in help: argparse would fill them in
    return field(default=default, metadata={"help": help, **more})


@dataclass
class DataArguments:
    """What TRL's own options cannot say about the data."""

    _argument_group_name = "data"

    dataset_revision: str | None = _option("branch, tag or commit of a dataset of the Hub")
    dataset_columns: list[str] | None = _option("rename columns, such as prompt=question completion=reply")


@dataclass
class GrowthOptions:
    """What to grow, and when; once and half-way unless something else is given."""

    _argument_group_name = "growth"

    budget: str | None = _option(
        "the most weights to add: a share of the model's, such as 0.02, or a number; unless set, 0.02, and 0.01 for "
        "measure and grow"
    )
    qk_dims: int = _option("instead of a budget: dims to add to every head's queries and keys", 0)
    v_dims: int = _option("instead of a budget: dims to add to every head's values", 0)
    growth_batches: int = _option("how many training batches to measure on, on each device", 16)
    grow_steps: list[int] | None = _option("grow after these steps; unless set, once, half-way")
    grow_every: int | None = _option("instead: grow again after every so many steps")
    grow_at: Literal["epoch", "plateau"] | None = _option(
        "instead: grow after each epoch, or whenever the held-out loss stops falling (plateau)"
    )
    max_growths: int | None = _option("the most growths; 0 trains without any")
    total_budget: str | None = _option("the most weights to add in all growths together, written as a budget")
    method: Literal["auto", "full", "growth", "lora", "both"] = _option(
        "what to train. full: all weights, and grow on the way. growth, lora, both: only what the budget adds at the "
        "start, as wider heads, as LoRA on all linear layers, or some of each, where --learning_rate is LoRA's and "
        "wider heads take a share of it. auto: race first, then train by the winner, and by another one if that is "
        "near, and keep the model that ends lower",
        "full",
    )
    race: str | None = _option(
        "with --method auto: the folder of a race of the same model and data, which goes on from there"
    )
    compare: bool = _option(
        "also train LoRA on all linear layers, and all weights without growth, and show all curves", False
    )


@dataclass
class RaceOptions:
    """How to choose what to train."""

    _argument_group_name = "race"

    steps: int | None = _option(
        "steps of each training; learning rates are tried for a quarter of them; unless set, 100, and with --method "
        "auto a fifth of --max_steps if that is less, but 20 at least"
    )
    seeds: int = _option(
        "how often a growth that leads has to win, each time with another order of the rows; once if it is far ahead", 2
    )
    full: bool = _option("also train all weights, with growth and without", False)


@dataclass
class EvaluationArguments:
    """What to evaluate."""

    _argument_group_name = "evaluation"

    base: str | None = _option("the model to compare with")
    text: list[str] | None = _option("data to measure perplexity on", action="extend")
    task: list[str] | None = _option("tasks of the harness, or files of tasks", action="extend")
    limit: int | None = _option("the most examples of each task")
    device: str | None = _option("cpu, cuda, cuda:1 and so on; unless set, the accelerator if there is one")


TAKEN = {  # by the commands that do not train: which options of growth and race
    "measure": ("budget", "qk_dims", "v_dims", "growth_batches"),
    "grow": ("budget", "qk_dims", "v_dims", "growth_batches"),
    "race": ("budget", "growth_batches", *(option.name for option in fields(RaceOptions))),
    "evaluate": (),
}


def untaken(command: str, words: list[str]) -> list[str]:
    """The options among some words that a command would pass over; a recipe, which commands share, may have them."""
    ours = {option.name for group in (GrowthOptions, RaceOptions) for option in fields(group)}
    given = {word[2:].partition("=")[0].replace("-", "_") for word in words if word.startswith("--")}
    return [f"--{name}" for name in sorted(given & ours - {*TAKEN.get(command, ours)})]


def listed(*groups: type, only: tuple[str, ...] = ()) -> str:
    """The options of some groups, or only some of them, with what they take and defaults, as a list in markdown."""
    options = (option for group in groups for option in fields(group) if not only or option.name in only)
    return "\n".join(
        f"- `{' '.join(filter(None, (f'--{option.name}', _taken(option.type))))}`: {option.metadata['help']}"
        + (f" (default {option.default})" if option.default not in (None, False) else "")
        for option in options
    )


def _taken(kind: Any) -> str:
    """What an option takes, as help writes it: nothing for a flag, the choices, or a type."""
    kind = next((each for each in get_args(kind) if each is not NoneType), kind) if NoneType in get_args(kind) else kind
    if get_origin(kind) is Literal:
        return "|".join(get_args(kind))
    if get_origin(kind) is list:
        return f"{_taken(get_args(kind)[0])} ..."
    return "" if kind is bool else {str: "TEXT", int: "NUMBER"}[kind]
