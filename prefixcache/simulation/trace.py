"""A trace: what was asked when, how long, and which prompts begin alike."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceRequest:
    """One request. Blocks are named by their whole prefix: who shares a block shares all before it."""

    arrival_s: float
    """Since the beginning of the trace; of a session's later requests it is only what was recorded."""
    prompt_tokens: int
    output_tokens: int
    blocks: Sequence[int]
    """Its whole blocks: what it leaves in a cache."""
    reusable_blocks: int
    """The leading ones that it may find there; at least one token is always computed."""
    session: int | None = None
    think_s: float = 0.0
    """From the end of the session's request before this one to its arrival."""


@dataclass(frozen=True, kw_only=True)
class Trace:
    """Requests in the order of their arrival.

    Where they name sessions the loop is closed: a session's next request comes once its last one has ended.
    """

    name: str
    block_tokens: int
    requests: Sequence[TraceRequest]

    @cached_property
    def is_closed_loop(self) -> bool:
        return any(request.session is not None for request in self.requests)

    @cached_property
    def num_unique_blocks(self) -> int:
        return len({block for request in self.requests for block in request.blocks})

    @cached_property
    def prompt_tokens(self) -> int:
        return sum(request.prompt_tokens for request in self.requests)

    @property
    def duration_s(self) -> float:
        """From the first arrival to the last."""
        return self.requests[-1].arrival_s - self.requests[0].arrival_s

    def between(self, begin_s: float, end_s: float) -> Trace:
        """The requests recorded in this time, which then begins at 0."""
        inside = [
            replace(request, arrival_s=request.arrival_s - begin_s)
            for request in self.requests
            if begin_s <= request.arrival_s < end_s
        ]
        return replace(self, requests=inside)

    def faster(self, factor: float) -> Trace:
        """The same requests, coming and thought about `factor` times as fast."""
        return replace(
            self,
            requests=[
                replace(request, arrival_s=request.arrival_s / factor, think_s=request.think_s / factor)
                for request in self.requests
            ],
        )
