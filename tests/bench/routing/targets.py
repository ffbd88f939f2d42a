"""What stands in front of the engines: our proxy in several forms, and routers of others where they are installed.

PEERS_HOME (default ~/.cache/peers) is where `vllm-router/bin/vllm-router` and `sglang-router/bin/sglang-router` are
looked for, each in a virtual environment of its own.
"""

from __future__ import annotations

import asyncio
import os
import subprocess
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import aiohttp

from prefixcache.cli.children import end, spawn
from prefixcache.cli.programs import program_command
from prefixcache.cli.valkey import EmbeddedValkey
from tests.support.ports import free_port
from tests.support.waiting import eventually

START_TIMEOUT_S = 60.0
PEERS_HOME = Path(os.environ.get("PEERS_HOME") or Path.home() / ".cache" / "peers")


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """Something that routes, started anew for every run."""

    name: str
    flags: tuple[str, ...] = ()
    num_proxies: int = 1
    """More than one share a Redis; only ours can."""
    binary: Path | None = None
    """Of another project's router; None is our proxy."""
    routes_by_prefix: bool = True
    engine_flags: tuple[str, ...] = ()
    """Of the engines behind it."""

    @property
    def slug(self) -> str:
        """The name as part of a file's."""
        return self.name.replace(",", "").replace(" ", "-")

    @property
    def is_ours(self) -> bool:
        return self.binary is None


TOKENIZER_FLAG = "--tokenizer"
"""Stands for the flag and the folder of the run; falls away where a run has none."""

OURS = (
    Target(name="ours", flags=(TOKENIZER_FLAG,)),
    Target(name="ours, no tokenizer"),
    Target(name="ours, two proxies", flags=(TOKENIZER_FLAG,), num_proxies=2),
    Target(name="ours, round robin", flags=("--policy", "round_robin"), routes_by_prefix=False),
)
_VLLM_ROUTER = PEERS_HOME / "vllm-router" / "bin" / "vllm-router"
_SGLANG_ROUTER = PEERS_HOME / "sglang-router" / "bin" / "sglang-router"
PEERS = (
    Target(name="vllm-router", binary=_VLLM_ROUTER),
    Target(name="vllm-router, engines do not render", binary=_VLLM_ROUTER, engine_flags=("--no-render",)),
    Target(name="sglang-router", binary=_SGLANG_ROUTER, engine_flags=("--speaks=sglang",)),
)
"""cache_aware, their default, unless the name says otherwise."""
FOR_REAL_ENGINES = (
    *OURS[:2],
    OURS[3],
    PEERS[0],
    Target(
        name="vllm-router, round robin", binary=_VLLM_ROUTER, flags=("--policy", "round_robin"), routes_by_prefix=False
    ),
    PEERS[2],
)


def installed(targets: Sequence[Target]) -> tuple[list[Target], list[str]]:
    """Those that can run here, and a line for each that cannot."""
    there = [target for target in targets if target.binary is None or target.binary.exists()]
    return there, [f"left out: {target.name}: no {target.binary}" for target in targets if target not in there]


@asynccontextmanager
async def running_target(
    target: Target, engines: Sequence[str], tokenizer: Path | None, folder: Path
) -> AsyncIterator[list[str]]:
    """Gives the URLs that clients may use. Raises AssertionError, with the log, for one that does not start."""
    async with AsyncExitStack() as stack:
        shared = ["--redis", stack.enter_context(EmbeddedValkey()).url] if target.num_proxies > 1 else []
        programs = [
            _start(target, engines, tokenizer, shared, folder / f"{target.slug}-{number}.log")
            for number in range(target.num_proxies)
        ]
        for program in programs:
            stack.push_async_callback(asyncio.to_thread, end, program.process, patience_s=2.0)
        for program in programs:
            await eventually(program.is_ready, START_TIMEOUT_S)
        yield [program.url for program in programs]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Program:
    process: subprocess.Popen[bytes]
    url: str
    log: Path

    async def is_ready(self) -> bool:
        """Whether it lists a model of the engines."""
        assert self.process.poll() is None, f"{self.log.stem} ended:\n{self.log.read_text()[-3000:]}"
        try:
            async with aiohttp.ClientSession() as session, session.get(self.url + "/v1/models") as response:
                return response.status == 200 and b'"id"' in await response.read()
        except aiohttp.ClientError:
            return False


def _start(
    target: Target, engines: Sequence[str], tokenizer: Path | None, shared: Sequence[str], log: Path
) -> _Program:
    port = free_port()
    environment = dict(os.environ)
    listening = ["--host", "127.0.0.1", "--port", str(port)]
    if target.binary is None:
        flags = [flag for flag in target.flags if flag != TOKENIZER_FLAG]
        if TOKENIZER_FLAG in target.flags and tokenizer is not None:
            flags.append(f"--tokenizer={tokenizer}")
        command = [*program_command("proxy"), *listening, *(f"--engine={url}" for url in engines), *flags, *shared]
    else:
        subcommand = ["launch"] if target.binary.name == "sglang-router" else []
        checks = ["--worker-startup-check-interval", "1", "--prometheus-port", str(free_port())]
        command = [str(target.binary), *subcommand, *listening, "--worker-urls", *engines, *checks, *target.flags]
        environment["PATH"] = f"{target.binary.parent}:{environment['PATH']}"
    with log.open("wb") as written:
        process = spawn(command, environment=environment, stdout=written, stderr=written)
    return _Program(process=process, url=f"http://127.0.0.1:{port}", log=log)
