"""Every routing policy by its name."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping

from prefixcache.routing.base import Policy
from prefixcache.routing.eta import Eta
from prefixcache.routing.longest_prefix import LongestPrefix
from prefixcache.routing.round_robin import RoundRobin

POLICIES: Mapping[str, Callable[[random.Random], Policy]] = {
    Eta.name: Eta,
    LongestPrefix.name: LongestPrefix,
    RoundRobin.name: RoundRobin,
}

DEFAULT_POLICY = Eta.name
