"""`make bench-index` still runs: a smoke of it with small sizes, on the embedded server."""

from __future__ import annotations

from pathlib import Path

from tests.support.quick_bench import quick_bench

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
    printed, content = quick_bench("index", "--server", "valkey", folder=tmp_path, timeout_s=TIMEOUT_S)
    assert printed.startswith("Valkey "), printed
    titles = [table["title"] for table in content["tables"]]
    assert len(titles) == len(TABLES) and all(map(str.startswith, titles, TABLES)), titles
    for beginning in FLOORS:
        found = [floor for floor in content["floors"] if floor["what"].startswith(beginning)]
        assert found and all(floor["value"] > 0 for floor in found), (beginning, content["floors"])
