"""The engines behind the routers: one process for all of a capacity, emptied between the runs."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import aiohttp

from prefixcache.cli.children import end, spawn
from tests.bench.routing.replay import Prefill, read_prefills
from tests.support.ports import free_port
from tests.support.waiting import eventually

START_TIMEOUT_S = 60.0
ROOT = Path(__file__).resolve().parents[3]


@dataclass(slots=True, kw_only=True)
class Engines:
    """Engines of one capacity."""

    capacity_blocks: int
    urls: tuple[str, ...]
    log: Path
    _num_read_chars: int = 0

    async def empty(self) -> None:
        async with aiohttp.ClientSession() as session:
            for url in self.urls:
                async with session.post(url + "/reset_prefix_cache") as response:
                    response.raise_for_status()
        self.new_prefills()

    def new_prefills(self) -> list[Prefill]:
        """Those since the last call."""
        text = self.log.read_text()[self._num_read_chars :]
        self._num_read_chars += len(text)
        return read_prefills(text.splitlines())


@asynccontextmanager
async def running_engines(
    folder: Path, num_engines: int, capacity_blocks: int, tokenizer: Path, *, flags: Sequence[str] = ()
) -> AsyncIterator[Engines]:
    ports = [free_port() for _ in range(num_engines)]
    name = f"engines-{capacity_blocks}-{'-'.join(flags).replace('=', '-')}"
    log, output = folder / f"{name}.jsonl", folder / f"{name}.log"
    log.touch()
    command = [sys.executable, "-m", "tests.support.lru_engine", *(f"--port={port}" for port in ports)]
    command += [f"--capacity-blocks={capacity_blocks}", f"--tokenizer={tokenizer}", f"--log={log}", *flags]
    with output.open("wb") as written:
        child = spawn(command, stdout=written, stderr=written, cwd=ROOT)

    def is_ready() -> bool:
        assert child.poll() is None, f"the engines ended:\n{output.read_text()[-2000:]}"
        return output.read_text().startswith("ready")

    try:
        await eventually(is_ready, START_TIMEOUT_S)
        urls = tuple(f"http://127.0.0.1:{port}" for port in ports)
        yield Engines(capacity_blocks=capacity_blocks, urls=urls, log=log)
    finally:
        await asyncio.to_thread(end, child, patience_s=2.0)
