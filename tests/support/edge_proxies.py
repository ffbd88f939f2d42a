"""Scripted proxies for the edge: ready or not, and whatever answer a test wants."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from tests.support.answer_bytes import json_answer
from tests.support.scripted_engine import ReceivedRequest, ScriptedEngine, Step, scripted_engine

NOT_READY = "no worker is ready, says the proxy"


@dataclass(slots=True, kw_only=True)
class ScriptedProxy:
    """Answers everything but /ready with `steps`."""

    server: ScriptedEngine
    ready: bool = True
    process: str = "a"
    """As it tells the edge."""
    steps: Sequence[Step] = ()
    """Its own port if there are none."""
    asked: list[ReceivedRequest] = field(default_factory=list)

    @property
    def port(self) -> int:
        return self.server.port

    def answer(self, request: ReceivedRequest) -> Sequence[Step]:
        if request.target != "/ready" or request.header("user-agent") != "prefixcache-edge":
            self.asked.append(request)
            return self.steps or (json_answer({"proxy": self.port}),)
        process = ("x-prefixcache-proxy", self.process)
        if self.ready:
            return (json_answer({"workers_ready": 1}, process),)
        return (json_answer({"error": {"message": NOT_READY}}, process, status=503),)


@asynccontextmanager
async def scripted_proxy() -> AsyncIterator[ScriptedProxy]:
    async with scripted_engine() as server:
        proxy = ScriptedProxy(server=server)
        server.answer = proxy.answer
        yield proxy
