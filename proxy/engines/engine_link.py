"""One engine as seen from this proxy: whether it is there, what it serves, its cache, its load.

    unknown ──a probe succeeds──► up ◄──a probe succeeds── down       probes: every ENGINE_ASK_S while it is up, else
                                   │                        ▲         after 0.25 s and up to 5 s
                                   └─two probes failed, or ─┘
                                     a request was refused

An engine tells nobody when its cache was lost. It is taken for lost, and what was claimed of it begins anew, when its
process is another one than before, when a counter fell, and, as long as it tells no start time, when it was down.
"""

from __future__ import annotations

import asyncio
import logging
import random
import sys
import time
import zlib
from collections.abc import Callable, Sequence
from typing import Protocol

from prefixcache.errors import EngineUnreachable, Unavailable
from prefixcache.limits import (
    ENGINE_ASK_S,
    ENGINE_FAILED_PROBES,
    ENGINE_RETRY_FIRST_S,
    ENGINE_RETRY_MOST_S,
    ENGINE_STUCK_S,
    ENGINE_SUSPECT_S,
)
from prefixcache.metrics import ProxyMetrics
from prefixcache.types import KV_BLOCK_SIZE
from proxy.engines.engine_metrics import EngineMetrics
from proxy.engines.engine_model import EngineModel
from proxy.engines.held_queue import HeldQueue
from proxy.engines.http_pool import HttpPool
from proxy.engines.prefill_estimate import PrefillEstimate
from proxy.engines.probe import EngineReport
from proxy.load_ledger import LoadLedger
from proxy.recent_placements import WorkerProcess
from proxy.warnings_log import QuietLog

_logger = logging.getLogger(__name__)
FIRST_STAND_IN = 1 << 31
"""Incarnations have 30 bits, and what names them has 32."""
_SAME_START_S = 1.0
"""Start times of one process differ by less: they are computed from the machine's clock, which is set now and then."""


class Claims(Protocol):
    """What a link needs of `engine_claims.EngineClaims`."""

    @property
    def anchor(self) -> int:
        """Incarnation on which load and pending claims of the engine stand; 0 while the index gave none."""

    @property
    def generations(self) -> Sequence[int]:
        """Incarnations on which its claims stand, newest first."""

    @property
    def num_claims(self) -> int:
        """Index blocks that it is claimed to hold."""

    @property
    def kept_share(self) -> float:
        """Of the engine's capacity, to which claims are kept by what it reported."""

    @property
    def is_reannouncing(self) -> bool:
        """Whether the index does not have, or lost, what was claimed."""

    def begin_anew(self) -> None:
        """The engine's cache is gone, and with it all that was claimed."""

    def claim(self, chain: Sequence[int], *, capacity_blocks: int | None, engine_blocks_per_index_block: float) -> None:
        """The engine has computed this prompt."""

    def observe(self, *, predicted_tokens: int, cached_tokens: int | None, index_block_tokens: float) -> None:
        """What was predicted by claims alone, and what the engine says it reused."""

    def note_hits(self, counted_tokens: float | None) -> None:
        """What the engine counts of cached tokens since it began; None if it does not."""


class Asks(Protocol):
    """What a link needs of `probe.Prober`."""

    async def probe(self) -> EngineReport:
        """Raises Unavailable."""

    def forget(self) -> None: ...


class EngineLink:
    """Keeps asking one engine; a `Destination`."""

    def __init__(
        self,
        *,
        engine_id: str,
        url: str,
        pool: HttpPool,
        prober: Asks,
        claims: Claims,
        namespace: str,
        capacity_blocks: int | None,
        metrics: ProxyMetrics,
        log: QuietLog,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`capacity_blocks`: of its KV cache, as long as the engine itself does not tell; None takes it for ample."""
        self.engine_id = engine_id
        self.url = url
        self.pool = pool
        self.claims = claims
        self.ledger = LoadLedger(clock)
        """What this process has placed on it and not seen the end of."""
        self.held = HeldQueue(clock=clock)
        self.estimate = PrefillEstimate()
        self._prober = prober
        self._namespace = namespace
        self._configured_capacity_blocks = capacity_blocks
        self._metrics = metrics
        self._log = log
        self._clock = clock
        self._stand_in = FIRST_STAND_IN + zlib.crc32(engine_id.encode()) % FIRST_STAND_IN
        self._report: EngineReport | None = None
        """Of the last successful probe."""
        self._names: frozenset[str] = frozenset()
        self._is_up = False
        self._num_failed = 0
        self._went_down = False
        self._probing_since: float | None = None
        self._progress_at = clock()
        self._cache_since = time.time()
        self.answered_at = 0.0
        """time.time() of the last successful probe, 0 before the first one."""
        self._elsewhere = (0, 0)
        self._wake = asyncio.Event()
        self.on_change: Callable[[], None] = _nothing
        """Called when it came up, or serves models that it did not serve before."""
        self.failure: str | None = None
        """Why it is down; None while it is up, and before the first probe ended."""

    @property
    def worker_id(self) -> str:
        return self.engine_id

    @property
    def namespace(self) -> str:
        return self._namespace

    @property
    def incarnation(self) -> int:
        """Until the index gives one: a number of its own that no index gives, so that nothing is kept for it there."""
        return self.claims.anchor or self._stand_in

    @property
    def claiming(self) -> Sequence[int]:
        return self.claims.generations

    @property
    def process(self) -> WorkerProcess:
        return WorkerProcess(worker_id=self.engine_id, started_at=self._cache_since)

    @property
    def is_reannouncing(self) -> bool:
        return self.claims.is_reannouncing

    @property
    def is_up(self) -> bool:
        return self._is_up

    @property
    def was_ever_up(self) -> bool:
        return self._report is not None

    @property
    def is_slow(self) -> bool:
        """Late with its list of models, or silent with requests in hand: it should get no further one."""
        now = self._clock()
        is_late = self._probing_since is not None and now - self._probing_since > ENGINE_SUSPECT_S
        was_late = self._report is not None and self._report.latency_s > ENGINE_SUSPECT_S
        is_stuck = self.ledger.num_running > 0 and now - self._progress_at > ENGINE_STUCK_S
        return is_late or was_late or is_stuck

    @property
    def models(self) -> tuple[EngineModel, ...]:
        """What it serves, or while it is down, served."""
        return self._report.models if self._report is not None else ()

    def knows(self, name: str) -> bool:
        """Whether it serves a model of that name, or did when it was last up."""
        return name in self._names

    @property
    def block_size(self) -> int:
        """Tokens of one of its KV blocks."""
        told = self._report.block_size if self._report is not None else None
        return told or KV_BLOCK_SIZE

    @property
    def capacity_blocks(self) -> int | None:
        """KV blocks of its cache; None if neither it nor the settings tell."""
        told = self._report.capacity_tokens if self._report is not None else None
        return max(told // self.block_size, 1) if told else self._configured_capacity_blocks

    @property
    def claimed_capacity_tokens(self) -> float | None:
        blocks = self.capacity_blocks
        return blocks * self.block_size * self.claims.kept_share if blocks is not None else None

    @property
    def num_claims(self) -> int:
        return self.claims.num_claims

    @property
    def caches_prefixes(self) -> bool | None:
        """None if it does not tell."""
        return self._report.caches_prefixes if self._report is not None else None

    @property
    def max_model_len(self) -> int:
        """The longest context of its models; no limit where it tells none: it refuses what is too long itself."""
        lengths = [model.max_model_len for model in self.models]
        return max((length or sys.maxsize for length in lengths), default=sys.maxsize)

    @property
    def metrics(self) -> EngineMetrics:
        """What its /metrics said last."""
        return self._report.metrics if self._report is not None else EngineMetrics()

    @property
    def prefill_rate(self) -> float | None:
        return self.estimate.prefill_rate

    @property
    def tokens_per_byte(self) -> float:
        return self.estimate.tokens_per_byte

    @property
    def num_waiting(self) -> int:
        """Requests in the ledger that are not started, and those of others by the engine's own count."""
        return self.ledger.num_waiting + self._elsewhere[0]

    @property
    def num_running(self) -> int:
        return self.ledger.num_running + self._elsewhere[1]

    def note_progress(self) -> None:
        """A byte of an answer arrived; called for each piece, so it does nothing else."""
        self._progress_at = self._clock()

    def note_failure(self, error: Unavailable) -> None:
        """It took no connection for a request: it is down until a probe says otherwise, and that is asked at once."""
        if self._is_up:
            self._go_down(str(error))
            self._wake.set()

    def note_lost_cache(self, why: str) -> None:
        """What was claimed of it begins anew."""
        _logger.warning("engine %s: %s, what it had cached is taken for lost", self.engine_id, why)
        self._cache_since = time.time()
        self._prober.forget()
        self.claims.begin_anew()

    def look_soon(self) -> None:
        """It was told to change: what it serves and holds is asked at once."""
        self._wake.set()

    async def run(self) -> None:
        """Never returns; cancelled by its owner."""
        pause_s = ENGINE_RETRY_FIRST_S
        while True:
            was_up = self._is_up
            try:
                await self.look()
            except Exception:
                _logger.exception("probing engine %s failed", self.engine_id)
            if self._is_up:
                pause_s = ENGINE_RETRY_FIRST_S
                await self._pause(ENGINE_ASK_S)
            else:
                if was_up:
                    pause_s = ENGINE_RETRY_FIRST_S
                # Full jitter over the upper half: proxies must not knock in step.
                await asyncio.sleep(pause_s * random.uniform(0.5, 1.0))
                pause_s = min(2 * pause_s, ENGINE_RETRY_MOST_S)

    async def look(self) -> None:
        """One probe and what follows from it."""
        self._wake.clear()
        self._probing_since = self._clock()
        try:
            report = await self._prober.probe()
        except Unavailable as error:
            self._take_failure(error)
        else:
            self._take(report)
        finally:
            self._probing_since = None

    async def _pause(self, seconds: float) -> None:
        """Ends early when a request found the engine down."""
        try:
            async with asyncio.timeout(seconds * random.uniform(0.9, 1.1)):
                await self._wake.wait()
        except TimeoutError:
            pass

    def _take(self, report: EngineReport) -> None:
        before = self._report
        if before is not None and lost_its_cache(before.metrics, report.metrics, was_down=self._went_down):
            self.note_lost_cache("it started anew")
        if before is None or before.metrics.computed_tokens != report.metrics.computed_tokens:
            self.note_progress()
        if not self.ledger.num_running:
            self.note_progress()  # who has nothing in hand is not late with it
        if not self._is_up:
            names = ", ".join(model.name for model in report.models[:3]) + (", ..." if len(report.models) > 3 else "")
            _logger.info("engine %s is up and serves %s", self.engine_id, names or "no model")
            if report.caches_prefixes is False:
                _logger.warning("engine %s runs without prefix caching: nothing is gained there", self.engine_id)
        names_before = self._names if self._is_up else frozenset()
        self._report, self._names = report, frozenset(model.name for model in report.models)
        self.answered_at = time.time()
        self.claims.note_hits(report.metrics.hit_tokens)
        self._elsewhere = requests_of_others(report.metrics, own=self.ledger.num_running)
        is_new = not self._is_up
        self._is_up, self._went_down, self._num_failed, self.failure = True, False, 0, None
        if is_new or not self._names <= names_before:
            self.on_change()

    def _take_failure(self, error: Unavailable) -> None:
        self._metrics.engine_probe_failures.labels(self.engine_id).inc()
        self._num_failed += 1
        if self._is_up and self._num_failed >= ENGINE_FAILED_PROBES:
            self._go_down(str(error))
        elif not self._is_up:
            self.failure = str(error)
            self._log.warning(f"engine {self.engine_id}", "%s", self.failure)

    def _go_down(self, why: str) -> None:
        self._is_up, self._went_down, self.failure = False, True, why
        self._elsewhere = (0, 0)
        _logger.warning("engine %s is down: %s", self.engine_id, why)
        self.held.turn_away(EngineUnreachable(f"engine {self.engine_id} is down: {why}"))


def _nothing() -> None:
    """What follows from a change, until somebody waits for one."""


def lost_its_cache(before: EngineMetrics, after: EngineMetrics, *, was_down: bool) -> bool:
    """Whether an engine that told this and then that has lost its KV cache in between."""
    pairs = (
        (before.queried_tokens, after.queried_tokens),
        (before.hit_tokens, after.hit_tokens),
        (before.computed_tokens, after.computed_tokens),
    )
    if any(old is not None and new is not None and new < old for old, new in pairs):
        return True
    if before.started_at is not None and after.started_at is not None:
        return abs(after.started_at - before.started_at) > _SAME_START_S
    return was_down


def requests_of_others(metrics: EngineMetrics, *, own: int) -> tuple[int, int]:
    """Waiting and running requests by the engine's count, without the `own` ones that were sent there from here."""
    waiting, running = metrics.num_waiting or 0, metrics.num_running or 0
    others = max(waiting + running - own, 0)
    return min(waiting, others), others - min(waiting, others)
