"""`prefixcache up` as a user runs it: a process of its own, known by what it prints."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil

from tests.support.ports import free_port


@dataclass(frozen=True, slots=True, kw_only=True)
class RunningStack:
    """A stack that printed its ready line."""

    process: subprocess.Popen[bytes]
    url: str
    """http://127.0.0.1:PORT"""
    output: str
    """What it printed on stdout up to and including the curl line."""
    start_s: float
    log: Path

    def descendants(self) -> list[psutil.Process]:
        return psutil.Process(self.process.pid).children(recursive=True)


@contextmanager
def running_stack(
    folder: Path, arguments: Sequence[str], *, environment: Mapping[str, str] | None = None, timeout_s: float = 240.0
) -> Iterator[RunningStack]:
    """Starts `prefixcache up` on a free port; its log is kept in `folder` and shown when it does not get ready."""
    log = folder / "up.log"
    port = free_port()
    command = [sys.executable, "-m", "prefixcache.cli.main", "up", "--port", str(port), *arguments]
    began = time.monotonic()
    with log.open("wb") as stderr:
        process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=stderr, env={**os.environ, **(environment or {})}
        )
    assert process.stdout is not None
    try:
        with process.stdout:
            output = _read_until_curl(process, timeout_s, log)
            yield RunningStack(
                process=process,
                url=f"http://127.0.0.1:{port}",
                output=output,
                start_s=time.monotonic() - began,
                log=log,
            )
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGINT)
            try:
                process.wait(20.0)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _read_until_curl(process: subprocess.Popen[bytes], timeout_s: float, log: Path) -> str:
    assert process.stdout is not None
    descriptor = process.stdout.fileno()
    deadline = time.monotonic() + timeout_s
    text = ""
    while "\ncurl " not in text or not text.endswith("\n"):
        left_s = deadline - time.monotonic()
        readable, _, _ = select.select([descriptor], [], [], max(left_s, 0.0))
        data = os.read(descriptor, 65536) if readable else b""
        if not data:
            raise AssertionError(f"the stack did not get ready within {timeout_s} s:\n{log.read_text()[-6000:]}")
        text += data.decode()
    return text
