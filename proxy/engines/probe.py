"""What one engine tells about itself, asked over HTTP: its models, its KV cache, whether it is well.

GET /v1/models      must be answered: without it a probe has failed
GET /health         a 5xx is a failed probe, too; 404 or no answer in time says nothing
GET /metrics        block size, capacity, counters and load of vLLM, counters and load of SGLang
GET /server_info    KV cache of SGLang; asked only while nothing else has told the capacity
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from prefixcache.errors import PrefixCacheError, Unavailable
from prefixcache.limits import ENGINE_ASK_TIMEOUT_S
from proxy.engines.engine_metrics import EngineMetrics, read_metrics
from proxy.engines.engine_model import EngineModel, read_models
from proxy.engines.server_info import ServerInfo, read_server_info

MOST_MODELS_BYTES = 1024 * 1024
MOST_METRICS_BYTES = 4 * 1024 * 1024
MOST_INFO_BYTES = 1024 * 1024
MOST_HEALTH_BYTES = 64 * 1024
INFO_PATHS = ("/server_info", "/get_server_info")
PROBES_BETWEEN_INFOS = 30
"""An engine that has not told its capacity is asked for it again after so many probes."""

Headers = Sequence[tuple[bytes, bytes]]


class ProbeFailed(Unavailable):
    """The engine did not answer, or not as an OpenAI-compatible server does."""


class Fetched(Protocol):
    """`http_pool.FetchedResponse`."""

    @property
    def status(self) -> int: ...

    @property
    def body(self) -> bytes: ...


class Fetching(Protocol):
    """What a probe needs of `http_pool.HttpPool`."""

    async def fetch(
        self, method: str, path: str, *, headers: Headers = (), body: bytes = b"", timeout_s: float, most_bytes: int
    ) -> Fetched:
        """Raises OSError, TimeoutError or PrefixCacheError without a whole answer in time and size."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineReport:
    """What a successful probe learnt; None for what the engine does not tell."""

    models: tuple[EngineModel, ...]
    latency_s: float
    """Of GET /v1/models, which computes nothing."""
    metrics: EngineMetrics
    block_size: int | None = None
    capacity_tokens: int | None = None
    caches_prefixes: bool | None = None


class Prober:
    """Asks one engine."""

    def __init__(
        self, pool: Fetching, url: str, *, headers: Headers = (), clock: Callable[[], float] = time.monotonic
    ) -> None:
        """`headers` go with every question; `url` is for messages."""
        self._pool = pool
        self._url = url
        self._headers = headers
        self._clock = clock
        self._info = ServerInfo()
        self._probes_until_info = 0

    async def probe(self) -> EngineReport:
        """Raises ProbeFailed. Takes two timeouts at most."""
        began_at = self._clock()
        models = await self._models()
        latency_s = self._clock() - began_at
        metrics, health_status = await asyncio.gather(self._metrics(), self._health_status())
        if health_status is not None and health_status >= 500:
            raise ProbeFailed(f"engine {self._url} answers {health_status} to GET /health: its log says why")
        if metrics.capacity_tokens is None or metrics.block_size is None:
            await self._ask_info()
        return EngineReport(
            models=models,
            latency_s=latency_s,
            metrics=metrics,
            block_size=metrics.block_size or self._info.block_size,
            capacity_tokens=metrics.capacity_tokens or self._info.capacity_tokens,
            caches_prefixes=self._info.caches_prefixes if metrics.caches_prefixes is None else metrics.caches_prefixes,
        )

    def forget(self) -> None:
        """It may have started anew, with another cache: what it told of that is asked again."""
        self._info = ServerInfo()
        self._probes_until_info = 0

    async def _models(self) -> tuple[EngineModel, ...]:
        path = "/v1/models"
        try:
            answer = await self._fetch(path, MOST_MODELS_BYTES)
        except (OSError, TimeoutError, PrefixCacheError) as error:
            why = str(error) or f"no answer within {ENGINE_ASK_TIMEOUT_S:g} s"
            said = why if self._url in why else f"engine {self._url} does not answer GET {path}: {why}"
            raise ProbeFailed(said) from error
        if answer.status in (401, 403):
            raise ProbeFailed(
                f"engine {self._url} answers {answer.status} to GET {path}: set PREFIXCACHE_ENGINE_API_KEY to the key "
                "that it was started with"
            )
        models = read_models(answer.body) if answer.status == 200 else None
        if models is None:
            raise ProbeFailed(
                f"engine {self._url} answers {answer.status} to GET {path}, and no list of models: is it the base URL "
                "of an OpenAI-compatible server, without /v1?"
            )
        return models

    async def _metrics(self) -> EngineMetrics:
        answer = await self._answer("/metrics", MOST_METRICS_BYTES)
        return EngineMetrics() if answer is None else read_metrics(answer)

    async def _health_status(self) -> int | None:
        """An engine whose core died may go on listing its models, but does not say that it is well."""
        if self._info.capacity_tokens is not None:
            return None  # SGLang generates a token for it, and ends as a whole when a part of it dies
        try:
            return (await self._fetch("/health", MOST_HEALTH_BYTES)).status
        except (OSError, TimeoutError, PrefixCacheError):
            return None

    async def _ask_info(self) -> None:
        if self._info.capacity_tokens is not None:
            return
        if self._probes_until_info:
            self._probes_until_info -= 1
            return
        self._probes_until_info = PROBES_BETWEEN_INFOS
        for path in INFO_PATHS:
            answer = await self._answer(path, MOST_INFO_BYTES)
            info = None if answer is None else read_server_info(answer)
            if info is not None:
                self._info = info
                return

    async def _answer(self, path: str, most_bytes: int) -> bytes | None:
        """Body of a 200; None for any other answer, or none."""
        try:
            answer = await self._fetch(path, most_bytes)
        except (OSError, TimeoutError, PrefixCacheError):
            return None
        return answer.body if answer.status == 200 else None

    async def _fetch(self, path: str, most_bytes: int) -> Fetched:
        return await self._pool.fetch(
            "GET", path, headers=self._headers, timeout_s=ENGINE_ASK_TIMEOUT_S, most_bytes=most_bytes
        )
