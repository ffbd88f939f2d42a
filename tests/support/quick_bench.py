"""A benchmark's own quick form, run as a user runs it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]


def quick_bench(name: str, *flags: str, folder: Path, timeout_s: float) -> tuple[str, dict[str, Any]]:
    """What `python -m tests.bench.NAME --quick` printed in `folder`, and the figures it wrote there."""
    ended = subprocess.run(
        [sys.executable, "-m", f"tests.bench.{name}", "--quick", *flags],
        cwd=folder,
        env={"PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin", "HOME": str(folder)},
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    content: dict[str, Any] = json.loads((folder / ".bench" / f"{name}-quick.json").read_text())
    return ended.stdout, content
