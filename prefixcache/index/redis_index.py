"""The prefix index of one namespace in Redis."""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence

from prefixcache import hashing
from prefixcache.index import scripts
from prefixcache.index.base import ApplyAnswer, PrefixIndex, Registration
from prefixcache.index.integrity import Content, check_content
from prefixcache.index.keys import FIELDS_PER_BUCKET, NamespaceKeys
from prefixcache.index.redis_client import RedisClient
from prefixcache.limits import INDEX_DEADLINE_S, INDEX_WRITE_TIMEOUT_S, LEASE_S, MAX_APPLY_HASHES, MAX_MATCH_BLOCKS

_TIER_BITS = 2
_SCAN_COUNT = 1_000
_READ_BATCH = 500
_WHOLE_INDEX_TIMEOUT_S = INDEX_WRITE_TIMEOUT_S


class RedisIndex(PrefixIndex):
    """Every call is one script, so one round trip and one moment; `index/keys.py` says where what stands."""

    def __init__(
        self,
        client: RedisClient,
        keys: NamespaceKeys,
        *,
        match_deadline_s: float = INDEX_DEADLINE_S,
        lease_s: float = LEASE_S,
        fields_per_bucket: int = FIELDS_PER_BUCKET,
    ) -> None:
        self._client = client
        self._keys = keys
        self._match_deadline_s = match_deadline_s
        self._lease_ms = round(lease_s * 1_000)
        self._fields_per_bucket = fields_per_bucket
        self._last_incarnation = 0
        self._index_ids: dict[int, str] = {}
        """Content of the store in which each own incarnation was registered: writes are fenced by it."""

    async def register(self) -> Registration:
        incarnation, index_id = await self._client.run(
            scripts.REGISTER,
            self._keys.meta,
            self._lease_ms,
            secrets.token_hex(8),
            hashing.SCHEME_VERSION,
            self._last_incarnation,
            deadline_s=INDEX_WRITE_TIMEOUT_S,
        )
        registration = Registration(incarnation=incarnation, index_id=index_id.decode())
        self._last_incarnation = registration.incarnation
        self._index_ids[registration.incarnation] = registration.index_id
        return registration

    async def renew(self, incarnation: int) -> bool:
        renewed: int = await self._client.run(
            scripts.RENEW,
            self._keys.meta,
            incarnation,
            self._index_ids.get(incarnation, ""),
            self._lease_ms,
            deadline_s=INDEX_WRITE_TIMEOUT_S,
        )
        return renewed == 1

    async def retire(self, incarnation: int) -> None:
        await self._client.run(
            scripts.RETIRE,
            self._keys.meta,
            incarnation,
            self._index_ids.get(incarnation, ""),
            deadline_s=INDEX_WRITE_TIMEOUT_S,
        )
        self._index_ids.pop(incarnation, None)

    async def match(self, hashes: Sequence[int]) -> Mapping[int, int]:
        if not hashes:
            return {}
        chain = hashing.pack_hashes(hashes[:MAX_MATCH_BLOCKS])
        groups = await self._client.run(scripts.MATCH, self._keys.meta, chain, deadline_s=self._match_deadline_s)
        depths: dict[int, int] = {}
        for depth, run in zip(groups[::2], groups[1::2], strict=True):
            for at in range(0, len(run), 4):
                depths[int.from_bytes(run[at : at + 4], "big") >> _TIER_BITS] = depth
        return depths

    async def apply(self, incarnation: int, batch: int, stored: Sequence[int], removed: Sequence[int]) -> ApplyAnswer:
        if len(stored) + len(removed) > MAX_APPLY_HASHES:
            raise ValueError(f"a batch of {len(stored) + len(removed)} hashes; at most {MAX_APPLY_HASHES} are allowed")
        status, index_id = await self._client.run(
            scripts.APPLY,
            self._keys.meta,
            incarnation,
            self._index_ids.get(incarnation, ""),
            batch,
            hashing.pack_hashes(stored),
            hashing.pack_hashes(removed),
            self._fields_per_bucket,
            deadline_s=INDEX_WRITE_TIMEOUT_S,
        )
        return ApplyAnswer(status=status.decode(), index_id=index_id.decode())

    async def check_integrity(self) -> None:
        check_content(self._keys, await self._read_all())

    async def _read_all(self) -> Content:
        """Walks the key space: not one moment, so no writer may be at work."""
        names = await self._names()
        readers = {b"hash": "HGETALL", b"zset": "ZRANGE", b"string": "GET"}
        hashes: dict[str, dict[bytes, bytes]] = {}
        strings: dict[str, bytes] = {}
        live: set[int] = set()
        for start in range(0, len(names), _READ_BATCH):
            some = names[start : start + _READ_BATCH]
            kinds = await self._client.commands([("TYPE", name) for name in some], deadline_s=_WHOLE_INDEX_TIMEOUT_S)
            reads = [
                (readers[kind], name, *((0, -1) if kind == b"zset" else ()))
                for name, kind in zip(some, kinds, strict=True)
            ]
            values = await self._client.commands(reads, deadline_s=_WHOLE_INDEX_TIMEOUT_S)
            for name, kind, value in zip(some, kinds, values, strict=True):
                if kind == b"hash":
                    hashes[name] = value
                elif kind == b"string":
                    strings[name] = value
                else:
                    live = {int(member) for member in value}
        return Content(hashes=hashes, strings=strings, live=live)

    async def _names(self) -> list[str]:
        pattern = "".join(f"\\{letter}" if letter in "*?[]\\^-" else letter for letter in self._keys.base) + ":*"
        names: set[str] = set()
        cursor = 0
        while True:
            cursor, found = await self._client.command(
                "SCAN", cursor, "MATCH", pattern, "COUNT", _SCAN_COUNT, deadline_s=_WHOLE_INDEX_TIMEOUT_S
            )
            names.update(name.decode() for name in found)
            if not cursor:
                return sorted(names)
