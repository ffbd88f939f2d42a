"""Judging simulated fleets: against the bound, and against an earlier simulator."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from prefixcache.simulation.outcome import Outcome
from tests.bench.report import Floor
from tests.bench.routing.published import PUBLISHED, agreement, thrashes
from tests.bench.routing.traces import TRACES, given_traces, measure_traces

CODING = "coding_21"


def _outcome(hit_points: float, p50_s: float, p99_s: float, mean_s: float) -> Outcome:
    return Outcome(
        hit_rate=hit_points / 100,
        ttft_mean_s=mean_s,
        ttft_p50_s=p50_s,
        ttft_p90_s=p50_s,
        ttft_p99_s=p99_s,
        ttft_max_s=p99_s,
        imbalance=1.0,
        utilisation=0.5,
        steals=0.0,
        slices=0.0,
    )


def _as_published() -> dict[tuple[str, str], list[Outcome]]:
    return {
        (trace, policy): [_outcome(figures[0], figures[1], figures[2], figures[3] or 1.0)]
        for trace, policies in PUBLISHED.items()
        for policy, figures in policies.items()
    }


def _missed(found: dict[tuple[str, str], list[Outcome]]) -> dict[str, float]:
    return {floor.what: floor.value for floor in agreement(found)[1] if not floor.held}


def test_equal_figures_agree() -> None:
    assert _missed(_as_published()) == {}
    table, floors = agreement(_as_published())
    assert len(table.rows) == sum(map(len, PUBLISHED.values())) == 32
    num_thrashing = sum(thrashes(trace, policy) for trace, policies in PUBLISHED.items() for policy in policies)
    assert 10 < num_thrashing < 20
    assert len(floors) == 2 * 32 - num_thrashing + len(PUBLISHED)


def test_means_over_the_seeds_are_judged() -> None:
    found = _as_published()
    [was] = found[CODING, "pooled"]
    found[CODING, "pooled"] = [replace(was, hit_rate=0.753), replace(was, hit_rate=0.753)]
    assert _missed(found) == {f"{CODING}, pooled: hit rate, points off": pytest.approx(2.0)}
    found[CODING, "pooled"] = [replace(was, hit_rate=0.753), replace(was, hit_rate=0.80)]
    assert _missed(found) == {}
    found[CODING, "pooled"] = [replace(was, ttft_p99_s=101.0 * 1.25)]
    assert _missed(found) == {f"{CODING}, pooled: times, off by": pytest.approx(0.25)}
    found[CODING, "pooled"] = [replace(was, ttft_mean_s=9.3 * 0.75)]
    assert _missed(found) == {f"{CODING}, pooled: times, off by": pytest.approx(0.25)}


def test_where_it_thrashes_times_are_not_judged() -> None:
    found = _as_published()
    [was] = found[CODING, "round_robin"]
    found[CODING, "round_robin"] = [replace(was, ttft_p99_s=900.0)]
    assert _missed(found) == {}
    found[CODING, "round_robin"] = [replace(was, hit_rate=was.hit_rate + 0.02)]
    assert set(_missed(found)) == {f"{CODING}, round_robin: hit rate, points off"}


def test_the_order_is_kept() -> None:
    found = _as_published()
    chats = "mooncake_conversation_a"
    [was] = found[chats, "round_robin"]
    found[chats, "round_robin"] = [replace(was, ttft_p50_s=1.0)]
    missed = _missed(found)
    assert missed[f"{chats}: pairs of policies in another order"] == 7


def test_a_trace_that_is_not_there_is_left_out_by_name(tmp_path: Path) -> None:
    traces, left_out = given_traces(tmp_path)
    assert traces == []
    assert [line.split(":")[1].strip() for line in left_out] == list(TRACES)


def test_a_smoke_of_the_grid() -> None:
    [table], floors = measure_traces(quick=True)
    assert len(table.rows) == 6
    assert all(isinstance(floor, Floor) for floor in floors) and len(floors) == 4
