"""SGLang's cache-aware routing: an approximate tree of what was sent where, unless the load is out of balance.

After sgl-model-gateway's `cache_aware` policy with its thresholds: it knows nothing of what engines evict.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

from prefixcache.routing.base import Decision, Policy, RoutingRequest, WorkerSnapshot, candidates, decision, least_of

CACHE_THRESHOLD = 0.3
"""Of the prompt: a match above it decides, one below goes to whoever has been sent the least."""
IMBALANCED_BY = 64
IMBALANCED_TIMES = 1.5
"""Requests of the most loaded worker beyond those of the least; where both hold, the least loaded one is taken."""
MOST_TREE_TOKENS = 2**24
"""Remembered of one worker, the longest unused forgotten first: its 2^26 characters."""


class SglangTree(Policy):
    """Scores are the matched shares of the prompt, by the tree; more is better.

    A worker that is not among those told of has left, and what was sent to it is forgotten.
    """

    name = "sglang_tree"

    def __init__(self, random: random.Random) -> None:
        self._random = random
        self._sent: dict[str, _Sent] = {}

    def choose(self, request: RoutingRequest, workers: Sequence[WorkerSnapshot]) -> Decision:
        among = candidates(workers)
        sent = self._sent = {worker.worker_id: self._sent.get(worker.worker_id) or _Sent() for worker in workers}
        hashes = request.index_hashes
        depths = {worker_id: each.depth(hashes) for worker_id, each in sent.items()}
        chosen = self._chosen(among, depths, len(hashes))
        sent[chosen.worker_id].add(hashes, most_blocks=max(1, int(MOST_TREE_TOKENS / request.block_tokens)))
        shares = {worker_id: depth / len(hashes) if hashes else 0.0 for worker_id, depth in depths.items()}
        return decision(chosen, among, shares)

    def _chosen(self, among: Sequence[WorkerSnapshot], depths: dict[str, int], num_blocks: int) -> WorkerSnapshot:
        loads = {worker.worker_id: float(worker.num_requests) for worker in among}
        most, least = max(loads.values()), min(loads.values())
        if most - least > IMBALANCED_BY and most > IMBALANCED_TIMES * least:
            return least_of(among, loads, self._random)
        deepest = max(depths[worker.worker_id] for worker in among)
        if deepest > CACHE_THRESHOLD * num_blocks:
            return self._random.choice([worker for worker in among if depths[worker.worker_id] == deepest])
        sizes = {worker.worker_id: float(self._sent[worker.worker_id].num_blocks) for worker in among}
        return least_of(among, sizes, self._random)


class _Sent:
    """Blocks of the prompts that one worker was sent, in the order of their last use, deeper ones of a prompt first.

    The deepest go first, so that whoever has a block has all before it.
    """

    __slots__ = ("_blocks",)

    def __init__(self) -> None:
        self._blocks: dict[int, None] = {}

    @property
    def num_blocks(self) -> int:
        return len(self._blocks)

    def depth(self, hashes: Sequence[int]) -> int:
        """Leading blocks that it was sent."""
        least, most = 0, len(hashes)
        while least < most:
            middle = (least + most + 1) // 2
            if hashes[middle - 1] in self._blocks:
                least = middle
            else:
                most = middle - 1
        return least

    def add(self, hashes: Sequence[int], *, most_blocks: int) -> None:
        blocks = self._blocks
        for name in reversed(hashes[:most_blocks]):
            blocks.pop(name, None)
            blocks[name] = None
        while len(blocks) > most_blocks:
            del blocks[next(iter(blocks))]
