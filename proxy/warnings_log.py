"""Warnings that would repeat with every request or retry, logged once in a while with the number left out."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from prefixcache.limits import SAME_WARNING_S

_MOST_KINDS = 64
"""Kinds above which those whose time is over are forgotten."""


class QuietLog:
    """Logs the first warning of each kind at once and then at most one in SAME_WARNING_S."""

    def __init__(self, logger: logging.Logger, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._logger = logger
        self._clock = clock
        self._silent_until: dict[str, float] = {}
        self._left_out: dict[str, int] = {}

    @property
    def num_kinds(self) -> int:
        """Kinds it remembers."""
        return len(self._silent_until)

    def warning(self, kind: str, message: str, *arguments: object) -> None:
        """Warnings of one `kind` are those that repeat each other; `message` and `arguments` as for logging."""
        now = self._clock()
        self._forget_old(now)
        if now < self._silent_until.get(kind, now):
            self._left_out[kind] = self._left_out.get(kind, 0) + 1
            return
        self._silent_until[kind] = now + SAME_WARNING_S
        left_out = self._left_out.pop(kind, 0)
        suffix = f" ({left_out} more like it since the last line)" if left_out else ""
        self._logger.warning(message + suffix, *arguments)

    def _forget_old(self, now: float) -> None:
        """Kinds may name workers, which come and go."""
        if len(self._silent_until) > _MOST_KINDS:
            self._silent_until = {kind: until for kind, until in self._silent_until.items() if until > now}
            self._left_out = {kind: count for kind, count in self._left_out.items() if kind in self._silent_until}
