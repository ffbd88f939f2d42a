"""What a routing policy is: a pure function from what is known to a decision with its reason."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

HitSource = Literal["claims", "pending", "own_placements"]
"""Who says that a worker has a prefix.

claims           the worker itself, through the index
pending          a proxy that has placed a request with that prefix there a moment ago, through the index
own_placements   this proxy's memory of what it sent there: what is left without an answer of the index
"""

Reason = Literal["longest_prefix", "pending_prefix", "own_placements", "least_ahead", "no_prefix"]
"""Why a worker was chosen; goes into a header and a metric label.

longest_prefix   nobody has more of the prompt, by the workers' claims
pending_prefix   nobody has more of it, counting what is being computed for requests placed before
own_placements   nobody has more of it, as far as this proxy remembers its own placements
least_ahead      another one has more of it, and so much work before it that the answer comes sooner here
no_prefix        nobody has any of it
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class RoutingRequest:
    """What a policy may know of a request."""

    prompt_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerSnapshot:
    """A worker as seen from the proxy at the moment of the decision."""

    worker_id: str
    hit_tokens: int = 0
    """Predicted: tokens of the request's match on this worker."""
    hit_source: HitSource = "claims"
    ahead_s: float = 0.0
    """Seconds of prefill that it will do before it begins with this request."""
    prefill_rate: float | None = None
    """Uncached prompt tokens a second, measured; None while nothing was."""
    num_waiting: int = 0
    """Requests that the worker has not started."""
    num_running: int = 0
    held_tokens: float = 0.0
    """What the index has claimed for it, where it cannot tell itself how full its cache is: a plain engine."""
    capacity_tokens: float | None = None
    """Of the cache that holds them; None where it is not known, and taken for ample."""
    is_draining: bool = False
    """It ends soon, and takes a request only where nobody else is."""

    def uncached_tokens(self, request: RoutingRequest) -> int:
        """What it would have to compute of the prompt."""
        return request.prompt_tokens - self.hit_tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """The chosen worker and why.

    `scores` has one entry a candidate, in the unit of the policy, whose docstring says whether more or less is better.
    """

    worker_id: str
    reason: Reason
    hit_tokens: int
    scores: Mapping[str, float] = field(default_factory=dict)


class Policy(Protocol):
    """Chooses among at least one worker. Does no I/O, keeps no state but its random source or whose turn it is."""

    name: str

    def choose(self, request: RoutingRequest, workers: Sequence[WorkerSnapshot]) -> Decision:
        """Raises ValueError for an empty sequence; the caller has no ready worker and answers for itself."""


def candidates(workers: Sequence[WorkerSnapshot]) -> Sequence[WorkerSnapshot]:
    """Those to choose from: the ones that stay, or all if none does. Raises ValueError without any."""
    if not workers:
        raise ValueError("no worker to choose from")
    return [worker for worker in workers if not worker.is_draining] or workers


def reason_for(chosen: WorkerSnapshot, workers: Sequence[WorkerSnapshot]) -> Reason:
    """Why `chosen` may be said to stand out among `workers`."""
    longest = max(worker.hit_tokens for worker in workers)
    if longest == 0:
        return "no_prefix"
    if chosen.hit_tokens < longest:
        return "least_ahead"
    if chosen.hit_source == "claims":
        return "longest_prefix"
    return "pending_prefix" if chosen.hit_source == "pending" else "own_placements"
