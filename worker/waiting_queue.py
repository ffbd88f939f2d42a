"""The requests that hold no blocks, and which of them goes next: no clock, no thread, no tensor.

    preempted   oldest admission first, before all others: a client has seen their beginning
    cut, new    by prefixcache/routing/order.py over what is uncached now and how long they have waited, proxy included;
                cut: a prefill after a slice, whose blocks stand in the pool as those of any that has ended

What is uncached changes with every block that is computed or evicted, and is needed for all of them at each choice. The
pool holds a prefix whole or up to a block, so the depth found last time is corrected from where it was, as a rule by
two looks into a table, and by none where the pool has not changed since:

    chain of hashes   [ h0 | h1 | h2 | h3 | h4 | h5 ]
    in the pool         x    x    x
                                  ^    ^ still not: the depth is 3 as before
                                  still there
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from prefixcache.limits import DEFAULT_PREFILL_RATE
from prefixcache.routing.order import Order, order_key
from worker.block_pool import BlockPool
from worker.sequence import Sequence

MOST_WALKED_BLOCKS = 2_048
"""Of all chains together in one step, about 2 ms; the rest is walked in the next ones, until then it is uncached."""


@dataclass(slots=True, eq=False)
class _Waiting:
    """One request, and how much of it was found in the pool when its content had this version."""

    sequence: Sequence
    num_uncached_tokens: int
    num_found_blocks: int = 0
    version: int | None = None
    """None while its chain was not walked to the end of what is there."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """A request that may go next; of several the one with the least key."""

    key: float
    sequence: Sequence
    num_found_blocks: int
    """Leading blocks that the pool holds, by their hashes alone."""
    num_uncached_tokens: int
    has_begun: bool = False
    """It was preempted or cut."""


class WaitingQueue:
    """Ordered anew at each choice."""

    def __init__(self, pool: BlockPool, *, block_size: int, order: Order = "mean") -> None:
        self._pool = pool
        self._block_size = block_size
        self._order: Order = order
        self._preempted: dict[Sequence, _Waiting] = {}
        """Last in, first out: of the running ones the newest is preempted first."""
        self._cut: dict[Sequence, _Waiting] = {}
        self._new: dict[Sequence, _Waiting] = {}
        self.num_uncached_tokens = 0
        """Of all requests, as of the last step."""

    def __len__(self) -> int:
        return len(self._preempted) + len(self._cut) + len(self._new)

    def __iter__(self) -> Iterator[Sequence]:
        """Preempted ones first, cut ones as they were cut, new ones as they came."""
        yield from reversed(self._preempted)
        yield from self._cut
        yield from self._new

    @property
    def cut_tokens(self) -> list[int]:
        """What each cut one still needs, as of the last step."""
        return [waiting.num_uncached_tokens for waiting in self._cut.values()]

    def add(self, sequence: Sequence) -> None:
        """A new request."""
        self._enter(self._new, sequence)

    def put_back(self, sequence: Sequence) -> None:
        """One that was admitted and has lost its blocks."""
        self._enter(self._preempted, sequence)

    def put_back_cut(self, sequence: Sequence, num_blocks: int) -> None:
        """One that gave its blocks back after a slice; its first `num_blocks` are in the pool."""
        self._enter(self._cut, sequence, num_blocks)

    def _enter(self, queue: dict[Sequence, _Waiting], sequence: Sequence, num_blocks: int = 0) -> None:
        num_uncached_tokens = sequence.num_tokens - num_blocks * self._block_size
        queue[sequence] = _Waiting(sequence, num_uncached_tokens, num_blocks)
        self.num_uncached_tokens += num_uncached_tokens

    def remove(self, sequence: Sequence) -> None:
        """It was admitted or has ended."""
        [queue] = [queue for queue in self._queues if sequence in queue]
        self.num_uncached_tokens -= queue.pop(sequence).num_uncached_tokens

    @property
    def _queues(self) -> tuple[dict[Sequence, _Waiting], ...]:
        return self._preempted, self._cut, self._new

    def go_on_walking(self) -> None:
        """Where a chain was too long for one step; in steps without a choice, lest a long cached prompt looks new."""
        self._find_prefixes(only_unfinished=True)

    def in_order(self, *, now: float, prefill_rate: float | None) -> list[Candidate]:
        """All of them, the next one first; `prefill_rate` None is one that was not measured yet.

        Costs 2 us a request, one more for each block by which its prefix has grown or shrunk.
        """
        self._find_prefixes()
        candidates = [
            Candidate(-math.inf, waiting.sequence, waiting.num_found_blocks, waiting.num_uncached_tokens, True)
            for waiting in reversed(self._preempted.values())
        ]
        others = [
            Candidate(
                self.key(waiting.sequence, waiting.num_uncached_tokens, now=now, prefill_rate=prefill_rate),
                waiting.sequence,
                waiting.num_found_blocks,
                waiting.num_uncached_tokens,
                has_begun,
            )
            for queue, has_begun in ((self._cut, True), (self._new, False))
            for waiting in queue.values()
        ]
        others.sort(key=_key)
        return candidates + others

    def key(self, sequence: Sequence, num_uncached_tokens: int, *, now: float, prefill_rate: float | None) -> float:
        """Of a request with so many tokens to compute, the least goes first."""
        prefill_s = num_uncached_tokens / (prefill_rate or DEFAULT_PREFILL_RATE)
        return order_key(self._order, prefill_s=prefill_s, waited_s=now - sequence.waiting_since)

    def _find_prefixes(self, only_unfinished: bool = False) -> None:
        version, num_left = self._pool.version, MOST_WALKED_BLOCKS
        for queue in self._queues:
            for waiting in queue.values():
                if waiting.version is None or not (only_unfinished or waiting.version == version):
                    num_left = self._find_prefix(waiting, version, num_left)
                    if num_left <= 0:
                        return

    def _find_prefix(self, waiting: _Waiting, version: int, num_left: int) -> int:
        """Walks from where its prefix ended to where it ends now; how many steps are left of `num_left`."""
        is_findable, sequence, depth = self._pool.is_findable, waiting.sequence, waiting.num_found_blocks
        before = depth
        while depth and num_left > 0 and not is_findable(sequence.block_hash(depth - 1)):
            depth, num_left = depth - 1, num_left - 1
        if depth == before:
            most = sequence.num_reusable_blocks
            while depth < most and num_left > 0 and is_findable(sequence.block_hash(depth)):
                depth, num_left = depth + 1, num_left - 1
        waiting.num_found_blocks = depth
        waiting.version = version if num_left > 0 else None
        num_uncached_tokens = sequence.num_tokens - depth * self._block_size
        self.num_uncached_tokens += num_uncached_tokens - waiting.num_uncached_tokens
        waiting.num_uncached_tokens = num_uncached_tokens
        return num_left


def _key(candidate: Candidate) -> float:
    return candidate.key
