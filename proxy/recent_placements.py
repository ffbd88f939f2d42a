"""What this proxy remembers of its own placements: the routing that is left without the index.

placed    boundaries of the chain ──► the worker process it went to, for each the last one
looked up every block of a new chain, deepest first: where an old chain ended, a new one has a block at any depth
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
        self._processes: OrderedDict[int, WorkerProcess] = OrderedDict()

    def __len__(self) -> int:
        return len(self._processes)

    def record(self, boundaries: Boundaries, process: WorkerProcess) -> None:
        """Deepest first, so that of one chain the shallow blocks, which more chains share, are kept longest."""
        processes = self._processes
        for block in reversed(boundaries.hashes):
            processes[block] = process
            processes.move_to_end(block)
        while len(processes) > self._capacity:
            processes.popitem(last=False)

    def depths(self, chain: Sequence[int]) -> Mapping[WorkerProcess, int]:
        """The deepest block of the chain on which each process got something, counted from 1."""
        depths: dict[WorkerProcess, int] = {}
        for depth in range(min(len(chain), MAX_MATCH_BLOCKS), 0, -1):
            process = self._processes.get(chain[depth - 1])
            if process is not None:
                depths.setdefault(process, depth)
        return depths
