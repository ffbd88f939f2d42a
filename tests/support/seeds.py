"""Random sources whose seed is printed; TEST_SEED repeats a run."""

from __future__ import annotations

import os
import random


def seeded(what: str) -> random.Random:
    """A random source for one purpose; pytest shows the printed seed when the test fails."""
    seed = os.environ.get("TEST_SEED") or str(random.SystemRandom().getrandbits(32))
    print(f"TEST_SEED={seed} ({what})")
    return random.Random(f"{seed}/{what}")
