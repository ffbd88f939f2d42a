"""The prefix index of one namespace in the memory of one process: the reference that every other one must equal."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from prefixcache.errors import IntegrityError
from prefixcache.index.base import (
    MOST_PENDING,
    ApplyAnswer,
    Commit,
    Match,
    PrefixIndex,
    Registration,
    SweepAnswer,
)
from prefixcache.index.boundaries import Boundaries
from prefixcache.index.family import GENERATIONS_A_CACHE, MOST_GENERATIONS, Family
from prefixcache.limits import (
    DEAD_AFTER_S,
    KEEPER_S,
    LEASE_S,
    LOAD_RECORD_S,
    MATCH_LOADS,
    MAX_APPLY_HASHES,
    MAX_MATCH_BLOCKS,
    PENDING_S,
    PENDING_SETTLED_S,
)
from prefixcache.load import (
    WORKER_WRITER,
    IncarnationLoad,
    ProxyLoad,
    WorkerLoad,
    decode_loads,
    proxy_writer,
    standing_version,
    stored_load,
    stored_record,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Pending:
    request_id: bytes
    end_s: float


class MemoryIndex(PrefixIndex):
    """Claims as plain sets, both by block and by incarnation; a match looks at every block. Never unavailable.

    For one event loop. A retired incarnation's claims are forgotten at once; `clock` gives seconds and never goes back.
    """

    def __init__(self, *, clock: Callable[[], float] = time.monotonic, lease_s: float = LEASE_S) -> None:
        self._clock = clock
        self._lease_s = lease_s
        self._last_incarnation = 0
        self._index_id = ""
        self._lease_ends: dict[int, float] = {}
        self._batches: dict[int, int] = {}
        self._holders: dict[int, set[int]] = {}
        self._held: dict[int, set[int]] = {}
        self._pending: dict[int, dict[int, _Pending]] = {}
        """By block and incarnation, both in the order in which they were written last."""
        self._loads: dict[int, dict[bytes, bytes]] = {}
        """Records by their writers, as bytes, so that their numbers are rounded as everywhere."""
        self._families: dict[str, list[int]] = {}
        """By engine: the anchor, the next generation, the newest, and the older ones."""
        self._keeper_id = ""
        self._keeper_until_s = float("-inf")
        self._swept_at_s = float("-inf")
        self._watched_since_s = float("-inf")

    async def register(self) -> Registration:
        self._index_id = self._index_id or secrets.token_hex(8)
        return Registration(incarnation=self._give_incarnation(), index_id=self._index_id)

    async def renew(self, incarnation: int, load: WorkerLoad | None = None) -> bool:
        if incarnation not in self._lease_ends:
            return False
        self._lease_ends[incarnation] = self._clock() + self._lease_s
        if load is not None:
            self._write_load(incarnation, WORKER_WRITER, load)
        return True

    async def retire(self, incarnation: int) -> None:
        self._forget(incarnation)

    async def match(self, hashes: Sequence[int], *, candidates: Sequence[int] = ()) -> Match:
        if len(candidates) > MATCH_LOADS:
            raise ValueError(f"the load of {len(candidates)} candidates; at most {MATCH_LOADS} are allowed")
        depths: dict[int, int] = {}
        for depth, block in enumerate(hashes[:MAX_MATCH_BLOCKS], start=1):
            depths.update(dict.fromkeys(self._holders.get(block, ()), depth))
        depths = {incarnation: depth for incarnation, depth in depths.items() if self.is_live(incarnation)}
        deepest = sorted(depths, key=lambda incarnation: (-depths[incarnation], incarnation))[:MATCH_LOADS]
        return Match(
            depths=depths,
            pending=self._pending_on(Boundaries.of(hashes)),
            loads=self._loads_of([*deepest, *candidates]),
        )

    async def commit(self, commit: Commit) -> Mapping[int, int]:
        return self._commit(commit)

    def post(self, commit: Commit) -> None:
        self._commit(commit)

    async def exchange_loads(
        self, proxy_id: str, own: Mapping[int, ProxyLoad], incarnations: Sequence[int]
    ) -> Mapping[int, IncarnationLoad]:
        for incarnation, load in own.items():
            self._write_load(incarnation, proxy_writer(proxy_id), load)
        return self._loads_of(incarnations)

    async def apply(self, incarnation: int, batch: int, stored: Sequence[int], removed: Sequence[int]) -> ApplyAnswer:
        if len(stored) + len(removed) > MAX_APPLY_HASHES:
            raise ValueError(f"a batch of {len(stored) + len(removed)} hashes; at most {MAX_APPLY_HASHES} are allowed")
        if incarnation not in self._lease_ends:
            return ApplyAnswer(status="dead", index_id=self._index_id)
        last = self._batches[incarnation]
        if batch != last + 1:
            return ApplyAnswer(status="old" if batch <= last else "gap", index_id=self._index_id)
        self._batches[incarnation] = batch
        held = self._held[incarnation]
        for block in stored:
            held.add(block)
            self._holders.setdefault(block, set()).add(incarnation)
        for block in held.intersection(removed):
            held.discard(block)
            self._drop(incarnation, block)
        return ApplyAnswer(status="ok", index_id=self._index_id)

    async def open_family(self, engine: str, *, instead_of: int | None = None) -> Family:
        ids = self._standing_family(engine)
        if ids and ids[0] == instead_of:
            for incarnation in ids:
                self._forget(incarnation)
            ids = []
        self._families[engine] = ids = ids or [self._give_incarnation()]
        self._add_generations(ids)
        self._renew_all(ids)
        return self._family_of(ids)

    async def families(self, engines: Sequence[str], *, renew: Collection[str] = ()) -> Mapping[str, Family]:
        found: dict[str, Family] = {}
        for engine in engines:
            if ids := self._standing_family(engine):
                if engine in renew:
                    self._renew_all(ids)
                found[engine] = self._family_of(ids)
        return found

    async def claim(self, engine: str, anchor: int, hashes: Sequence[int], *, capacity: int) -> Family | None:
        if len(hashes) > MAX_APPLY_HASHES:
            raise ValueError(f"a claim of {len(hashes)} hashes; at most {MAX_APPLY_HASHES} are allowed")
        ids = self._standing_family(engine)
        if not ids or ids[0] != anchor:
            return None
        self._add_generations(ids)
        if len(self._held[ids[2]]) * GENERATIONS_A_CACHE >= capacity and len(ids) < 2 + MOST_GENERATIONS:
            ids.insert(1, self._give_incarnation())
        for block in hashes:
            holders = self._holders.setdefault(block, set())
            for incarnation in holders.intersection(ids):
                self._held[incarnation].discard(block)
                holders.discard(incarnation)
            holders.add(ids[2])
            self._held[ids[2]].add(block)
        self._families[engine] = self._without_old_generations(ids, capacity)
        return self._family_of(self._families[engine])

    async def sweep(self, keeper_id: str) -> SweepAnswer:
        now_s = self._clock()
        if keeper_id != self._keeper_id and now_s < self._keeper_until_s:
            return SweepAnswer(status="other")
        self._keeper_id, self._keeper_until_s = keeper_id, now_s + KEEPER_S
        if now_s - self._swept_at_s > KEEPER_S:
            self._watched_since_s = now_s
        self._swept_at_s = now_s
        if now_s - self._watched_since_s < DEAD_AFTER_S:
            return SweepAnswer(status="idle")
        dead = [incarnation for incarnation, end_s in self._lease_ends.items() if now_s - end_s > DEAD_AFTER_S]
        removed_claims = sum(len(self._held[incarnation]) for incarnation in dead)
        for incarnation in dead:
            self._forget(incarnation)
        self._families = {engine: ids for engine, ids in self._families.items() if ids[0] in self._lease_ends}
        return SweepAnswer(status="idle", dead_incarnations=len(dead), removed_claims=removed_claims)

    async def check_integrity(self, most_claims: Mapping[int, int] = MappingProxyType({})) -> None:
        by_block = {(incarnation, block) for block, holders in self._holders.items() for incarnation in holders}
        by_incarnation = {(incarnation, block) for incarnation, blocks in self._held.items() for block in blocks}
        if by_block != by_incarnation:
            raise IntegrityError(f"claims by block and by incarnation differ in {by_block ^ by_incarnation}")
        if not all(self._holders.values()):
            raise IntegrityError("a block without holders is kept")
        if not self._lease_ends.keys() == self._batches.keys() == self._held.keys():
            raise IntegrityError("leases, batch numbers and claims are not those of the same incarnations")
        for incarnation, most in most_claims.items():
            if len(self._held.get(incarnation, ())) > most:
                raise IntegrityError(
                    f"incarnation {incarnation} claims {len(self._held[incarnation])} blocks, its pool holds {most}"
                )
        if any(not 0 < len(entries) <= MOST_PENDING for entries in self._pending.values()):
            raise IntegrityError(f"a block has no pending claim, or more than {MOST_PENDING}")
        if not self._loads.keys() <= self._lease_ends.keys():
            raise IntegrityError(f"the load of {self._loads.keys() - self._lease_ends.keys()} outlived the lease")
        for engine, (anchor, *generations) in self._families.items():
            claimed = [block for incarnation in generations for block in self._held.get(incarnation, ())]
            if len(set(claimed)) < len(claimed):
                raise IntegrityError(f"two generations of engine {engine} claim one block")
            if self._held.get(anchor) or anchor not in self._lease_ends:
                raise IntegrityError(f"the anchor of engine {engine} has claims, or no lease")

    def is_live(self, incarnation: int) -> bool:
        """Whether the incarnation holds a lease that has not run out."""
        return incarnation in self._lease_ends and self._lease_ends[incarnation] > self._clock()

    def held_by(self, incarnation: int) -> frozenset[int]:
        """Hashes of the index blocks that the incarnation claims, whether its lease has run out or not."""
        return frozenset(self._held.get(incarnation, ()))

    def expire(self, incarnation: int) -> None:
        """Ends a lease without removing it: the next renewal brings the incarnation back."""
        if incarnation in self._lease_ends:
            self._lease_ends[incarnation] = float("-inf")

    def flush(self) -> None:
        """What FLUSHALL does: everything is gone, and ids go on."""
        self._index_id = self._keeper_id = ""
        self._keeper_until_s = self._swept_at_s = self._watched_since_s = float("-inf")
        contents = (self._lease_ends, self._batches, self._holders, self._held, self._pending, self._loads)
        for content in (*contents, self._families):
            content.clear()

    def _give_incarnation(self) -> int:
        self._last_incarnation += 1
        incarnation = self._last_incarnation
        self._lease_ends[incarnation] = self._clock() + self._lease_s
        self._batches[incarnation] = 0
        self._held[incarnation] = set()
        return incarnation

    def _standing_family(self, engine: str) -> list[int]:
        """Anchor and generations that have a lease entry; empty if the anchor has none."""
        ids = self._families.get(engine, [])
        if not ids or ids[0] not in self._lease_ends:
            return []
        return [incarnation for incarnation in ids if incarnation in self._lease_ends]

    def _add_generations(self, ids: list[int]) -> None:
        """Those that a family always has, the next one and the newest."""
        while len(ids) < 3:
            ids.insert(1, self._give_incarnation())

    def _renew_all(self, ids: Sequence[int]) -> None:
        for incarnation in ids:
            self._lease_ends[incarnation] = self._clock() + self._lease_s

    def _family_of(self, ids: Sequence[int]) -> Family:
        num_claims = sum(len(self._held.get(incarnation, ())) for incarnation in ids)
        return Family(anchor=ids[0], generations=tuple(ids[1:]), num_claims=num_claims)

    def _without_old_generations(self, ids: Sequence[int], capacity: int) -> list[int]:
        """Retires those that hold nothing, and the oldest as long as the others hold the capacity."""
        anchor, following, newest, *older = ids
        kept = [incarnation for incarnation in older if self._held[incarnation]]
        num_claims = sum(len(self._held[incarnation]) for incarnation in (newest, *kept))
        while kept and num_claims - len(self._held[kept[-1]]) >= capacity:
            num_claims -= len(self._held[kept.pop()])
        for incarnation in set(older).difference(kept):
            self._forget(incarnation)
        return [anchor, following, newest, *kept]

    def _commit(self, commit: Commit) -> dict[int, int]:
        others = self._pending_on(commit.boundaries, besides=commit.request_id)
        for block in commit.boundaries.hashes:
            self._write_pending(block, commit)
        self._drop_expired_pending()
        self._write_load(commit.incarnation, proxy_writer(commit.proxy_id), commit.load)
        return others

    def _pending_on(self, boundaries: Boundaries, besides: bytes = b"") -> dict[int, int]:
        """Deepest boundary with a pending claim of each live incarnation; those of one request do not count."""
        now_s = self._clock()
        return {
            incarnation: depth
            for depth, block in zip(boundaries.depths, boundaries.hashes, strict=True)
            for incarnation, entry in self._pending.get(block, {}).items()
            if entry.end_s > now_s and entry.request_id != besides and self.is_live(incarnation)
        }

    def _write_pending(self, block: int, commit: Commit) -> None:
        now_s = self._clock()
        entries = {
            incarnation: entry
            for incarnation, entry in self._pending.pop(block, {}).items()
            if entry.end_s > now_s and incarnation in self._lease_ends
        }
        here = entries.get(commit.incarnation)
        is_own = here is not None and here.request_id == commit.request_id
        if commit.verb == "place":
            entries = {
                incarnation: entry
                for incarnation, entry in entries.items()
                if incarnation != commit.incarnation and entry.request_id != commit.request_id
            }
            if commit.incarnation in self._lease_ends:
                if len(entries) == MOST_PENDING:
                    del entries[min(entries, key=lambda incarnation: entries[incarnation].end_s)]
                entries[commit.incarnation] = _Pending(request_id=commit.request_id, end_s=now_s + PENDING_S)
        elif here is not None and is_own:
            del entries[commit.incarnation]
            if commit.verb == "settle":
                end_s = min(here.end_s, now_s + PENDING_SETTLED_S)
                entries[commit.incarnation] = _Pending(request_id=commit.request_id, end_s=end_s)
        if entries:
            self._pending[block] = entries

    def _drop_expired_pending(self) -> None:
        """Whatever was not written for PENDING_S is gone, so that memory is bounded by what was placed since."""
        now_s = self._clock()
        while self._pending:
            block, entries = next(iter(self._pending.items()))
            if any(entry.end_s > now_s for entry in entries.values()):
                return
            del self._pending[block]

    def _write_load(self, incarnation: int, writer: bytes, load: WorkerLoad | ProxyLoad) -> None:
        if incarnation not in self._lease_ends:
            return
        now_ms = self._now_ms()
        records = self._loads.get(incarnation, {})
        versions = {writer: standing_version(record, now_ms) for writer, record in records.items()}
        standing = versions.get(writer)
        if standing is None or standing < load.version:
            records = {writer: record for writer, record in records.items() if versions[writer] is not None}
            end_ms = now_ms + round(LOAD_RECORD_S * 1_000)
            records[writer] = stored_record(load.payload(), end_ms=end_ms, version=load.version)
            self._loads[incarnation] = records

    def _loads_of(self, incarnations: Sequence[int]) -> dict[int, IncarnationLoad]:
        stored = {incarnation: stored_load(self._loads.get(incarnation, {})) for incarnation in incarnations}
        return decode_loads(stored.items(), self._now_ms())

    def _now_ms(self) -> int:
        return int(self._clock() * 1_000)

    def _forget(self, incarnation: int) -> None:
        """Everything but pending claims, which expire."""
        for block in self._held.get(incarnation, ()):
            self._drop(incarnation, block)
        for content in (self._lease_ends, self._batches, self._held, self._loads):
            content.pop(incarnation, None)

    def _drop(self, incarnation: int, block: int) -> None:
        holders = self._holders[block]
        holders.discard(incarnation)
        if not holders:
            del self._holders[block]
