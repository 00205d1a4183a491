"""What a fine-tuning with growth is told, apart from Trainer's own options: described once, for every command line.

Without torch, so that help is there at once.
"""

from dataclasses import MISSING, dataclass, field, fields
from typing import Literal

TRAINER_DOCS = "https://huggingface.co/docs/transformers/main_classes/trainer"


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


@dataclass
class ModelArguments:
    """Which model."""

    _argument_group_name = "model"

    model: str = field(metadata={"help": "path or Hub id of a Llama- or GPT-2-style causal LM"})
    lora_rank: int = field(
        default=0, metadata={"help": "train adapters of this rank, merged at the end; 0 trains all weights"}
    )


@dataclass
class TextArguments:
    """Which text."""

    _argument_group_name = "text"

    dataset: str = field(metadata={"help": "text file, folder of text files, or Hub id"})
    block_size: int = field(default=128, metadata={"help": "tokens in one row of a batch"})


@dataclass
class GrowthArguments:
    """What to grow, and when; once and half-way unless something else is given."""

    _argument_group_name = "growth"

    budget: str | None = field(  # no percent signs: argparse would fill them in
        default=None,
        metadata={"help": "weights to add at most: a share of the model's or a number; 0.02 if nothing is said"},
    )
    qk_dims: int = field(default=0, metadata={"help": "instead: dims to add to each head's queries and keys"})
    v_dims: int = field(default=0, metadata={"help": "instead: dims to add to each head's values"})
    grow_steps: list[int] | None = field(
        default=None, metadata={"help": "steps after which to grow; half-way if nothing is said"}
    )
    grow_every: int | None = field(default=None, metadata={"help": "instead: grow after every so many steps"})
    grow_at: Literal["epoch", "plateau"] | None = field(
        default=None,
        metadata={"help": "instead: after each epoch, or at a plateau, when the held-out loss stops falling"},
    )
    growth_batches: int = field(default=16, metadata={"help": "training batches to grow on, on each device"})
    max_growths: int | None = field(default=None, metadata={"help": "growths at most"})
    total_budget: str | None = field(
        default=None, metadata={"help": "weights to add at most in all growths together, as budget"}
    )
    compare: bool = field(default=False, metadata={"help": "train once more without growth, and show both curves"})


def listed(*groups: type) -> str:
    """The options of some groups that need not be given, as a list in markdown."""
    options = [option for group in groups for option in fields(group) if option.default is not MISSING]
    return "\n".join(f"- `--{option.name}`: {option.metadata['help']}" for option in options)
