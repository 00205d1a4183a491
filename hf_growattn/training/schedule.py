"""When a training grows: `Schedule`, which goes by what a Trainer's state says."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from transformers.trainer_utils import has_length

ADDED = "growth_added_parameters"  # what the log history says of each growth
_MOMENTS = ("middle", "epoch", "plateau")


@dataclass(frozen=True)
class Schedule:
    """When a training grows, on how many batches, and how often at most; as `GrowthCallback` takes it.

    Raises:
        ValueError: both `steps` and `at`, or a value out of its range.
    """

    at: str = "middle"
    steps: Sequence[int] | None = None
    batches: int = 16
    max_growths: int | None = None

    def __post_init__(self):
        if self.at != "middle" and self.steps is not None:
            raise ValueError('Say when to grow by one of steps=[500, 1000], at="epoch" and at="plateau".')
        if self.at not in _MOMENTS:
            raise ValueError(f"at must be one of {', '.join(map(repr, _MOMENTS))}; got {self.at!r}.")
        if self.steps is not None and not (isinstance(self.steps, Sequence) and len(self.steps)):
            raise ValueError(f"steps must be a list of at least one step, as in steps=[500]; got {self.steps!r}.")
        # Two batches at least: each half of them judges what the other found.
        _check_number("batches", self.batches, 2)
        if self.max_growths is not None:
            _check_number("max_growths", self.max_growths, 1)
        for index, step in enumerate(self.steps or ()):
            _check_number(f"steps[{index}]", step, 1)

    def is_due(self, state: Any, made_before: int = 0, epoch_ended: bool = False) -> bool:
        """Whether to grow after the optimizer step that was just taken.

        A step that passed without a growth stays due, since the batches may not have sufficed, or a run was resumed.

        Args:
            state: of the Trainer.
            made_before: growths that count, but are not in the state.
            epoch_ended: where this is asked after an epoch instead of after a step.
        """
        growths = growths_of(state)
        last = growths[-1]["step"] if growths else -1
        if made_before + len(growths) >= self._most_growths() or last == state.global_step:
            return False
        if self.at == "epoch":
            return epoch_ended or state.epoch == int(state.epoch)
        if self.at == "plateau":
            losses = _evaluation_losses(state, last)
            return len(losses) > 1 and losses[-1] >= min(losses[:-1])
        return any(last < step <= state.global_step for step in self._chosen_steps(state))

    def check(self, args: Any, state: Any, loader: Any) -> None:
        """Raise a ValueError if a growth is set for a time that a training will not reach."""
        if self.at == "plateau" and args.eval_strategy == "no":
            raise ValueError('at="plateau" watches the evaluation loss: set eval_strategy and eval_dataset.')
        last = self._last_step(args, state, loader)
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

    def _most_growths(self) -> float:
        moments = 1 if self.at == "middle" else math.inf
        return min(self.max_growths or math.inf, len(self.steps) if self.steps else moments)

    def _chosen_steps(self, state: Any) -> Sequence[int]:
        return self.steps or [max(state.max_steps // 2, 1)]

    def _last_step(self, args: Any, state: Any, loader: Any) -> int:
        """The last of the steps to grow after, or the first one that `at` allows; 0 where that cannot be known."""
        if self.at == "middle":
            return max(self._chosen_steps(state))
        epoch = math.ceil(len(loader) / args.gradient_accumulation_steps) if has_length(loader) else 0
        if self.at == "epoch":
            return epoch
        interval = epoch if args.eval_strategy == "epoch" else state.eval_steps
        return interval if args.eval_on_start else 2 * interval


def growths_of(state: Any) -> list[dict]:
    """What the log history of a Trainer's state says of its growths."""
    return [entry for entry in state.log_history if ADDED in entry]


def _check_number(name: str, value: Any, least: int) -> None:
    if type(value) is not int or value < least:
        raise ValueError(f"{name} must be a whole number, at least {least}; got {value!r}.")


def _evaluation_losses(state: Any, since: int) -> list[float]:
    """The held-out losses after a step, of the first of several evaluation sets."""
    names = (name for entry in state.log_history for name in entry)
    watched = next((name for name in names if name.startswith("eval_") and name.endswith("loss")), None)
    return [entry[watched] for entry in state.log_history if entry["step"] > since and watched in entry]
