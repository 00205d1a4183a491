"""The options of growth and of races, without torch, so that help is shown at once."""
# ruff: noqa: RUF009  an option is a field of a dataclass

from dataclasses import dataclass, field
from typing import Any, Literal


def parse_budget(text: str) -> int | float:
    """A budget as people write it: 1%, 0.01 or 20000.

    Raises:
        ValueError: it is no number.
    """
    try:
        number = float(text.rstrip("%"))
    except ValueError:
        raise ValueError(f"The budget {text!r} is not a number; write 1%, 0.01 or 20000.") from None
    if text.endswith("%"):
        return number / 100
    return int(number) if number >= 1 and number.is_integer() else number


def option(help: str, default: Any = None, *aliases: str) -> Any:
    """A field of options; no percent signs in help: argparse would fill them in."""
    return field(default=default, metadata={"help": help, "aliases": aliases})


@dataclass
class BudgetOptions:
    """How much to add, by a growth or by LoRA."""

    budget: str | None = option(
        "the most weights to add: a share of the model's, such as 0.02, or a number; unless set, 0.02, and 0.01 for "
        "measure and grow"
    )
    growth_batches: int = option("how many training batches to measure on, on each device", 16)


@dataclass
class GrowthOptions(BudgetOptions):
    """What one growth adds."""

    qk_dims: int = option("instead of a budget: dims to add to every head's queries and keys", 0)
    v_dims: int = option("instead of a budget: dims to add to every head's values", 0)


@dataclass
class FinetuneOptions(GrowthOptions):
    """What to train, and when to grow; once and half-way by default."""

    grow_steps: list[int] | None = option("grow after these steps; unless set, once, half-way")
    grow_every: int | None = option("instead: grow each time after this number of steps")
    grow_at: Literal["epoch", "plateau"] | None = option(
        "instead: grow after each epoch, or whenever the held-out loss stops falling (plateau)"
    )
    max_growths: int | None = option("the most growths; 0 trains without growth")
    method: Literal["full", "growth", "lora", "both"] = option(
        "what to train. full: all weights, and grow on the way. growth, lora, both: only what the budget adds at the "
        "start, as wider heads, as LoRA on all linear layers, or some of each, where --learning_rate is LoRA's and "
        "wider heads take a share of it",
        "full",
    )


@dataclass
class RaceOptions(BudgetOptions):
    """How long and how often a race trains."""

    steps: int = option("steps of each training; learning rates are tried for a quarter of them", 100)
    seeds: int = option("how often LoRA and its best challenger train, each time on the rows in another order", 2)
