"""An index together with what a test does to the store behind it."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Protocol

from prefixcache.index.base import PrefixIndex
from prefixcache.index.memory_index import MemoryIndex
from prefixcache.limits import LEASE_S


class World(Protocol):
    @property
    def name(self) -> str: ...

    @property
    def index(self) -> PrefixIndex: ...

    def expire(self, incarnation: int) -> None:
        """Lets the lease run out now."""

    def flush(self) -> None:
        """FLUSHALL."""

    def let_pass(self, passed_s: float) -> None:
        """Makes everything that is stored so much older."""


class MemoryWorld:
    name = "memory"

    def __init__(self, *, clock: Callable[[], float] = time.monotonic, lease_s: float = LEASE_S) -> None:
        self._passed_s = 0.0
        self.index = MemoryIndex(clock=lambda: clock() + self._passed_s, lease_s=lease_s)

    def expire(self, incarnation: int) -> None:
        self.index.expire(incarnation)

    def flush(self) -> None:
        self.index.flush()

    def let_pass(self, passed_s: float) -> None:
        self._passed_s += passed_s
