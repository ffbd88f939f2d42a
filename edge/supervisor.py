"""Looks who the proxies are and which are ready, every EDGE_LOOK_S, and tells nginx when the list is another one."""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

from edge.address import Address
from edge.capacity import Capacity
from edge.config import EdgeConfig
from edge.metrics import EdgeMetrics
from edge.nginx import Nginx
from edge.nginx_config import nginx_config
from edge.readiness import ask_ready
from edge.reload_pace import ReloadPace
from edge.resolver import Resolver
from edge.roster import Roster, Saying
from prefixcache.limits import DRAIN_TIMEOUT_S, EDGE_LOOK_S

_logger = logging.getLogger(__name__)


@dataclass(slots=True, kw_only=True)
class Supervisor:
    config: EdgeConfig
    room: Capacity
    resolver: Resolver
    nginx: Nginx
    ask: Callable[[Address], Awaitable[Saying]] = ask_ready
    look_s: float = EDGE_LOOK_S
    grace_s: float = DRAIN_TIMEOUT_S
    roster: Roster = field(default_factory=Roster)
    pace: ReloadPace = field(default_factory=ReloadPace)
    listed: tuple[Address, ...] = ()
    """What nginx has."""
    num_crashes: int = 0
    """That nginx's configuration knows of."""
    num_reloads: int = 0
    _probe_key: str = field(default_factory=lambda: secrets.token_urlsafe(24), repr=False)

    async def run(self, told_to_end: asyncio.Event) -> int:
        """Until it is told to end, or nginx ends by itself; the exit status. Raises ConfigError."""
        self._write_probe_key()
        self.listed = await self._look()
        await self.nginx.start(self._configuration())
        self._log()
        watching = asyncio.create_task(self._watch(), name="watch")
        ended = asyncio.create_task(self.nginx.ended(), name="nginx")
        told = asyncio.create_task(told_to_end.wait(), name="told")
        try:
            await asyncio.wait({watching, ended, told}, return_when=asyncio.FIRST_COMPLETED)
            if watching.done():
                watching.result()
            if ended.done():
                _logger.error("nginx has ended with status %d", ended.result())
                return 1
            return 0
        finally:
            for task in (watching, told):
                task.cancel()
            await asyncio.gather(watching, told, return_exceptions=True)
            await self.nginx.stop(grace_s=self.grace_s)
            await ended
            await self.resolver.close()

    async def _watch(self) -> None:
        loop = asyncio.get_running_loop()
        began_at = loop.time()
        while True:
            # One that is silent makes a look long; the others take leave meanwhile.
            await asyncio.sleep(began_at + self.look_s - loop.time())
            began_at = loop.time()
            proxies = await self._look()
            news = proxies != self.listed or self.nginx.num_crashes != self.num_crashes
            if news and self.pace.allows(loop.time()):
                self.listed, self.num_crashes = proxies, self.nginx.num_crashes
                self.nginx.reload(self._configuration())
                self.num_reloads += 1
                self.pace.reloaded(loop.time())
                self._log()

    async def _look(self) -> tuple[Address, ...]:
        addresses = sorted(await self.resolver.addresses(timeout_s=self.look_s))
        sayings = await asyncio.gather(*map(self.ask, addresses))
        listed = self.roster.look(dict(zip(addresses, sayings, strict=True)))
        self._write_metrics(num_known=len(addresses))
        return listed

    def _write_metrics(self, *, num_known: int) -> None:
        """Whole or not at all: nginx may read it at any time."""
        metrics = EdgeMetrics(
            num_known=num_known,
            num_ready=self.roster.num_ready,
            num_lost=self.roster.num_lost,
            num_reloads=self.num_reloads,
            looked_at=time.time(),
        )
        path = self.config.run_dir / "metrics"
        part = path.with_suffix(".part")
        part.write_text(metrics.text, encoding="utf-8")
        part.replace(path)

    def _configuration(self) -> str:
        return nginx_config(self.config, self.listed, self.room, self.num_crashes, probe_key=self._probe_key)

    def _write_probe_key(self) -> None:
        """The health check of the container shows it: a client's keys need not be known there."""
        path = self.config.run_dir / "probe-key"
        with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w", encoding="utf-8") as file:
            file.write(self._probe_key)

    def _log(self) -> None:
        listed = ", ".join(map(str, self.listed)) or "none"
        _logger.info("proxies in the list: %s; ready: %d", listed, self.roster.num_ready)
