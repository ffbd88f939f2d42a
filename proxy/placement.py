"""Which worker gets a request: what the policy is told, and its answer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Generic, TypeVar

from prefixcache.errors import ContextLengthExceeded, NoWorkerReady
from prefixcache.limits import DEFAULT_PREFILL_RATE
from prefixcache.load import waiting_class
from prefixcache.routing.base import Decision, Policy, RoutingRequest, WorkerSnapshot
from prefixcache.routing.rates import prefill_rates
from proxy.destination import Destination, Geometry
from proxy.expectation import NOTHING, Expectation
from proxy.load_ledger import LoadLedger
from proxy.load_table import LoadTable

D = TypeVar("D", bound=Destination)


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement(Generic[D]):
    """A chosen worker."""

    link: D
    incarnation: int
    """Of the worker when its claims were read."""
    decision: Decision
    expectation: Expectation
    """What the decision took the worker to have of the prompt."""
    best_hit_tokens: int
    """What the worker with most of the prompt was taken to have, when it was first placed."""
    uncached_tokens: int
    prefill_s: float
    """That many tokens at the worker's rate, or at the one assumed for it."""
    max_tokens: int

    @property
    def index_hit_tokens(self) -> int:
        """Hit tokens that the index predicted: what this proxy merely remembers is no prediction of the index."""
        return 0 if self.expectation.source == "own_placements" else self.decision.hit_tokens

    @property
    def claimed_hit_tokens(self) -> int | None:
        """Hit tokens by the worker's own claims; None where the expectation goes by anything else."""
        return self.decision.hit_tokens if self.expectation.source == "claims" else None


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
    otherwise: Expectation = NOTHING,
    index_hashes: Sequence[int] = (),
    usual_max_tokens: int | None = None,
    field: str = "messages",
    is_refused_elsewhere: bool = False,
) -> Placement[D]:
    """Asks the policy. Raises NoWorkerReady where none stays, ContextLengthExceeded if the request fits none.

    `expected`: what each worker has of the prompt, by worker id; whoever is absent has `otherwise`. What fits none is
    left to the destination where it `is_refused_elsewhere`: there the count of tokens may be an estimate.
    """
    links = [link for link in links if not loads.is_draining(link)]
    if not links:
        raise NoWorkerReady("no worker is ready to serve this model, try again in a moment")
    if not is_refused_elsewhere:
        check_context(links, prompt_tokens, max_tokens, field=field)
    fitting = {link.worker_id: link for link in links if fits(link, prompt_tokens, max_tokens)}
    fitting = fitting or {link.worker_id: link for link in links}
    snapshots = {
        worker_id: _snapshot(link, expected.get(worker_id, otherwise), loads, geometry, prompt_tokens)
        for worker_id, link in fitting.items()
    }
    rates = prefill_rates(list(snapshots.values()))
    for worker_id in snapshots.keys() & expected.keys():
        unbegun_s = expected[worker_id].unbegun_blocks * geometry.index_block_tokens / rates[worker_id]
        if unbegun_s:
            snapshots[worker_id] = _with_unbegun(snapshots[worker_id], unbegun_s, fitting[worker_id].ledger)
    request = RoutingRequest(
        prompt_tokens=prompt_tokens, index_hashes=index_hashes, block_tokens=geometry.index_block_tokens
    )
    decision = policy.choose(request, list(snapshots.values()))
    return placement_on(
        fitting[decision.worker_id],
        decision,
        expected.get(decision.worker_id, otherwise),
        best_hit_tokens=max(snapshot.hit_tokens for snapshot in snapshots.values()),
        prefill_rate=rates[decision.worker_id],
        prompt_tokens=prompt_tokens,
        max_tokens=max_tokens,
        usual_max_tokens=usual_max_tokens,
    )


def placement_on(
    link: D,
    decision: Decision,
    expectation: Expectation,
    *,
    best_hit_tokens: int,
    prefill_rate: float,
    prompt_tokens: int,
    max_tokens: int | None,
    usual_max_tokens: int | None,
) -> Placement[D]:
    """What a decision for a worker means there."""
    room = link.max_model_len - prompt_tokens
    uncached_tokens = prompt_tokens - decision.hit_tokens
    return Placement(
        link=link,
        incarnation=link.incarnation,
        decision=decision,
        expectation=expectation,
        best_hit_tokens=best_hit_tokens,
        uncached_tokens=uncached_tokens,
        prefill_s=uncached_tokens / prefill_rate,
        max_tokens=max_tokens or min(room, usual_max_tokens or room),
    )


def fits(link: Destination, prompt_tokens: int, max_tokens: int | None) -> bool:
    """Whether the worker has room for the prompt with the answer asked for, of one token at least."""
    return prompt_tokens + (max_tokens or 1) <= link.max_model_len


def _snapshot(
    link: Destination, expected: Expectation, loads: LoadTable, geometry: Geometry, prompt_tokens: int
) -> WorkerSnapshot:
    rest_s, waiting_s = loads.ahead(link)
    rate, worker = loads.prefill_rate(link), loads.worker(link)
    free_tokens: float | None = None
    if worker is not None and worker.free_blocks is not None:
        # What is placed there is not stored yet, and will be before this one is.
        unstored_tokens = (rest_s + sum(waiting_s)) * (rate or DEFAULT_PREFILL_RATE)
        free_tokens = max(worker.free_blocks * link.block_size - unstored_tokens, 0.0)
    return WorkerSnapshot(
        worker_id=link.worker_id,
        hit_tokens=geometry.predicted_hit_tokens(expected.blocks, prompt_tokens),
        hit_source=expected.source,
        rest_s=rest_s,
        waiting_s=waiting_s,
        prefill_rate=rate,
        num_waiting=link.num_waiting,
        num_running=link.num_running,
        free_tokens=free_tokens,
        oldest_age_s=worker.oldest_age_s if worker is not None else 0.0,
        held_tokens=link.num_claims * geometry.index_block_tokens,
        capacity_tokens=link.claimed_capacity_tokens,
        recent_tokens=loads.recent_tokens(link),
    )


def _with_unbegun(snapshot: WorkerSnapshot, unbegun_s: float, ledger: LoadLedger) -> WorkerSnapshot:
    """With a prefill of which nobody can have told yet, and which comes before this request in any case.

    What has been told besides may have come to include it meanwhile: the larger of the two counts.
    """
    own_s = ledger.prefilling_s() + sum(ledger.waiting_s()[: waiting_class(unbegun_s) + 1])
    missing_s = own_s + unbegun_s - snapshot.ahead_s(unbegun_s)
    return replace(snapshot, rest_s=snapshot.rest_s + missing_s) if missing_s > 0.0 else snapshot
