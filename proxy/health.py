"""Is the process alive, and can a token be produced?"""

from __future__ import annotations

import time
from typing import Literal

import msgspec
from aiohttp import web

import prefixcache
from prefixcache.errors import Unavailable
from proxy.error_answers import ErrorBody, described
from proxy.fleet import Fleet
from proxy.json_answers import json_answer
from proxy.load_table import LoadTable
from proxy.store import Store


class RedisHealth(msgspec.Struct, frozen=True, kw_only=True):
    reachable: bool
    """Whether the last read of the registry was answered."""
    last_answer_s: float | None
    """Seconds since the registry last answered; null if it never did."""


class WorkerHealth(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    model: str
    address: str
    incarnation: int
    connected: bool
    ready: bool
    waiting: int
    """Requests of all proxies that it has not started."""
    running: int
    ahead_s: float
    """Seconds of prefill before a request sent now, as far as this proxy knows."""


class Health(msgspec.Struct, frozen=True, kw_only=True):
    status: str = "ok"
    version: str = prefixcache.__version__
    redis: RedisHealth
    routing: Literal["index", "own_placements"]
    """By what prompts are routed: the index, or while it does not answer, what this proxy placed itself."""
    workers: tuple[WorkerHealth, ...]


class Readiness(msgspec.Struct, frozen=True, kw_only=True):
    workers_ready: int
    error: ErrorBody | msgspec.UnsetType = msgspec.UNSET


class HealthHandlers:
    """GET /health and GET /ready."""

    def __init__(self, store: Store, fleet: Fleet, loads: LoadTable) -> None:
        self._store = store
        self._fleet = fleet
        self._loads = loads

    async def health(self, _request: web.Request) -> web.Response:
        """200 as long as the process answers; the details say how it is."""
        fleet = self._fleet
        read_at = fleet.registry_read_at
        redis = RedisHealth(
            reachable=fleet.registry_reachable,
            last_answer_s=round(time.monotonic() - read_at, 3) if read_at is not None else None,
        )
        workers = tuple(
            WorkerHealth(
                id=link.worker_id,
                model=link.record.model,
                address=link.record.address,
                incarnation=link.incarnation,
                connected=link.stream is not None,
                ready=link.ready,
                waiting=link.num_waiting,
                running=link.num_running,
                ahead_s=round(self._loads.ahead_s(link), 3),
            )
            for link in fleet.links
        )
        routing: Literal["index", "own_placements"] = "index" if self._store.index_available else "own_placements"
        return json_answer(Health(redis=redis, routing=routing, workers=workers))

    async def ready(self, _request: web.Request) -> web.Response:
        """200 if at least one worker can take a request, else 503."""
        num_ready = self._fleet.num_ready
        if num_ready:
            return json_answer(Readiness(workers_ready=num_ready))
        status, envelope = described(Unavailable("no worker is ready"))
        return json_answer(Readiness(workers_ready=0, error=envelope.error), status=status)
