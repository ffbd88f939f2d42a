"""The rest of what is in hand, counted down from the moment at which it was noted."""

from __future__ import annotations

import pytest

from prefixcache.load import WorkerLoad
from worker.workload import Workload


def workload(
    *,
    prefill_tokens: int = 0,
    chunk_tokens: int = 0,
    prefill_rate: float = 1_000,
    began_at: float | None = 100.0,
    evicted_next_used_at: float | None = None,
) -> Workload:
    return Workload(
        prefill_rate=prefill_rate,
        inter_token_latency_s=0.02,
        prefill_tokens=prefill_tokens,
        chunk_tokens=chunk_tokens,
        step_began_at=began_at,
        available_blocks=7,
        evicted_next_used_at=evicted_next_used_at,
    )


@pytest.mark.parametrize(
    ("now", "rest_s"),
    [(100.0, 3.0), (100.25, 2.75), (100.5, 2.5), (110.0, 2.5)],
)
def test_prefills_are_counted_down_by_the_chunk_in_work_at_most(now: float, rest_s: float) -> None:
    assert workload(prefill_tokens=3_000, chunk_tokens=500).rest_s(now) == pytest.approx(rest_s)


def test_a_prefill_that_sits_the_step_out_is_not_counted_down() -> None:
    assert workload(prefill_tokens=3_000).rest_s(100.5) == pytest.approx(3.0)


@pytest.mark.parametrize(("now", "rest_s"), [(100.0, 0.02), (100.015, 0.005), (101.0, 0.0)])
def test_a_step_of_decodes_leaves_at_most_one_inter_token_latency(now: float, rest_s: float) -> None:
    assert workload().rest_s(now) == pytest.approx(rest_s)


def test_between_steps_only_prefills_count() -> None:
    assert workload(began_at=None).rest_s(100.0) == 0
    assert workload(began_at=None, prefill_tokens=500).rest_s(100.0) == pytest.approx(0.5)


def test_without_a_rate_nothing_is_said_of_prefills() -> None:
    assert workload(prefill_tokens=500, chunk_tokens=500, prefill_rate=0).rest_s(100.0) == 0


def test_the_record() -> None:
    assert workload(prefill_tokens=500, chunk_tokens=500, evicted_next_used_at=40.0).record(100.25) == WorkerLoad(
        rest_s=0.25, prefill_rate=1_000, inter_token_latency_s=0.02, available_blocks=7, oldest_age_s=60.25
    )
    assert workload().record(100.0).oldest_age_s == 0
