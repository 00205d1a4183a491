"""Ctrl-C amid a growth: held back until the model can be put back whole."""

import signal
import threading
from typing import Any


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
