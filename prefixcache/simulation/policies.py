"""What the simulator can be told to run: the policies of the proxy, published ones, and the bounds."""

from __future__ import annotations

import random
from dataclasses import replace

from prefixcache.errors import ConfigError
from prefixcache.routing.base import Policy
from prefixcache.routing.eta import Eta
from prefixcache.routing.policies import POLICIES, PUBLISHED_POLICIES
from prefixcache.routing.published.least_ttft import LeastTtft
from prefixcache.simulation.fleet import Fleet
from prefixcache.simulation.mechanisms import ALL, NONE, Mechanisms
from prefixcache.simulation.scenario import Scenario
from prefixcache.simulation.trace import Trace

POOLED = "pooled"
"""One cache as large as all, to the worker that is free first; first in, first out."""
POOLED_SLICES = "pooled_slices"
"""The best that is known: one cache, and all that this project does besides."""
_POOLED_POLICY = {POOLED: LeastTtft, POOLED_SLICES: Eta}
_ROUTED = {**POLICIES, **PUBLISHED_POLICIES}
NAMES = (*_ROUTED, *_POOLED_POLICY)


def usual_mechanisms(name: str) -> Mechanisms:
    """`eta` has all that this project does; every other one is the baseline that it is compared with."""
    return ALL if name in (Eta.name, POOLED_SLICES) else NONE


def new_fleet(name: str, trace: Trace, scenario: Scenario, mechanisms: Mechanisms | None, *, seed: int) -> Fleet:
    """`mechanisms` None are the usual ones of that name; a bound always has its own.

    Raises ConfigError for an unknown name.
    """
    chance = random.Random(f"policy {seed}")
    if name in _POOLED_POLICY:
        # A pool knows all that there is to know.
        scenario = replace(scenario, num_proxies=1, event_lag_s=0.0, load_lag_s=0.0, rate_error=0.0, knows_rates=True)
        policies: list[Policy] = [_POOLED_POLICY[name](chance)]
        return Fleet(trace, scenario, usual_mechanisms(name), policies, seed=seed, is_pooled=True)
    if name not in _ROUTED:
        raise ConfigError(f"no policy is called {name!r}; there are {', '.join(NAMES)}")
    policies = [_ROUTED[name](chance) for _ in range(scenario.num_proxies)]
    return Fleet(trace, scenario, mechanisms or usual_mechanisms(name), policies, seed=seed)
