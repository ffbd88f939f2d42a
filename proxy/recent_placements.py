"""What this proxy remembers of its own placements: the routing that is left without the index.

placed    boundaries of the chain ──► the worker process it went to, for each the last one
looked up every block of a new chain, deepest first: where an old chain ended, a new one has a block at any depth
since     the boundaries of a chain alone: what went to a worker after this chain was asked for at the index
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from prefixcache.index.boundaries import Boundaries
from prefixcache.limits import MAX_MATCH_BLOCKS, RECENT_PLACEMENTS


class WorkerProcess(NamedTuple):
    """One run of a worker: its cache outlives an incarnation, and ends with the process."""

    worker_id: str
    started_at: float


class RecentPlacements:
    """The last `capacity` blocks on which something was placed; whoever is placed on again stays longer."""

    def __init__(self, capacity: int = RECENT_PLACEMENTS) -> None:
        self._capacity = capacity
        self._placed: OrderedDict[int, tuple[WorkerProcess, int]] = OrderedDict()
        self.num_recorded = 0
        """Placements so far: a moment, to whoever asks what came after it."""

    def __len__(self) -> int:
        return len(self._placed)

    def record(self, boundaries: Boundaries, process: WorkerProcess) -> None:
        """Deepest first, so that of one chain the shallow blocks, which more chains share, are kept longest."""
        self.num_recorded += 1
        placed = self._placed
        for block in reversed(boundaries.hashes):
            placed[block] = (process, self.num_recorded)
            placed.move_to_end(block)
        while len(placed) > self._capacity:
            placed.popitem(last=False)

    def depths(self, chain: Sequence[int]) -> Mapping[WorkerProcess, int]:
        """The deepest block of the chain on which each process got something, counted from 1."""
        depths: dict[WorkerProcess, int] = {}
        for depth in range(min(len(chain), MAX_MATCH_BLOCKS), 0, -1):
            placed = self._placed.get(chain[depth - 1])
            if placed is not None:
                depths.setdefault(placed[0], depth)
        return depths

    def depth_since(self, boundaries: Boundaries, process: WorkerProcess, moment: int) -> int:
        """The deepest of these boundaries on which it got something after `moment`, a `num_recorded`; 0: none."""
        for depth, block in zip(reversed(boundaries.depths), reversed(boundaries.hashes), strict=True):
            placed = self._placed.get(block)
            if placed is not None and placed[0] == process and placed[1] > moment:
                return depth
        return 0
