"""What one plain engine is claimed to hold: prompts go into its newest generation, reports correct how many are kept.

    first byte of an answer ── claim ──► queue ── run ──► index.claim ──► family of incarnations ──► generations
    cached tokens, of an answer or as the engine counts them ── observe, note_hits ──► estimate of the capacity

Nothing here is waited for by a request, and nothing fails: a claim that cannot be written is a lost hint. A report
below the prediction removes no claims: by then the engine has computed the prompt, and holds what it lacked.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from prefixcache.errors import IndexUnavailable
from prefixcache.index.base import PrefixIndex
from prefixcache.index.family import Family
from prefixcache.limits import FAMILY_SETTLED_S, MAX_APPLY_HASHES, MAX_QUEUED_CLAIMS
from proxy.engines.cache_estimate import CacheEstimate
from proxy.engines.counted_hits import CountedHits
from proxy.warnings_log import QuietLog

NO_INCARNATION = 0
"""Given to nobody: what is written for it is not kept."""
TOLERANCE = 1 / 8
"""Of a prediction: where tokens are estimated from bytes it is off by so much, whatever the engine holds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Claim:
    chain: Sequence[int]
    capacity: int
    anchor: int
    """Of the family for which it was made; NO_INCARNATION if there was none yet."""


class EngineClaims:
    """`engine_families.EngineFamilies` makes it, and tells it its family."""

    def __init__(
        self, index: PrefixIndex, engine: str, log: QuietLog, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.engine = engine
        self._index = index
        self._log = log
        self._clock = clock
        self._estimate = CacheEstimate()
        self._counted_hits = CountedHits()
        self._family: Family | None = None
        self._replaced: int | None = None
        """Anchor of the family that is to be retired, for the engine's cache is gone."""
        self._changed_at = float("-inf")
        """When another proxy's new family was seen."""
        self._incomplete: int | None = None
        """The newest generation when claims were lost: those that it holds, and older ones, are not all."""
        self._is_lost = False
        self._queue: deque[_Claim] = deque()
        self._wake = asyncio.Event()
        self.on_need: Callable[[], None] = _nothing
        """Called when it needs a family at once."""

    @property
    def anchor(self) -> int:
        """Incarnation on which load and pending claims of the engine stand; NO_INCARNATION while there is none."""
        return self._family.anchor if self._family is not None else NO_INCARNATION

    @property
    def generations(self) -> Sequence[int]:
        """Incarnations on which its claims stand, newest first."""
        return self._family.generations if self._family is not None else ()

    @property
    def num_claims(self) -> int:
        """Index blocks that it is claimed to hold."""
        return self._family.num_claims if self._family is not None else 0

    @property
    def kept_share(self) -> float:
        """Of the engine's capacity, to which claims are kept by what it reported."""
        return self._estimate.share

    @property
    def is_reannouncing(self) -> bool:
        """Whether claims were lost that a cache full of newer ones has not replaced yet."""
        return self._family is None or self._incomplete is not None

    @property
    def replaced(self) -> int | None:
        """What to name to `open_family`."""
        return self._replaced

    def claim(self, chain: Sequence[int], *, capacity_blocks: int | None, engine_blocks_per_index_block: float) -> None:
        """The engine has computed this prompt. `capacity_blocks`: KV blocks of its cache, None if nobody tells."""
        if not chain:
            return
        if len(self._queue) == MAX_QUEUED_CLAIMS:
            self._queue.popleft()
            self._lose("they come faster than they are written")
        capacity = self._estimate.capacity(capacity_blocks, engine_blocks_per_index_block)
        self._queue.append(_Claim(chain=chain, capacity=capacity, anchor=self.anchor))
        self._wake.set()

    def observe(self, *, predicted_tokens: int, cached_tokens: int | None, index_block_tokens: float) -> None:
        """How a prediction made from claims alone turned out; `cached_tokens` is None if the engine did not tell."""
        if not predicted_tokens:
            return
        if cached_tokens is None:
            self._counted_hits.predict(predicted_tokens)
            return
        tolerated = max(index_block_tokens, TOLERANCE * predicted_tokens)
        is_below = cached_tokens == 0 or predicted_tokens - cached_tokens >= tolerated
        self._estimate.observe(is_below=is_below, num_claims=self.num_claims)

    def note_hits(self, counted_tokens: float | None) -> None:
        """What the engine counts of cached tokens since it began, asked now and then; None if it does not."""
        is_below = self._counted_hits.take(counted_tokens)
        if is_below is not None:
            self._estimate.observe(is_below=is_below, num_claims=self.num_claims)

    def begin_anew(self) -> None:
        """The engine's cache is gone, and with it all that was claimed. Where another proxy just saw it: nothing."""
        if self._family is None or self._clock() - self._changed_at < FAMILY_SETTLED_S:
            return
        self._replaced = self._family.anchor
        self._family = self._incomplete = None
        self._is_lost = False
        self._queue.clear()
        self.on_need()

    def take(self, family: Family | None) -> None:
        """What the index says of the family; None if there is none."""
        before, self._family = self._family, family
        if family is None:
            if before is not None:
                self._is_lost = True
            return
        if before is not None and before.anchor != family.anchor:
            self._changed_at, self._incomplete = self._clock(), None
        if self._is_lost:
            self._incomplete, self._is_lost = family.generations[1], False
        if self._incomplete not in family.generations:
            self._incomplete = None
        self._replaced = None
        self._wake.set()

    async def run(self) -> None:
        """Writes what is claimed; never returns."""
        while True:
            while self._queue and self._family is not None:
                await self._write(self._queue.popleft())
            self._wake.clear()
            await self._wake.wait()

    async def _write(self, claim: _Claim) -> None:
        """The deep end first: a block never outlives its parent."""
        anchor = claim.anchor or self.anchor
        first = (len(claim.chain) - 1) // MAX_APPLY_HASHES * MAX_APPLY_HASHES
        for start in range(first, -1, -MAX_APPLY_HASHES):
            piece = claim.chain[start : start + MAX_APPLY_HASHES]
            try:
                family = await self._index.claim(self.engine, anchor, piece, capacity=claim.capacity)
            except IndexUnavailable as error:
                self._lose(str(error))
                return
            if family is None:
                self.on_need()
                return
            if family.anchor == self.anchor:
                self.take(family)

    def _lose(self, why: str) -> None:
        self._log.warning(f"claims {self.engine}", "claims of engine %s are lost: %s", self.engine, why)
        if self._family is not None:
            self._incomplete = self._family.generations[1]
        else:
            self._is_lost = True


def _nothing() -> None:
    """Until there is an owner."""
