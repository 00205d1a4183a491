"""The options of growth and of races, without torch, so that help is shown at once."""

from dataclasses import dataclass, field
from typing import Any


class UsageError(ValueError):
    """A command line that cannot be read; the message names the fix."""


def option(help: str, default: Any = None, *aliases: str) -> Any:
    """A field of options; no percent signs in help: argparse would fill them in."""
    return field(default=default, metadata={"help": help, "aliases": aliases})


@dataclass
class BudgetOptions:
    """How much to add, by a growth or by LoRA."""

    budget: float | None = option(
        "the most weights to add, as a share of the model's weights or as a number (default: 0.02)"
    )
    growth_batches: int = option("how many training batches to measure on, on each device", 16)


@dataclass
class GrowthOptions(BudgetOptions):
    """What one growth adds."""

    qk_dims: int = option("instead of a budget: dims to add to every head's queries and keys", 0)
    v_dims: int = option("instead of a budget: dims to add to every head's values", 0)


@dataclass
class RaceOptions(BudgetOptions):
    """How long and how often a race trains."""

    steps: int = option("steps of each training; learning rates are tried for a quarter of them", 100)
    seeds: int = option("how often LoRA and its best challenger train, each time on the rows in another order", 2)
