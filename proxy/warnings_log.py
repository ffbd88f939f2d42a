"""Warnings that would repeat with every request or retry, logged once in a while with the number left out."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from prefixcache.limits import SAME_WARNING_S


class QuietLog:
    """Logs the first warning of each kind at once and then at most one in SAME_WARNING_S."""

    def __init__(self, logger: logging.Logger, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._logger = logger
        self._clock = clock
        self._silent_until: dict[str, float] = {}
        self._left_out: dict[str, int] = {}

    def warning(self, kind: str, message: str, *arguments: object) -> None:
        """`kind` comes from a bounded set; `message` and `arguments` as for logging."""
        now = self._clock()
        if now < self._silent_until.get(kind, now):
            self._left_out[kind] = self._left_out.get(kind, 0) + 1
            return
        self._silent_until[kind] = now + SAME_WARNING_S
        left_out = self._left_out.pop(kind, 0)
        suffix = f" ({left_out} more like it since the last line)" if left_out else ""
        self._logger.warning(message + suffix, *arguments)
