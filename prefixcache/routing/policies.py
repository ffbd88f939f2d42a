"""Every routing policy by its name."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping

from prefixcache.routing.base import Policy
from prefixcache.routing.consistent_hash import ConsistentHash
from prefixcache.routing.eta import Eta
from prefixcache.routing.least_loaded import LeastLoaded
from prefixcache.routing.longest_prefix import LongestPrefix
from prefixcache.routing.published.dynamo_cost import DynamoCost
from prefixcache.routing.published.least_ttft import LeastTtft
from prefixcache.routing.published.llmd_sticky import LlmdSticky
from prefixcache.routing.published.sglang_tree import SglangTree
from prefixcache.routing.round_robin import RoundRobin

POLICIES: Mapping[str, Callable[[random.Random], Policy]] = {
    Eta.name: Eta,
    LongestPrefix.name: LongestPrefix,
    LeastLoaded.name: LeastLoaded,
    RoundRobin.name: RoundRobin,
    ConsistentHash.name: ConsistentHash,
}
"""What a proxy may be told to go by."""

PUBLISHED_POLICIES: Mapping[str, Callable[[random.Random], Policy]] = {
    SglangTree.name: SglangTree,
    DynamoCost.name: DynamoCost,
    LlmdSticky.name: LlmdSticky,
    LeastTtft.name: LeastTtft,
}
"""What the simulator compares them with. They were published without pending claims, and are told of none."""

DEFAULT_POLICY = Eta.name
