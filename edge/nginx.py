"""The nginx process: started, given new configurations, ended."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

from edge.error_log import open_log
from prefixcache.cli.children import die_with_parent
from prefixcache.errors import ConfigError
from prefixcache.limits import CLOSE_TIMEOUT_S


class Nginx:
    """One for the life of the edge. Its output is the edge's own; its errors go through `error_log.py`."""

    def __init__(self, program: str, run_dir: Path) -> None:
        self._program = program
        self._path = run_dir / "nginx.conf"
        self._run_dir = run_dir
        self._process: asyncio.subprocess.Process | None = None
        self._error_log: asyncio.Task[None] | None = None
        self.num_crashes = 0
        """Processes that fell, each with what it had in hand; nginx starts another one."""

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    async def start(self, config: str) -> None:
        """Raises ConfigError if the program cannot be run."""
        self._write(config)
        errors, self._error_log = await open_log(self._count_crash)
        try:
            self._process = await asyncio.create_subprocess_exec(
                *(self._program, "-p", str(self._run_dir), "-c", str(self._path), "-e", "stderr"),
                stderr=errors,
                process_group=0,  # Ctrl-C reaches the supervisor alone
                preexec_fn=lambda: die_with_parent(signal.SIGTERM),
            )
        except OSError as error:
            raise ConfigError(f"{self._program} cannot be run: {error}") from error
        finally:
            os.close(errors)

    def reload(self, config: str) -> None:
        """New connections get the new configuration; requests in hand end under the one they began with."""
        self._write(config)
        self._signal(signal.SIGHUP)

    async def ended(self) -> int:
        """Returns its exit status once it has ended by itself or was told to."""
        assert self._process is not None
        return await self._process.wait()

    async def stop(self, *, grace_s: float) -> None:
        """Takes no connection from now on; what is in hand after `grace_s` is cut."""
        self._signal(signal.SIGQUIT)
        try:
            async with asyncio.timeout(grace_s):
                await self.ended()
        except TimeoutError:
            self._signal(signal.SIGTERM)
            await self.ended()
        assert self._error_log is not None
        await asyncio.wait({self._error_log}, timeout=CLOSE_TIMEOUT_S)  # a master that was killed leaves processes
        self._error_log.cancel()
        await asyncio.gather(self._error_log, return_exceptions=True)

    def _count_crash(self) -> None:
        self.num_crashes += 1

    def _signal(self, number: signal.Signals) -> None:
        assert self._process is not None
        if self._process.returncode is None:
            self._process.send_signal(number)

    def _write(self, config: str) -> None:
        """For this user's eyes: keys stand in it."""
        part = self._path.with_suffix(".part")
        with open(os.open(part, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w", encoding="utf-8") as file:
            file.write(config)
        part.replace(self._path)
