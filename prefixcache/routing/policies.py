"""Every routing policy by its name."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping

from prefixcache.routing.base import Policy
from prefixcache.routing.longest_prefix import LongestPrefix

POLICIES: Mapping[str, Callable[[random.Random], Policy]] = {
    LongestPrefix.name: LongestPrefix,
}

DEFAULT_POLICY = LongestPrefix.name
