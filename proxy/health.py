"""Is the process alive, and can a token be produced?"""

from __future__ import annotations

import time

import msgspec
from aiohttp import web

import prefixcache
from prefixcache.errors import Unavailable
from proxy.error_answers import ErrorBody, described
from proxy.fleet import Fleet
from proxy.json_answers import json_answer


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
    running: int


class Health(msgspec.Struct, frozen=True, kw_only=True):
    status: str = "ok"
    version: str = prefixcache.__version__
    redis: RedisHealth
    workers: tuple[WorkerHealth, ...]


class Readiness(msgspec.Struct, frozen=True, kw_only=True):
    workers_ready: int
    error: ErrorBody | msgspec.UnsetType = msgspec.UNSET


class HealthHandlers:
    """GET /health and GET /ready."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet

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
            )
            for link in fleet.links
        )
        return json_answer(Health(redis=redis, workers=workers))

    async def ready(self, _request: web.Request) -> web.Response:
        """200 if at least one worker can take a request, else 503."""
        num_ready = self._fleet.num_ready
        if num_ready:
            return json_answer(Readiness(workers_ready=num_ready))
        status, envelope = described(Unavailable("no worker is ready"))
        return json_answer(Readiness(workers_ready=0, error=envelope.error), status=status)
