"""The prefix index: which incarnation claims to hold which index block.

A claim says "incarnation I (one life of one worker's KV cache) holds the index block whose chained hash is h".
Because h covers the whole prefix, child pointers are implicit. Caches are prefix-closed (leaves are evicted first),
so an incarnation's match on a chain is its deepest live claim there, found by jumps and a binary search:

    chain      h0   h1   h2   h3   h4
    claims     A B  A B  A    A    -          match = {A: 4, B: 2}

For claims that are prefix-closed the depth is exact. Where a claim was lost it may come out smaller, but is always one
at which the incarnation really holds a claim. A plain engine's claims are spread over the generations of its family
(`index/family.py`): the deepest one of them all is exact, others may be left out.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Literal, Protocol

from prefixcache.index.boundaries import Boundaries
from prefixcache.index.family import Family
from prefixcache.load import IncarnationLoad, ProxyLoad, WorkerLoad

REQUEST_ID_BYTES = 12
"""Of the id under which a request's pending claim stands: unique among all proxies of the deployment."""
MOST_PENDING = 4
"""Incarnations with a pending claim on one block; a fifth takes the place of the one that expires first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Registration:
    """A new incarnation with its first lease."""

    incarnation: int
    """30 bits, never given before, also not after the store was emptied or rewound."""
    index_id: str
    """Random name of this content of the store: a new one means that every claim is gone."""


ApplyStatus = Literal["ok", "old", "gap", "dead"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ApplyAnswer:
    """What became of a batch.

    ok    applied.
    old   its number was applied before: a resend is safe, nothing changed.
    gap   a number before it never arrived: nothing changed.
    dead  the incarnation has no lease entry: nothing changed.
    On gap, dead or another index_id the writer takes a new incarnation and announces its whole set.
    """

    status: ApplyStatus
    index_id: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Match:
    """What the index knows about one chain, at one moment."""

    depths: Mapping[int, int] = field(default_factory=dict)
    """Depth of each live incarnation's deepest claim, counted from 1; who holds nothing is absent."""
    pending: Mapping[int, int] = field(default_factory=dict)
    """Deepest boundary on which a request placed on the incarnation has a pending claim; live incarnations only."""
    loads: Mapping[int, IncarnationLoad] = field(default_factory=dict)
    """Of the MATCH_LOADS deepest holders and of the candidates asked for; who has none is absent."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Commit:
    """What a proxy has decided about one request, with the load it has since put on that incarnation.

    place    writes its pending claims for PENDING_S, in place of any it had on other incarnations
    settle   cuts those that are still its own to PENDING_SETTLED_S: its first token came, its claims are on their way
    release  removes those that are still its own: it failed, was cancelled, or will not be sent
    A pending claim belongs to the request that wrote it last: a later one placed on the same incarnation takes it over.
    Settle and release touch this incarnation alone. One without a lease entry gets neither claims nor load. Raises
    ValueError for a request id of another length.
    """

    verb: Literal["place", "settle", "release"]
    request_id: bytes
    """REQUEST_ID_BYTES long."""
    boundaries: Boundaries
    incarnation: int
    proxy_id: str
    """Of this proxy process: 16 hex digits."""
    load: ProxyLoad

    def __post_init__(self) -> None:
        if len(self.request_id) != REQUEST_ID_BYTES:
            raise ValueError(f"a request id of {len(self.request_id)} bytes in place of {REQUEST_ID_BYTES}")


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepAnswer:
    """What one call of a keeper did.

    other   another process is the keeper: nothing was done
    idle    no dead incarnation has claims left
    more    there are dead claims beyond those that this call looked at
    """

    status: Literal["other", "idle", "more"]
    dead_incarnations: int = 0
    """Leases removed by this call."""
    removed_claims: int = 0


class PrefixIndex(Protocol):
    """One namespace of the index. Every call raises IndexUnavailable when the store does not answer in time."""

    async def register(self) -> Registration:
        """Takes a new incarnation id and writes its lease, batch number 0 and, where missing, the index_id."""

    async def renew(self, incarnation: int, load: WorkerLoad | None = None) -> bool:
        """Extends the lease and writes the load; False if the incarnation has no lease any more: it must register."""

    async def retire(self, incarnation: int) -> None:
        """Ends the lease at once: the incarnation's claims are never matched again."""

    async def match(self, hashes: Sequence[int], *, candidates: Sequence[int] = ()) -> Match:
        """What is known about a chain of index block hashes, in one round trip.

        `candidates`: at most MATCH_LOADS incarnations whose load is asked for. Blocks beyond limits.MAX_MATCH_BLOCKS
        are not looked at.
        """

    async def commit(self, commit: Commit) -> Mapping[int, int]:
        """Writes pending claims and load as one; returns what other requests have pending there, as Match.pending."""

    def post(self, commit: Commit) -> None:
        """`commit` without waiting for an answer, in the order of the calls; one that fails is forgotten."""

    async def exchange_loads(
        self, proxy_id: str, own: Mapping[int, ProxyLoad], incarnations: Sequence[int]
    ) -> Mapping[int, IncarnationLoad]:
        """Writes a proxy's load on each incarnation in `own`; returns that of each in `incarnations` that has one."""

    async def apply(self, incarnation: int, batch: int, stored: Sequence[int], removed: Sequence[int]) -> ApplyAnswer:
        """Writes one numbered batch (from 1, without holes) of the incarnation's only writer, atomically.

        At most limits.MAX_APPLY_HASHES hashes. Adding a claim that stands, or removing one that does not, is no error.
        """

    async def open_family(self, engine: str, *, instead_of: int | None = None) -> Family:
        """The standing family of a plain engine, its leases extended, else a new one: an anchor and one generation.

        A standing one whose anchor is `instead_of` is retired first: the engine lost its cache. Of several proxies that
        saw it the first one retires, the others get what it began.
        """

    async def families(self, engines: Sequence[str], *, renew: Collection[str] = ()) -> Mapping[str, Family]:
        """The standing families by engine, those of engines in `renew`, a part of `engines`, with leases extended.

        An engine is absent whose anchor has no lease entry: it was never opened, the keeper removed it, or the store
        was emptied.
        """

    async def claim(self, engine: str, anchor: int, hashes: Sequence[int], *, capacity: int) -> Family | None:
        """Moves blocks into the newest generation, opens and retires some as index/family.py draws it.

        `capacity`: index blocks that the engine's cache holds, at least 1. At most limits.MAX_APPLY_HASHES hashes; of a
        longer chain the deep end goes first, so that no block outlives its parent. None, and nothing is written, if the
        standing family has another anchor, or there is none. Any number of proxies may claim at once.
        """

    async def sweep(self, keeper_id: str) -> SweepAnswer:
        """One bounded step of the elected keeper: removes leases that ended DEAD_AFTER_S ago, then dead claims.

        Only time in which a keeper was at work counts: a store that stood still, or was restarted, killed nobody.
        """

    async def check_integrity(self, most_claims: Mapping[int, int] = MappingProxyType({})) -> None:
        """Raises IntegrityError unless claims counted equal claims stored and all values are well formed.

        `most_claims`: index blocks that the pool of an incarnation holds; nobody claims more. Reads everything: for
        tests and repair, not for the request path.
        """
