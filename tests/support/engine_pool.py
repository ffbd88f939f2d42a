"""A scripted engine with a pool in front of it, and what is left of both afterwards."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from proxy.engines.http_message import EngineRequest
from proxy.engines.http_pool import HttpPool, ResponseHandle
from tests.support.response_log import ResponseLog
from tests.support.scripted_engine import ScriptedEngine, scripted_engine
from tests.support.waiting import eventually


@asynccontextmanager
async def engine_and_pool(**how: Any) -> AsyncIterator[tuple[ScriptedEngine, HttpPool]]:
    """`how` as for HttpPool; checks at the end that no connection, task or slot is left."""
    num_tasks = len(asyncio.all_tasks())
    async with scripted_engine() as engine:
        pool = HttpPool(engine.url, **how)
        try:
            yield engine, pool
        finally:
            async with asyncio.timeout(10):
                await pool.aclose()
        assert pool.num_connections == pool.num_idle == 0
        await eventually(lambda: not engine.connections)
    await eventually(lambda: len(asyncio.all_tasks()) <= num_tasks)


def post(body: bytes = b"{}", target: str = "/v1/chat/completions") -> EngineRequest:
    return EngineRequest(method="POST", target=target, body=body)


async def ask(pool: HttpPool, body: bytes = b"{}") -> tuple[ResponseHandle, ResponseLog]:
    """A request whose answer comes meanwhile."""
    log = ResponseLog()
    return await pool.send(post(body), log), log


async def answer(pool: HttpPool, body: bytes = b"{}") -> ResponseLog:
    """A request and its whole answer; raises what it failed with."""
    handle, log = await ask(pool, body)
    try:
        return await log.ended()
    finally:
        handle.abort()


def num_sockets() -> int:
    """Open sockets of this process."""
    num = 0
    for descriptor in Path("/proc/self/fd").iterdir():
        try:
            num += os.readlink(descriptor).startswith("socket:")
        except FileNotFoundError:
            continue  # The one that lists them.
    return num
