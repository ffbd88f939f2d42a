"""A proxy in front of scripted engines."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import Any

import httpx

from prefixcache.local_store import LocalStore
from proxy.app import ENGINES
from proxy.engines.engine_fleet import EngineFleet
from proxy.engines.engine_link import EngineLink
from proxy.engines.engine_settings import EngineSettings
from proxy.store import Store
from tests.support.answer_bytes import chat_answer, models_answer, whole
from tests.support.proxy_harness import RunningProxy, running_proxy
from tests.support.scripted_engine import ReceivedRequest, ScriptedEngine, Step, scripted_engine
from tests.support.waiting import eventually

MODEL = "demo"
PROBED = ("/v1/models", "/health", "/metrics", "/server_info", "/get_server_info")

Answer = Callable[[ReceivedRequest], Sequence[Step]]


def engine_answers(*models: str, then: Answer | None = None) -> Answer:
    """Answers probes as an engine of these models does, everything else as `then` says, or with a short chat."""

    def answer(request: ReceivedRequest) -> Sequence[Step]:
        path = request.target.partition("?")[0]
        if request.method == "GET" and path == "/v1/models":
            return (models_answer(*(models or (MODEL,))),)
        if request.method == "GET" and path in PROBED:
            return (whole(b"", status=404, reason="Not Found"),)
        return then(request) if then is not None else (chat_answer("hi"),)

    return answer


def chat(text: str = "hello", **fields: Any) -> dict[str, Any]:
    return {"model": MODEL, "messages": [{"role": "user", "content": text}], **fields}


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineProxy:
    """A proxy that listens, and its engines."""

    proxy: RunningProxy
    engines: Sequence[ScriptedEngine]

    @property
    def client(self) -> httpx.AsyncClient:
        return self.proxy.client

    @property
    def fleet(self) -> EngineFleet:
        return self.proxy.app[ENGINES]

    def link(self, engine: ScriptedEngine) -> EngineLink:
        return next(link for link in self.fleet.links if link.url == engine.url)

    def asked(self, engine: ScriptedEngine | None = None) -> list[ReceivedRequest]:
        """Requests that were no probes."""
        requests = [request for each in self.engines if engine in (None, each) for request in each.requests]
        return [request for request in requests if request.method != "GET" or request.target not in PROBED]

    async def chat(self, text: str = "hello", **fields: Any) -> httpx.Response:
        return await self.client.post("/v1/chat/completions", json=chat(text, **fields))


@asynccontextmanager
async def engine_proxy(*answers: Answer, store: Store | None = None, **settings: Any) -> AsyncIterator[EngineProxy]:
    """One engine for each answer (at least one), all of them up; `settings` are those of EngineSettings."""
    async with AsyncExitStack() as stack:
        engines = []
        for answer in answers or (engine_answers(),):
            engine = await stack.enter_async_context(scripted_engine())
            engine.answer = answer
            engines.append(engine)
        chosen = EngineSettings(urls=[engine.url for engine in engines], **settings)
        proxy = await stack.enter_async_context(running_proxy(store or LocalStore(), engines=chosen))
        running = EngineProxy(proxy=proxy, engines=engines)
        await eventually(lambda: running.fleet.num_up == len(engines))
        yield running
