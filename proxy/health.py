"""Is the process alive, and can a token be produced?"""

from __future__ import annotations

import time
from typing import Literal

import msgspec
from aiohttp import web

import prefixcache
from prefixcache.errors import Unavailable
from proxy.departure import Departure, shutting_down
from proxy.engines.engine_fleet import EngineFleet
from proxy.engines.engine_link import EngineLink
from proxy.error_answers import ErrorBody, described, retry_headers
from proxy.fleet import Fleet
from proxy.json_answers import json_answer
from proxy.load_table import LoadTable
from proxy.redis_memory import RedisMemoryWatch
from proxy.secret import DeploymentSecret
from proxy.store import Store
from proxy.worker_link import WorkerLink


class RedisHealth(msgspec.Struct, frozen=True, kw_only=True):
    reachable: bool
    """Whether the last read of the registry was answered."""
    last_answer_s: float | None
    """Seconds since the registry last answered; null if it never did."""
    memory_full: bool | None
    """It has used up its maxmemory: who is there is still known, what they hold from now on is not. Null: not known."""
    secret_known: bool
    """Whether it told or took the deployment secret since the start: until then this proxy is not ready."""


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


class EngineHealth(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    url: str
    up: bool
    slow: bool
    """Gets requests only where no other engine may take them."""
    failure: str | None
    """Why it is not up."""
    models: tuple[str, ...]
    block_size: int
    """Tokens of one KV block."""
    capacity_blocks: int | None
    """KV blocks of its cache; null if neither it nor the settings tell: it is taken for ample."""
    prefix_caching: bool | None
    """Null if it does not tell."""
    prefill_tokens_per_s: float | None
    """As measured by this proxy; null while nothing was."""
    tokens_per_byte: float
    waiting: int
    running: int
    ahead_s: float


class Health(msgspec.Struct, frozen=True, kw_only=True):
    status: Literal["ok", "leaving"]
    """leaving: told to end, as /ready says."""
    version: str = prefixcache.__version__
    redis: RedisHealth | None
    """Null where this process keeps everything itself."""
    routing: Literal["index", "own_placements"]
    """By what prompts are routed: the index, or while it does not answer, what this proxy placed itself."""
    workers: tuple[WorkerHealth, ...]
    engines: tuple[EngineHealth, ...]


class Readiness(msgspec.Struct, frozen=True, kw_only=True):
    workers_ready: int
    engines_ready: int | msgspec.UnsetType = msgspec.UNSET
    """Absent where no engine is configured."""
    error: ErrorBody | msgspec.UnsetType = msgspec.UNSET


class HealthHandlers:
    """GET /health and GET /ready."""

    def __init__(
        self,
        *,
        store: Store,
        redis_memory: RedisMemoryWatch,
        secret: DeploymentSecret,
        fleet: Fleet,
        engines: EngineFleet,
        loads: LoadTable,
        departure: Departure,
        has_redis: bool,
        proxy_id: str,
    ) -> None:
        self._store = store
        self._redis_memory = redis_memory
        self._secret = secret
        self._fleet = fleet
        self._engines = engines
        self._loads = loads
        self._departure = departure
        self._has_redis = has_redis
        self._process = {"x-prefixcache-proxy": proxy_id}
        """Told with each answer to /ready: a balancer sees that this is not the process which it asked before."""

    async def health(self, _request: web.Request) -> web.Response:
        """200 as long as the process answers; the details say how it is."""
        routing: Literal["index", "own_placements"] = "index" if self._store.index_available else "own_placements"
        return json_answer(
            Health(
                status="leaving" if self._departure.is_leaving else "ok",
                redis=self._redis() if self._has_redis else None,
                routing=routing,
                workers=tuple(map(self._worker, self._fleet.links)),
                engines=tuple(map(self._engine, self._engines.links)),
            )
        )

    async def ready(self, _request: web.Request) -> web.Response:
        """200 if at least one worker or engine can take a request and the proxy stays, else 503."""
        num_workers, num_engines = self._fleet.num_ready, self._engines.num_up
        engines_ready = num_engines if self._engines.links else msgspec.UNSET
        if (error := self._unready(num_workers + num_engines)) is None:
            return json_answer(Readiness(workers_ready=num_workers, engines_ready=engines_ready), headers=self._process)
        status, envelope = described(error)
        readiness = Readiness(workers_ready=num_workers, engines_ready=engines_ready, error=envelope.error)
        return json_answer(readiness, status=status, headers={**(retry_headers(error) or {}), **self._process})

    def _unready(self, num_ready: int) -> Unavailable | None:
        """Why no request is served."""
        if self._departure.is_leaving:
            return shutting_down()
        if (unknown := self._secret.unknown) is not None:
            return unknown
        if num_ready:
            return None
        return Unavailable("no engine is up and no worker is ready" if self._engines.links else "no worker is ready")

    def _redis(self) -> RedisHealth:
        read_at = self._fleet.registry_read_at
        return RedisHealth(
            reachable=self._fleet.registry_reachable,
            last_answer_s=round(time.monotonic() - read_at, 3) if read_at is not None else None,
            memory_full=self._redis_memory.is_full,
            secret_known=self._secret.unknown is None,
        )

    def _worker(self, link: WorkerLink) -> WorkerHealth:
        return WorkerHealth(
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

    def _engine(self, link: EngineLink) -> EngineHealth:
        return EngineHealth(
            id=link.engine_id,
            url=link.url,
            up=link.is_up,
            slow=link.is_slow,
            failure=link.failure,
            models=tuple(model.name for model in link.models),
            block_size=link.block_size,
            capacity_blocks=link.capacity_blocks,
            prefix_caching=link.caches_prefixes,
            prefill_tokens_per_s=link.prefill_rate,
            tokens_per_byte=round(link.tokens_per_byte, 4),
            waiting=link.num_waiting,
            running=link.num_running,
            ahead_s=round(self._loads.ahead_s(link), 3),
        )
