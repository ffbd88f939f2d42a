"""Places on workers for tests without a worker: links that are not run, and what a generation tells of itself."""

from __future__ import annotations

from array import array
from collections.abc import Callable
from typing import cast

from prefixcache.errors import Unavailable, WorkerFault
from prefixcache.protocol import Generate
from prefixcache.routing.slices import SLICE_S
from proxy.load_ledger import LedgerEntry, LoadLedger
from proxy.reservation import Reservation, ReservedChoice
from proxy.tokenizer_fetch import Tokenizers
from proxy.warnings_log import QuietLog
from proxy.whereabouts import Whereabouts
from proxy.worker_link import WorkerLink
from proxy.worker_stream import Sink, WorkerStream
from tests.support.worker_records import worker_record


def idle_link(
    worker_id: str, *, incarnation: int = 1, clock: Callable[[], float] | None = None, **fields: object
) -> WorkerLink:
    """A link that is not run: it fetches, connects and logs nothing. `fields` of its record."""
    record = worker_record(worker_id=worker_id, incarnation=incarnation, **fields)
    link = WorkerLink(record, cast(Tokenizers, None), cast(QuietLog, None))
    if clock is not None:
        link.ledger = LoadLedger(clock, slice_s=SLICE_S)
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


class OneWorker(Whereabouts):
    """Sends one frame on one stream, and knows of nowhere else."""

    def __init__(self, stream: WorkerStream, frame: Generate, choice: ReservedChoice) -> None:
        self.number = frame.choice
        self._one = (stream, frame)
        self._choice = choice
        self._error: Unavailable | WorkerFault | None = None
        self.output = array("I")
        self.num_faults = self.num_suspect_faults = 0
        self.num_brought_tokens = 0
        self.was_begun = False

    @property
    def choice(self) -> ReservedChoice:
        return self._choice

    @property
    def stream(self) -> WorkerStream:
        return self._one[0]

    @property
    def sent(self) -> tuple[WorkerStream, Generate]:
        return self._one

    @property
    def vocab_size(self) -> int:
        return 512

    @property
    def num_prompt_tokens(self) -> int:
        return len(self._one[1].prompt_ids) // 4

    @property
    def is_movable(self) -> bool:
        return False

    def send(self, sink: Sink) -> None:
        stream, frame = self._one
        stream.generate(frame, sink)

    def first_token(self) -> None:
        self._choice.first_token()

    def failed(self, error: Unavailable | WorkerFault) -> None:
        self._error = error
        self._choice.gone()

    def send_elsewhere(self, sink: Sink) -> None:
        assert self._error is not None, "it failed"
        raise self._error

    def count(self, outcome: str) -> None:
        """Nobody asks."""

    def tell(self, what: str) -> None:
        """Nobody reads it."""
