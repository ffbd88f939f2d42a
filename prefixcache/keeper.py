"""The keeper: removes what dead workers left in the index and in the registry.

Every proxy process runs one; per namespace the index elects one of them. Only the dead go: a lease that ended merely
hides its incarnation until somebody has watched it gone for DEAD_AFTER_S, and a record until RECORD_DEAD_AFTER_S.

    turn   read all records ─► sweep each namespace ─► again those with more, 5 ms apart ─► next turn after 1 s
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Collection
from typing import NoReturn, Protocol, TypeVar

from prefixcache.errors import IndexUnavailable
from prefixcache.index.base import PrefixIndex
from prefixcache.limits import KEEPER_PAUSE_S, KEEPER_S, RECORD_DEAD_AFTER_S, SWEEP_PAUSE_S
from prefixcache.registry import Registry, WorkerRecord

logger = logging.getLogger(__name__)

T = TypeVar("T")


class KeptStore(Protocol):
    """What is kept clean."""

    def index(self, namespace: str) -> PrefixIndex: ...

    def registry(self) -> Registry: ...


class Keeper:
    """Never ends by itself; a store that does not answer is waited for."""

    def __init__(
        self,
        store: KeptStore,
        *,
        keeper_id: str,
        namespaces: Collection[str] = (),
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`namespaces`: those to be kept clean though no worker registers in them."""
        self._store = store
        self._keeper_id = keeper_id
        self._clock = clock
        self._always = frozenset(namespaces)
        self._named_at_s: dict[str, float] = {}
        """When a record last named each namespace, or it was first found: the leases in one that nobody names any more
        may still have to be dead."""
        self._gone_since_s: dict[WorkerRecord, float] = {}
        self._read_at_s: float | None = None
        self._failure: IndexUnavailable | None = None
        self._was_available = True

    async def run(self) -> NoReturn:
        while True:
            begun_s = self._clock()
            await self.turn()
            await asyncio.sleep(max(begun_s + KEEPER_PAUSE_S - self._clock(), 0.0))

    async def turn(self) -> None:
        """Reads the records once and sweeps for KEEPER_PAUSE_S at most."""
        end_s = self._clock() + KEEPER_PAUSE_S
        self._failure = None
        await self._guarded(self._look_after_records())
        unfinished = set(self._named_at_s)
        while unfinished:
            for namespace in sorted(unfinished):
                if not await self._guarded(self._sweep(namespace)):
                    unfinished.discard(namespace)
            if self._clock() >= end_s:
                break
            if unfinished:
                await asyncio.sleep(SWEEP_PAUSE_S)
        self._tell_changes()

    async def _look_after_records(self) -> None:
        registry = self._store.registry()
        workers, namespaces = await registry.workers(), await registry.namespaces()
        now_s = self._clock()
        if self._read_at_s is None or now_s - self._read_at_s > KEEPER_S:
            # Nobody watched: they may have had leases in the meantime.
            self._gone_since_s.clear()
            self._named_at_s = dict.fromkeys(self._named_at_s, now_s)
        self._read_at_s = now_s
        self._named_at_s = dict.fromkeys(namespaces, now_s) | self._named_at_s
        self._named_at_s |= dict.fromkeys((*self._always, *(record.namespace for record in workers)), now_s)
        self._gone_since_s = {
            record: self._gone_since_s.get(record, now_s) for record, is_live in workers.items() if not is_live
        }
        for record, gone_since_s in self._gone_since_s.items():
            if now_s - gone_since_s >= RECORD_DEAD_AFTER_S:
                await registry.withdraw(record)
                logger.info(
                    "removed the record of worker %s: no lease for %.0f s", record.worker_id, now_s - gone_since_s
                )

    async def _sweep(self, namespace: str) -> bool:
        """Whether there is more."""
        answer = await self._store.index(namespace).sweep(self._keeper_id)
        if answer.dead_incarnations:
            logger.info("removed %d dead incarnations from namespace %s", answer.dead_incarnations, namespace)
        unnamed_s = self._clock() - self._named_at_s[namespace]
        if answer.status == "idle" and unnamed_s >= RECORD_DEAD_AFTER_S:
            await self._store.registry().forget_namespace(namespace)
            del self._named_at_s[namespace]
        return answer.status == "more"

    async def _guarded(self, call: Awaitable[T]) -> T | None:
        """What the call returns, None if it failed: whatever goes wrong, the keeper goes on."""
        try:
            return await call
        except IndexUnavailable as error:
            self._failure = error
        except Exception:
            logger.exception("the keeper failed and goes on")
        return None

    def _tell_changes(self) -> None:
        if self._failure is not None and self._was_available:
            logger.info("the keeper waits for the store: %s", self._failure)
        elif self._failure is None and not self._was_available:
            logger.info("the keeper goes on")
        self._was_available = self._failure is None
