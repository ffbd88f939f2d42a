"""When a child that has died is started again, and when it is given up. Decides on a clock that is given.

alive ──dies──► pause of FIRST_PAUSE_S, doubled with each death up to MOST_PAUSE_S ──► alive
          │     (a life of LASTING_S or more: the pauses begin anew)
          └── before it was ready once: wrong settings, or MOST_FAILED_STARTS deaths ──► given up
"""

from __future__ import annotations

import math
import signal

EXIT_CONFIG = 2
"""Of all our programs where a setting is wrong, and of click where a flag is: the next start would say the same.

Once the same settings have served, what is wrong is what stands around them, and passes: a port that somebody else has
taken meanwhile, or memory that is short."""
FIRST_PAUSE_S = 0.5
MOST_PAUSE_S = 30.0
LASTING_S = 60.0
MOST_FAILED_STARTS = 5


class GivenUp(Exception):
    """Says why, as the end of a sentence on how it ended."""


class Restarts:
    """Of one child."""

    def __init__(self, *, was_ready: bool = False) -> None:
        self._was_ready = was_ready
        self._started_at = -math.inf
        self._pause_s = 0.0
        self._num_failed_starts = 0

    def started(self, now: float) -> None:
        """A life begins."""
        self._started_at = now

    def ready(self) -> None:
        """It does what it is there for; from now on its deaths are accidents."""
        self._was_ready = True

    def ended(self, code: int, now: float) -> float:
        """Seconds until it is to be started again; `code` as subprocess tells it. Raises GivenUp."""
        if not self._was_ready:
            if code == EXIT_CONFIG:
                raise GivenUp("for a setting is wrong")
            self._num_failed_starts += 1
            if self._num_failed_starts >= MOST_FAILED_STARTS:
                raise GivenUp(f"for the {self._num_failed_starts}th time before it was ready once")
        has_lasted = now - self._started_at >= LASTING_S
        self._pause_s = FIRST_PAUSE_S if has_lasted or not self._pause_s else min(2 * self._pause_s, MOST_PAUSE_S)
        return self._pause_s


def how(code: int) -> str:
    """The end of a process in words."""
    if code >= 0:
        return f"with exit code {code}"
    try:
        return f"by signal {signal.Signals(-code).name}"
    except ValueError:
        return f"by signal {-code}"  # a real-time signal has no name
