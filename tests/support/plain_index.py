"""The index as plainly as it can be written, to test the one in memory: slow, and by its clock alone."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType

import pytest

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
from prefixcache.index.family import Family
from prefixcache.limits import (
    DEAD_AFTER_S,
    KEEPER_S,
    LOAD_RECORD_S,
    MATCH_LOADS,
    PENDING_S,
    PENDING_SETTLED_S,
)
from prefixcache.load import IncarnationLoad, ProxyLoad, WorkerLoad
from tests.support.manual_clock import ManualClock


@dataclass(frozen=True, kw_only=True)
class PlainPending:
    block: int
    incarnation: int
    request_id: bytes
    end_s: float


@dataclass(frozen=True, kw_only=True)
class PlainLoad:
    incarnation: int
    name: str
    load: WorkerLoad | ProxyLoad
    end_s: float


class PlainIndex(PrefixIndex):
    """Everything that was ever accepted in one set or list; nothing is found faster than by going through all of it."""

    def __init__(self, clock: Callable[[], float], lease_s: float) -> None:
        self.clock = clock
        self.lease_s = lease_s
        self.num_contents = 0
        self.num_given = 0
        self.forget()

    def forget(self) -> None:
        self.num_contents += 1
        self.lease_ends: dict[int, float] = {}
        self.accepted: dict[int, int] = {}
        self.claims: set[tuple[int, int]] = set()
        self.pending: list[PlainPending] = []
        self.loads: list[PlainLoad] = []
        self.sweeps: list[tuple[float, str]] = []
        self.engines: dict[str, list[int]] = {}
        """Every incarnation that each engine ever had since the last of its anchors, in the order of their ids."""

    async def register(self) -> Registration:
        self.num_given += 1
        self.lease_ends[self.num_given] = self.clock() + self.lease_s
        return Registration(incarnation=self.num_given, index_id=str(self.num_contents))

    async def renew(self, incarnation: int, load: WorkerLoad | None = None) -> bool:
        if incarnation in self.lease_ends:
            self.lease_ends[incarnation] = self.clock() + self.lease_s
        if load is not None:
            self.write_load(incarnation, "w", load)
        return incarnation in self.lease_ends

    async def retire(self, incarnation: int) -> None:
        self.lease_ends.pop(incarnation, None)

    def is_live(self, incarnation: int) -> bool:
        return self.lease_ends.get(incarnation, 0.0) > self.clock()

    async def match(self, hashes: Sequence[int], *, candidates: Sequence[int] = ()) -> Match:
        live = {incarnation for incarnation in self.lease_ends if self.is_live(incarnation)}
        held = {incarnation: [block for block in hashes if (incarnation, block) in self.claims] for incarnation in live}
        depths = {incarnation: hashes.index(blocks[-1]) + 1 for incarnation, blocks in held.items() if blocks}
        deepest = sorted((-depth, incarnation) for incarnation, depth in depths.items())[:MATCH_LOADS]
        pending = self.pending_on(Boundaries.of(hashes), self.pending)
        wanted = [incarnation for _, incarnation in deepest] + list(candidates)
        return Match(depths=depths, pending=pending, loads=await self.exchange_loads("", {}, wanted))

    async def commit(self, commit: Commit) -> Mapping[int, int]:
        others = [entry for entry in self.pending if entry.request_id != commit.request_id]
        answer = self.pending_on(commit.boundaries, others)
        self.pending = [entry for entry in self.pending if entry.end_s > self.clock()]
        for block in commit.boundaries.hashes:
            own = [
                entry
                for entry in self.pending
                if (entry.block, entry.request_id) == (block, commit.request_id)
                and (commit.verb == "place" or entry.incarnation == commit.incarnation)
            ]
            self.pending = [entry for entry in self.pending if entry not in own]
            if commit.verb == "place" and commit.incarnation in self.lease_ends:
                self.place(block, commit)
            if commit.verb == "settle":
                end_s = self.clock() + PENDING_SETTLED_S
                self.pending += [replace(entry, end_s=min(entry.end_s, end_s)) for entry in own]
        self.write_load(commit.incarnation, commit.proxy_id, commit.load)
        return answer

    def place(self, block: int, commit: Commit) -> None:
        there = [entry for entry in self.pending if entry.block == block]
        gone = [e for e in there if e.incarnation == commit.incarnation or e.incarnation not in self.lease_ends]
        if len(there) - len(gone) == MOST_PENDING:
            gone.append(min((entry for entry in there if entry not in gone), key=lambda entry: entry.end_s))
        end_s = self.clock() + PENDING_S
        new = PlainPending(block=block, incarnation=commit.incarnation, request_id=commit.request_id, end_s=end_s)
        self.pending = [entry for entry in self.pending if entry not in gone] + [new]

    def pending_on(self, boundaries: Boundaries, entries: Sequence[PlainPending]) -> dict[int, int]:
        found: dict[int, int] = {}
        for depth, block in zip(boundaries.depths, boundaries.hashes, strict=True):
            for entry in entries:
                if entry.block == block and entry.end_s > self.clock() and self.is_live(entry.incarnation):
                    found[entry.incarnation] = depth
        return found

    def post(self, commit: Commit) -> None:
        with pytest.raises(StopIteration):
            self.commit(commit).send(None)

    def write_load(self, incarnation: int, name: str, load: WorkerLoad | ProxyLoad) -> None:
        current = [record for record in self.loads if record.end_s > self.clock()]
        standing = [record for record in current if (record.incarnation, record.name) == (incarnation, name)]
        if all(record.load.version < load.version for record in standing):
            end_s = self.clock() + LOAD_RECORD_S
            new = PlainLoad(incarnation=incarnation, name=name, load=load, end_s=end_s)
            self.loads = [record for record in self.loads if record not in standing] + [new]

    async def exchange_loads(
        self, proxy_id: str, own: Mapping[int, ProxyLoad], incarnations: Sequence[int]
    ) -> Mapping[int, IncarnationLoad]:
        """Records are those of incarnations with a lease entry; times are not counted down."""
        for incarnation, load in own.items():
            self.write_load(incarnation, proxy_id, load)
        found: dict[int, IncarnationLoad] = {}
        for incarnation in set(incarnations) & self.lease_ends.keys():
            records = [r for r in self.loads if r.incarnation == incarnation and r.end_s > self.clock()]
            workers = [r.load for r in records if isinstance(r.load, WorkerLoad)]
            proxies = {r.name: r.load for r in records if isinstance(r.load, ProxyLoad)}
            if records:
                found[incarnation] = IncarnationLoad(worker=workers[0] if workers else None, proxies=proxies)
        return found

    async def apply(self, incarnation: int, batch: int, stored: Sequence[int], removed: Sequence[int]) -> ApplyAnswer:
        index_id = str(self.num_contents)
        if incarnation not in self.lease_ends:
            return ApplyAnswer(status="dead", index_id=index_id)
        expected = self.accepted.get(incarnation, 0) + 1
        if batch > expected:
            return ApplyAnswer(status="gap", index_id=index_id)
        if batch < expected:
            return ApplyAnswer(status="old", index_id=index_id)
        self.accepted[incarnation] = batch
        self.claims |= {(incarnation, block) for block in stored}
        self.claims -= {(incarnation, block) for block in removed}
        return ApplyAnswer(status="ok", index_id=index_id)

    def give(self) -> int:
        self.num_given += 1
        self.lease_ends[self.num_given] = self.clock() + self.lease_s
        return self.num_given

    def family(self, engine: str) -> Family:
        anchor, *generations = [id_ for id_ in self.engines[engine] if id_ in self.lease_ends]
        num_claims = sum(holder in generations for holder, _ in self.claims)
        return Family(anchor=anchor, generations=tuple(reversed(generations)), num_claims=num_claims)

    def stands(self, engine: str) -> bool:
        return engine in self.engines and self.engines[engine][0] in self.lease_ends

    async def open_family(self, engine: str, *, instead_of: int | None = None) -> Family:
        if self.stands(engine) and self.engines[engine][0] == instead_of:
            for incarnation in self.engines[engine]:
                self.lease_ends.pop(incarnation, None)
        if not self.stands(engine):
            self.engines[engine] = [self.give(), self.give(), self.give()]
        return (await self.families([engine], renew=[engine]))[engine]

    async def families(self, engines: Sequence[str], *, renew: Collection[str] = ()) -> Mapping[str, Family]:
        for engine in renew:
            if self.stands(engine):
                ends = dict.fromkeys(self.engines[engine], self.clock() + self.lease_s)
                self.lease_ends |= {id_: end for id_, end in ends.items() if id_ in self.lease_ends}
        return {engine: self.family(engine) for engine in engines if self.stands(engine)}

    async def claim(self, engine: str, anchor: int, hashes: Sequence[int], *, capacity: int) -> Family | None:
        """Those that are empty and, seen from the newest, those behind a cache full of claims are retired."""
        if not self.stands(engine) or self.engines[engine][0] != anchor:
            return None
        held = {id_: {block for holder, block in self.claims if holder == id_} for id_ in self.engines[engine]}
        generations = self.family(engine).generations
        if len(held[generations[1]]) >= capacity / 4 and len(generations) <= 8:
            self.engines[engine].append(self.give())
            held[self.engines[engine][-1]] = set()
            generations = (self.engines[engine][-1], *generations)
        self.claims -= {(id_, block) for id_ in generations for block in hashes}
        self.claims |= {(generations[1], block) for block in hashes}
        num_younger = len({block for holder, block in self.claims if holder == generations[1]})
        for generation in generations[2:]:
            num_held = sum(holder == generation for holder, _ in self.claims)
            if not num_held or num_younger >= capacity:
                del self.lease_ends[generation]
            num_younger += num_held
        return self.family(engine)

    async def sweep(self, keeper_id: str) -> SweepAnswer:
        now_s = self.clock()
        if self.sweeps and self.sweeps[-1][1] != keeper_id and now_s < self.sweeps[-1][0] + KEEPER_S:
            return SweepAnswer(status="other")
        self.sweeps.append((now_s, keeper_id))
        watched_since_s = now_s
        for swept_at_s, _ in reversed(self.sweeps):
            if watched_since_s - swept_at_s > KEEPER_S:
                break
            watched_since_s = swept_at_s
        dead = [
            incarnation
            for incarnation, end_s in self.lease_ends.items()
            if now_s - max(end_s, watched_since_s) >= DEAD_AFTER_S and now_s - end_s > DEAD_AFTER_S
        ]
        removed = [claim for claim in self.claims if claim[0] in dead]
        for incarnation in dead:
            del self.lease_ends[incarnation]
        return SweepAnswer(status="idle", dead_incarnations=len(dead), removed_claims=len(removed))

    async def check_integrity(self, most_claims: Mapping[int, int] = MappingProxyType({})) -> None:
        assert {incarnation for incarnation, _ in self.claims} <= set(range(1, self.num_given + 1))


class PlainWorld:
    name = "plain"

    def __init__(self, clock: ManualClock, lease_s: float) -> None:
        self._passed_s = 0.0
        self.index = PlainIndex(lambda: clock() + self._passed_s, lease_s)

    def expire(self, incarnation: int) -> None:
        if incarnation in self.index.lease_ends:
            self.index.lease_ends[incarnation] = float("-inf")

    def flush(self) -> None:
        self.index.forget()

    def let_pass(self, passed_s: float) -> None:
        self._passed_s += passed_s
