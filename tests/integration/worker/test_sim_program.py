"""`python -m worker --runner sim` as a process: small, soon ready, and as fast as its cost model says."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp
import psutil
import pytest

from prefixcache.cli.children import spawn
from prefixcache.cli.programs import program_command
from prefixcache.protocol import End, Started
from prefixcache.registry import WorkerRecord
from prefixcache.rendering.byte_tokenizer import BYTE_STOP_ID, BYTE_VOCAB_SIZE, byte_tokenizer_files
from prefixcache.store import RedisStore
from tests.support.requests import generate
from tests.support.stream_client import StreamClient, connected
from tests.support.valkey import Server
from tests.support.waiting import eventually

START_TIMEOUT_S = 30.0
PROMPT = [*b"Tell me about the river behind the house, and about the road that follows it." * 8]


@asynccontextmanager
async def started(valkey: Server, log: Path, *flags: str) -> AsyncIterator[tuple[psutil.Process, WorkerRecord]]:
    """A simulated worker once it says that it is ready, and what it registered; killed on exit if it still runs."""
    command = [*program_command("worker"), "--runner", "sim", "--redis", valkey.url, *flags]
    with log.open("wb") as output:
        process: subprocess.Popen[bytes] = spawn(command, environment=dict(os.environ), stderr=output)

    def is_ready() -> bool:
        text = log.read_text()
        assert process.poll() is None, text
        return " ready at " in text

    try:
        await eventually(is_ready, START_TIMEOUT_S)
        async with RedisStore.open(valkey.url) as store:
            (record,) = await store.registry().live_workers()
        yield psutil.Process(process.pid), record
        process.send_signal(signal.SIGTERM)
        assert await asyncio.to_thread(process.wait, 10.0) == 0
    finally:
        process.kill()
        process.wait()


async def answer(client: StreamClient, request_id: str, max_tokens: int) -> End:
    """The end of one request for PROMPT."""
    client.send(generate(request_id, PROMPT, max_tokens=max_tokens, stop_token_ids=[BYTE_STOP_ID]))
    end = await client.ended(request_id)
    assert isinstance(end, End)
    return end


async def test_it_registers_and_answers_in_words_cached_as_uncached(valkey: Server, tmp_path: Path) -> None:
    async with started(valkey, tmp_path / "log", "--sim-speed", "20", "--num-blocks", "512") as (_, record):
        assert (record.model, record.served_names) == ("sim", ("sim",))
        assert (record.vocab_size, record.num_blocks, record.max_model_len) == (BYTE_VOCAB_SIZE, 512, 8192)
        assert record.tokenizer_fingerprint == byte_tokenizer_files().fingerprint
        assert record.stop_token_ids == (BYTE_STOP_ID,)
        async with connected(record.address, namespace=record.namespace) as client:
            cold, cached = await answer(client, "cold", 100), await answer(client, "cached", 100)
            assert (cold.usage.cached_tokens, cached.usage.cached_tokens) == (0, (len(PROMPT) - 1) // 16 * 16)
            assert client.tokens("cached") == client.tokens("cold")
            text = bytes([token for token in client.tokens("cold") if token != BYTE_STOP_ID]).decode("ascii")
            assert text.isprintable() and " " in text
        async with (
            aiohttp.ClientSession(f"http://{record.address}") as http,
            http.get("/tokenizer/files/tokenizer.json") as response,
        ):
            assert await response.read() == byte_tokenizer_files().files["tokenizer.json"]


async def test_requests_take_the_time_that_the_cost_model_gives_them(valkey: Server, tmp_path: Path) -> None:
    costs = ["--sim-prefill-us", "500", "--sim-step-ms", "0", "--sim-itl-ms", "30", "--sim-itl-per-sequence-ms", "0"]
    async with started(valkey, tmp_path / "log", *costs, "--sim-itl-per-1k-context-ms", "0") as (_, record):
        async with connected(record.address, namespace=record.namespace) as client:
            cold, cached = await answer(client, "cold", 11), await answer(client, "cached", 11)
    uncached_tokens = len(PROMPT) - (len(PROMPT) - 1) // 16 * 16
    # Lower bounds only: on a busy machine anything may make it slower. Then decodes make up for what the step before
    # them was late, so that only the whole is never faster.
    for usage, num_tokens in ((cold.usage, len(PROMPT)), (cached.usage, uncached_tokens)):
        assert usage.prefill_s >= num_tokens * 500e-6
        assert usage.prefill_s + usage.decode_s >= num_tokens * 500e-6 + 10 * 0.030
    assert cached.usage.prefill_s < cold.usage.prefill_s


@pytest.mark.parametrize(("order", "started_first"), [("mean", "short"), ("tail", "long")])
async def test_the_order_that_was_set_decides_who_goes_first(
    valkey: Server, tmp_path: Path, order: str, started_first: str
) -> None:
    """By the mean 0.75 s after a wait of 1.5 s come behind 0.05 s after none, by the tail before them."""
    costs = ["--sim-prefill-us", "500", "--sim-step-ms", "0", "--order", order]
    async with started(valkey, tmp_path / "log", *costs) as (_, record):
        async with connected(record.address, namespace=record.namespace) as client:
            client.send(generate("warm", [1] * 512, max_tokens=1))
            await client.ended("warm")
            client.send(generate("held", [2] * 2_000, max_tokens=1))
            await client.started("held")  # or the long one, there before the short one, goes before both
            client.send(
                generate("long", [3] * 1_500, max_tokens=1, waited_s=1.5), generate("short", [4] * 100, max_tokens=1)
            )
            await client.ended("long")
            await client.ended("short")
            starts = [frame.id for frame in client.received if isinstance(frame, Started)]
    assert next(name for name in starts if name in ("long", "short")) == started_first


async def test_it_is_small_and_soon_ready(valkey: Server, tmp_path: Path) -> None:
    async with started(valkey, tmp_path / "log") as (process, _):
        spent = process.cpu_times()
        assert spent.user + spent.system < 1.0, "seconds of CPU until it is ready"
        assert process.memory_info().rss < 100 * 2**20
        libraries = {Path(mapping.path).name for mapping in process.memory_maps()}
        assert not [name for name in libraries if name.startswith(("libtorch", "libopenblas", "tokenizers"))]
