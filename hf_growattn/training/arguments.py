"""What growing, reading data and evaluating are told beyond TRL's own options, for every command; without torch.

So that help is there at once.
"""
# ruff: noqa: RUF009  an _option is a field of a dataclass

from dataclasses import dataclass, field, fields
from typing import Any, Literal

SFT_DOCS = "https://huggingface.co/docs/trl/sft_trainer"


def budget_of(text: str) -> int | float:
    """A budget as people write it: 1%, 0.01 or 20000.

    Raises:
        ValueError: it is no number, or out of range.
    """
    try:
        value = float(text.rstrip("%")) / 100 if text.endswith("%") else float(text)
    except ValueError:
        raise ValueError(f"The budget {text!r} is no number; write 1%, 0.01 or 20000.") from None
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
    """What TRL's own options do not say of the data."""

    _argument_group_name = "data"

    dataset_revision: str | None = _option("branch, tag or commit of a dataset of the Hub")
    dataset_columns: list[str] | None = _option("take columns by other names, such as prompt=question completion=reply")


@dataclass
class GrowthArguments:
    """What to grow, and when; once and half-way unless something else is given."""

    _argument_group_name = "growth"

    budget: str | None = _option(
        "weights to add at most, a share of the model's or a number; by itself 0.02, and 0.01 to measure"
    )
    qk_dims: int = _option("instead: dims to add to each head's queries and keys", 0)
    v_dims: int = _option("instead: dims to add to each head's values", 0)
    growth_batches: int = _option("training batches to grow or to measure on, on each device", 16)
    grow_steps: list[int] | None = _option("steps after which to grow; half-way if nothing is said")
    grow_every: int | None = _option("instead: grow after every so many steps")
    grow_at: Literal["epoch", "plateau"] | None = _option(
        "instead: after each epoch, or at a plateau, when the held-out loss stops falling"
    )
    max_growths: int | None = _option("growths at most; 0 trains without growing")
    total_budget: str | None = _option("weights to add at most in all growths together, as budget")
    method: Literal["auto", "full", "growth", "lora", "both"] = _option(
        "what trains: all weights, of which some are grown on the way (full); within the budget and from the start, "
        "growth, LoRA on all linear layers, or some of both; or what a race finds best (auto)",
        "full",
    )
    compare: bool = _option(
        "train once more by LoRA on all linear layers, and all weights without growth, and show all curves", False
    )


@dataclass
class RaceArguments:
    """How to choose what to train."""

    _argument_group_name = "race"

    steps: int = _option("steps of a long training; learning rates are tried for a quarter of that", 100)
    seeds: int = _option("long trainings of each method, with other orders of the rows", 2)
    full: bool = _option("train all weights as well, with growth and without", False)


@dataclass
class EvaluationArguments:
    """What to evaluate."""

    _argument_group_name = "evaluation"

    base: str | None = _option("the model to compare with")
    text: list[str] | None = _option("data to measure the perplexity of, one or more", action="extend")
    task: list[str] | None = _option("tasks of the harness, or files of tasks, one or more", action="extend")
    limit: int | None = _option("only so many examples of each task")
    device: str | None = _option("cpu, cuda, cuda:1 and so on; by default the accelerator, if there is one")


def listed(*groups: type, only: tuple[str, ...] = ()) -> str:
    """The options of some groups with their types and defaults, or only some of them, as a list in markdown."""
    return "\n".join(
        f"- `--{option.name}` ({str(getattr(option.type, '__name__', option.type)).replace('typing.', '')}, default "
        f"{option.default}): {option.metadata['help']}"
        for group in groups
        for option in fields(group)
        if not only or option.name in only
    )
