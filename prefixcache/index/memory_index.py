"""The prefix index of one namespace in the memory of one process: the reference that every other one must equal."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Mapping, Sequence

from prefixcache.errors import IntegrityError
from prefixcache.index.base import ApplyAnswer, PrefixIndex, Registration
from prefixcache.limits import LEASE_S, MAX_APPLY_HASHES, MAX_MATCH_BLOCKS


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

    async def register(self) -> Registration:
        self._index_id = self._index_id or secrets.token_hex(8)
        self._last_incarnation += 1
        incarnation = self._last_incarnation
        self._lease_ends[incarnation] = self._clock() + self._lease_s
        self._batches[incarnation] = 0
        self._held[incarnation] = set()
        return Registration(incarnation=incarnation, index_id=self._index_id)

    async def renew(self, incarnation: int) -> bool:
        if incarnation not in self._lease_ends:
            return False
        self._lease_ends[incarnation] = self._clock() + self._lease_s
        return True

    async def retire(self, incarnation: int) -> None:
        if incarnation in self._lease_ends:
            for block in self._held[incarnation]:
                self._drop(incarnation, block)
            for content in (self._lease_ends, self._batches, self._held):
                del content[incarnation]

    async def match(self, hashes: Sequence[int]) -> Mapping[int, int]:
        depths: dict[int, int] = {}
        for depth, block in enumerate(hashes[:MAX_MATCH_BLOCKS], start=1):
            depths.update(dict.fromkeys(self._holders.get(block, ()), depth))
        return {incarnation: depth for incarnation, depth in depths.items() if self.is_live(incarnation)}

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

    async def check_integrity(self) -> None:
        by_block = {(incarnation, block) for block, holders in self._holders.items() for incarnation in holders}
        by_incarnation = {(incarnation, block) for incarnation, blocks in self._held.items() for block in blocks}
        if by_block != by_incarnation:
            raise IntegrityError(f"claims by block and by incarnation differ in {by_block ^ by_incarnation}")
        if not all(self._holders.values()):
            raise IntegrityError("a block without holders is kept")
        if not self._lease_ends.keys() == self._batches.keys() == self._held.keys():
            raise IntegrityError("leases, batch numbers and claims are not those of the same incarnations")

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
        self._index_id = ""
        for content in (self._lease_ends, self._batches, self._holders, self._held):
            content.clear()

    def _drop(self, incarnation: int, block: int) -> None:
        holders = self._holders[block]
        holders.discard(incarnation)
        if not holders:
            del self._holders[block]
