"""`make bench-index` still runs: a smoke of it with small sizes, on the embedded server."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
TABLES = ("Memory", "Whole match", "apply of 256", "claim of 256", "CPU of the client", "Lookups", "Growth", "Sweep")
FLOORS = (
    "bytes a block, agent forks, holders 4",
    "largest key of any shape",
    "match of 128 blocks, all hold it: server",
    "match of 128 blocks, cold: client p99",
    "apply, 256 stored, growing from empty: mean",
    "claim, moved to a new generation, each call: mean",
    "client CPU of a coalesced match",
    "match of 128, 4,000 to",
    "growing apply",
    "longest call of the sweep",
)
TIMEOUT_S = 120


def test_the_index_benchmark_runs_and_writes_all_its_figures(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tests.bench.index", "--quick", "--server", "valkey"]
    ended = subprocess.run(
        command,
        cwd=tmp_path,
        env={"PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin"},
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert ended.stdout.startswith("Valkey "), ended.stdout
    content = json.loads((tmp_path / ".bench" / "index-quick.json").read_text())
    titles = [table["title"] for table in content["tables"]]
    assert len(titles) == len(TABLES) and all(map(str.startswith, titles, TABLES)), titles
    for beginning in FLOORS:
        found = [floor for floor in content["floors"] if floor["what"].startswith(beginning)]
        assert found and all(floor["value"] > 0 for floor in found), (beginning, content["floors"])
