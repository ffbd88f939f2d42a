"""`python -m worker` as a process: it starts, serves a tiny model, and ends as it is told."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import subprocess
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp
import pytest

from prefixcache.cli.children import spawn
from prefixcache.cli.programs import program_command
from prefixcache.protocol import End
from prefixcache.registry import WorkerRecord
from prefixcache.store import RedisStore
from tests.support.requests import generate
from tests.support.stream_client import connected
from tests.support.tiny_models import tiny_model, write_model
from tests.support.valkey import Server
from tests.support.waiting import eventually

START_TIMEOUT_S = 60.0
EXIT_TIMEOUT_S = 10.0


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "tiny"
    folder.mkdir()
    return write_model(tiny_model("Llama"), folder)


def command(valkey: Server, model: Path, *more: str) -> list[str]:
    flags = ["--redis", valkey.url, "--model", str(model), "--threads", "1", "--dtype", "float32"]
    return [*program_command("worker"), *flags, "--num-blocks", "32", *more]


@asynccontextmanager
async def started(arguments: list[str], log: Path) -> AsyncIterator[subprocess.Popen[bytes]]:
    """The program once it says that it is ready; killed on exit if it still runs."""
    with log.open("wb") as output:
        process = spawn(arguments, environment=dict(os.environ), stderr=output)

    def is_ready() -> bool:
        text = log.read_text()
        assert process.poll() is None, text
        return " ready at " in text

    try:
        await eventually(is_ready, START_TIMEOUT_S)
        yield process
    finally:
        process.kill()
        process.wait()


async def exit_code(process: subprocess.Popen[bytes]) -> int:
    return await asyncio.to_thread(process.wait, EXIT_TIMEOUT_S)


async def only_worker(store: RedisStore) -> WorkerRecord:
    (record,) = await store.registry().live_workers()
    return record


async def test_it_serves_and_leaves_on_a_signal(valkey: Server, model_folder: Path, tmp_path: Path) -> None:
    log = tmp_path / "log"
    arguments = command(valkey, model_folder, "--name", "w1", "--served-model-name", "alias")
    async with RedisStore.open(valkey.url) as store, started(arguments, log) as process:
        record = await only_worker(store)
        assert (record.worker_id, record.model, record.served_names) == ("w1", "tiny", ("alias",))
        assert (record.num_blocks, record.max_model_len) == (32, 256)
        assert int(record.address.rpartition(":")[2]) > 0
        async with connected(record.address, namespace=record.namespace) as client:
            client.send(generate("a", list(range(10, 90))))
            assert isinstance(await client.ended("a"), End)
            client.send(generate("b", list(range(10, 90))))
            end = await client.ended("b")
            assert isinstance(end, End)
            assert end.usage.cached_tokens == 64
            assert client.tokens("a") == client.tokens("b")
        async with aiohttp.ClientSession(f"http://{record.address}") as http:
            async with http.get("/health") as response:
                assert response.status == 200
            async with http.get("/tokenizer/manifest") as response:
                assert (await response.json())["fingerprint"] == record.tokenizer_fingerprint
        process.send_signal(signal.SIGTERM)
        assert await exit_code(process) == 0
        assert await store.registry().live_workers() == []
    lines = log.read_text().splitlines()
    assert [line for line in lines if " ready at " in line and "tiny" not in line and "alias" in line]
    assert all(re.match(r"(INFO|WARNING) \S+ ", line) for line in lines), lines


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--kv-memory", "much"], "--kv-memory is 'much'; it must be a size such as 2GiB"),
        (["--listen", "nowhere"], "--listen is 'nowhere'; it must be HOST:PORT"),
        (["--model", "/does/not/exist"], "model folder /does/not/exist does not exist"),
    ],
)
def test_a_wrong_setting_is_one_plain_line(flags: list[str], message: str, valkey: Server, model_folder: Path) -> None:
    ended = subprocess.run(command(valkey, model_folder, *flags), capture_output=True, text=True, timeout=60)
    assert ended.returncode == 2
    assert ended.stderr.startswith(f"worker: {message}")
    assert len(ended.stderr.splitlines()) == 1


async def test_a_port_in_use_is_known_before_the_model_is_loaded(valkey: Server, model_folder: Path) -> None:
    server = await asyncio.start_server(lambda _reader, writer: writer.close(), "127.0.0.1", 0)
    async with server:
        host, port = server.sockets[0].getsockname()
        arguments = command(valkey, model_folder, "--listen", f"{host}:{port}")
        ended = await asyncio.to_thread(subprocess.run, arguments, capture_output=True, text=True, timeout=60)
    assert ended.returncode == 2
    (line,) = ended.stderr.splitlines()
    assert line.startswith(f"worker: cannot listen on {host}:{port}: ")
