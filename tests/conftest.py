"""For every test: OpenMP threads that wait asleep, how many examples hypothesis tries, and what is left out.

Spinning OpenMP threads slow each other down many times on few cores. HYPOTHESIS_PROFILE=thorough tries twenty times as
many examples as an ordinary run.
"""

from __future__ import annotations

import os

from hypothesis import settings

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

settings.register_profile("quick", max_examples=25, deadline=None, print_blob=True)
settings.register_profile("thorough", max_examples=500, deadline=None, print_blob=True)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "quick"))

collect_ignore = ["compose"]
"""Needs a Docker engine and minutes; `make test-compose` names it."""
