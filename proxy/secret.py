"""The deployment secret that seeds every root hash, kept the same on all proxies."""

from __future__ import annotations

import asyncio
import logging

from prefixcache.errors import IndexUnavailable, Unavailable
from prefixcache.hashing import seed_of
from prefixcache.limits import RECONNECT_MOST_S, SECRET_READ_S
from proxy.store import Store
from proxy.warnings_log import QuietLog

_logger = logging.getLogger(__name__)


class DeploymentSecret:
    """Read at start and then on a timer: put back after the store was emptied, adopted when another one stands."""

    def __init__(self, store: Store, configured: bytes | None, log: QuietLog) -> None:
        self._store = store
        self._secret = configured
        self._log = log
        self._seed: int | None = None

    @property
    def unknown(self) -> Unavailable | None:
        """Why no prompt can be taken yet; None once the store told or took a secret."""
        return _unknown() if self._seed is None else None

    @property
    def seed(self) -> int:
        """Raises Unavailable while it is not known."""
        if self._seed is None:
            raise _unknown()
        return self._seed

    async def run(self) -> None:
        """Never returns; cancelled by its owner."""
        while True:
            try:
                self._secret = await self._store.deployment_secret(self._secret)
                self._seed = seed_of(self._secret)
            except IndexUnavailable as error:
                self._log.warning("secret", "the deployment secret could not be read or written: %s", error)
            except Exception:
                _logger.exception("reading the deployment secret failed")
            await asyncio.sleep(SECRET_READ_S if self._seed is not None else RECONNECT_MOST_S / 4)


def _unknown() -> Unavailable:
    return Unavailable("the deployment secret is not known yet: Redis neither told nor took one since the start")
