"""What a simulated worker computes with: it is told of prefills and says when the next thing of interest happens.

prefill ──► next_at ──► advance: the piece has ended ──┬─► the worker chooses what goes next
                                                       └─► decode ──► next_at ──► advance: this answer has ended
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from prefixcache.simulation.job import Job

NEVER = float("inf")


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """What has ended by a moment: in this order."""

    decoded: Sequence[Job] = ()
    prefilled: Job | None = None
    """Whose piece has ended."""
    prefill_s: float = 0.0
    """How long that piece took."""


class Engine(Protocol):
    """One prefill piece at a time, any number of decodes. Times are those of the simulation."""

    keeps_decodes: bool
    """Whether a decode holds its blocks, and the tokens it generates take room."""
    next_at: float
    """When to `advance`; NEVER while there is nothing to do."""
    prefill_ends_at: float
    """As far as is known now; NEVER without a prefill."""
    busy_s: float
    """Time spent on prefills that have ended."""

    def prefill(self, job: Job, tokens: int, now: float) -> None:
        """Begins a piece of so many uncached tokens; none is running."""

    def decode(self, job: Job, now: float) -> None:
        """Its prefill has just ended: generates the rest of its tokens."""

    def advance(self, now: float) -> Progress:
        """Called at `next_at`."""

    def generated_tokens(self, job: Job, now: float) -> int:
        """Of a job that decodes here."""

    def decoding(self) -> Sequence[Job]: ...
