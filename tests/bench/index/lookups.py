"""Lookups a second and their p99 with one, two and four proxies: client processes that look up as fast as they can."""

from __future__ import annotations

import asyncio
import json
import sys
from asyncio.subprocess import PIPE, Process

import msgspec

from tests.bench.index.bench import Bench, percentile
from tests.bench.index.lookup_client import Figures, Order
from tests.bench.index.match_cost import Fleet
from tests.bench.index.tree_shapes import new_hashes
from tests.bench.report import Table

AT_ONCE = 16
NUM_BLOCKS = 128
MOST_LINE_BYTES = 1 << 26


async def measure_lookups(bench: Bench) -> Table:
    bench.server.flush()
    fleet = await Fleet.open(bench)
    chain = new_hashes(bench.random, NUM_BLOCKS)
    for holder in fleet.holders:
        await holder.store(chain)
    order = Order(
        url=bench.server.url,
        namespace=fleet.keys.namespace,
        chain=chain.tolist(),
        candidates=list(fleet.candidates),
        at_once=AT_ONCE,
        duration_s=bench.sizes.lookup_s,
    )
    rows: list[dict[str, object]] = []
    for proxies in bench.sizes.proxies:
        await fleet.tell_loads([chain])
        began_s = bench.server.cpu_s()
        figures = await _at_once(order, proxies)
        server_s = bench.server.cpu_s() - began_s
        lookup_s = [lookup for one in figures for lookup in one.lookup_s]
        duration_s = max(one.duration_s for one in figures)
        rows.append(
            {
                "proxies": proxies,
                "lookups a second": round(len(lookup_s) / duration_s),
                "p50 ms": percentile(lookup_s, 0.5) * 1e3,
                "p99 ms": percentile(lookup_s, 0.99) * 1e3,
                "server busy": server_s / duration_s,
                "server CPU us a lookup": server_s / len(lookup_s) * 1e6,
                "client CPU us a lookup": sum(one.cpu_s for one in figures) / len(lookup_s) * 1e6,
            }
        )
    bench.server.flush()
    return Table(title=f"Lookups of {NUM_BLOCKS} blocks by processes that keep {AT_ONCE} in flight each", rows=rows)


async def _at_once(order: Order, proxies: int) -> list[Figures]:
    """Starts the clients, lets all begin together, and reads what they say."""
    clients: list[Process] = []
    try:
        for _ in range(proxies):
            clients.append(
                await asyncio.create_subprocess_exec(
                    sys.executable,
                    "-m",
                    "tests.bench.index.lookup_client",
                    stdin=PIPE,
                    stdout=PIPE,
                    limit=MOST_LINE_BYTES,
                )
            )
        for client in clients:
            _say(client, json.dumps(msgspec.to_builtins(order)))
        for client in clients:
            assert await _heard(client) == "ready", "a client did not start"
        for client in clients:
            _say(client, "go")
        return [msgspec.json.decode(await _heard(client), type=Figures) for client in clients]
    finally:
        for client in clients:
            if client.returncode is None and client.stdin is not None:
                client.stdin.close()
            await client.wait()


def _say(client: Process, line: str) -> None:
    assert client.stdin is not None
    client.stdin.write(line.encode() + b"\n")


async def _heard(client: Process) -> str:
    assert client.stdout is not None
    return (await client.stdout.readline()).decode().strip()
