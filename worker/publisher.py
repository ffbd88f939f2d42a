"""Keeps registry and index true to one worker: lease, load, record, and numbered batches of the pool's net changes.

    register ──► announce the record ──► renew every LEASE_RENEWAL_S with the load, apply what changed ──► drain, close
       ▲                                          │
       └── new incarnation, everything held is ◄──┘ lease lost, answer gap or dead, another index_id, number taken
           announced again, spread over time

A batch that got no answer may or may not have been applied. It is sent again, the very same under the very same number,
until there is an answer; `old` then means that the first one had arrived.

A store that was restored from an older copy knows a smaller number than the last one it acknowledged, so the next batch
is answered `gap`. Where nothing changes, an empty batch asks for that answer every INDEX_CHECK_S.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from typing import Literal

import msgspec

from prefixcache.errors import IndexUnavailable
from prefixcache.index.base import ApplyAnswer, PrefixIndex
from prefixcache.limits import (
    INDEX_CHECK_S,
    INDEX_RETRY_S,
    LEASE_RENEWAL_S,
    LEASE_S,
    MAX_APPLY_HASHES,
    PUBLISH_PAUSE_S,
    REANNOUNCE_JITTER_S,
)
from prefixcache.load import WorkerLoad
from prefixcache.metrics import WorkerMetrics
from prefixcache.registry import Registry, WorkerRecord
from worker.index_changes import IndexChanges

logger = logging.getLogger(__name__)

_Call = Literal["lease", "record", "claims"]


class _IncarnationLost(Exception):
    """The index no longer knows this life of the cache, or something else than we told it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Batch:
    number: int
    stored: list[int]
    removed: list[int]


class Publisher:
    """The only writer of this worker's record and claims. Belongs to one event loop."""

    def __init__(
        self,
        *,
        index: PrefixIndex,
        registry: Registry,
        changes: IndexChanges,
        measure: Callable[[], WorkerLoad],
        record: WorkerRecord,
        metrics: WorkerMetrics,
        random: Random,
        reannounce_jitter_s: float = REANNOUNCE_JITTER_S,
        renewal_s: float = LEASE_RENEWAL_S,
        retry_s: float = INDEX_RETRY_S,
        pause_s: float = PUBLISH_PAUSE_S,
        check_s: float = INDEX_CHECK_S,
    ) -> None:
        """The record's incarnation is filled in here, at each registration; version and draining of the load, too."""
        self._index = index
        self._registry = registry
        self._changes = changes
        self._measure = measure
        self._record = record
        self._metrics = metrics
        for change in ("stored", "removed"):
            metrics.published_hashes.labels(change)
        self._random = random
        self._reannounce_jitter_s = reannounce_jitter_s
        self._renewal_s = renewal_s
        self._retry_s = retry_s
        self._pause_s = pause_s
        self._check_s = check_s

        self._incarnation: int | None = None
        self._index_id = ""
        self._num_loads = 0
        self._is_draining = False
        self._next_number = 1
        self._unanswered: _Batch | None = None
        self._is_announced = False
        self._restore_at = 0.0
        self._failing: set[_Call] = set()
        self._renew_at = 0.0
        self._publish_at = 0.0
        self._check_at = 0.0
        self._woken = asyncio.Event()
        self._registered = asyncio.Event()

    @property
    def incarnation(self) -> int:
        """The current one; 0 before the first registration."""
        return self._incarnation or 0

    @property
    def record(self) -> WorkerRecord:
        """What stands, or is to stand, in the registry."""
        return msgspec.structs.replace(self._record, incarnation=self.incarnation)

    async def registered(self) -> None:
        """Returns once the worker has an incarnation and its record is announced."""
        await self._registered.wait()

    def wake(self) -> None:
        """The pool has changes to publish. Called on the event loop."""
        self._woken.set()

    async def run(self) -> None:
        """Publishes until it is cancelled; `close` then takes leave."""
        after_fault = False
        while True:
            try:
                await self._live(after_fault=after_fault)
            except _IncarnationLost as error:
                logger.warning("incarnation %d is lost: %s", self.incarnation, error)
            except Exception:
                logger.exception("publisher failed and begins a new incarnation")
                self._metrics.publish_failures.inc()
            after_fault = True

    async def drain(self) -> None:
        """Tells the proxies that the worker takes nothing new: at once, and with every renewal from now on."""
        self._is_draining = True
        if self._incarnation is None:
            return
        try:
            await self._index.renew(self._incarnation, self._next_load())
        except IndexUnavailable as error:
            logger.warning("proxies not told that the worker is draining: %s", error)

    async def close(self) -> None:
        """Ends the lease and withdraws the record, as far as the store can be reached. Call it after `run` ended."""
        await self._retire()
        try:
            await self._registry.withdraw(self.record)
        except IndexUnavailable as error:
            logger.warning("record not withdrawn, its lease will expire: %s", error)

    # --- one incarnation ------------------------------------------------------------------------------------

    async def _live(self, *, after_fault: bool) -> None:
        """From registration until the incarnation is lost."""
        loop = asyncio.get_running_loop()
        if after_fault:
            await asyncio.sleep(self._retry_s)
            await self._retire()
        await self._register()
        self._renew_at = self._publish_at = loop.time()
        if after_fault:
            self._publish_at += self._random.uniform(0, self._reannounce_jitter_s)
        self._check_at = self._publish_at + self._check_s
        while True:
            if loop.time() >= self._renew_at:
                await self._renew()
                self._renew_at = loop.time() + self._renewal_s
            if loop.time() >= self._publish_at:
                await self._publish(until=self._renew_at)
            await self._sleep()

    async def _sleep(self) -> None:
        """Until there is something to send and time to send it, or the lease is due."""
        self._woken.clear()
        if self._unanswered is None and not self._changes:
            try:
                async with asyncio.timeout_at(self._renew_at):
                    await self._woken.wait()
            except TimeoutError:
                return
        due = min(self._renew_at, self._publish_at)
        await asyncio.sleep(max(due - asyncio.get_running_loop().time(), 0))

    async def _register(self) -> None:
        while True:
            try:
                registration = await self._index.register()
                break
            except IndexUnavailable as error:
                self._note("lease", error)
                await asyncio.sleep(self._retry_s)
        self._note("lease", None)
        self._incarnation, self._index_id = registration.incarnation, registration.index_id
        self._next_number, self._unanswered = 1, None
        self._changes.restart(registration.incarnation)
        await self._announce()
        logger.info("registered as incarnation %d of namespace %s", self.incarnation, self._record.namespace)

    async def _announce(self) -> None:
        """Writes the record of a new incarnation; what fails is tried again at the next renewal."""
        self._is_announced, self._restore_at = False, asyncio.get_running_loop().time() + LEASE_S
        try:
            await self._registry.announce(self.record)
        except IndexUnavailable as error:
            self._note("record", error)
        else:
            self._note("record", None)
            self._is_announced = True
            self._registered.set()

    async def _restore(self) -> None:
        """Writes the record again where it was lost, but not over that of a worker which took the name since."""
        self._restore_at = asyncio.get_running_loop().time() + LEASE_S
        try:
            await self._registry.announce(self.record, replace=False)
        except IndexUnavailable as error:
            self._note("record", error)
        else:
            self._note("record", None)

    async def _renew(self) -> None:
        if not self._is_announced:
            await self._announce()
        elif asyncio.get_running_loop().time() >= self._restore_at:
            await self._restore()
        try:
            holds_lease = await self._index.renew(self.incarnation, self._next_load())
        except IndexUnavailable as error:
            self._note("lease", error)
            return
        self._note("lease", None)
        if not holds_lease:
            raise _IncarnationLost("it has no lease any more")

    def _next_load(self) -> WorkerLoad:
        self._num_loads += 1
        return msgspec.structs.replace(self._measure(), version=self._num_loads, is_draining=self._is_draining)

    async def _publish(self, *, until: float) -> None:
        """Sends batches until nothing is left, one gets no answer, or the lease is due."""
        loop = asyncio.get_running_loop()
        while loop.time() < until:
            batch, is_resent = self._unanswered, self._unanswered is not None
            if batch is None:
                stored, removed = self._changes.take(MAX_APPLY_HASHES)
                if not stored and not removed and loop.time() < self._check_at:
                    return
                batch = self._unanswered = _Batch(number=self._next_number, stored=stored, removed=removed)
            try:
                answer = await self._index.apply(self.incarnation, batch.number, batch.stored, batch.removed)
            except IndexUnavailable as error:
                self._note("claims", error)
                self._metrics.publish_failures.inc()
                self._publish_at = loop.time() + self._retry_s
                return
            self._note("claims", None)
            self._take_answer(batch, answer, is_resent=is_resent)

    def _take_answer(self, batch: _Batch, answer: ApplyAnswer, *, is_resent: bool) -> None:
        if answer.index_id != self._index_id:
            raise _IncarnationLost(f"the index is {answer.index_id} now, it was {self._index_id}")
        if answer.status != "ok" and not (answer.status == "old" and is_resent):
            raise _IncarnationLost(f"batch {batch.number} was answered {answer.status}")
        self._unanswered = None
        self._next_number = batch.number + 1
        now = asyncio.get_running_loop().time()
        self._publish_at, self._check_at = now + self._pause_s, now + self._check_s
        self._metrics.published_hashes.labels("stored").inc(len(batch.stored))
        self._metrics.published_hashes.labels("removed").inc(len(batch.removed))

    async def _retire(self) -> None:
        """Ends the lease of the current incarnation; what cannot be reached expires by itself."""
        if self._incarnation is None:
            return
        try:
            await self._index.retire(self._incarnation)
        except IndexUnavailable as error:
            logger.warning("incarnation %d not retired, its lease will expire: %s", self.incarnation, error)

    def _note(self, call: _Call, error: IndexUnavailable | None) -> None:
        """Logs when the first of these calls begins to fail and when none does any more: a full store takes some."""
        was_failing = bool(self._failing)
        if error is None:
            self._failing.discard(call)
        else:
            self._failing.add(call)
        if bool(self._failing) == was_failing:
            return
        if error is None:
            logger.info("the index takes everything again")
        else:
            logger.warning("the index does not take everything: %s", error)
