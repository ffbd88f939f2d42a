"""What the index says of a simulated worker's cache, some time after it became true; and what is about to be there."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from functools import lru_cache

from prefixcache.index.boundaries import boundary_depths
from prefixcache.simulation.lru import LruCache
from prefixcache.simulation.trace import TraceRequest
from prefixcache.types import INDEX_STRIDE, KV_BLOCK_SIZE

INDEX_BLOCK_TOKENS = KV_BLOCK_SIZE * INDEX_STRIDE


class Claims:
    """Claims of one worker, and pending claims of requests on their way to it.

    Pending claims stand on boundaries of a chain alone, as in the index.
    """

    __slots__ = ("_block_tokens", "_cache", "_changes", "_hidden", "_hidden_from", "_lag_s", "_pending", "_shown")

    def __init__(self, cache: LruCache, lag_s: float, *, block_tokens: int) -> None:
        self._cache = cache
        self._block_tokens = block_tokens
        self._lag_s = lag_s
        self._pending: dict[int, int] = {}
        self._hidden: Sequence[int] = ()
        """The chain that is being computed, and from where on: its blocks are in the cache, and not there yet."""
        self._hidden_from = 0
        self._shown: set[int] = set()
        self._changes: deque[tuple[float, bool, Sequence[int]]] = deque()
        """(when it shows, whether stored, blocks): used with a lag alone."""

    def computing(self, blocks: Sequence[int], depth: int, evicted: Sequence[int], now: float) -> None:
        """A prefill begins behind the first `depth` of its blocks."""
        self._hidden, self._hidden_from = blocks, depth
        if self._lag_s:
            self._changes.append((now + self._lag_s, False, evicted))

    def computed(self, now: float) -> None:
        """It has ended, and all its blocks are there."""
        if self._lag_s:
            self._changes.append((now + self._lag_s, True, self._hidden))
        self._hidden = ()

    def evicted(self, blocks: Sequence[int], now: float) -> None:
        if self._lag_s and blocks:
            self._changes.append((now + self._lag_s, False, blocks))

    def depth(self, request: TraceRequest, now: float) -> int:
        """Blocks of the request that the index names."""
        if self._lag_s:
            return self._shown_depth(request, now)
        blocks, hidden, first = request.blocks, self._hidden, self._hidden_from
        depth = self._cache.depth(blocks, request.reusable_blocks)
        if depth > first and first < len(hidden) and blocks[first] == hidden[first]:
            return first
        return depth

    def pending_depth(self, request: TraceRequest) -> int:
        """Blocks of the request that others which were placed here are going to store."""
        pending, blocks = self._pending, request.blocks
        if not pending:
            return 0
        for depth in reversed(_boundaries(len(blocks), self._block_tokens)):
            if blocks[depth - 1] in pending:
                return min(depth, request.reusable_blocks)
        return 0

    def expect(self, request: TraceRequest) -> None:
        """It was placed here."""
        for depth in _boundaries(len(request.blocks), self._block_tokens):
            block = request.blocks[depth - 1]
            self._pending[block] = self._pending.get(block, 0) + 1

    def forget(self, request: TraceRequest) -> None:
        """Its blocks are there, or it went elsewhere."""
        for depth in _boundaries(len(request.blocks), self._block_tokens):
            block = request.blocks[depth - 1]
            left = self._pending[block] - 1
            if left:
                self._pending[block] = left
            else:
                del self._pending[block]

    def _shown_depth(self, request: TraceRequest, now: float) -> int:
        changes, shown = self._changes, self._shown
        while changes and changes[0][0] <= now:
            _, is_stored, changed = changes.popleft()
            (shown.update if is_stored else shown.difference_update)(changed)
        blocks = request.blocks
        low, high = 0, request.reusable_blocks
        while low < high:
            middle = (low + high + 1) >> 1
            if blocks[middle - 1] in shown:
                low = middle
            else:
                high = middle - 1
        return low


@lru_cache(maxsize=1_024)
def _boundaries(num_blocks: int, block_tokens: int) -> tuple[int, ...]:
    """The boundaries of a chain of index blocks, in whole blocks of the trace; ascending, counted from 1."""
    num_index_blocks = num_blocks * block_tokens // INDEX_BLOCK_TOKENS
    depths = {depth * INDEX_BLOCK_TOKENS // block_tokens for depth in boundary_depths(num_index_blocks)}
    return tuple(sorted(depths - {0}))
