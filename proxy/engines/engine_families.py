"""The incarnations of all plain engines: opened, kept alive while the engines answer, and read for what others opened.

every FAMILY_READ_S, at once where one is missing    families(all, renew: those that answer) ──► claims of each
absent: never opened, dead for long, or the store was emptied      ──► open_family
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection

from prefixcache.errors import IndexUnavailable
from prefixcache.index.base import PrefixIndex
from prefixcache.limits import FAMILY_READ_S
from proxy.engines.engine_claims import EngineClaims
from proxy.warnings_log import QuietLog

_logger = logging.getLogger(__name__)


class EngineFamilies:
    """One for the process, of the namespace in which all engines are."""

    def __init__(self, index: PrefixIndex, log: QuietLog) -> None:
        self._index = index
        self._log = log
        self._claims: dict[str, EngineClaims] = {}
        self._wake = asyncio.Event()

    def claims_of(self, engine: str) -> EngineClaims:
        """Always the same object. Those that are asked for before `run` are written."""
        if engine not in self._claims:
            self._claims[engine] = claims = EngineClaims(self._index, engine, self._log)
            claims.on_need = self._wake.set
        return self._claims[engine]

    async def run(self, answering: Callable[[], Collection[str]]) -> None:
        """Never returns; cancelled by its owner. `answering`: the engines that are up by now."""
        writers = [asyncio.create_task(claims.run(), name=f"claims {name}") for name, claims in self._claims.items()]
        try:
            while True:
                try:
                    await self.exchange(answering())
                except IndexUnavailable as error:
                    self._log.warning("families", "what engines hold is not known: %s", error)
                except Exception:
                    _logger.exception("reading the incarnations of engines failed")
                await self._pause()
        finally:
            for writer in writers:
                writer.cancel()
            await asyncio.gather(*writers, return_exceptions=True)

    async def exchange(self, answering: Collection[str]) -> None:
        """Reads all families once, renews those that answer and opens what is missing. Raises IndexUnavailable."""
        self._wake.clear()
        found = await self._index.families(list(self._claims), renew=answering)
        for engine, claims in self._claims.items():
            family = found.get(engine)
            if family is None or family.anchor == claims.replaced:
                claims.take(None)
                family = await self._index.open_family(engine, instead_of=claims.replaced)
            claims.take(family)

    async def _pause(self) -> None:
        try:
            async with asyncio.timeout(FAMILY_READ_S):
                await self._wake.wait()
        except TimeoutError:
            pass
