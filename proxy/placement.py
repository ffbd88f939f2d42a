"""Which worker gets a request: what the policy is told, and its answer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from prefixcache.errors import ContextLengthExceeded, Unavailable
from prefixcache.routing.base import Decision, Policy, RoutingRequest, WorkerSnapshot
from prefixcache.types import CacheGeometry
from proxy.worker_link import WorkerLink


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """A chosen worker."""

    link: WorkerLink
    decision: Decision
    max_tokens: int


def check_context(
    links: Sequence[WorkerLink], prompt_tokens: int, max_tokens: int | None, *, field: str = "messages"
) -> None:
    """Raises ContextLengthExceeded unless the prompt, with the answer asked for, fits one of the workers at least.

    `field` is where the prompt stood in the request.
    """
    limit = max((link.record.max_model_len for link in links), default=None)
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


def place(
    policy: Policy,
    links: Sequence[WorkerLink],
    depths: Mapping[int, int],
    *,
    geometry: CacheGeometry,
    prompt_tokens: int,
    max_tokens: int | None,
    usual_max_tokens: int | None = None,
    field: str = "messages",
    also_waiting: Mapping[str, int] = MappingProxyType({}),
) -> Placement:
    """Raises Unavailable without a ready worker, ContextLengthExceeded if the request fits none of them.

    `also_waiting`: what the same request has given each worker already and is not sent yet.
    """
    if not links:
        raise Unavailable("no worker is ready to serve this model, try again in a moment")
    check_context(links, prompt_tokens, max_tokens, field=field)
    fitting = {link.worker_id: link for link in links if prompt_tokens + (max_tokens or 1) <= link.record.max_model_len}
    snapshots = [
        WorkerSnapshot(
            worker_id=link.worker_id,
            hit_tokens=geometry.predicted_hit_tokens(depths.get(link.incarnation, 0), prompt_tokens),
            num_waiting=link.num_waiting + also_waiting.get(link.worker_id, 0),
            num_running=link.num_running,
        )
        for link in fitting.values()
    ]
    decision = policy.choose(RoutingRequest(prompt_tokens=prompt_tokens), snapshots)
    link = fitting[decision.worker_id]
    room = link.record.max_model_len - prompt_tokens
    return Placement(link=link, decision=decision, max_tokens=max_tokens or min(room, usual_max_tokens or room))
