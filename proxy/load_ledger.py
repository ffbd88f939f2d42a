"""The load that this proxy process has put on one worker, generation by generation.

    placed ──► waiting ──started──► prefilling ──first token──► running ──► gone
               prefill seconds,      what is left of them,        counted
               by class              counted down with time
       └────────────┴──────────────────────┴────────────────────────┴──────► gone, whatever ends it

Nothing is sent from here: `record` is what the index is told. Seconds are kept as whole microseconds, so that what was
added is taken away exactly and an empty ledger says zero.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from enum import Enum

from prefixcache.limits import LOAD_RECORD_S
from prefixcache.load import NUM_WAITING_CLASSES, ProxyLoad, waiting_class

_MICRO = 1_000_000


class _Phase(Enum):
    WAITING = "waiting"
    PREFILLING = "prefilling"
    RUNNING = "running"
    GONE = "gone"


class LedgerEntry:
    """One generation, owned by one scope; a phase that is past is never entered again, and each call may come twice."""

    __slots__ = ("_ledger", "_left_us", "_phase", "_waiting_class")

    def __init__(self, ledger: LoadLedger, prefill_s: float) -> None:
        self._ledger = ledger
        self._phase = _Phase.WAITING
        self._left_us = round(prefill_s * _MICRO)
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

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        """`clock` is one for the whole process: versions of records come from it, and grow from ledger to ledger."""
        self._clock = clock
        self._waiting_us = [0] * NUM_WAITING_CLASSES
        self._prefilling: dict[LedgerEntry, None] = {}
        self._counted_down_at = clock()
        self._version = 0
        self._idle_since = float("-inf")
        self.num_waiting = 0
        self.num_running = 0
        """Started and not ended."""

    def place(self, prefill_s: float) -> LedgerEntry:
        """A generation that is to be sent; it counts until its entry is gone."""
        return LedgerEntry(self, prefill_s)

    @property
    def waiting_s(self) -> float:
        """Prefill seconds of what the worker has not started."""
        return sum(self._waiting_us) / _MICRO if self.num_waiting else 0.0

    def prefilling_s(self) -> float:
        """What is left of the prefills it has started."""
        if not self._prefilling:
            return 0.0
        self._count_down()
        return sum(entry._left_us for entry in self._prefilling) / _MICRO

    def ahead_s(self) -> float:
        """Seconds of prefill of all that is in it."""
        return self.prefilling_s() + self.waiting_s

    @property
    def is_idle(self) -> bool:
        return not self.num_waiting and not self.num_running

    def needs_report(self) -> bool:
        """Whether a record tells anything: one of nothing does as long as one of something may stand."""
        return not self.is_idle or self._clock() - self._idle_since < LOAD_RECORD_S

    def record(self) -> ProxyLoad:
        """The load of now, with a higher version than any before."""
        self._version = max(self._version + 1, int(self._clock() * 1e9))
        return ProxyLoad(
            version=self._version,
            running=self.num_running,
            prefilling_s=self.prefilling_s(),
            waiting_s=tuple(micros / _MICRO for micros in self._waiting_us),
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

    def _count_down(self) -> None:
        """A worker prefills in the order in which it started: time is taken off the first ones first."""
        now = self._clock()
        passed_us = round((now - self._counted_down_at) * _MICRO)
        self._counted_down_at = now
        for entry in self._prefilling:
            if passed_us <= 0:
                break
            taken_us = min(entry._left_us, passed_us)
            entry._left_us -= taken_us
            passed_us -= taken_us
