"""SIGINT and SIGTERM as a condition to wait for instead of an exception at any line."""

from __future__ import annotations

import signal
import threading


class StopSignals:
    """Takes both over when it is made, in the main thread."""

    def __init__(self) -> None:
        self._event = threading.Event()
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self._set)

    def _set(self, _number: int, _frame: object) -> None:
        self._event.set()

    def wait(self, timeout_s: float) -> bool:
        """True once a signal came."""
        return self._event.wait(timeout_s)
