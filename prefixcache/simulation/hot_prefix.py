"""Skew: a share of a trace's conversations gets one prefix in common, a hot one."""

from __future__ import annotations

import random
from dataclasses import replace

from prefixcache.simulation.trace import Trace, TraceRequest


def with_hot_prefix(trace: Trace, share: float, num_blocks: int, *, seed: int = 0) -> Trace:
    """That share of them begins with the same `num_blocks` new blocks, and is longer by them.

    A conversation is a session, or in a trace without sessions all requests that agree up to their second block: the
    first one may be a system prompt of all. Behind the hot prefix all blocks have new names, since a name stands for
    the whole prefix.
    """
    first_new = 1 + max((block for request in trace.requests for block in request.blocks), default=0)
    prefix = tuple(range(first_new, first_new + num_blocks))
    shift = first_new + num_blocks
    chance = random.Random(f"hot prefix {seed}")
    is_hot: dict[object, bool] = {}

    def changed(request: TraceRequest) -> TraceRequest:
        conversation = _conversation(request)
        if conversation not in is_hot:
            is_hot[conversation] = chance.random() < share
        if not is_hot[conversation]:
            return request
        return replace(
            request,
            prompt_tokens=request.prompt_tokens + num_blocks * trace.block_tokens,
            blocks=(*prefix, *(block + shift for block in request.blocks)),
            reusable_blocks=request.reusable_blocks + num_blocks,
        )

    return replace(trace, name=f"{trace.name}+hot", requests=[changed(request) for request in trace.requests])


def _conversation(request: TraceRequest) -> object:
    if request.session is not None:
        return request.session
    return request.blocks[:2][-1] if request.blocks else None
