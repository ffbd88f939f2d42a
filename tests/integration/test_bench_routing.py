"""`make bench-routing` still runs: a smoke of it with small sizes, on our proxy alone."""

from __future__ import annotations

from pathlib import Path

from prefixcache.routing.policies import POLICIES
from tests.support.quick_bench import quick_bench

TARGETS = ["ours", "ours, no tokenizer", "ours, two proxies", "ours, round robin"]
FLOORS = (
    "tokenizing a new turn over a whole encode",
    "microseconds of a decision among 16",
    "microseconds of a decision among 256",
    "coding_part, 2 workers, 25%: mean over the bound's",
    "ours, 1500 blocks: share of the bound lost",
    "ours, no tokenizer, 60 blocks: share of one pooled LRU's hit rate lost",
    "ours, two proxies, 60 blocks: imbalance, median",
    "live: hit rate, points off the prediction",
    "live: ttft_p90 off the prediction by",
)
TIMEOUT_S = 120


def test_the_routing_benchmark_runs_and_writes_all_its_figures(tmp_path: Path) -> None:
    printed, content = quick_bench("routing", folder=tmp_path, timeout_s=TIMEOUT_S)
    assert "left out: sglang-router: --quick" in printed
    tokenizing, deciding, ample, tight, decisions, simulated, live, run, cores = content["tables"]
    assert tokenizing["rows"][0]["tokens"] > 0
    assert {row["policy"] for row in deciding["rows"]} == set(POLICIES)
    for table in (ample, tight):
        assert [row["target"] for row in table["rows"]] == TARGETS
        assert all(row["hit rate, median"] > 0 and row["errors"] == 0 for row in table["rows"]), table
    assert {row["target"] for row in decisions["rows"]} == set(TARGETS)
    # Little is evicted at no load: whoever follows prefixes finds them.
    rates = {row["target"]: row["hit rate, median"] for row in ample["rows"]}
    assert rates["ours"] > rates["ours, round robin"]
    bounded = {(row["trace"], row["policy"]): row["of the bound"] for row in simulated["rows"]}
    assert {policy for _, policy in bounded} == {"eta", "pooled", "pooled_slices"}
    assert all(bounded[trace, "pooled"] == 1.0 for trace, _ in bounded)
    measured = {row[""]: row for row in live["rows"]}
    assert run["rows"][0]["errors"] == 0
    # Times are noise here; what is found in caches is not.
    predicted = measured["predicted, mean of the seeds"]["hit_rate"]
    assert predicted > 0 and abs(measured["measured"]["hit_rate"] - predicted) < 0.05
    assert cores["rows"][0]["all"] > 0
    names = [floor["what"] for floor in content["floors"]]
    assert all(name in names for name in FLOORS), names


def test_routers_alone_in_front_of_quick_engines(tmp_path: Path) -> None:
    _, content = quick_bench(
        "routing", "--quick-engines", "--only", "two proxies", folder=tmp_path, timeout_s=TIMEOUT_S
    )
    ample, tight, _decisions = content["tables"]
    assert [row["target"] for table in (ample, tight) for row in table["rows"]] == ["ours, two proxies"] * 2
    assert all(row["hit rate, median"] > 0 and row["errors"] == 0 for table in (ample, tight) for row in table["rows"])
    names = [floor["what"] for floor in content["floors"]]
    assert "ours, two proxies, 60 blocks: share of one pooled LRU's hit rate lost" in names
