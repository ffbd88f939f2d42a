"""The prefix index of one namespace in Redis."""

from __future__ import annotations

import secrets
import struct
from collections.abc import Collection, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from prefixcache import hashing
from prefixcache.index import scripts
from prefixcache.index.base import ApplyAnswer, Commit, Match, PrefixIndex, Registration, SweepAnswer
from prefixcache.index.boundaries import Boundaries
from prefixcache.index.family import Family
from prefixcache.index.hot_client import HotClient
from prefixcache.index.integrity import Content, check_content
from prefixcache.index.keys import FIELDS_PER_BUCKET, NamespaceKeys
from prefixcache.index.redis_client import Argument, RedisClient
from prefixcache.limits import (
    DEAD_AFTER_S,
    INDEX_WRITE_TIMEOUT_S,
    KEEPER_S,
    LEASE_S,
    MATCH_LOADS,
    MAX_APPLY_HASHES,
    MAX_MATCH_BLOCKS,
    PENDING_S,
    PENDING_SETTLED_S,
    SWEEP_FIELDS,
)
from prefixcache.load import IncarnationLoad, ProxyLoad, WorkerLoad, decode_loads, proxy_writer

_TIER_BITS = 2
_U32 = struct.Struct(">I")
_SCAN_COUNT = 1_000
_READ_BATCH = 500
_WHOLE_INDEX_TIMEOUT_S = INDEX_WRITE_TIMEOUT_S


class RedisIndex(PrefixIndex):
    """Every call is one script, so one round trip and one moment; `index/keys.py` says where what stands.

    What a request waits for goes over the hot connection, the rest over the pool.
    """

    def __init__(
        self,
        client: RedisClient,
        hot: HotClient,
        keys: NamespaceKeys,
        *,
        lease_s: float = LEASE_S,
        fields_per_bucket: int = FIELDS_PER_BUCKET,
    ) -> None:
        self._client = client
        self._hot = hot
        self._keys = keys
        self._lease_ms = _ms(lease_s)
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

    async def renew(self, incarnation: int, load: WorkerLoad | None = None) -> bool:
        renewed: int = await self._client.run(
            scripts.RENEW,
            self._keys.meta,
            incarnation,
            self._index_ids.get(incarnation, ""),
            self._lease_ms,
            0 if load is None else load.version,
            b"" if load is None else load.payload(),
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

    async def match(self, hashes: Sequence[int], *, candidates: Sequence[int] = ()) -> Match:
        if len(candidates) > MATCH_LOADS:
            raise ValueError(f"the load of {len(candidates)} candidates; at most {MATCH_LOADS} are allowed")
        if not hashes and not candidates:
            return Match()
        boundaries = Boundaries.of(hashes)
        now_ms, groups, loads, pending = await self._hot.run(
            scripts.MATCH,
            self._keys.meta,
            hashing.pack_hashes(hashes[:MAX_MATCH_BLOCKS]),
            _boundary_argument(boundaries),
            _packed(candidates),
        )
        depths: dict[int, int] = {}
        for depth, run in zip(groups[::2], groups[1::2], strict=True):
            for (claim,) in _U32.iter_unpack(run):
                depths[claim >> _TIER_BITS] = depth
        return Match(depths=depths, pending=_pending_of(pending, boundaries), loads=_loads_of(loads, now_ms))

    async def commit(self, commit: Commit) -> Mapping[int, int]:
        pending = await self._hot.run(scripts.COMMIT, self._keys.meta, *_commit_arguments(commit))
        return _pending_of(pending, commit.boundaries)

    def post(self, commit: Commit) -> None:
        self._hot.post(scripts.COMMIT, self._keys.meta, *_commit_arguments(commit))

    async def exchange_loads(
        self, proxy_id: str, own: Mapping[int, ProxyLoad], incarnations: Sequence[int]
    ) -> Mapping[int, IncarnationLoad]:
        records: list[Argument] = []
        for incarnation, load in own.items():
            records += (incarnation, load.version, load.payload())
        now_ms, loads = await self._hot.run(
            scripts.EXCHANGE_LOADS, self._keys.meta, proxy_writer(proxy_id), len(own), *records, _packed(incarnations)
        )
        return _loads_of(loads, now_ms)

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

    async def open_family(self, engine: str, *, instead_of: int | None = None) -> Family:
        family = await self._client.run(
            scripts.OPEN_FAMILY,
            self._keys.meta,
            engine,
            instead_of or 0,
            self._lease_ms,
            deadline_s=INDEX_WRITE_TIMEOUT_S,
        )
        return _family_of(family)

    async def families(self, engines: Sequence[str], *, renew: Collection[str] = ()) -> Mapping[str, Family]:
        asked = sorted(engines, key=lambda engine: engine not in renew)
        if not asked:
            return {}
        found = await self._client.run(
            scripts.FAMILIES,
            self._keys.meta,
            self._lease_ms,
            sum(engine in renew for engine in asked),
            *asked,
            deadline_s=INDEX_WRITE_TIMEOUT_S,
        )
        return {engine: _family_of(family) for engine, family in zip(asked, found, strict=True) if family}

    async def claim(self, engine: str, anchor: int, hashes: Sequence[int], *, capacity: int) -> Family | None:
        if len(hashes) > MAX_APPLY_HASHES:
            raise ValueError(f"a claim of {len(hashes)} hashes; at most {MAX_APPLY_HASHES} are allowed")
        family = await self._client.run(
            scripts.CLAIM,
            self._keys.meta,
            engine,
            anchor,
            hashing.pack_hashes(hashes),
            capacity,
            self._lease_ms,
            self._fields_per_bucket,
            deadline_s=INDEX_WRITE_TIMEOUT_S,
        )
        return _family_of(family) if family else None

    async def sweep(self, keeper_id: str) -> SweepAnswer:
        status, dead_incarnations, removed_claims = await self._client.run(
            scripts.SWEEP,
            self._keys.meta,
            keeper_id,
            _ms(KEEPER_S),
            _ms(DEAD_AFTER_S),
            SWEEP_FIELDS,
            deadline_s=INDEX_WRITE_TIMEOUT_S,
        )
        return SweepAnswer(status=status.decode(), dead_incarnations=dead_incarnations, removed_claims=removed_claims)

    async def check_integrity(self, most_claims: Mapping[int, int] = MappingProxyType({})) -> None:
        check_content(self._keys, await self._read_all(), most_claims)

    async def _read_all(self) -> Content:
        """Walks the key space: not one moment, so no writer may be at work. Keys that end on the way are left out."""
        names = await self._names()
        readers = {b"hash": "HGETALL", b"zset": "ZRANGE", b"string": "GET"}
        hashes: dict[str, dict[bytes, bytes]] = {}
        strings: dict[str, bytes] = {}
        live: set[int] = set()
        for start in range(0, len(names), _READ_BATCH):
            some = names[start : start + _READ_BATCH]
            kinds = await self._client.commands([("TYPE", name) for name in some], deadline_s=_WHOLE_INDEX_TIMEOUT_S)
            found = [(name, kind) for name, kind in zip(some, kinds, strict=True) if kind != b"none"]
            reads = [(readers[kind], name, *((0, -1) if kind == b"zset" else ())) for name, kind in found]
            values = await self._client.commands(reads, deadline_s=_WHOLE_INDEX_TIMEOUT_S)
            for (name, kind), value in zip(found, values, strict=True):
                if kind == b"hash":
                    hashes[name] = value
                elif kind == b"zset":
                    live = {int(member) for member in value}
                elif value is not None:
                    strings[name] = value
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


def _ms(duration_s: float) -> int:
    return round(duration_s * 1_000)


def _packed(incarnations: Sequence[int]) -> bytes:
    return struct.pack(f">{len(incarnations)}I", *incarnations)


def _family_of(reply: Sequence[int]) -> Family:
    """From {claims, anchor, generations, ..}."""
    num_claims, anchor, *generations = reply
    return Family(anchor=anchor, generations=tuple(generations), num_claims=num_claims)


def _boundary_argument(boundaries: Boundaries) -> str:
    return hashing.pack_hashes(boundaries.hashes).hex()


_PENDING_MS = {"place": _ms(PENDING_S), "settle": _ms(PENDING_SETTLED_S), "release": 0}


def _commit_arguments(commit: Commit) -> tuple[Argument, ...]:
    return (
        commit.verb,
        commit.request_id,
        commit.incarnation,
        _boundary_argument(commit.boundaries),
        _PENDING_MS[commit.verb],
        proxy_writer(commit.proxy_id),
        commit.load.version,
        commit.load.payload(),
    )


def _pending_of(reply: Sequence[Any], boundaries: Boundaries) -> dict[int, int]:
    """From {place, run, ..} with places in ascending order: the deepest one of each incarnation."""
    pending: dict[int, int] = {}
    deeper = b""
    for place, run in zip(reply[-2::-2], reply[::-2], strict=True):
        if run != deeper:  # Those who ask for equal prompts stand on all boundaries alike.
            deeper = run
            for (incarnation,) in _U32.iter_unpack(run):
                pending.setdefault(incarnation, boundaries.depths[place - 1])
    return pending


def _loads_of(reply: Sequence[Any], now_ms: int) -> dict[int, IncarnationLoad]:
    """From {id, value, ..}."""
    return decode_loads(zip(reply[::2], reply[1::2], strict=True), now_ms)
