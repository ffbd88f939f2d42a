"""Which worker gets a request: what the policy is told, and its answer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Generic, TypeVar

from prefixcache.errors import ContextLengthExceeded, Unavailable
from prefixcache.routing.base import Decision, Policy, RoutingRequest, WorkerSnapshot
from prefixcache.routing.rates import prefill_rates
from proxy.destination import Destination, Geometry
from proxy.expectation import NOTHING, Expectation
from proxy.load_table import LoadTable

D = TypeVar("D", bound=Destination)


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement(Generic[D]):
    """A chosen worker."""

    link: D
    decision: Decision
    expectation: Expectation
    """What the decision took the worker to have of the prompt."""
    uncached_tokens: int
    prefill_s: float
    """That many tokens at the worker's rate, or at the one assumed for it."""
    max_tokens: int

    @property
    def index_hit_tokens(self) -> int:
        """Hit tokens that the index predicted: what this proxy merely remembers is no prediction of the index."""
        return 0 if self.expectation.source == "own_placements" else self.decision.hit_tokens


def check_context(
    links: Sequence[Destination], prompt_tokens: int, max_tokens: int | None, *, field: str = "messages"
) -> None:
    """Raises ContextLengthExceeded unless the prompt, with the answer asked for, fits one of the workers at least.

    `field` is where the prompt stood in the request.
    """
    limit = max((link.max_model_len for link in links), default=None)
    if limit is None or prompt_tokens + (max_tokens or 1) <= limit:
        return
    subject = field.partition("[")[0]
    if max_tokens is None:
        raise ContextLengthExceeded(
            f"This model's maximum context length is {limit} tokens. However, your {subject} resulted in "
            f"{prompt_tokens} tokens, which leaves no room for an answer. Please reduce the length of the {subject}.",
            param=field,
        )
    raise ContextLengthExceeded(
        f"This model's maximum context length is {limit} tokens. However, you requested "
        f"{prompt_tokens + max_tokens} tokens ({prompt_tokens} in the {subject}, {max_tokens} in the completion). "
        f"Please reduce the length of the {subject} or completion.",
        param=field,
    )


def placement(
    policy: Policy,
    links: Sequence[D],
    expected: Mapping[str, Expectation],
    loads: LoadTable,
    *,
    geometry: Geometry,
    prompt_tokens: int,
    max_tokens: int | None,
    usual_max_tokens: int | None = None,
    field: str = "messages",
    is_refused_elsewhere: bool = False,
) -> Placement[D]:
    """Asks the policy. Raises Unavailable without a ready worker, ContextLengthExceeded if the request fits none.

    `expected`: what each worker has of the prompt, by worker id; whoever is absent has nothing. What fits none is left
    to the destination where it `is_refused_elsewhere`: there the count of tokens may be an estimate.
    """
    if not links:
        raise Unavailable("no worker is ready to serve this model, try again in a moment")
    if not is_refused_elsewhere:
        check_context(links, prompt_tokens, max_tokens, field=field)
    fitting = {link.worker_id: link for link in links if prompt_tokens + (max_tokens or 1) <= link.max_model_len}
    fitting = fitting or {link.worker_id: link for link in links}
    snapshots = {
        worker_id: _snapshot(link, expected.get(worker_id, NOTHING), loads, geometry, prompt_tokens)
        for worker_id, link in fitting.items()
    }
    rates = prefill_rates(list(snapshots.values()))
    for worker_id in snapshots.keys() & expected.keys():
        unbegun_s = expected[worker_id].unbegun_blocks * geometry.index_block_tokens / rates[worker_id]
        if unbegun_s:
            # Nobody can have told of that load yet; what has been told besides may have come to include it meanwhile.
            least_s = fitting[worker_id].ledger.ahead_s() + unbegun_s
            snapshot = snapshots[worker_id]
            snapshots[worker_id] = replace(snapshot, ahead_s=max(snapshot.ahead_s, least_s))
    decision = policy.choose(RoutingRequest(prompt_tokens=prompt_tokens), list(snapshots.values()))
    link = fitting[decision.worker_id]
    room = link.max_model_len - prompt_tokens
    uncached_tokens = prompt_tokens - decision.hit_tokens
    return Placement(
        link=link,
        decision=decision,
        expectation=expected.get(decision.worker_id, NOTHING),
        uncached_tokens=uncached_tokens,
        prefill_s=uncached_tokens / rates[decision.worker_id],
        max_tokens=max_tokens or min(room, usual_max_tokens or room),
    )


def _snapshot(
    link: Destination, expected: Expectation, loads: LoadTable, geometry: Geometry, prompt_tokens: int
) -> WorkerSnapshot:
    return WorkerSnapshot(
        worker_id=link.worker_id,
        hit_tokens=geometry.predicted_hit_tokens(expected.blocks, prompt_tokens),
        hit_source=expected.source,
        ahead_s=loads.ahead_s(link),
        prefill_rate=loads.prefill_rate(link),
        num_waiting=link.num_waiting,
        num_running=link.num_running,
        held_tokens=link.num_claims * geometry.index_block_tokens,
        capacity_tokens=link.claimed_capacity_tokens,
        is_draining=loads.is_draining(link),
    )
