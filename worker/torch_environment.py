"""What torch and its libraries read from the environment as they are loaded."""

from __future__ import annotations

import os

_SETTINGS = {
    # Threads that spin make a step 40 times slower beside a busy neighbour.
    "OMP_WAIT_POLICY": "PASSIVE",
    # oneDNN keeps 1,024 compiled kernels unless told otherwise, 0.6 MB each, and compiles again what it dropped, 0.7 ms
    # each. A layer takes 2 for every length of its decodes (worker/attention/tiles.py), and up to 18 others.
    "ONEDNN_PRIMITIVE_CACHE_CAPACITY": "72",
    # Torch holds those of linear layers once more, 1,024 of them; what it has not, oneDNN's own cache has.
    "LRU_CACHE_CAPACITY": "8",
}


def settle() -> None:
    """Sets what the environment does not say itself; takes effect only before torch is imported."""
    for name, value in _SETTINGS.items():
        os.environ.setdefault(name, value)
