"""What is answered at a worker's port before there is a worker: by itself, and by the program."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from prefixcache.cli.children import spawn
from prefixcache.cli.programs import program_command
from prefixcache.errors import ConfigError
from prefixcache.limits import HELLO_TIMEOUT_S
from prefixcache.metrics import WorkerMetrics
from prefixcache.probe import Finding, Server, check_worker
from prefixcache.protocol import MAJOR, MINOR, Hello, encode
from tests.support.ports import free_port
from tests.support.scraping import scraped
from tests.support.waiting import eventually
from worker.config import Address
from worker.loading_server import answering_while_loading
from worker.server import bind

TIMEOUT_S = 10.0
LOADING = "prefixcache_worker_loading"
INFO = "prefixcache_worker_build_info"


@pytest.fixture
def bound() -> Iterator[socket.socket]:
    with bind(Address(host="127.0.0.1", port=0)) as made:
        yield made


def connect(bound: socket.socket) -> socket.socket:
    return socket.create_connection(bound.getsockname(), timeout=TIMEOUT_S)


async def test_health_and_metrics_say_that_it_loads(bound: socket.socket) -> None:
    metrics = WorkerMetrics()
    metrics.identify(worker="w", model="")
    host, port = bound.getsockname()
    server = Server(host, port)
    with answering_while_loading(bound, metrics):
        assert server.ask("/health") == (503, {"serving": False, "reason": "the model is loading"})
        assert server.ask("/tokenizer/manifest")[0] == 503
        assert check_worker(server) == Finding(False, "503, the model is loading")
        assert await scraped(f"http://{host}:{port}", LOADING) == {"": 1}
        assert await scraped(f"http://{host}:{port}", INFO, label="worker") == {"w": 1}
        assert (
            sum((await scraped(f"http://{host}:{port}", "prefixcache_worker_process_start_time_seconds")).values()) > 0
        )
    assert metrics.registry.get_sample_value(LOADING) == 0, "it is over"


def test_a_proxy_that_knew_it_before_is_turned_away_at_once(bound: socket.socket) -> None:
    with answering_while_loading(bound, WorkerMetrics()), closing(connect(bound)) as client:
        client.settimeout(HELLO_TIMEOUT_S / 2)  # before any timeout of its own
        client.sendall(encode(Hello(major=MAJOR, minor=MINOR, namespace="n")))
        try:
            assert client.recv(1) == b""
        except ConnectionResetError:
            pass


def test_who_is_slow_does_not_hold_up_its_end(bound: socket.socket, capfd: pytest.CaptureFixture[str]) -> None:
    with answering_while_loading(bound, WorkerMetrics()):
        silent, slow = connect(bound), connect(bound)
        slow.sendall(b"GET /hea")
        assert Server(*bound.getsockname()).ask("/health")[0] == 503
    for client in (silent, slow):
        client.setblocking(False)
        with pytest.raises(BlockingIOError):  # it has not been waited for until its time was over
            client.recv(1)
        client.close()
    assert capfd.readouterr().err == "", "nor does anybody read of it"


async def test_who_connects_between_it_and_the_worker_is_answered_by_the_worker(bound: socket.socket) -> None:
    with answering_while_loading(bound, WorkerMetrics()):
        pass

    async def answer(_reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"the worker")
        writer.close()

    with closing(connect(bound)) as client:
        async with await asyncio.start_server(answer, sock=bound):
            assert await asyncio.to_thread(client.recv, 64) == b"the worker"


def test_a_port_that_somebody_listens_on_is_refused_by_name() -> None:
    """Two sockets may be bound to one port as long as neither listens."""
    address = Address(host="127.0.0.1", port=free_port())
    with bind(address) as first, bind(address) as second, answering_while_loading(first, WorkerMetrics()):
        with pytest.raises(ConfigError, match=f"cannot listen on {address}: "):
            with answering_while_loading(second, WorkerMetrics()):
                pass


async def test_the_program_answers_while_it_loads_and_may_be_ended(tmp_path: Path) -> None:
    """Its model's settings cannot be read: nobody has written them yet."""
    os.mkfifo(tmp_path / "config.json")
    address = f"127.0.0.1:{free_port()}"
    flags = ["--redis", "redis://127.0.0.1:1", "--model", str(tmp_path), "--listen", address, "--name", "w1"]
    process = spawn([*program_command("worker"), *flags])

    async def says_that_it_loads() -> bool:
        try:
            loading = await scraped(f"http://{address}", LOADING)
            return loading == {"": 1} and await scraped(f"http://{address}", INFO, label="worker") == {"w1": 1}
        except OSError:
            return False

    try:
        await eventually(says_that_it_loads, TIMEOUT_S)
        process.send_signal(signal.SIGTERM)
        assert await asyncio.to_thread(process.wait, TIMEOUT_S) == 0
    finally:
        process.kill()
        process.wait()
