"""What runs on real engines are held against."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.bench.report import Floor
from tests.bench.routing.load import Tally
from tests.bench.routing.real_engines import Counted, RealRun, read_counters, real_floors, real_table
from tests.bench.routing.targets import OURS, Target
from tests.support.engine_answers import VLLM_METRICS

PEER = Target(name="peer", binary=Path("/router"))
BASELINE = next(target for target in OURS if not target.routes_by_prefix)


def _run(target: Target, hit_tokens: float, ttft_s: list[float], *, num_errors: int = 0) -> RealRun:
    return RealRun(
        target=target,
        chats=[],
        tally=Tally(num_errors=num_errors, ttft_s=ttft_s, prompt_tokens=100, cached_tokens=50),
        counted=Counted(queried_tokens=100, hit_tokens=hit_tokens),
    )


def _by_name(found: list[Floor]) -> dict[str, Floor]:
    return {floor.what.removeprefix("ours, real engines: "): floor for floor in found}


def test_only_the_counters_of_the_prefix_cache_are_read() -> None:
    assert read_counters(VLLM_METRICS.decode()) == Counted(queried_tokens=1_341_177, hit_tokens=1_020_544)
    two = 'vllm:prefix_cache_hits_total{engine="0"} 3\nvllm:prefix_cache_hits_total{engine="1"} 4.0\n'
    assert read_counters(two) == Counted(hit_tokens=7)
    assert read_counters("") == Counted()


def test_each_seed_is_held_against_its_own_best_peer() -> None:
    seeds = [
        [_run(OURS[0], 80, [0.1]), _run(PEER, 80, [0.1]), _run(PEER, 70, [0.3])],
        [_run(OURS[0], 80, [0.9]), _run(PEER, 70, [1.0]), _run(PEER, 79, [2.0])],
        [_run(OURS[0], 60, [9.0]), _run(PEER, 90, [1.0]), _run(PEER, 50, [2.0])],
    ]
    found = _by_name(real_floors(seeds))
    assert found["hit rate below the best peer's"].value == pytest.approx(0.0)
    assert found["TTFT p50 over the best peer's"].value == pytest.approx(1.0)
    assert all(floor.held for floor in found.values())


@pytest.mark.parametrize(
    ("ours", "missed"),
    [
        (_run(OURS[0], 79, [0.1]), "hit rate below the best peer's"),
        (_run(OURS[0], 80, [0.2]), "TTFT p50 over the best peer's"),
        (_run(OURS[0], 80, []), "TTFT p50 over the best peer's"),
        (_run(OURS[0], 80, [0.1], num_errors=1), "failed requests"),
    ],
)
def test_each_floor_can_be_missed(ours: RealRun, missed: str) -> None:
    found = _by_name(real_floors([[ours, _run(PEER, 80, [0.1])]]))
    assert [name for name, floor in found.items() if not floor.held] == [missed]


def test_a_baseline_has_no_floors_and_without_peers_only_failures_count() -> None:
    found = real_floors([[_run(OURS[0], 10, [0.1]), _run(BASELINE, 90, [0.01])]])
    assert [floor.what for floor in found] == ["ours, real engines: failed requests"]


def test_a_row_has_the_medians_of_the_seeds() -> None:
    seeds = [[_run(PEER, hits, [0.1, ttft_s])] for hits, ttft_s in ((50, 0.2), (70, 0.4), (90, 0.9))]
    [row] = real_table(seeds).rows
    assert row["hit rate, median"] == pytest.approx(0.7)
    assert row["least / most"] == (0.5, 0.9)
    assert row["by its clients"] == pytest.approx(0.5)
    assert row["TTFT ms p50 / p95"] == (pytest.approx(400), pytest.approx(400))
    assert row["TTFT ms mean"] == pytest.approx(250)
