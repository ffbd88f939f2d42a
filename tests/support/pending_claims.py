"""Pending claims as they stand in Redis, read without the product's own code."""

from __future__ import annotations

import struct

import redis

from prefixcache.index.keys import DEFAULT_KEY_PREFIX, NamespaceKeys

_ENTRY = ">IQ12s"


def pending_ends_s(url: str, namespace: str) -> list[float]:
    """When each of them ends, by Redis' clock, which is that of time.time() here. Blocks."""
    keys = NamespaceKeys(key_prefix=DEFAULT_KEY_PREFIX, namespace=namespace)
    with redis.Redis.from_url(url) as client:
        values = [client.get(key) for key in client.scan_iter(match=keys.pending + "*")]
    return [
        end_ms / 1e3
        for value in values
        if isinstance(value, bytes)
        for _incarnation, end_ms, _request_id in struct.iter_unpack(_ENTRY, value)
    ]
