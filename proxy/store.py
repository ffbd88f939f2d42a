"""What the proxy needs of the deployment's store; `prefixcache.store.RedisStore` is the real one."""

from __future__ import annotations

from typing import Protocol

from prefixcache.index.base import PrefixIndex
from prefixcache.registry import Registry
from prefixcache.store import RedisMemory


class Store(Protocol):
    """Every call that waits raises IndexUnavailable within its deadline."""

    def index(self, namespace: str) -> PrefixIndex: ...

    @property
    def index_available(self) -> bool:
        """Whether a call to an index has a prospect of an answer now."""

    def registry(self) -> Registry: ...

    async def memory(self) -> RedisMemory | None:
        """Of the server behind it; None where there is none, or it does not tell."""

    async def deployment_secret(self, configured: bytes | None) -> bytes:
        """What stands in the store wins; else what is configured, or a new secret, is put there."""
