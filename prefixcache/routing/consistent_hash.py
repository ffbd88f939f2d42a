"""Consistent hashing with bounded load: to the worker that the beginning of the prompt is assigned to.

Each worker draws a number for each key, and the highest one has it (rendezvous hashing, Thaler and Ravishankar 1996).
So a new worker takes one key of N + 1 from the others and no other key moves, nor does any but its own when one leaves,
and all proxies agree without a word. A worker that has its share of all requests and a quarter more passes the key on
to the next one (Mirrokni, Thorup and Zadimoghaddam 2016).
"""

from __future__ import annotations

import hashlib
import math
import random
from collections.abc import Sequence
from functools import lru_cache

from prefixcache.routing.base import Decision, Policy, RoutingRequest, WorkerSnapshot, candidates, decision

BOUND = 1.25
"""Requests that a worker may have, of the mean of all."""
KEY_TOKENS = 4_096
"""Prompts are kept together that agree in so many tokens: fewer are a system prompt, shared by half of all chats."""
_MASK = 2**64 - 1
_MOST_REMEMBERED = 4_096
"""Workers whose factor is kept."""


class ConsistentHash(Policy):
    """A prompt shorter than an index block has no key, and goes to whoever has the fewest requests.

    Scores are the workers' numbers for the key, below 1, and 0 without one; more is better.
    """

    name = "consistent_hash"

    def __init__(self, random: random.Random) -> None:
        self._random = random

    def choose(self, request: RoutingRequest, workers: Sequence[WorkerSnapshot]) -> Decision:
        among = candidates(workers)
        key = _key(request)
        if key is None:
            least = min(worker.num_requests for worker in among)
            chosen = self._random.choice([worker for worker in among if worker.num_requests <= least])
            return decision(chosen, among, {worker.worker_id: 0.0 for worker in workers})
        scores = {worker.worker_id: _number(key, worker.worker_id) for worker in workers}
        num_requests = sum(worker.num_waiting + worker.num_running for worker in among)
        most = math.ceil(BOUND * (1 + num_requests) / len(among))
        # One at least has no more than the mean.
        having_room = [worker for worker in among if worker.num_waiting + worker.num_running < most]
        chosen = max(having_room, key=lambda worker: (scores[worker.worker_id], worker.worker_id))
        return decision(chosen, among, scores)


def _key(request: RoutingRequest) -> int | None:
    hashes = request.index_hashes
    if not hashes:
        return None
    num_blocks = max(1, round(KEY_TOKENS / request.block_tokens))
    return hashes[min(num_blocks, len(hashes)) - 1]


def _number(key: int, worker_id: str) -> float:
    """In [0, 1): the upper bits of a product with a random factor (multiply-shift, Dietzfelbinger et al. 1997)."""
    return (key * _factor(worker_id) & _MASK) / 2**64


@lru_cache(maxsize=_MOST_REMEMBERED)
def _factor(worker_id: str) -> int:
    """64 bits, odd."""
    return int.from_bytes(hashlib.blake2b(worker_id.encode(), digest_size=8).digest()) | 1
