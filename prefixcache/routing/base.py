"""What a routing policy is: a pure function from what is known to a decision with its reason."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol


@dataclass(frozen=True, slots=True, kw_only=True)
class RoutingRequest:
    """What a policy may know of a request."""

    prompt_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerSnapshot:
    """A worker as seen from the proxy at the moment of the decision."""

    worker_id: str
    hit_tokens: int
    """Predicted: tokens of the request's match on this worker."""
    num_waiting: int
    """Requests that the worker has not started, as far as this proxy knows."""
    num_running: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """The chosen worker and why. `scores` has one entry a candidate, in the policy's own unit: higher is better."""

    worker_id: str
    reason: str
    hit_tokens: int
    scores: Mapping[str, float] = field(default_factory=dict)


class Policy(Protocol):
    """Chooses among at least one worker. Does no I/O, keeps no state but its random source."""

    name: str

    def choose(self, request: RoutingRequest, workers: Sequence[WorkerSnapshot]) -> Decision:
        """Raises ValueError for an empty sequence; the caller has no ready worker and answers for itself."""
