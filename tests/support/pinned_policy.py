"""A policy for tests that need a worker to have too much to do."""

from __future__ import annotations

from collections.abc import Sequence

from prefixcache.routing.base import Decision, RoutingRequest, WorkerSnapshot


class PinnedPolicy:
    """Everything to one worker, where it may be chosen; else to the first of the others."""

    name = "pinned"

    def __init__(self, worker_id: str) -> None:
        self.worker_id = worker_id
        self.told: Sequence[WorkerSnapshot] = ()
        """Of the last decision."""

    def choose(self, request: RoutingRequest, workers: Sequence[WorkerSnapshot]) -> Decision:
        self.told = workers
        by_id = {worker.worker_id: worker for worker in workers}
        chosen = by_id.get(self.worker_id, workers[0])
        return Decision(worker_id=chosen.worker_id, reason="no_prefix", hit_tokens=chosen.hit_tokens)
