"""The prefix index: which incarnation claims to hold which index block.

A claim says "incarnation I (one life of one worker's KV cache) holds the index block whose chained hash is h".
Because h covers the whole prefix, child pointers are implicit. Caches are prefix-closed (leaves are evicted first),
so an incarnation's match on a chain is its deepest live claim there, not an unbroken run:

    chain      h0   h1   h2   h3   h4
    claims     A    A    A .. A B  -          match = {A: 4, B: 4}    a lost claim of B on h0..h2 costs nothing
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol


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


class PrefixIndex(Protocol):
    """One namespace of the index. Every call raises IndexUnavailable when the store does not answer in time."""

    async def register(self) -> Registration:
        """Takes a new incarnation id and writes its lease, batch number 0 and, where missing, the index_id."""

    async def renew(self, incarnation: int) -> bool:
        """Extends the lease; False if the incarnation has none any more (it must register anew)."""

    async def retire(self, incarnation: int) -> None:
        """Ends the lease at once: the incarnation's claims are never matched again."""

    async def match(self, hashes: Sequence[int]) -> Mapping[int, int]:
        """Depth of each live incarnation on a chain of index block hashes, deepest claim counted from 1.

        Incarnations that hold nothing are absent; so are those whose lease has expired. One round trip.
        Blocks beyond limits.MAX_MATCH_BLOCKS are not looked at.
        """

    async def apply(self, incarnation: int, batch: int, stored: Sequence[int], removed: Sequence[int]) -> ApplyAnswer:
        """Writes one numbered batch (from 1, without holes) of the incarnation's only writer, atomically.

        At most limits.MAX_APPLY_HASHES hashes. Adding a claim that stands, or removing one that does not, is no error.
        """

    async def check_integrity(self) -> None:
        """Raises IntegrityError unless claims counted equal claims stored and all values are well formed.

        Reads everything: for tests and repair, not for the request path.
        """
