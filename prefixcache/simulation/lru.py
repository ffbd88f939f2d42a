"""The prefix cache of a simulated worker: what the worker's block pool holds, without its blocks.

                  hold                              release (last user)
    absent ───────────────► in use, never evicted ───────────────────────► idle: least recently used, deepest first, out

Chains are held and given back from their first block on, so whoever holds a block holds those before it, and a match is
a binary search. A test holds the block pool and this to be equal on random workloads.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice

from prefixcache.errors import IntegrityError


class LruCache:
    """Blocks by the names of their prefixes."""

    __slots__ = ("_idle", "_users", "capacity_blocks", "num_evictions")

    def __init__(self, capacity_blocks: int) -> None:
        self.capacity_blocks = capacity_blocks
        self.num_evictions = 0
        self._idle: dict[int, float] = {}
        """Time of the last release, in the order of eviction."""
        self._users: dict[int, int] = {}

    @property
    def num_free(self) -> int:
        """Blocks that hold nothing."""
        return self.capacity_blocks - len(self._idle) - len(self._users)

    @property
    def evicted_next_used_at(self) -> float | None:
        """When what goes first was used last; None if nothing can go."""
        return next(iter(self._idle.values()), None)

    def depth(self, blocks: Sequence[int], most: int) -> int:
        """How many of the first `most` blocks are there."""
        idle, users = self._idle, self._users
        if not most or (blocks[0] not in idle and blocks[0] not in users):
            return 0
        if blocks[most - 1] in idle or blocks[most - 1] in users:
            return most
        low, high = 1, most
        while high - low > 1:
            middle = (low + high) >> 1
            block = blocks[middle - 1]
            if block in idle or block in users:
                low = middle
            else:
                high = middle
        return low

    def can_hold(self, blocks: Sequence[int]) -> bool:
        """Whether there is room for them beside what is in use."""
        users, room = self._users, self.capacity_blocks - len(self._users)
        return len(blocks) <= room or sum(block not in users for block in blocks) <= room

    def hold(self, blocks: Sequence[int]) -> Sequence[int]:
        """One more user of each; returns what was evicted for those that were absent.

        Raises IntegrityError where `can_hold` says no.
        """
        idle, users = self._idle, self._users
        for block in blocks:
            if block in users:
                users[block] += 1
            else:
                idle.pop(block, None)
                users[block] = 1
        excess = len(idle) + len(users) - self.capacity_blocks
        if excess <= 0:
            return ()
        evicted = list(islice(idle, excess))
        if len(evicted) < excess:
            raise IntegrityError(f"{len(users)} blocks are in use, {self.capacity_blocks} is the capacity")
        for block in evicted:
            del idle[block]
        self.num_evictions += excess
        return evicted

    def release(self, blocks: Sequence[int], now: float) -> None:
        """One user less of each."""
        idle, users = self._idle, self._users
        for block in reversed(blocks):
            left = users[block] - 1
            if left:
                users[block] = left
            else:
                del users[block]
                idle[block] = now


class UnpinnedCache(LruCache):
    """Of a pool: what is in use may be evicted, so that prefills in hand take no room from others. A bound may do that.

    A chain counts as used when it is held and again when it is released.
    """

    __slots__ = ()

    def can_hold(self, blocks: Sequence[int]) -> bool:
        return len(blocks) <= self.capacity_blocks

    def hold(self, blocks: Sequence[int]) -> Sequence[int]:
        evicted = super().hold(blocks)
        super().release(blocks, 0.0)
        return evicted

    def release(self, blocks: Sequence[int], now: float) -> None:
        super().hold(blocks)
        super().release(blocks, now)
