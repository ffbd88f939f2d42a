"""What the proxy tells about itself: models, metrics, cache statistics."""

from __future__ import annotations

from typing import Literal

import msgspec
from aiohttp import web

from prefixcache.metrics import CONTENT_TYPE, ProxyMetrics, exposition
from proxy.cache_stats import CacheStats
from proxy.json_answers import json_answer
from proxy.served_models import ServedModels
from proxy.served_name import ServedName


class ModelEntry(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str
    root: str
    """The model that the name stands for."""
    parent: str | None
    max_model_len: int | None


class ModelList(msgspec.Struct, frozen=True, kw_only=True):
    object: Literal["list"] = "list"
    data: tuple[ModelEntry, ...]


class ReportHandlers:
    """GET /v1/models, /v1/models/NAME, /metrics and /cache/stats."""

    def __init__(self, served: ServedModels, metrics: ProxyMetrics, stats: CacheStats) -> None:
        self._served = served
        self._metrics = metrics
        self._stats = stats

    async def models(self, _request: web.Request) -> web.Response:
        return json_answer(ModelList(data=tuple(map(_entry, self._served.names()))))

    async def model(self, request: web.Request) -> web.Response:
        """Raises ModelNotFound, or Unavailable while its workers are not there yet."""
        return json_answer(_entry(self._served.named(request.match_info["name"])))

    async def metrics(self, _request: web.Request) -> web.Response:
        return web.Response(body=exposition(self._metrics.registry), headers={"Content-Type": CONTENT_TYPE})

    async def cache_stats(self, _request: web.Request) -> web.Response:
        return json_answer(self._stats.report())


def _entry(served: ServedName) -> ModelEntry:
    return ModelEntry(
        id=served.name,
        created=served.created,
        owned_by=served.owned_by,
        root=served.root,
        parent=served.parent,
        max_model_len=served.max_model_len,
    )
