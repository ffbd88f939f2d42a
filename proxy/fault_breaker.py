"""Whether a worker process that failed requests gets the next one.

                 WORKER_FAULTS in a row, or it hung                  the pause is over
     closed ───────────────────────────────────────► open ───────────────────────────► trial due
       ▲ ▲                                          ▲  ▲  a fault: the pause doubles     │  │
       │ └── a token: one more fault opens it again ┘  └─────────────────────────────────┘  │
       └──────────────────────────────── a token, or a whole answer ────────────────────────┘

Only what the worker itself did wrong is a fault: never what a client sent, that it is full, or that it ends. It decides
nothing: whoever chooses passes over an open one as long as there is another worker.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from prefixcache.limits import WORKER_FAULTS, WORKER_TRIAL_FIRST_S, WORKER_TRIAL_MOST_S


class FaultBreaker:
    """Of one process: the next one under the same name begins anew."""

    def __init__(self, *, clock: Callable[[], float] = time.monotonic) -> None:
        self.is_open = False
        self._clock = clock
        self._num_faults = 0
        self._pause_s = WORKER_TRIAL_FIRST_S
        self._trial_at = 0.0

    @property
    def is_trial_due(self) -> bool:
        return self.is_open and self._clock() >= self._trial_at

    def failed(self) -> None:
        """A request met a fault. What was sent before it opened may still do so, and tells nothing new."""
        if self.is_open:
            if self.is_trial_due:
                self._open()
            return
        self._num_faults += 1
        if self._num_faults >= WORKER_FAULTS:
            self._open()

    def hung(self) -> None:
        """It had work and did nothing."""
        if not self.is_open or self.is_trial_due:
            self._open()

    def gave_token(self) -> None:
        """It works, at least at first; nor does what began before it opened tell anything until a trial is due."""
        if self.is_trial_due:
            self.is_open = False
            self._num_faults = WORKER_FAULTS - 1

    def answered(self) -> None:
        """A request came to its end as it should."""
        self.is_open = False
        self._num_faults = 0
        self._pause_s = WORKER_TRIAL_FIRST_S

    def _open(self) -> None:
        self.is_open = True
        self._trial_at = self._clock() + self._pause_s
        self._pause_s = min(2 * self._pause_s, WORKER_TRIAL_MOST_S)
