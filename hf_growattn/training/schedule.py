"""When a training grows: `Schedule`, which goes by what a Trainer's state says."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ..grow.plan import check_numbers

ADDED = "growth_added_parameters"  # what the log history says of each growth


@dataclass(frozen=True)
class Schedule:
    """After which steps a training grows, and on how many batches; as `GrowthCallback` takes it.

    Raises:
        ValueError: a value out of its range.
    """

    steps: Sequence[int] | None = None
    batches: int = 16

    def __post_init__(self):
        steps = [1] if self.steps is None else self.steps
        if not (isinstance(steps, Sequence) and len(steps) and all(type(n) is int and n > 0 for n in steps)):
            raise ValueError(f"steps must be a list of steps from 1 on, as in steps=[500]; got {self.steps!r}.")
        check_numbers(self, batches=2)  # each half of them judges what the other found

    def is_due(self, state: Any, made_before: int = 0) -> bool:
        """Whether to grow after the optimizer step that was just taken.

        A step that passed without a growth stays due, since the batches may not have sufficed, or a run was resumed.

        Args:
            state: of the Trainer.
            made_before: growths that count, but are not in the state.
        """
        growths, steps = growths_of(state), self._chosen_steps(state)
        last = growths[-1]["step"] if growths else -1
        return made_before + len(growths) < len(steps) and any(last < step <= state.global_step for step in steps)

    def check(self, args: Any, state: Any) -> None:
        """Raise a ValueError if a growth is set for a time that a training will not reach."""
        last = max(self._chosen_steps(state))
        if last >= state.max_steps:
            raise ValueError(
                f"Growth is set for step {last}, but training ends at step {state.max_steps}. Choose an earlier step, "
                "so that there is training after the growth."
            )
        first = math.ceil(self.batches / args.gradient_accumulation_steps)
        if state.global_step == 0 and first >= state.max_steps:
            raise ValueError(
                f"Growth reads the last {self.batches} batches, which are seen after step {first} at the earliest, but "
                f"training ends at step {state.max_steps}. Choose fewer, by batches=."
            )

    def _chosen_steps(self, state: Any) -> Sequence[int]:
        return self.steps or [max(state.max_steps // 2, 1)]


def growths_of(state: Any) -> list[dict]:
    """What the log history of a Trainer's state says of its growths."""
    return [entry for entry in state.log_history if ADDED in entry]
