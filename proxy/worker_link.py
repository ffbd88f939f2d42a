"""One registered worker as seen from this proxy: its record, its stream, its load."""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Callable, Sequence

from prefixcache.errors import PrefixCacheError
from prefixcache.limits import (
    REANNOUNCE_JITTER_S,
    RECONNECT_FIRST_S,
    RECONNECT_MOST_S,
    WORKER_KNOWS_S,
    WORKER_SILENCE_S,
)
from prefixcache.protocol import MAJOR, MINOR, Beat, Hello
from prefixcache.registry import WorkerRecord
from prefixcache.rendering.renderer import Renderer
from prefixcache.routing.slices import SLICE_S
from proxy.fault_breaker import FaultBreaker
from proxy.load_ledger import LoadLedger
from proxy.pulse import Pulse, until_hung
from proxy.recent_placements import WorkerProcess
from proxy.tokenizer_fetch import Tokenizers
from proxy.warnings_log import QuietLog
from proxy.worker_stream import WorkerStream, connected_stream

_logger = logging.getLogger(__name__)


def same_place(a: WorkerRecord, b: WorkerRecord) -> bool:
    """Whether a stream to the one may go on as a stream to the other.

    Also where the process is another one by now: a stream that stands is one to whoever listens there today, and may
    have been made anew before the new record was read.
    """
    return (a.address, a.namespace, a.tokenizer_fingerprint) == (b.address, b.namespace, b.tokenizer_fingerprint)


class WorkerLink:
    """Keeps one stream to one worker; `run` connects again whenever it is lost."""

    def __init__(
        self,
        record: WorkerRecord,
        tokenizers: Tokenizers,
        log: QuietLog,
        worker_token: bytes | None = None,
        *,
        on_idle: Callable[[WorkerLink], None] = lambda _: None,
        on_lost: Callable[[], object] = lambda: None,
        measured_rate: Callable[[WorkerLink], float | None] = lambda _: None,
    ) -> None:
        """`on_idle` is called with each beat of a worker that owes nobody a first token.

        `on_lost`: each time that the stream ends and the worker has not taken leave before.
        `measured_rate`: tokens a second that the worker prefills, None while nobody knows.
        """
        self.record = record
        self.incarnation = record.incarnation
        self.ledger = LoadLedger(slice_s=SLICE_S)
        """What this proxy has placed on the worker, sent or about to be."""
        self.breaker = FaultBreaker()
        """Of the process behind the stream."""
        self.renderer: Renderer | None = None
        self._tokenizers = tokenizers
        self._log = log
        self._worker_token = worker_token
        self._on_idle = on_idle
        self._on_lost = on_lost
        self._measured_rate = measured_rate
        self._stream: WorkerStream | None = None
        self._waiting_elsewhere = 0
        self._running_elsewhere = 0
        self._pulse = Pulse(0.0)
        self._renewed_at = float("-inf")
        self._started_at = record.started_at
        """Of the process behind the stream, or the record's while there is none."""
        self._tells_process = False
        """Whether the worker has said itself which process it is, as from protocol 1.3 on."""
        self.is_succeeded = False
        """Whether another worker is registered where this one listened: a stream would be one to that."""

    @property
    def worker_id(self) -> str:
        return self.record.worker_id

    @property
    def stream(self) -> WorkerStream | None:
        """The stream past its hello, None while there is none."""
        stream = self._stream
        return stream if stream is not None and stream.open else None

    @property
    def ready(self) -> bool:
        """Whether it takes requests."""
        stream = self.stream
        return self.renderer is not None and stream is not None and not stream.is_draining and not self.is_succeeded

    @property
    def is_silent(self) -> bool:
        """No beat, or no step with something to do, for so long that it should get no further request."""
        if self.stream is None:
            return False
        now, rate = asyncio.get_running_loop().time(), self._measured_rate(self)
        return self._pulse.is_suspect(now, prefill_rate=rate)

    @property
    def is_set_aside(self) -> bool:
        """It failed so much that others are asked first, but for a trial now and then, one request at a time."""
        breaker = self.breaker
        return breaker.is_open and not (breaker.is_trial_due and self.ledger.is_idle)

    @property
    def namespace(self) -> str:
        return self.record.namespace

    @property
    def max_model_len(self) -> int:
        return self.record.max_model_len

    @property
    def claiming(self) -> Sequence[int]:
        return (self.incarnation,)

    @property
    def num_claims(self) -> int:
        return 0

    @property
    def claimed_capacity_tokens(self) -> float | None:
        return None

    @property
    def block_size(self) -> int:
        return self.record.block_size

    @property
    def prefill_rate(self) -> float | None:
        """The worker measures it itself and tells it with its load."""
        return None

    @property
    def process(self) -> WorkerProcess:
        """What holds the cache, under whatever incarnation it is known."""
        return WorkerProcess(worker_id=self.record.worker_id, started_at=self._started_at)

    @property
    def is_reannouncing(self) -> bool:
        """Whether the process took a new incarnation so lately that its claims may not all be in the index again."""
        return time.monotonic() - self._renewed_at < 2 * REANNOUNCE_JITTER_S

    @property
    def own_waiting(self) -> int:
        """Requests of this proxy on the stream that the worker has not started."""
        return self._stream.num_waiting if self._stream is not None else 0

    @property
    def own_running(self) -> int:
        return self._stream.num_running if self._stream is not None else 0

    @property
    def num_waiting(self) -> int:
        """Requests in the ledger that are not started, and those of other proxies by the worker's last beat."""
        return self.ledger.num_waiting + self._waiting_elsewhere

    @property
    def num_running(self) -> int:
        return self.ledger.num_running + self._running_elsewhere

    def update(self, record: WorkerRecord) -> None:
        """Takes over a newer record of the same place; the stream's own word on the incarnation is fresher."""
        self.record = record
        self.is_succeeded = False
        stream = self.stream
        if stream is None:
            self._take_process(record.started_at)
            self._renew(record.incarnation)
            return
        if not self._tells_process:
            # Who has registered listens there: the stream is to it, or to one that is gone and will be seen to be.
            self._take_process(record.started_at)
            stream.breaker = self.breaker
        if record.started_at == self._started_at and record.incarnation > self.incarnation:
            # The record of the process before stands until the one behind the stream has registered.
            self._renew(record.incarnation)

    async def run(self) -> None:
        """Never returns; cancelled by its owner."""
        pause_s = RECONNECT_FIRST_S
        while True:
            try:
                self.renderer = await self._tokenizers.renderer(self.record.tokenizer_fingerprint, self.record.address)
                await self._hold_stream()
                pause_s = RECONNECT_FIRST_S
            except (OSError, TimeoutError, UnicodeError, OverflowError, PrefixCacheError) as error:
                # UnicodeError: the address names no host; OverflowError: no port.
                self._log.warning(
                    f"connect {self.worker_id}",
                    "worker %s at %s is not reachable: %s",
                    self.worker_id,
                    self.record.address,
                    str(error) or type(error).__name__,
                )
            except Exception:
                _logger.exception("link to worker %s failed", self.worker_id)
            # Full jitter over the upper half: restarted proxies must not knock in step.
            await asyncio.sleep(pause_s * random.uniform(0.5, 1.0))
            pause_s = min(2 * pause_s, RECONNECT_MOST_S)

    async def _hold_stream(self) -> None:
        """Connects, serves until the stream is lost."""
        mine = Hello(major=MAJOR, minor=MINOR, namespace=self.record.namespace)
        self._pulse = Pulse(asyncio.get_running_loop().time())
        async with connected_stream(
            self.record.address,
            self.worker_id,
            mine,
            self._take_beat,
            token=self._worker_token,
            breaker=self.breaker,
        ) as (stream, hello):
            self._tells_process = bool(hello.started_at)
            self._take_process(hello.started_at or self.record.started_at)
            stream.breaker = self.breaker
            self._pulse.connected(asyncio.get_running_loop().time())
            self._renew(hello.incarnation)
            self._stream = stream
            _logger.info("worker %s connected at %s", self.worker_id, self.record.address)
            watch = asyncio.create_task(self._cut_when_hung(stream))
            try:
                await asyncio.shield(stream.closed)
            finally:
                watch.cancel()
                await asyncio.gather(watch, return_exceptions=True)
                self._stream = None
                self._waiting_elsewhere = self._running_elsewhere = 0
        if stream.is_draining:
            _logger.info("worker %s has taken leave", self.worker_id)
        else:
            _logger.warning("worker %s is lost: it ended, or was cut off, without taking leave", self.worker_id)
            self._on_lost()

    def _take_process(self, started_at: float) -> None:
        """A process that is another one by now has none of the faults of the one before."""
        if started_at != self._started_at:
            self._started_at = started_at
            self.breaker = FaultBreaker()

    async def _cut_when_hung(self, stream: WorkerStream) -> None:
        wrong = await until_hung(self._hang)
        _logger.warning("worker %s %s: its stream is cut, what it had goes on elsewhere", self.worker_id, wrong)
        stream.cut(wrong)

    def _hang(self, now: float) -> str | None:
        """What the worker does not do; one that makes no step beats on, and would be taken for idle once it is cut."""
        stream, pulse = self.stream, self._pulse
        if stream is None:
            return None
        if pulse.is_silent(now):
            return f"sent no beat for {WORKER_SILENCE_S:g} s"
        if pulse.is_stuck(now, prefill_rate=self._measured_rate(self), depth_tokens=self.max_model_len):
            self.breaker.hung()
            return f"made no step for {pulse.stood_still_s(now):.0f} s"
        if pulse.is_forgetful(now):
            self.breaker.hung()
            return "counts fewer requests than it has of ours"
        return None

    def _take_beat(self, beat: Beat) -> None:
        self._renew(beat.incarnation)
        now, stream = asyncio.get_running_loop().time(), self.stream
        self._pulse.beat(
            beat,
            now,
            num_ours=stream.num_sent_before(now - WORKER_KNOWS_S) if stream is not None else 0,
            tells_prefilling=stream is not None and stream.knows_if_waiting,
        )
        self._waiting_elsewhere = max(0, beat.waiting - self.own_waiting)
        self._running_elsewhere = max(0, beat.running - self.own_running)
        if stream is not None and stream.knows_if_waiting and not beat.waiting and not beat.prefilling:
            self._on_idle(self)

    def _renew(self, incarnation: int) -> None:
        """The same process under another incarnation: what it holds is the same, what it claims begins anew."""
        if incarnation != self.incarnation:
            self.incarnation = incarnation
            self._renewed_at = time.monotonic()
