"""The load that this proxy process has put on one worker, generation by generation.

    placed ──► waiting ──started──► prefilling ──first token──► running ──► gone
               prefill seconds,      what is left of them,        counted
               by class              counted down with time
       └────────────┴──────────────────────┴────────────────────────┴──────► gone, whatever ends it

A worker that slices computes a long prefill a slice at a time, and shorter ones between the slices. So what has started
is prefilled in the order of starting, but the sliced ones last, whichever has the least left before the others; and of
that one only the rest of the slice that runs is sure to come before anything else: what is left of it then, and all
that is left of the others, waits once more, each by its own length.

Nothing is sent from here: `record` is what the index is told. Seconds are kept as whole microseconds, so that what was
added is taken away exactly and an empty ledger says zero.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from enum import Enum

from prefixcache.limits import LOAD_RECORD_S
from prefixcache.load import NO_WAITING, NUM_WAITING_CLASSES, ProxyLoad, waiting_class
from prefixcache.routing.slices import PASSING

_MICRO = 1_000_000


class _Phase(Enum):
    WAITING = "waiting"
    PREFILLING = "prefilling"
    RUNNING = "running"
    GONE = "gone"


class LedgerEntry:
    """One generation, owned by one scope; a phase that is past is never entered again, and each call may come twice."""

    __slots__ = ("_ledger", "_left_us", "_phase", "_prefill_us", "_waiting_class")

    def __init__(self, ledger: LoadLedger, prefill_s: float) -> None:
        self._ledger = ledger
        self._phase = _Phase.WAITING
        self._prefill_us = self._left_us = round(prefill_s * _MICRO)
        self._waiting_class = waiting_class(prefill_s)
        ledger._enter_waiting(self)

    def started(self) -> None:
        """Its first chunk is being computed."""
        if self._phase is _Phase.WAITING:
            self._ledger._leave_waiting(self)
            self._ledger._enter_prefilling(self)
            self._phase = _Phase.PREFILLING

    def first_token(self) -> None:
        self.started()
        if self._phase is _Phase.PREFILLING:
            self._ledger._leave_prefilling(self)
            self._phase = _Phase.RUNNING

    def gone(self) -> None:
        if self._phase is _Phase.GONE:
            return
        if self._phase is _Phase.WAITING:
            self._ledger._leave_waiting(self)
        else:
            self.first_token()
            self._ledger._leave_running()
        self._phase = _Phase.GONE


class LoadLedger:
    """What this process has placed on one worker and not seen the end of."""

    def __init__(self, clock: Callable[[], float] = time.monotonic, *, slice_s: float = math.inf) -> None:
        """`clock` is one for the whole process: versions of records come from it, and grow from ledger to ledger.

        `slice_s`: of the slices of the worker, infinite for one that does not slice.
        """
        self._clock = clock
        self._slice_us = slice_s * _MICRO
        self._waiting_us = [0] * NUM_WAITING_CLASSES
        self._prefilling: dict[LedgerEntry, None] = {}
        self._counted_down_at = clock()
        self._version = 0
        self._idle_since = float("-inf")
        self.num_waiting = 0
        self.num_running = 0
        """Started and not ended."""
        self.recent_tokens = 0.0
        """Prompt tokens that this process placed there of late; `load_table.LoadTable` keeps it."""

    def place(self, prefill_s: float) -> LedgerEntry:
        """A generation that is to be sent; it counts until its entry is gone."""
        return LedgerEntry(self, prefill_s)

    @property
    def num_prefilling(self) -> int:
        """Started and without a token."""
        return len(self._prefilling)

    def ahead(self) -> tuple[float, tuple[float, ...]]:
        """What is left of the prefills it has started, up to the end of the slice that runs now; and what waits.

        That is prefill seconds by WAITING_CLASSES_S: of what it has not started, and of sliced ones after this slice.
        """
        if not self._prefilling:
            return 0.0, self._waiting_with(()) if self.num_waiting else NO_WAITING
        rest_us, sliced_us = self._started()
        return rest_us / _MICRO, self._waiting_with(sliced_us)

    def prefilling_s(self) -> float:
        """The first part of `ahead`."""
        return self.ahead()[0]

    def waiting_s(self) -> tuple[float, ...]:
        """The second part of `ahead`."""
        return self.ahead()[1]

    def ahead_s(self) -> float:
        """Seconds of prefill of all that is in it."""
        self._count_down()
        return (sum(self._waiting_us) + sum(entry._left_us for entry in self._prefilling)) / _MICRO

    @property
    def is_idle(self) -> bool:
        return not self.num_waiting and not self.num_running

    def needs_report(self) -> bool:
        """Whether a record tells anything: one of nothing does as long as one of something may stand."""
        return not self.is_idle or self._clock() - self._idle_since < LOAD_RECORD_S

    def record(self) -> ProxyLoad:
        """The load of now, with a higher version than any before."""
        self._version = max(self._version + 1, int(self._clock() * 1e9))
        rest_s, waiting_s = self.ahead()
        return ProxyLoad(
            version=self._version,
            running=self.num_running,
            prefilling_s=rest_s,
            waiting_s=waiting_s,
            recent_tokens=self.recent_tokens,
        )

    def _enter_waiting(self, entry: LedgerEntry) -> None:
        self.num_waiting += 1
        self._waiting_us[entry._waiting_class] += entry._left_us

    def _leave_waiting(self, entry: LedgerEntry) -> None:
        self.num_waiting -= 1
        self._waiting_us[entry._waiting_class] -= entry._left_us
        self._note_idle()

    def _enter_prefilling(self, entry: LedgerEntry) -> None:
        self._count_down()
        self.num_running += 1
        self._prefilling[entry] = None

    def _leave_prefilling(self, entry: LedgerEntry) -> None:
        self._count_down()
        del self._prefilling[entry]

    def _leave_running(self) -> None:
        self.num_running -= 1
        self._note_idle()

    def _note_idle(self) -> None:
        if self.is_idle:
            self._idle_since = self._clock()

    def _started(self) -> tuple[float, Sequence[float]]:
        """Microseconds to the end of the slice that runs now, and what is left of each sliced prefill after it."""
        self._count_down()
        rest_us, sliced = 0.0, list[LedgerEntry]()
        for entry in self._prefilling:
            if self._is_sliced(entry):
                sliced.append(entry)
            else:
                rest_us += entry._left_us
        sliced_us = [float(entry._left_us) for entry in sliced]
        if sliced and not rest_us:
            first = min(sliced, key=self._place)
            rest_us = self._slice_us - (first._prefill_us - first._left_us) % self._slice_us
            sliced_us[sliced.index(first)] -= rest_us
        return rest_us, sliced_us

    def _waiting_with(self, sliced_us: Sequence[float]) -> tuple[float, ...]:
        if not self.num_waiting and not sliced_us:
            return NO_WAITING
        by_class: list[float] = list(self._waiting_us)
        for left_us in sliced_us:
            by_class[waiting_class(left_us / _MICRO)] += left_us
        return tuple(micros / _MICRO for micros in by_class)

    def _is_sliced(self, entry: LedgerEntry) -> bool:
        """Whether it makes room for others after its slice; the last of it is not cut any more."""
        return entry._left_us > PASSING * self._slice_us

    def _place(self, entry: LedgerEntry) -> int:
        """In which order the worker computes what it has started: least first."""
        return entry._left_us if self._is_sliced(entry) else 0

    def _count_down(self) -> None:
        now = self._clock()
        passed_us = round((now - self._counted_down_at) * _MICRO)
        self._counted_down_at = now
        if passed_us <= 0:
            return
        # Stable: of those that are not sliced, whoever started first goes first.
        for entry in sorted(self._prefilling, key=self._place) if len(self._prefilling) > 1 else self._prefilling:
            if passed_us <= 0:
                break
            taken_us = min(entry._left_us, passed_us)
            entry._left_us -= taken_us
            passed_us -= taken_us
