"""How much of what was claimed a plain engine still holds: the capacity that its claims are kept to.

    told by the engine or the settings ──► upper bound ──► times a share in (0, 1] ──► capacity, in index blocks
    not told ──────► taken for ample ────────┘                     ▲
                                                   reports of cached tokens

An engine's cache is never ours alone: answers take blocks, too, and so do others' requests. A report below the
prediction says that less is held than was claimed; a single one may be a lost race.

Simulated with an LRU cache of 125-1,000 index blocks (chats that share a system prompt): from ample to 1.3 of the true
capacity within some 300 reports, then 0.9-1.2 of it, with 5 % of the predictions too high.
"""

from __future__ import annotations

ASSUMED_ENGINE_BLOCKS = 262_144
"""4 million tokens: more than a model of 8 billion parameters leaves room for on any one machine."""
LEAST_ENGINE_BLOCKS = 256
"""4,096 tokens, if the capacity is not told."""
LEAST_SHARE = 1 / 2
"""Of a capacity that is told."""
MOST_STRIKES = 3
"""Reports below the prediction, within so few others that they did not fade, that shrink the capacity."""
FADING = 1 / 32
"""Of a strike, with each report that was not below."""
SHRINKING = 0.8
TOLD_SHRINKING = 0.95
"""Where the capacity is told: it is near the truth, and engines whose shares jump push chats to and fro."""
TOLD_CLAIMED = 0.9
"""Of a capacity that is told: answers, and what is left of prompts beyond their last index block, are never claimed."""
GROWTH = 1.002
"""With each report that was not below; together with the fading, one in twenty is below in the long run."""


class CacheEstimate:
    """Of one engine, by what one proxy saw."""

    def __init__(self) -> None:
        self._told: int | None = None
        self._share = 1.0
        self._strikes = 0.0
        self._engine_blocks_per_index_block = 1.0

    def capacity(self, told_blocks: int | None, engine_blocks_per_index_block: float) -> int:
        """Index blocks, at least 1. `told_blocks`: KV blocks of the engine's cache, None if nobody tells."""
        if told_blocks != self._told:
            self._told, self._share, self._strikes = told_blocks, 1.0, 0.0
        self._engine_blocks_per_index_block = engine_blocks_per_index_block
        claimed = TOLD_CLAIMED if told_blocks else 1.0
        return max(round(self._most_blocks * self._share * claimed / engine_blocks_per_index_block), 1)

    @property
    def share(self) -> float:
        """Of what was told."""
        return self._share

    def observe(self, *, is_below: bool, num_claims: int) -> None:
        """One report: whether it was below the prediction, and the index blocks that are claimed at that time."""
        if not is_below:
            self._strikes = max(self._strikes - FADING, 0.0)
            self._share = min(self._share * GROWTH, 1.0)
            return
        self._strikes += 1.0
        if self._strikes >= MOST_STRIKES:
            self._strikes = 0.0
            claimed_share = num_claims * self._engine_blocks_per_index_block / self._most_blocks
            shrinking = TOLD_SHRINKING if self._told else SHRINKING
            self._share = max(min(self._share, claimed_share) * shrinking, self._least_share)

    @property
    def _most_blocks(self) -> int:
        return self._told or ASSUMED_ENGINE_BLOCKS

    @property
    def _least_share(self) -> float:
        return LEAST_SHARE if self._told else LEAST_ENGINE_BLOCKS / ASSUMED_ENGINE_BLOCKS
