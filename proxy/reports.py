"""What the proxy tells about itself: models, metrics, cache statistics."""

from __future__ import annotations

from typing import Literal

import msgspec
from aiohttp import web

from prefixcache.metrics import CONTENT_TYPE, ProxyMetrics, exposition
from proxy.cache_stats import CacheStats
from proxy.fleet import Fleet, ServedName
from proxy.json_answers import json_answer


class ModelEntry(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: Literal["prefixcache"] = "prefixcache"
    root: str
    """The model that the name stands for."""
    parent: None = None
    max_model_len: int


class ModelList(msgspec.Struct, frozen=True, kw_only=True):
    object: Literal["list"] = "list"
    data: tuple[ModelEntry, ...]


class ReportHandlers:
    """GET /v1/models, /v1/models/NAME, /metrics and /cache/stats."""

    def __init__(self, fleet: Fleet, metrics: ProxyMetrics, stats: CacheStats) -> None:
        self._fleet = fleet
        self._metrics = metrics
        self._stats = stats

    async def models(self, _request: web.Request) -> web.Response:
        return json_answer(ModelList(data=tuple(map(_entry, self._fleet.served_names()))))

    async def model(self, request: web.Request) -> web.Response:
        """Raises ModelNotFound, or Unavailable while its workers are not there yet."""
        name = request.match_info["name"]
        self._fleet.model(name)
        return json_answer(next(_entry(served) for served in self._fleet.served_names() if served.name == name))

    async def metrics(self, _request: web.Request) -> web.Response:
        return web.Response(body=exposition(self._metrics.registry), headers={"Content-Type": CONTENT_TYPE})

    async def cache_stats(self, _request: web.Request) -> web.Response:
        return json_answer(self._stats.report())


def _entry(served: ServedName) -> ModelEntry:
    return ModelEntry(id=served.name, created=served.created, root=served.root, max_model_len=served.max_model_len)
