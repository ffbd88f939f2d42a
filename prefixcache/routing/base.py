"""What a routing policy is: a pure function from what is known to a decision with its reason."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

from prefixcache.load import NO_WAITING, waiting_class

HitSource = Literal["claims", "pending", "own_placements"]
"""Who says that a worker has a prefix.

claims           the worker itself, through the index
pending          a proxy that has placed a request with that prefix there a moment ago, through the index
own_placements   this proxy's memory of what it sent there: what is left without an answer of the index
"""

Reason = Literal["longest_prefix", "pending_prefix", "own_placements", "least_ahead", "no_prefix", "stolen"]
"""Why a worker was chosen; goes into a header and a metric label.

longest_prefix   nobody has more of the prompt, by the workers' claims
pending_prefix   nobody has more of it, counting what is being computed for requests placed before
own_placements   nobody has more of it, as far as this proxy remembers its own placements
least_ahead      another one has more of it, and less before it speaks for this one, by what the policy goes by
no_prefix        nobody has any of it
stolen           it waited for another one when this one had nothing to do; said by the proxy, not by a policy
"""


SAME = 1e-9
"""Scores nearer to each other than this differ by rounding alone."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RoutingRequest:
    """What a policy may know of a request."""

    prompt_tokens: int
    index_hashes: Sequence[int] = ()
    """Of its whole index blocks from the first one on, for policies that go by the prefix itself."""
    block_tokens: float = 64
    """Tokens of each of them; an estimate where no tokenizer counts them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerSnapshot:
    """A worker as seen from the proxy at the moment of the decision."""

    worker_id: str
    hit_tokens: int = 0
    """Predicted: tokens of the request's match on this worker."""
    hit_source: HitSource = "claims"
    rest_s: float = 0.0
    """Seconds until it may begin with another request: the rest of the slice that runs now."""
    waiting_s: tuple[float, ...] = NO_WAITING
    """Prefill seconds of what it has in hand besides, by WAITING_CLASSES_S; what is left of a sliced one by its own."""
    prefill_rate: float | None = None
    """Uncached prompt tokens a second, measured; None while nothing was."""
    num_waiting: int = 0
    """Requests that the worker has not started."""
    num_running: int = 0
    """Requests started and not ended."""
    free_tokens: float | None = None
    """Room in its cache that holds nothing yet; None where it is not known, and taken for ample."""
    oldest_age_s: float = 0.0
    """Since what would be evicted first was used last; 0 is just now, or not known."""
    running_tokens: int = 0
    """Of all requests there, those that wait included; 0 where it is not known."""
    held_tokens: float = 0.0
    """What the index has claimed for it, where it cannot tell itself how full its cache is: a plain engine."""
    capacity_tokens: float | None = None
    """Of the cache that holds them; None where it is not known, and taken for ample."""
    recent_tokens: float = 0.0
    """Prompt tokens placed on it of late: each proxy's last quarter of what all caches together hold, e-fold."""
    is_draining: bool = False
    """It ends soon, and takes a request only where nobody else is."""

    def ahead_s(self, prefill_s: float) -> float:
        """Seconds of prefill that it will do before a request of so much prefill: short ones go first.

        Never less than nothing, whatever a clock that went back made of the times.
        """
        ahead_s = self.rest_s + sum(self.waiting_s[: waiting_class(prefill_s) + 1])
        return ahead_s if ahead_s > 0.0 else 0.0

    @property
    def all_ahead_s(self) -> float:
        """Seconds of prefill of all that it has in hand; not less than nothing either."""
        ahead_s = self.rest_s + sum(self.waiting_s)
        return ahead_s if ahead_s > 0.0 else 0.0

    @property
    def num_requests(self) -> int:
        return self.num_waiting + self.num_running

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
    """Chooses among at least one worker, which may be other ones each time.

    Does no I/O and has no clock. What it remembers of earlier choices, if anything, is its own and bounded.
    """

    name: str

    def choose(self, request: RoutingRequest, workers: Sequence[WorkerSnapshot]) -> Decision:
        """Raises ValueError for an empty sequence; the caller has no ready worker and answers for itself."""


def candidates(workers: Sequence[WorkerSnapshot]) -> Sequence[WorkerSnapshot]:
    """Those to choose from: the ones that stay, or all if none does. Raises ValueError without any."""
    if not workers:
        raise ValueError("no worker to choose from")
    return [worker for worker in workers if not worker.is_draining] or workers


def least_of(workers: Sequence[WorkerSnapshot], scores: Mapping[str, float], random: random.Random) -> WorkerSnapshot:
    """The one with the least score, a random one of equals."""
    least = min(scores[worker.worker_id] for worker in workers)
    return random.choice([worker for worker in workers if scores[worker.worker_id] <= least + SAME])


def decision(chosen: WorkerSnapshot, among: Sequence[WorkerSnapshot], scores: Mapping[str, float]) -> Decision:
    """For the chosen one of the candidates."""
    return Decision(
        worker_id=chosen.worker_id, reason=reason_for(chosen, among), hit_tokens=chosen.hit_tokens, scores=scores
    )


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
