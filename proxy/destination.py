"""Where a prompt can go, own worker or plain engine, as far as placing it needs to know."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from proxy.load_ledger import LoadLedger
from proxy.recent_placements import WorkerProcess


class Destination(Protocol):
    """`WorkerLink` is one, and so is the link to an engine."""

    ledger: LoadLedger
    """What this process has placed there and not seen the end of."""

    @property
    def worker_id(self) -> str:
        """Fit for a header and a metric label."""

    @property
    def namespace(self) -> str:
        """Of the index in which its claims and its load stand."""

    @property
    def incarnation(self) -> int:
        """What its load and the pending claims of requests placed on it stand on."""

    @property
    def claiming(self) -> Sequence[int]:
        """Incarnations whose claims say what it holds."""

    @property
    def process(self) -> WorkerProcess:
        """What holds the cache, under whatever incarnation it is known."""

    @property
    def is_reannouncing(self) -> bool:
        """Whether its claims may not all be in the index, so that this proxy's own placements speak for it too."""

    @property
    def num_waiting(self) -> int:
        """Requests it has not started."""

    @property
    def num_running(self) -> int: ...

    @property
    def max_model_len(self) -> int:
        """Most tokens of prompt and answer together."""

    @property
    def block_size(self) -> int:
        """Tokens of one KV block."""

    @property
    def prefill_rate(self) -> float | None:
        """Uncached tokens a second as this proxy measured them; None while it has not, or leaves that to the worker."""

    @property
    def num_claims(self) -> int:
        """Index blocks that all proxies have claimed for it; 0 where the worker claims for itself."""

    @property
    def claimed_capacity_tokens(self) -> float | None:
        """What its claims are kept to; None where its capacity is not known, or the worker claims for itself."""


class HasLinks(Protocol):
    """A fleet, to whoever asks for its links alone."""

    @property
    def links(self) -> Sequence[Destination]: ...


class Destinations:
    """Those of several fleets."""

    def __init__(self, *fleets: HasLinks) -> None:
        self._fleets = fleets

    @property
    def links(self) -> Sequence[Destination]:
        return [link for fleet in self._fleets for link in fleet.links]


class Geometry(Protocol):
    """What index blocks are worth in tokens. `types.CacheGeometry` is one."""

    @property
    def index_block_tokens(self) -> float: ...

    def predicted_hit_tokens(self, matched_index_blocks: int, prompt_tokens: int) -> int:
        """Tokens that a destination with this match is expected to reuse."""
