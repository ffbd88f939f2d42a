"""One client process of the lookup benchmark: 16 lookups at a time, each followed by the next, for a bounded time.

Reads one JSON object a line from stdin: the order, then anything, which starts it. Writes `ready` and its figures.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time

import msgspec
import uvloop

from prefixcache.index.hot_client import HotClient
from prefixcache.index.keys import NamespaceKeys
from prefixcache.index.redis_client import RedisClient
from prefixcache.index.redis_index import RedisIndex
from tests.bench.index.bench import DEADLINE_S, KEY_PREFIX


class Order(msgspec.Struct, frozen=True, kw_only=True):
    url: str
    namespace: str
    chain: list[int]
    candidates: list[int]
    at_once: int
    duration_s: float


class Figures(msgspec.Struct, frozen=True, kw_only=True):
    lookup_s: list[float]
    cpu_s: float
    duration_s: float


async def run(order: Order) -> Figures:
    keys = NamespaceKeys(key_prefix=KEY_PREFIX, namespace=order.namespace)
    client = RedisClient(order.url)
    lookup_s: list[float] = []
    async with HotClient.open(order.url, deadline_s=DEADLINE_S) as hot:
        index = RedisIndex(client, hot, keys)
        await index.match(order.chain, candidates=order.candidates)
        print("ready", flush=True)
        await asyncio.to_thread(sys.stdin.readline)
        began_s, began_cpu_s = time.perf_counter(), time.process_time()

        async def lookups() -> None:
            now_s = time.perf_counter()
            while now_s < began_s + order.duration_s:
                await index.match(order.chain, candidates=order.candidates)
                before_s, now_s = now_s, time.perf_counter()
                lookup_s.append(now_s - before_s)

        await asyncio.gather(*(lookups() for _ in range(order.at_once)))
        figures = Figures(
            lookup_s=lookup_s,
            cpu_s=time.process_time() - began_cpu_s,
            duration_s=time.perf_counter() - began_s,
        )
    await client.aclose()
    return figures


if __name__ == "__main__":
    content = uvloop.run(run(msgspec.convert(json.loads(sys.stdin.readline()), Order)))
    print(json.dumps(msgspec.to_builtins(content)))
