"""Resident memory of worker programs: over prompts of many lengths, and over many requests."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from pathlib import Path
from random import Random

import psutil

from prefixcache.protocol import Abort, End, Generate
from prefixcache.registry import WorkerRecord
from prefixcache.store import RedisStore
from tests.bench.report import Floor, Table
from tests.bench.worker.prompts import new_prompt
from tests.bench.worker.sizes import Sizes
from tests.support.program_fleet import ProgramFleet
from tests.support.requests import generate
from tests.support.stream_client import StreamClient, connected

ANSWER_TIMEOUT_S = 120.0
ANSWER_TOKENS = 4
MOST_OVER_BARE = 1.1
"""Resident bytes of a worker over those of a bare process with the weights, of packed weights, and of its KV blocks."""
LOOKS = 4
"""At the memory, from the first request to the last."""

SIM_BLOCKS = 2_048
SIM_GROUP = 100
"""Requests that one connection brings at once: more than one step takes, so that some wait."""
SIM_PREFIXES = 40
SIM_PREFIX_TOKENS = 800
"""Together as much as the cache: prefixes are found, and evicted."""
SIM_ANSWER_TOKENS = 8
ABORTED = 10
"""One of so many that are sent at once is aborted as soon as it is sent."""
MOST_GROWTH = 1.02
"""Resident bytes after all requests over those after half of them, when caches and the allocator have settled."""


async def measure_memory(
    fleet: ProgramFleet, folder: Path, dtype: str, sizes: Sizes, random: Random
) -> tuple[Table, list[Floor]]:
    """One prompt after the other, each of another length."""
    command = [sys.executable, "-m", "tests.bench.worker.bare_process", str(folder), dtype]
    bare = await asyncio.to_thread(subprocess.run, command, capture_output=True, text=True, check=True)
    bare_bytes, packed_bytes = map(int, bare.stdout.split())
    flags = ("--model", str(folder), "--dtype", dtype, "--threads", "1", "--num-blocks", str(sizes.memory_blocks))
    async with _running(fleet, "memory", *flags, runner="torch") as (worker, process):
        pool_bytes = worker.num_blocks * worker.block_size * worker.kv_bytes_per_token
        lengths = random.sample(range(1, sizes.longest_prompt), sizes.prompt_lengths)
        rows: list[dict[str, object]] = []

        def look(num_lengths: int) -> float:
            own_bytes = process.memory_info().rss
            share = own_bytes / (bare_bytes + packed_bytes + pool_bytes)
            rows.append(
                {
                    "prompts": num_lengths,
                    "worker MB": own_bytes / 1e6,
                    "bare process MB": bare_bytes / 1e6,
                    "packed weights MB": packed_bytes / 1e6,
                    "KV blocks MB": pool_bytes / 1e6,
                    "over all": share,
                }
            )
            return share

        share = look(0)
        for start in range(0, len(lengths), part := -(-len(lengths) // LOOKS)):
            chosen = lengths[start : start + part]
            prompts = (new_prompt(random, length) for length in chosen)
            await _ask(worker, (generate(str(len(prompt)), prompt, max_tokens=ANSWER_TOKENS) for prompt in prompts))
            share = look(start + len(chosen))
    title = "Memory of a worker, after so many prompts of distinct lengths"
    what = "worker's memory over a bare process, packed weights and its KV blocks"
    return Table(title=title, rows=rows), [Floor(what=what, value=share, most=MOST_OVER_BARE)]


async def measure_growth(fleet: ProgramFleet, sizes: Sizes, random: Random) -> tuple[Table, list[Floor]]:
    """Of a simulated worker: all that is there but for the tensors."""
    flags = ("--sim-speed", "inf", "--num-blocks", str(SIM_BLOCKS))
    async with _running(fleet, "growth", *flags, runner="sim") as (worker, process):
        prefixes = [new_prompt(random, SIM_PREFIX_TOKENS) for _ in range(SIM_PREFIXES)]
        seen: list[tuple[int, int]] = []
        for done in range(SIM_GROUP, sizes.requests + 1, SIM_GROUP):
            prompts = [
                random.choice(prefixes) + new_prompt(random, random.randint(1, SIM_PREFIX_TOKENS))
                for _ in range(SIM_GROUP)
            ]
            requests = (
                generate(str(number), prompt, max_tokens=SIM_ANSWER_TOKENS) for number, prompt in enumerate(prompts)
            )
            await _ask(worker, requests, at_once=True)
            if done % (sizes.requests // 10) == 0:
                seen.append((done, process.memory_info().rss))
    rows: list[dict[str, object]] = [{"requests": done, "MB": rss_bytes / 1e6} for done, rss_bytes in seen]
    (half, half_bytes), (last, last_bytes) = seen[len(seen) // 2 - 1], seen[-1]
    what = f"simulated worker's memory after {last:,} requests over that after {half:,}"
    return Table(title="Memory of a simulated worker", rows=rows), [
        Floor(what=what, value=last_bytes / half_bytes, most=MOST_GROWTH)
    ]


@asynccontextmanager
async def _running(
    fleet: ProgramFleet, name: str, *flags: str, runner: str
) -> AsyncIterator[tuple[WorkerRecord, psutil.Process]]:
    """A worker program that is registered."""
    program = fleet.start_worker(name, *flags, runner=runner)
    await program.said(" ready at ")
    async with RedisStore.open(str(fleet.redis_url)) as store:
        (record,) = await store.registry().live_workers()
    try:
        yield record, psutil.Process(program.process.pid)
    finally:
        await program.stop()


async def _ask(worker: WorkerRecord, requests: Iterable[Generate], *, at_once: bool = False) -> None:
    """Over one connection; the next one when one has ended, or all at once and some of them aborted at once."""
    async with connected(worker.address, namespace=worker.namespace) as client:
        waiting: list[str] = []
        for number, request in enumerate(requests):
            client.send(request)
            waiting.append(request.id)
            if at_once and number % ABORTED == 0:
                client.send(Abort(id=request.id))
            if not at_once:
                await _ended(client, waiting.pop())
        for request_id in waiting:
            await _ended(client, request_id)


async def _ended(client: StreamClient, request_id: str) -> None:
    ending = await client.ended(request_id, ANSWER_TIMEOUT_S)
    assert isinstance(ending, End), ending
