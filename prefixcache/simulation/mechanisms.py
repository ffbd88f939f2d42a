"""What a fleet does besides choosing a worker."""

from __future__ import annotations

from dataclasses import dataclass

from prefixcache.routing.order import Order


@dataclass(frozen=True, slots=True, kw_only=True)
class Mechanisms:
    """ARCHITECTURE.md says what each is."""

    pending: bool
    """Whether what is about to be stored counts as held."""
    order: Order | None
    """In which workers start what waits; None is the order of arrival."""
    slices: bool
    """Whether a long prefill makes room for short ones."""
    steal: bool
    """Whether an idle worker is given what waits for another one."""


ALL = Mechanisms(pending=True, order="mean", slices=True, steal=True)
"""What proxy and workers do."""
NONE = Mechanisms(pending=False, order=None, slices=False, steal=False)
"""What the published policies were measured with: exact knowledge of what is stored, and queues by arrival."""
