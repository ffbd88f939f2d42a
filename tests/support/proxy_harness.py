"""The whole proxy in this process, on a real port, over any store."""

from __future__ import annotations

import json
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import httpx
from aiohttp import web
from prometheus_client.parser import text_string_to_metric_families

from prefixcache.limits import HELD_DOWN_S
from prefixcache.metrics import exposition
from prefixcache.routing.base import Policy
from prefixcache.routing.policies import DEFAULT_POLICY, POLICIES
from proxy.app import BOOKS, DEPARTURE, FLEET, AppParts, create_app
from proxy.engines.engine_settings import EngineSettings
from proxy.fleet import Fleet
from proxy.server import serving
from proxy.store import Store
from tests.support.waiting import eventually

USER = ({"role": "user", "content": "hello"},)


def body(**fields: Any) -> dict[str, Any]:
    """A chat request to the model of FakeWorker; `fields` come on top."""
    return {"model": "tiny", "messages": list(USER), **fields}


@dataclass(frozen=True, slots=True, kw_only=True)
class RunningProxy:
    """A proxy that listens."""

    app: web.Application
    url: str
    client: httpx.AsyncClient

    @property
    def fleet(self) -> Fleet:
        return self.app[FLEET]

    @property
    def port(self) -> int:
        return int(self.url.rpartition(":")[2])

    async def ready(self, workers: int = 1) -> None:
        """Waits until this many workers are ready."""
        await eventually(lambda: self.fleet.num_ready == workers)

    async def chat(self, **fields: Any) -> httpx.Response:
        return await self.client.post("/v1/chat/completions", json=body(**fields))

    async def events(self, **fields: Any) -> list[Any]:
        """Data of every event of a streamed answer: JSON values, and "[DONE]" as it is."""
        async with self.client.stream("POST", "/v1/chat/completions", json=body(stream=True, **fields)) as answer:
            assert answer.status_code == 200, await answer.aread()
            text = (await answer.aread()).decode()
        return events_of(text)

    def metric(self, name: str, **labels: str) -> float:
        """Sum of the samples of this name whose labels include `labels`."""
        text = exposition(self.app[BOOKS].metrics.registry).decode()
        return sum(
            sample.value
            for family in text_string_to_metric_families(text)
            for sample in family.samples
            if sample.name == name and labels.items() <= sample.labels.items()
        )


def events_of(text: str) -> list[Any]:
    """Parses server-sent events strictly: data lines, each followed by a blank one."""
    assert text.endswith("\n\n"), text[-200:]
    values: list[Any] = []
    for event in text[:-2].split("\n\n"):
        assert event.startswith("data: ") and "\n" not in event, event
        data = event.removeprefix("data: ")
        values.append(data if data == "[DONE]" else json.loads(data))
    return values


def text_of(events: list[Any]) -> str:
    """Text of a streamed answer."""
    chunks = [event for event in events if isinstance(event, dict)]
    return "".join(choice["delta"].get("content") or "" for chunk in chunks for choice in chunk.get("choices", ()))


@asynccontextmanager
async def running_proxy(
    store: Store,
    *,
    secret: bytes | None = None,
    worker_token: bytes | None = None,
    cors_origins: tuple[str, ...] = (),
    engines: EngineSettings | None = None,
    has_redis: bool = True,
    held_s: float = HELD_DOWN_S,
    policy: Policy | None = None,
    drain_delay_s: float = 0.0,
    drain_s: float = 3.0,
) -> AsyncIterator[RunningProxy]:
    """A proxy over `store`, which the caller owns."""

    @asynccontextmanager
    async def open_store() -> AsyncIterator[Store]:
        yield store

    parts = AppParts(
        open_store=open_store,
        policy=policy or POLICIES[DEFAULT_POLICY](random.Random(0)),
        held_s=held_s,
        secret=secret,
        worker_token=worker_token,
        drain_delay_s=drain_delay_s,
        drain_s=drain_s,
        cors_origins=cors_origins,
        engines=engines or EngineSettings(),
        has_redis=has_redis,
    )
    app = create_app(parts)
    async with (
        serving(app, app[DEPARTURE], host="127.0.0.1", port=0) as url,
        httpx.AsyncClient(base_url=url, timeout=20.0, trust_env=False) as client,
    ):
        yield RunningProxy(app=app, url=url, client=client)
