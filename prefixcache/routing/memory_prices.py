"""What a prompt costs the cache that takes it in: the prefill that others will have to do once more, in tokens.

Several prices, because a cache pays at several moments:

    displaced   at once: what must be evicted for the prompt is computed again by whoever comes back for it
    crowding    later: chats that follow one system prompt to one worker overflow it when they have grown, while others
                are half empty; when they begin nothing is full, and nothing displaced
    copies      as long as they stay: what is computed here and held elsewhere takes room twice
    flocking    before: a chat that begins is a few tokens behind a system prompt, and whoever gets more than its
                share of the requests will hold more than its share

Crowding and flocking are in proportion to the prompt and to the part of a cache that lies beyond a share. Bare tokens
beyond it grow with the caches: where those hold hundreds of prompts they would send chats away from all that they have
though there is room enough.

Copies, crowding and flocking count only for caches whose capacity and claims are known here, those of plain engines:
prompts cannot be moved or sliced there, and what is misplaced stays.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from prefixcache.routing.base import WorkerSnapshot

DISPLACED_PRICE = 2.0
"""Tokens computed that a token evicted just after its last use is worth; by simulation, on engines and own workers."""
FORGOTTEN_S = 180.0
"""Age at which what is evicted is worth e times less: likely nobody comes back for it; by simulation, as above."""
CROWDING_PRICE = 20.0
"""Times the prompt that a whole cache held beyond a worker's share is worth."""
CROWDED_FILL = 1 / 8
"""Of all caches, from which on crowding counts in full, in proportion before: in empty ones all that would be beyond a
share is what the prompt brings itself, and a long one that all ask for must spread."""
COPY_PRICE = 1.0
"""Of a token that is computed here though it may be held elsewhere, besides the time that it takes."""
FLOCKING_PRICE = 4.0
"""Times the prompt that a whole cache placed of late beyond a worker's share is worth, for each request that a worker
has on average ..."""
MOST_FLOCKING = 16.0
"""... of so many; more was not tried. A burst of 64 with one prompt of 670 tokens on four workers with caches of 64,000
must not leave one of them out, as it does at 12 times the prompt; chats of three clients on two workers must not be
moved, as they are at 33 times the prompt.

By simulation of chats as in `make bench-routing`: 15 to 30 for crowding and, with 8 clients, 4 to 7 times the prompt
for flocking measure alike; without both, caches that do not hold everything lose 6 % of their hits. On two engines of
46,592 tokens, nine chats of 500 to 700: all of an infinite cache's hits, where 4.0 and 0.5 for a bare token beyond a
share have .98.
"""


def displaced_price_tokens(worker: WorkerSnapshot, uncached_tokens: int) -> float:
    """For taking in so many tokens; nothing where the room is not known."""
    free_tokens = worker.free_tokens
    if free_tokens is None:
        capacity_tokens = worker.capacity_tokens
        if not capacity_tokens:
            return 0.0
        free_tokens = capacity_tokens - worker.held_tokens
    displaced_tokens = uncached_tokens - free_tokens if free_tokens > 0.0 else uncached_tokens
    if displaced_tokens <= 0.0:
        return 0.0
    age_s = worker.oldest_age_s
    price = DISPLACED_PRICE * displaced_tokens
    return price * math.exp(-age_s / FORGOTTEN_S) if age_s > 0.0 else price


def sharing_prices_tokens(
    workers: Sequence[WorkerSnapshot], uncached_tokens: Sequence[float], prompt_tokens: int
) -> Sequence[float] | None:
    """Crowding, copies and flocking for each worker, which would compute `uncached_tokens` of the prompt.

    None where a capacity is not known, so that there are no shares. Crowding counts with the prompt taken in: moving a
    chat is no gain where the new place is then as full as the old.
    """
    capacity_tokens = held_tokens = recent_tokens = 0.0
    num_requests = 0
    for worker in workers:
        capacity = worker.capacity_tokens
        if not capacity:
            return None
        capacity_tokens += capacity
        held_tokens += worker.held_tokens
        recent_tokens += worker.recent_tokens
        num_requests += worker.num_requests
    # Written without calls of max and min: every decision comes here once for each worker.
    held_share, recent_share = held_tokens / capacity_tokens, recent_tokens / capacity_tokens
    crowding_price = CROWDING_PRICE * prompt_tokens
    if held_share < CROWDED_FILL:
        crowding_price *= held_share / CROWDED_FILL
    # A lone chat may stay where it is, however long: nothing is shared out among idle workers.
    busy = num_requests / len(workers)
    flocking_price = FLOCKING_PRICE * prompt_tokens * (busy if busy < MOST_FLOCKING else MOST_FLOCKING)
    prices: list[float] = []
    for worker, uncached in zip(workers, uncached_tokens, strict=True):
        capacity = worker.capacity_tokens or 1.0
        price = COPY_PRICE * uncached
        crowding = (worker.held_tokens + uncached) / capacity - held_share
        if crowding > 0.0:
            price += crowding_price * crowding
        flocking = worker.recent_tokens / capacity - recent_share
        if flocking > 0.0:
            price += flocking_price * flocking
        prices.append(price)
    return prices
