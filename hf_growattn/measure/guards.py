"""Guards around a growth: Ctrl-C waits until the model can be put back whole, and adapters stay as they are."""

import contextlib
import signal
import threading
from collections.abc import Iterator
from typing import Any

from transformers import PreTrainedModel

from ..growable.attention import attentions
from ..growable.projections import is_adapted


class HeldInterrupts:
    """Holds Ctrl-C back until `check` or the end, so that it never comes amid what puts a model back.

    A second one is not held. Handlers of others, and threads other than the main one, are left alone.
    """

    def __init__(self):
        self._is_pending = self._is_holding = False

    def __enter__(self) -> "HeldInterrupts":
        is_main = threading.current_thread() is threading.main_thread()
        if is_main and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            self._is_holding = True
            signal.signal(signal.SIGINT, self._note)
        return self

    def __exit__(self, kind: type | None, *_) -> None:
        if self._is_holding:
            signal.signal(signal.SIGINT, signal.default_int_handler)
        if kind is None:
            self.check()

    def _note(self, number: int, frame: Any) -> None:
        if self._is_pending:
            signal.default_int_handler(number, frame)
        self._is_pending = True

    def check(self) -> None:
        """Raise the KeyboardInterrupt that was held back, if there was one."""
        if self._is_pending:
            self._is_pending = False
            raise KeyboardInterrupt


@contextlib.contextmanager
def adapters_stay(model: PreTrainedModel) -> Iterator[None]:
    """Raise a ValueError in a loss whose reference is the model itself under other adapters: that would grow too."""
    adapted = [module for module in model.modules() if is_adapted(module)]

    def active(module: Any) -> tuple:
        return module.disable_adapters, *module.active_adapters

    before = [active(module) for module in adapted]

    def check(*_) -> None:
        if [active(module) for module in adapted] != before:
            raise ValueError(
                "The loss compares the model with itself under other adapters or none, and growth would change both: "
                "new dims go into the base. Compute the reference before (in TRL precompute_ref_log_probs=True), or "
                "give it a model of its own."
            )

    handle = attentions(model)[0].module.register_forward_pre_hook(check)
    try:
        yield
    finally:
        handle.remove()
