"""The index on a real server."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from prefixcache.index.hot_client import HotClient
from prefixcache.index.keys import FIELDS_PER_BUCKET, NamespaceKeys
from prefixcache.index.redis_client import RedisClient
from prefixcache.index.redis_index import RedisIndex
from prefixcache.limits import LEASE_S
from tests.integration.index.passed_time import let_pass
from tests.support.valkey import Server

MATCH_DEADLINE_S = 1.0
"""Generous: machines that run tests are busy, and what is tested is not their speed."""
KEYS = NamespaceKeys(key_prefix="test", namespace="0123456789abcdef")


class RedisWorld:
    def __init__(self, server: Server, index: RedisIndex) -> None:
        self.name = server.name
        self.index = index
        self._server = server

    def expire(self, incarnation: int) -> None:
        self._server.command("ZADD", KEYS.live, "XX", 1, incarnation)

    def flush(self) -> None:
        self._server.flush()

    def let_pass(self, passed_s: float) -> None:
        let_pass(self._server, KEYS, passed_s)


@asynccontextmanager
async def redis_world(
    server: Server, *, lease_s: float = LEASE_S, fields_per_bucket: int = FIELDS_PER_BUCKET
) -> AsyncIterator[RedisWorld]:
    """An index on a server, closed at the end and found intact."""
    client = RedisClient(server.url)
    try:
        async with HotClient.open(server.url, deadline_s=MATCH_DEADLINE_S) as hot:
            index = RedisIndex(client, hot, KEYS, lease_s=lease_s, fields_per_bucket=fields_per_bucket)
            yield RedisWorld(server, index)
            await index.check_integrity()
    finally:
        await client.aclose()
