"""A deployment as an operator runs it: workers and proxies are processes, which a test kills and restarts."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import subprocess
import urllib.request
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from prefixcache.cli.children import spawn
from prefixcache.cli.programs import program_command
from tests.support.waiting import eventually

START_TIMEOUT_S = 60.0
STOP_TIMEOUT_S = 15.0


@dataclass(slots=True, kw_only=True)
class Program:
    """One process and its log."""

    name: str
    command: Sequence[str]
    process: subprocess.Popen[bytes]
    log: Path
    environment: Mapping[str, str]
    niceness: int = 0
    url: str = ""
    """Of a proxy: http://127.0.0.1:PORT."""

    def kill(self) -> None:
        """kill -9, and the process is gone when this returns."""
        self.process.kill()
        self.process.wait()

    async def stop(self) -> None:
        """SIGTERM, and the process has taken leave when this returns."""
        self.process.terminate()
        assert await asyncio.to_thread(self.process.wait, STOP_TIMEOUT_S) == 0, self.log.read_text()[-4000:]

    async def said(self, words: str, timeout_s: float = START_TIMEOUT_S) -> str:
        """The log once it contains a line that matches `words`."""

        def is_there() -> bool:
            text = self.log.read_text()
            if re.search(words, text) is None:
                assert self.process.poll() is None, f"{self.name} ended:\n{text[-4000:]}"
                return False
            return True

        await eventually(is_there, timeout_s)
        return self.log.read_text()


class ProgramFleet:
    """Starts programs against one Redis; `running_fleet` ends them all."""

    def __init__(self, folder: Path, redis_url: str | None) -> None:
        """Without a Redis proxies serve plain engines alone."""
        self.redis_url = redis_url
        self._folder = folder
        self._num_started = 0
        self.programs: list[Program] = []

    def start_worker(
        self,
        name: str,
        *flags: str,
        runner: str = "sim",
        environment: Mapping[str, str] | None = None,
        niceness: int = 0,
    ) -> Program:
        """`await program.said(" ready at ")` waits for it."""
        assert self.redis_url is not None
        command = [*program_command("worker"), "--runner", runner, "--redis", self.redis_url, "--name", name, *flags]
        return self._start(name, command, environment or {}, niceness)

    async def start_proxy(self, name: str, *flags: str, environment: Mapping[str, str] | None = None) -> Program:
        """A proxy that listens."""
        redis = ["--redis", self.redis_url] if self.redis_url is not None else []
        command = [*program_command("proxy"), *redis, "--port", "0", *flags]
        program = self._start(name, command, environment or {})
        log = await program.said(r"listening http://\S+\n")
        program.url = re.findall(r"listening (http://\S+)\n", log)[-1]
        return program

    def restart(self, program: Program) -> Program:
        """The same command once more, in a log of its own."""
        return self._start(program.name, program.command, program.environment, program.niceness)

    def _start(self, name: str, command: Sequence[str], environment: Mapping[str, str], niceness: int = 0) -> Program:
        self._num_started += 1
        log = self._folder / f"{self._num_started}-{name}.log"
        with log.open("wb") as output:
            process = spawn(command, environment={**os.environ, **environment}, niceness=niceness, stderr=output)
        program = Program(
            name=name, command=command, process=process, log=log, environment=environment, niceness=niceness
        )
        self.programs.append(program)
        return program

    def end(self) -> None:
        for program in self.programs:
            if program.process.poll() is None:
                program.process.send_signal(signal.SIGKILL)
        for program in self.programs:
            program.process.wait()

    def failures(self) -> str:
        """Tracebacks in any of the logs."""
        texts = [(program.name, program.log.read_text()) for program in self.programs]
        return "\n".join(f"{name}:\n{text[-4000:]}" for name, text in texts if "Traceback" in text)


@asynccontextmanager
async def running_fleet(folder: Path, redis_url: str | None) -> AsyncIterator[ProgramFleet]:
    """Ends every program on exit and fails if one of them logged a traceback."""
    fleet = ProgramFleet(folder, redis_url)
    try:
        yield fleet
    finally:
        await asyncio.to_thread(fleet.end)
    assert not fleet.failures(), fleet.failures()


async def get_json(url: str) -> dict[str, Any]:
    """The JSON behind a URL, whatever the status."""

    def read() -> dict[str, Any]:
        with urllib.request.urlopen(url, timeout=10) as answer:
            value: dict[str, Any] = json.loads(answer.read())
            return value

    return await asyncio.to_thread(read)


async def all_ready(proxy: Program, num_workers: int, timeout_s: float = START_TIMEOUT_S) -> None:
    """Returns once the proxy is connected to so many workers."""

    async def is_ready() -> bool:
        health = await get_json(proxy.url + "/health")
        return len([worker for worker in health["workers"] if worker["ready"]]) == num_workers

    await eventually(is_ready, timeout_s)


async def all_connected(workers: Iterable[Program], proxies: Iterable[Program]) -> None:
    """Returns once every worker is ready, and every proxy is connected to all of them."""
    workers = list(workers)
    for worker in workers:
        await worker.said(" ready at ")
    for proxy in proxies:
        await all_ready(proxy, len(workers))
