"""The addresses of the proxies' names, asked for again and again without waiting for a slow answer."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Awaitable, Callable, Sequence

from edge.address import Address
from edge.config import Name

_logger = logging.getLogger(__name__)
Lookup = Callable[[Name], Awaitable[frozenset[Address]]]
"""Raises OSError if the name has no address."""


async def look_up(name: Name) -> frozenset[Address]:
    """All IPv4 addresses, or all of IPv6 if there are none: a proxy that has both counts once."""
    found = await asyncio.get_running_loop().getaddrinfo(name.host, name.port, type=socket.SOCK_STREAM)
    of_family = {
        family: frozenset(Address(str(entry[4][0]), name.port) for entry in found if entry[0] == family)
        for family in (socket.AF_INET, socket.AF_INET6)
    }
    return of_family[socket.AF_INET] or of_family[socket.AF_INET6]


class Resolver:
    """What each name meant when it was last known.

    A name server that fails, or is slow, changes nothing: addresses that are no more refuse, or stay silent.
    """

    def __init__(self, names: Sequence[Name], lookup: Lookup = look_up) -> None:
        self._names = tuple(names)
        self._lookup = lookup
        self._known: dict[Name, frozenset[Address]] = {}
        self._pending: dict[Name, asyncio.Task[frozenset[Address]]] = {}

    async def addresses(self, *, timeout_s: float) -> frozenset[Address]:
        """Waits no longer than `timeout_s`; an answer that comes later counts for the next call."""
        for name in self._names:
            if name not in self._pending:
                self._pending[name] = asyncio.ensure_future(self._lookup(name))
        await asyncio.wait(self._pending.values(), timeout=timeout_s)
        for name, task in [*self._pending.items()]:
            if task.done():
                del self._pending[name]
                self._take(name, task)
        return frozenset().union(*self._known.values())

    def _take(self, name: Name, task: asyncio.Task[frozenset[Address]]) -> None:
        error = task.exception()
        if error is None:
            self._known[name] = task.result()
        elif not isinstance(error, OSError | UnicodeError):
            raise error
        elif name not in self._known:
            self._known[name] = frozenset()
            _logger.warning("%s: %s", name.host, error)

    async def close(self) -> None:
        for task in self._pending.values():
            task.cancel()
        await asyncio.gather(*self._pending.values(), return_exceptions=True)
