"""For every test: OpenMP threads wait asleep; spinning ones slow each other down many times on few cores."""

from __future__ import annotations

import os

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
