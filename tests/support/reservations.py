"""Places on workers for tests without a worker: links that are not run, and what a generation tells of itself."""

from __future__ import annotations

from collections.abc import Callable
from typing import cast

from proxy.load_ledger import LedgerEntry, LoadLedger
from proxy.reservation import Reservation, ReservedChoice
from proxy.tokenizer_fetch import Tokenizers
from proxy.warnings_log import QuietLog
from proxy.worker_link import WorkerLink
from tests.support.worker_records import worker_record


def idle_link(
    worker_id: str, *, incarnation: int = 1, clock: Callable[[], float] | None = None, **fields: object
) -> WorkerLink:
    """A link that is not run: it fetches, connects and logs nothing. `fields` of its record."""
    record = worker_record(worker_id=worker_id, incarnation=incarnation, **fields)
    link = WorkerLink(record, cast(Tokenizers, None), cast(QuietLog, None))
    if clock is not None:
        link.ledger = LoadLedger(clock)
    return link


class RecordedChoice(ReservedChoice):
    """Keeps the calls instead of a place."""

    def __init__(self) -> None:
        super().__init__(cast(Reservation, None), cast(LedgerEntry, None))
        self.calls: list[str] = []

    def started(self) -> None:
        self.calls.append("started")

    def first_token(self) -> None:
        self.calls.append("first token")

    def gone(self) -> None:
        self.calls.append("gone")
