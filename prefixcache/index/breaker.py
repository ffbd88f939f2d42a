"""When a call to Redis is worth sending: replies come in order, so behind an overdue one nobody is answered in time.

                a call expired              or it was the third stall      owes nothing, BREAKER_PAUSE_S passed:
                                            without an answer in time      begin_trial()
     closed ─────────────────────► owing    between ───────────────► open ────────────────────► trial
       ▲  ▲                          │                               ▲  ▲                        │ │
       │  └── all owed replies came, ┘          a call was refused ──┘  └── expired or refused ──┘ │
       │      or the connection is gone                                                           │
       └───────────────────────────────── the trial was answered in time ─────────────────────────┘

Only a closed breaker lets calls through. What was sent before runs on; each call that expires owes a reply until that
comes (and is dropped) or its connection is gone. All that expire before the first one's reply came are one stall: a
server that stood still for a moment is asked again as soon as it moves. One that is late again and again is not worth
waiting for, though each late reply came at last. A trial is no caller's call: nobody waits for it. One whose connection
is lost leaves the breaker open, to be tried on the next connection.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Literal

from prefixcache.limits import BREAKER_PAUSE_S, BREAKER_STALLS

BreakerState = Literal["closed", "owing", "open", "trial"]


class Breaker:
    """Told what became of every call, it says whether to send the next one."""

    def __init__(self, *, clock: Callable[[], float] = time.monotonic) -> None:
        self.state: BreakerState = "closed"
        self.num_owed = 0
        """Overdue replies that may still come."""
        self._clock = clock
        self._stalls_in_row = 0
        self._opened_at = 0.0

    @property
    def trial_at(self) -> float | None:
        """From when on a trial may begin, on the breaker's clock; None while there is no need or no sense."""
        return self._opened_at + BREAKER_PAUSE_S if self.state == "open" and self.num_owed == 0 else None

    def answered(self) -> None:
        """A call got its reply in time."""
        self._stalls_in_row = 0

    def expired(self) -> None:
        """A call, or the trial, got no reply in time; it is owed from now on."""
        self.num_owed += 1
        if self.state == "trial":
            self._open()
        elif self.state == "closed":
            self._stalls_in_row += 1
            if self._stalls_in_row >= BREAKER_STALLS:
                self._open()
            else:
                self.state = "owing"

    def paid(self) -> None:
        """An owed reply came."""
        assert self.num_owed > 0, "nothing is owed"
        self.num_owed -= 1
        if self.state == "owing" and self.num_owed == 0:
            self.state = "closed"

    def refused(self) -> None:
        """A call, or the trial, was answered in time that this server serves nobody now."""
        if self.state != "open":
            self._open()

    def lost(self) -> None:
        """The connection is gone, and what it owed with it."""
        self.num_owed = 0
        if self.state == "owing":
            self.state = "closed"
        elif self.state == "trial":
            self.state = "open"

    def begin_trial(self) -> None:
        """The caller sends one call of its own and tells what came of it: `passed`, `expired` or `refused`."""
        at = self.trial_at
        assert at is not None and self._clock() >= at, "no trial is due"
        self.state = "trial"

    def passed(self) -> None:
        """The trial was answered in time; it proves nothing if an earlier call has expired since it began."""
        if self.state != "trial":
            return
        self.state = "closed"
        self._stalls_in_row = 0

    def _open(self) -> None:
        self.state = "open"
        self._opened_at = self._clock()
