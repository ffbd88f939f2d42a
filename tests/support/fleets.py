"""Made-up fleets and prompts for tests and benchmarks of routing."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

from prefixcache.load import NUM_WAITING_CLASSES
from prefixcache.routing.base import HitSource, RoutingRequest, WorkerSnapshot

BLOCK_TOKENS = 64


def some_request(random: random.Random, *, num_blocks: int = 100) -> RoutingRequest:
    """A prompt that shares nothing with any other."""
    return RoutingRequest(
        prompt_tokens=num_blocks * BLOCK_TOKENS + 1,
        index_hashes=[random.getrandbits(64) for _ in range(num_blocks)],
        block_tokens=BLOCK_TOKENS,
    )


def some_fleet(random: random.Random, num_workers: int, *, most_blocks: int, **fields: Any) -> list[WorkerSnapshot]:
    """Workers in all kinds of states, with up to so many blocks of the prompt; `fields` are alike for all."""
    return [_some_worker(random, f"w{number}", most_blocks, fields) for number in range(num_workers)]


def _some_worker(random: random.Random, worker_id: str, most_blocks: int, fields: dict[str, Any]) -> WorkerSnapshot:
    sources: Sequence[HitSource] = ("claims", "pending", "own_placements")
    values: dict[str, Any] = {
        "hit_tokens": BLOCK_TOKENS * random.randint(0, most_blocks),
        "hit_source": random.choice(sources),
        "rest_s": random.uniform(0, 2),
        "waiting_s": tuple(random.choice([0.0, random.uniform(0, 10)]) for _ in range(NUM_WAITING_CLASSES)),
        "prefill_rate": random.choice([None, random.uniform(500, 9_000)]),
        "num_waiting": random.randrange(9),
        "num_running": random.randrange(50),
        "running_tokens": random.randrange(1_000_000),
        "free_tokens": random.choice([None, 0.0, random.uniform(0, 20_000)]),
        "oldest_age_s": random.choice([0.0, random.uniform(0, 1_000)]),
        "held_tokens": random.uniform(0, 900_000),
        "capacity_tokens": random.choice([None, 1_000_000.0]),
        "is_draining": random.random() < 0.1,
        **fields,
    }
    return WorkerSnapshot(worker_id=worker_id, **values)
