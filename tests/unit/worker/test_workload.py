"""The rest of what is in hand, counted down from the moment at which it was noted."""

from __future__ import annotations

import pytest

from prefixcache.limits import DEFAULT_PREFILL_RATE
from prefixcache.load import NO_WAITING, WorkerLoad
from worker.workload import Workload


def workload(
    *,
    prefill_tokens: int = 0,
    chunk_tokens: int = 0,
    prefill_rate: float = 1_000,
    began_at: float | None = 100.0,
    sliced_tokens: tuple[int, ...] = (),
    waiting_tokens: int = 0,
    evicted_next_used_at: float | None = None,
) -> Workload:
    return Workload(
        prefill_rate=prefill_rate,
        inter_token_latency_s=0.02,
        prefill_tokens=prefill_tokens,
        chunk_tokens=chunk_tokens,
        step_began_at=began_at,
        sliced_tokens=sliced_tokens,
        waiting_tokens=waiting_tokens,
        available_blocks=7,
        free_blocks=3,
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


def test_what_comes_after_the_running_slice_is_no_part_of_its_rest() -> None:
    """What is left of each sliced prefill counts for the class of its own length."""
    left = (20_000, 8_000, 5_000, 1_500, 0)
    record = workload(prefill_tokens=500, chunk_tokens=500, sliced_tokens=left, waiting_tokens=1_500).record(100.25)
    assert (record.rest_s, record.sliced_s) == (0.25, (0.0, 0.0, 1.5, 13.0, 20.0))
    unmeasured = workload(prefill_tokens=500, sliced_tokens=left, prefill_rate=0).record(100.0)
    assert (unmeasured.rest_s, unmeasured.sliced_s) == (0.0, NO_WAITING)


def test_all_that_is_ahead() -> None:
    assert workload(prefill_tokens=500, sliced_tokens=(7_000, 1_000), waiting_tokens=1_500).ahead_s(
        100.0
    ) == pytest.approx(10.0)
    assert workload(waiting_tokens=3_000, prefill_rate=0).ahead_s(100.0) == 0.02 + 3_000 / DEFAULT_PREFILL_RATE


def test_the_record() -> None:
    assert workload(prefill_tokens=500, chunk_tokens=500, evicted_next_used_at=40.0).record(100.25) == WorkerLoad(
        rest_s=0.25,
        prefill_rate=1_000,
        inter_token_latency_s=0.02,
        available_blocks=7,
        free_blocks=3,
        oldest_age_s=60.25,
    )
    assert workload().record(100.0).oldest_age_s == 0
