"""`python -m proxy` as a process."""

from __future__ import annotations

import json
import os
import re
import select
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from tests.support.valkey import Server

START_TIMEOUT_S = 30.0


@contextmanager
def _program(
    *arguments: str, environment: dict[str, str] | None = None
) -> Iterator[tuple[subprocess.Popen[bytes], str]]:
    """The process, and its log up to the line that tells its URL."""
    process = subprocess.Popen(
        [sys.executable, "-m", "proxy", *arguments],
        stderr=subprocess.PIPE,
        env={**os.environ, **(environment or {})},
    )
    assert process.stderr is not None
    try:
        with process.stderr:
            yield process, _log_until(process, b"listening http://")
    finally:
        if process.poll() is None:
            process.kill()
        process.wait()


def _log_until(process: subprocess.Popen[bytes], words: bytes) -> str:
    assert process.stderr is not None
    log = b""
    deadline = time.monotonic() + START_TIMEOUT_S
    while words not in log or not log.endswith(b"\n"):
        ready, _, _ = select.select([process.stderr], [], [], max(0.0, deadline - time.monotonic()))
        data = os.read(process.stderr.fileno(), 65536) if ready else b""
        assert data, f"{words!r} not said within {START_TIMEOUT_S} s: {log.decode()}"
        log += data
    return log.decode()


def _url(log: str) -> str:
    found = re.search(r"^INFO proxy listening (http://127\.0\.0\.1:\d+)$", log, re.MULTILINE)
    assert found is not None, log
    return found[1]


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM])
def test_says_where_it_listens_and_ends_cleanly(valkey: Server, how: signal.Signals) -> None:
    with _program("--redis", valkey.url, "--port", "0") as (process, log):
        with urllib.request.urlopen(_url(log) + "/health", timeout=10) as answer:
            assert answer.status == 200
        with pytest.raises(urllib.error.HTTPError) as refused:
            urllib.request.urlopen(_url(log) + "/nothing", timeout=10)
        with refused.value:
            assert refused.value.code == 404
        log = _log_until(process, b" 404 ")
        assert re.search(r"^INFO proxy\.access_log GET /nothing 404 model=- .* id=[0-9a-f]{32}$", log, re.MULTILINE)
        assert "/health" not in log, "probes do not fill the log"
        process.send_signal(how)
        assert process.wait(10) == 0


def test_told_to_end_it_is_not_ready_first_and_told_again_it_goes(valkey: Server) -> None:
    with _program("--redis", valkey.url, "--port", "0", "--drain-delay", "600") as (process, log):
        process.terminate()
        _log_until(process, b"not ready any more, requests are taken for another 600 s")
        with pytest.raises(urllib.error.HTTPError) as unready:
            urllib.request.urlopen(_url(log) + "/ready", timeout=10)
        with unready.value:
            assert "shutting down" in json.loads(unready.value.read())["error"]["message"]
        with urllib.request.urlopen(_url(log) + "/v1/models", timeout=10) as answer:
            assert (answer.status, answer.headers["connection"]) == (200, "close")
        process.terminate()
        assert process.wait(10) == 0


def test_starts_without_redis() -> None:
    with _program("--redis", "redis://127.0.0.1:1", "--port", "0") as (process, log):
        with pytest.raises(urllib.error.HTTPError) as unready:
            urllib.request.urlopen(_url(log) + "/ready", timeout=10)
        with unready.value:
            assert unready.value.code == 503
        process.terminate()
        assert process.wait(10) == 0


def test_in_front_of_an_engine_it_needs_no_redis() -> None:
    environment = {"PREFIXCACHE_ENGINE_API_KEY": "k3y"}
    with _program("--engine", "http://127.0.0.1:1/v1", "--port", "0", environment=environment) as (process, log):
        with urllib.request.urlopen(_url(log) + "/health", timeout=10) as answer:
            health = json.loads(answer.read())
        assert health["redis"] is None
        assert [engine["url"] for engine in health["engines"]] == ["http://127.0.0.1:1"]
        assert "redis" not in log.lower() and "k3y" not in log
        process.terminate()
        assert process.wait(10) == 0


def test_beside_an_engine_it_takes_the_redis_that_is_named(valkey: Server) -> None:
    with _program("--engine", "http://127.0.0.1:1", "--redis", valkey.url, "--port", "0") as (process, log):
        deadline = time.monotonic() + START_TIMEOUT_S
        while not _reaches_redis(_url(log)):
            assert time.monotonic() < deadline
        process.terminate()
        assert process.wait(10) == 0


def test_settings_come_from_the_environment_too(valkey: Server) -> None:
    environment = {"PREFIXCACHE_REDIS": valkey.url, "PREFIXCACHE_PORT": "0", "PREFIXCACHE_SECRET": "s3cret"}
    with _program(environment=environment) as (process, log):
        deadline = time.monotonic() + START_TIMEOUT_S
        while not _reaches_redis(_url(log)):
            assert time.monotonic() < deadline
        assert valkey.command("GET", "prefixcache:secret") == b"$6\r\ns3cret\r\n"
        assert "s3cret" not in log
        process.terminate()
        assert process.wait(10) == 0


def _reaches_redis(url: str) -> bool:
    with urllib.request.urlopen(url + "/health", timeout=10) as answer:
        return bool(json.loads(answer.read())["redis"]["reachable"])


def test_a_port_in_use_is_one_plain_line() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        done = subprocess.run(
            [sys.executable, "-m", "proxy", "--redis", "redis://127.0.0.1:1", "--port", str(port)],
            capture_output=True,
            timeout=START_TIMEOUT_S,
        )
    assert done.returncode == 2
    assert done.stdout == b""
    (line,) = [line for line in done.stderr.decode().splitlines() if "redis" not in line.lower()]
    assert line == f"error: cannot listen on 127.0.0.1:{port}: the port is in use, choose another one"


@pytest.mark.parametrize(
    "arguments",
    [
        ["--redis", "http://x"],
        ["--policy", "best"],
        ["--port", "99999"],
        ["--key-prefix", "{x}"],
        ["--cors-origin", "x"],
        ["--drain-delay", "-1"],
        ["--drain-timeout", "inf"],
        ["--engine", "10.0.0.5:8000"],
        ["--engine", "http://h:1", "--engine", "http://h:1/v1"],
        ["--engine", "http://h:1", "--engine-capacity", "0"],
        ["--engine", "http://h:1", "--tokenizer", "/nowhere"],
        ["--engine", "http://h:1", "--engine-api-key", "in sight"],
    ],
)
def test_wrong_settings_end_with_2(arguments: list[str]) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "proxy", "--port", "0", *arguments], capture_output=True, timeout=START_TIMEOUT_S
    )
    assert done.returncode == 2
    assert b"Traceback" not in done.stderr
