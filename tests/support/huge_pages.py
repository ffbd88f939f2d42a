"""Whether this machine has what `worker/huge_pages.py` asks for."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

_ENABLED = Path("/sys/kernel/mm/transparent_hugepage/enabled")


def _takes_advice() -> bool:
    """Whether this kernel has huge pages and MADV_COLLAPSE, which came with Linux 6.1."""
    release = [int(number) for number in re.findall(r"\d+", os.uname().release)[:2]]
    return _ENABLED.exists() and "[never]" not in _ENABLED.read_text() and release >= [6, 1]


needs_huge_pages = pytest.mark.skipif(not _takes_advice(), reason=f"no huge pages: {_ENABLED}, or Linux before 6.1")
