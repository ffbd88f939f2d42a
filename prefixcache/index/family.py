"""The incarnations of one plain engine, which tells neither what it stores nor what it evicts: claims that age.

    proxies claim ───────────┐
                             ▼
    anchor       next     newest    older ───────────────────────►  oldest       a claim stands on one of them only:
                |       | |#####   |######|####   |##     |#####  |              a prefix that is used again moves to
                                     <── prompts last used then ──               the newest, as an LRU cache keeps it

    opened    the newest holds a quarter of the engine's cache: the next claim goes to the next one, and another is
              opened behind it, so that all proxies know a generation before a claim stands on it
    retired   the oldest, as long as the others hold the cache's capacity: what is claimed is the capacity and at most
              one generation more, which is the safe side; an older one that lost all its claims to newer ones goes, too

The anchor has no claims: load and pending claims of the engine stand on it, whatever the generation.

By counting the claims that stand, not only new ones, 1.0 to 1.4 of the capacity are claimed, also where most of it is
used again; five generations of a quarter of new blocks each reach 3.3, and one prediction in four is wrong.
"""

from __future__ import annotations

from dataclasses import dataclass

GENERATIONS_A_CACHE = 4
MOST_GENERATIONS = 8
"""With claims, at a time: where that many have lost most of theirs to newer ones, the newest grows beyond a quarter."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """Of one engine, at one moment."""

    anchor: int
    generations: tuple[int, ...]
    """The next one, the newest and the older ones, from new to old."""
    num_claims: int = 0
    """Index blocks claimed by all of them together."""
