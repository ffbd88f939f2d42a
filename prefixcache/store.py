"""One Redis or Valkey, by its URL: prefix index, registry and deployment secret."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

from prefixcache.hashing import new_secret
from prefixcache.index import scripts
from prefixcache.index.base import PrefixIndex
from prefixcache.index.hot_client import HotClient
from prefixcache.index.keys import DEFAULT_KEY_PREFIX, NamespaceKeys, check_key_prefix, secret_key
from prefixcache.index.redis_client import RedisClient
from prefixcache.index.redis_index import RedisIndex
from prefixcache.index.redis_registry import RedisRegistry
from prefixcache.limits import INDEX_DEADLINE_S, INDEX_WRITE_TIMEOUT_S
from prefixcache.registry import Registry

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class RedisMemory:
    """What a server says of its memory."""

    used_bytes: int
    limit_bytes: int
    """Beyond it writes are refused; 0: there is none."""

    @property
    def is_full(self) -> bool:
        return 0 < self.limit_bytes <= self.used_bytes


class RedisStore:
    """What one deployment keeps in Redis. A call raises IndexUnavailable when no answer comes within its deadline."""

    def __init__(self, client: RedisClient, hot: HotClient, key_prefix: str) -> None:
        self._client = client
        self._hot = hot
        self._key_prefix = key_prefix
        self._indexes: dict[str, RedisIndex] = {}
        self._registry = RedisRegistry(client, key_prefix)

    @classmethod
    @asynccontextmanager
    async def open(
        cls,
        url: str,
        *,
        key_prefix: str = DEFAULT_KEY_PREFIX,
        match_deadline_s: float = INDEX_DEADLINE_S,
        looks_up: bool = True,
    ) -> AsyncIterator[RedisStore]:
        """The store behind redis://, rediss:// or unix://; the server need not be up. Raises ConfigError.

        Without `looks_up` there is no connection for what requests wait for: match, commit, post and exchange_loads.
        """
        check_key_prefix(key_prefix)
        client = RedisClient(url)
        try:
            opening = HotClient.open(url, deadline_s=match_deadline_s) if looks_up else HotClient.closed(url)
            async with opening as hot:
                yield cls(client, hot, key_prefix)
        finally:
            await client.aclose()

    @property
    def index_available(self) -> bool:
        """Whether prompts are looked up: calls on the path of a request would be sent."""
        return self._hot.is_available

    def index(self, namespace: str) -> PrefixIndex:
        """The index of a namespace; always the same object, which knows the incarnations registered through it."""
        if namespace not in self._indexes:
            keys = NamespaceKeys(key_prefix=self._key_prefix, namespace=namespace)
            self._indexes[namespace] = RedisIndex(self._client, self._hot, keys)
        return self._indexes[namespace]

    def registry(self) -> Registry:
        return self._registry

    async def deployment_secret(self, configured: bytes | None) -> bytes:
        """The seed secret of all root hashes: what stands in Redis, else `configured`, else a new random one.

        A proxy that calls it again with the secret it has puts that back after the store was emptied, and learns it
        when another one stands there.
        """
        candidate = configured or new_secret()
        key = secret_key(self._key_prefix)
        # Read first: a replica takes no write and knows it all the same.
        standing = await self._client.command("GET", key, deadline_s=INDEX_WRITE_TIMEOUT_S)
        if standing is None:
            standing = await self._client.run(
                scripts.WRITE, key, "SET", candidate, "NX", "GET", deadline_s=INDEX_WRITE_TIMEOUT_S
            )
        if standing is None:
            standing = candidate
        if configured is not None and standing != configured:
            logger.warning(
                "Redis at %s holds another deployment secret than the one given: using it", self._client.place
            )
        return bytes(standing)

    async def memory(self) -> RedisMemory | None:
        """By the server's own account; None where it does not tell. Its user needs the right to call INFO."""
        told = await self._client.command("INFO", "memory", deadline_s=INDEX_WRITE_TIMEOUT_S)
        used_bytes = told.get("used_memory") if isinstance(told, dict) else None
        if used_bytes is None:
            return None
        return RedisMemory(used_bytes=int(used_bytes), limit_bytes=int(told.get("maxmemory", 0)))

    async def ping(self) -> None:
        """Returns if Redis answers."""
        await self._client.command("PING", deadline_s=INDEX_WRITE_TIMEOUT_S)
