"""A simulated fleet and what happens to it."""

from __future__ import annotations

from dataclasses import dataclass

from prefixcache.limits import LOAD_REPORT_S
from prefixcache.simulation.costs import Costs


@dataclass(frozen=True, slots=True, kw_only=True)
class Kill:
    """A worker dies; what it had in hand goes to others, and it does not come back."""

    worker: int
    """Counted from 1."""
    at_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """Everything but the trace, the policy and the seed."""

    num_workers: int
    capacity_blocks: int
    """Of each worker's cache, in blocks of the trace."""
    costs: Costs
    num_proxies: int = 1
    """They take requests in turn."""
    load_lag_s: float = LOAD_REPORT_S
    """How often workers and proxies tell their load; a proxy knows its own at once."""
    event_lag_s: float = 0.0
    """From a change of a cache to when the index shows it."""
    rate_error: float = 0.0
    """Sigma of the lognormal error of what each worker takes its prefill rate for."""
    kills: tuple[Kill, ...] = ()
    knows_rates: bool = False
    """Workers know their prefill rate from the beginning, and do not learn it."""
