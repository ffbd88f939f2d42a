"""How much of a prompt each worker is expected to have, and who says so."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from prefixcache.index.base import Match
from prefixcache.routing.base import HitSource
from proxy.destination import Destination
from proxy.recent_placements import RecentPlacements


@dataclass(frozen=True, slots=True, kw_only=True)
class Expectation:
    """Of one worker and one chain."""

    blocks: int = 0
    """Index blocks from the beginning of the chain."""
    source: HitSource = "claims"
    claimed_blocks: int = 0
    """Those of them that the worker itself claims."""
    unbegun_blocks: int = 0
    """Those that a request is about to compute which is younger than all that is known of the worker's load."""


NOTHING = Expectation()
NO_ANSWER = Expectation(source="own_placements")
"""Nothing either, but the index did not say so."""


def claimed_blocks(link: Destination, match: Match) -> int:
    """How deep on the chain of the match the destination's own claims reach."""
    depths = match.depths
    return max((depths.get(incarnation, 0) for incarnation in link.claiming), default=0)


def expectations(
    links: Sequence[Destination],
    chain: Sequence[int],
    match: Match | None,
    recent: RecentPlacements,
    newer: Mapping[int, int] = MappingProxyType({}),
) -> Mapping[str, Expectation]:
    """By worker id; a worker without anything is absent.

    `newer`: depths of pending claims that others wrote after the match, by incarnation. This proxy's own placements
    speak where the index does not: for all workers without an answer (`match` None), else for those whose claims are
    being announced again.
    """
    found = match or Match()
    remembered = recent.depths(chain) if match is None or any(link.is_reannouncing for link in links) else {}
    expected: dict[str, Expectation] = {}
    for link in links:
        claimed = claimed_blocks(link, found)
        known = max(claimed, found.pending.get(link.incarnation, 0))
        pending = max(known, newer.get(link.incarnation, 0))
        own = remembered.get(link.process, 0) if match is None or link.is_reannouncing else 0
        blocks = max(pending, own)
        if blocks:
            source: HitSource = "claims" if claimed == blocks else "pending" if pending == blocks else "own_placements"
            expected[link.worker_id] = Expectation(
                blocks=blocks, source=source, claimed_blocks=claimed, unbegun_blocks=pending - known
            )
    return expected
