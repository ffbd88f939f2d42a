"""Class redis-dependency: Redis may freeze or be called by many at once; a client notices a lost prediction at most."""

from __future__ import annotations

import asyncio
import time

import httpx

from prefixcache.limits import INDEX_CONNECTIONS, INDEX_DEADLINE_S
from tests.cases.catalogue import CASES, Call, Placeholders, call_of
from tests.cases.outcome import send
from tests.cases.world import MODEL, open_world
from tests.support.valkey import Server
from tests.support.waiting import eventually

NUM_WHILE_FROZEN = 50
ONE_DELAY_S = 0.05
MOST_DELAYS = 6
"""Lookups that wait before the breaker is open: two at once are on their way, and a trial now and then."""


async def test_rw_110_a_frozen_redis_costs_one_delay(valkey: Server) -> None:
    async with open_world(valkey, num_workers=2, match_deadline_s=INDEX_DEADLINE_S) as world:
        text = world.placeholders.text(300, seed="frozen")
        body = {"messages": [{"role": "user", "content": text}], "max_tokens": 1}
        call = call_of({"method": "POST", "path": "/v1/chat/completions", "body": {"model": MODEL}}, **body)
        warm = await world.send(call)
        holder = warm.headers["x-prefixcache-worker"]
        await eventually(lambda: _is_predicted(world.proxy.client, call))
        with valkey.paused():
            before_s = world.proxy.metric("prefixcache_index_lookup_seconds_sum")
            outcomes = [await world.send(call) for _ in range(NUM_WHILE_FROZEN)]
            waited_s = world.proxy.metric("prefixcache_index_lookup_seconds_sum") - before_s
            assert [outcome.status for outcome in outcomes] == [200] * NUM_WHILE_FROZEN
            assert {outcome.headers["x-prefixcache-worker"] for outcome in outcomes} == {holder}, "affinity by memory"
            assert waited_s <= MOST_DELAYS * ONE_DELAY_S
            health = (await world.proxy.client.get("/health")).json()
            assert health["routing"] == "own_placements"
            assert world.proxy.metric("prefixcache_index_available") == 0
        thawed_at = time.monotonic()
        await eventually(lambda: _is_predicted(world.proxy.client, call), 10.0)
        assert time.monotonic() - thawed_at < 5.0
        assert (await world.proxy.client.get("/health")).json()["routing"] == "index"
        assert world.proxy.metric("prefixcache_index_available") == 1


async def _is_predicted(client: httpx.AsyncClient, call: Call) -> bool:
    """By the index, not by the proxy's own memory."""
    outcome = await send(client, call)
    return outcome.hit_tokens > 0 and outcome.headers["x-prefixcache-reason"] == "longest_prefix"


NUM_CLIENTS = 500
POOL_LIMIT = 20


async def test_rw_111_a_burst_waits_for_a_connection(valkey: Server) -> None:
    assert CASES["RW-111"].attempt["clients"] == NUM_CLIENTS
    assert INDEX_CONNECTIONS < POOL_LIMIT
    async with open_world(valkey, num_workers=2) as world:
        placeholders = Placeholders(model=MODEL)
        requests = [placeholders.filled(CASES["RW-111"].attempt["request"]) for _ in range(NUM_CLIENTS)]
        most = 0
        limits = httpx.Limits(max_connections=NUM_CLIENTS)
        async with httpx.AsyncClient(base_url=world.proxy.url, timeout=60.0, trust_env=False, limits=limits) as client:
            asking = asyncio.gather(*(send(client, call_of(request)) for request in requests))
            while not asking.done():
                most = max(most, _num_connections(valkey))
                await asyncio.sleep(0.02)
            outcomes = await asking
        assert [outcome.status for outcome in outcomes] == [200] * NUM_CLIENTS
        print(f"{most} connections at most")
        assert 0 < most <= POOL_LIMIT


def _num_connections(server: Server) -> int:
    """Without the one that asks."""
    return server.command("CLIENT", "LIST").count(b" addr=") - 1
