"""What the figures of a run are held against."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from tests.bench.report import Floor
from tests.bench.routing.bench import Outcome, Routed, floors, tables
from tests.bench.routing.load import Tally
from tests.bench.routing.sizes import FULL
from tests.bench.routing.targets import OURS, Target, installed

PEER = Target(name="peer", binary=Path("/router"))


def _routed(
    target: Target, capacity_blocks: int, hit_rates: Sequence[float], *, imbalance: float = 1.1, num_errors: int = 0
) -> Routed:
    outcomes = [
        Outcome(
            hit_rate=rate,
            bound=0.9,
            pooled=0.8,
            partitioned=0.76,
            imbalance=imbalance,
            tally=Tally(num_errors=num_errors, prompt_tokens=10, ttft_s=[0.01, 0.02]),
        )
        for rate in hit_rates
    ]
    return Routed(target=target, capacity_blocks=capacity_blocks, outcomes=outcomes)


def _by_name(found: Sequence[Floor]) -> dict[str, Floor]:
    return {floor.what.removeprefix("ours, "): floor for floor in found}


def test_the_median_of_the_seeds_is_judged() -> None:
    ample = _routed(OURS[0], FULL.ample_blocks, [0.5, 0.899, 0.9])
    tight = _routed(OURS[0], FULL.tight_blocks, [0.5, 0.83, 0.83])
    found = _by_name(floors([ample, tight], FULL))
    assert all(floor.held for floor in found.values()), found
    assert found["1500 blocks: share of the bound lost"].value == pytest.approx(1 - 0.899 / 0.9)
    assert found["500 blocks: share of one pooled LRU's hit rate lost"].verdict == "held, very good"


@pytest.mark.parametrize(
    ("capacity", "rate", "imbalance", "num_errors", "missed"),
    [
        (1500, 0.88, 1.1, 0, "1500 blocks: share of the bound lost"),
        (1500, 0.90, 1.1, 1, "1500 blocks: failed requests"),
        (500, 0.79, 1.1, 0, "500 blocks: share of one pooled LRU's hit rate lost"),
        (500, 0.85, 1.3, 0, "500 blocks: imbalance, median"),
    ],
)
def test_each_floor_can_be_missed(capacity: int, rate: float, imbalance: float, num_errors: int, missed: str) -> None:
    routed = _routed(OURS[0], capacity, [rate], imbalance=imbalance, num_errors=num_errors)
    assert [name for name, floor in _by_name(floors([routed], FULL)).items() if not floor.held] == [missed]


def test_the_best_peer_at_the_tight_capacity_is_a_floor() -> None:
    peers = [_routed(PEER, 500, [0.84]), _routed(replace(PEER, name="worse"), 500, [0.5]), _routed(PEER, 1500, [0.9])]
    for rate, is_held in ((0.85, True), (0.83, False)):
        found = _by_name(floors([_routed(OURS[0], 500, [rate]), *peers], FULL))
        assert found["500 blocks: hit rate below the best peer's"].held is is_held


def test_a_baseline_has_no_floors_and_a_peer_no_decisions() -> None:
    [baseline] = [target for target in OURS if not target.routes_by_prefix]
    routed = [_routed(baseline, 500, [0.1]), _routed(PEER, 500, [0.2])]
    assert floors(routed, FULL) == []
    *capacities, decisions = tables(routed, FULL)
    assert [len(table.rows) for table in capacities] == [0, 2]
    assert [row["target"] for row in decisions.rows] == [baseline.name]
    assert capacities[1].rows[0]["fixed chats, of one pooled LRU"] == pytest.approx(0.95)


def test_what_is_not_installed_is_named(tmp_path: Path) -> None:
    there = tmp_path / "router"
    there.touch()
    here, away = Target(name="here", binary=there), Target(name="away", binary=tmp_path / "none")
    assert installed([OURS[0], here, away]) == ([OURS[0], here], [f"left out: away: no {tmp_path / 'none'}"])
