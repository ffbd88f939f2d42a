"""When a worker that failed gets the next request."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from prefixcache.limits import WORKER_FAULTS, WORKER_TRIAL_FIRST_S, WORKER_TRIAL_MOST_S
from proxy.fault_breaker import FaultBreaker
from tests.support.manual_clock import ManualClock


def _opened() -> tuple[FaultBreaker, ManualClock]:
    clock = ManualClock(100.0)
    breaker = FaultBreaker(clock=clock)
    for _ in range(WORKER_FAULTS):
        assert not breaker.is_open
        breaker.failed()
    assert breaker.is_open
    return breaker, clock


def test_faults_in_a_row_open_it_and_an_answer_between_breaks_the_row() -> None:
    _opened()
    breaker = FaultBreaker(clock=ManualClock())
    for _ in range(10):
        breaker.failed()
        breaker.failed()
        breaker.answered()
    assert not breaker.is_open


def test_a_trial_is_due_after_a_pause_that_doubles_with_each_that_fails() -> None:
    breaker, clock = _opened()
    pause_s = WORKER_TRIAL_FIRST_S
    for _ in range(10):
        clock.now += pause_s - 0.01
        assert not breaker.is_trial_due
        clock.now += 0.01
        assert breaker.is_open and breaker.is_trial_due
        breaker.failed()
        assert not breaker.is_trial_due
        pause_s = min(2 * pause_s, WORKER_TRIAL_MOST_S)


def test_what_was_under_way_as_it_opened_tells_nothing_new() -> None:
    breaker, clock = _opened()
    breaker.failed()
    breaker.hung()
    breaker.gave_token()
    assert breaker.is_open
    clock.now += WORKER_TRIAL_FIRST_S
    assert breaker.is_trial_due, "the pause has not grown"


def test_a_token_closes_it_and_one_more_fault_opens_it_for_longer() -> None:
    breaker, clock = _opened()
    clock.now += WORKER_TRIAL_FIRST_S
    breaker.gave_token()
    assert not breaker.is_open
    breaker.failed()
    clock.now += 2 * WORKER_TRIAL_FIRST_S - 0.01
    assert breaker.is_open and not breaker.is_trial_due
    clock.now += 0.01
    breaker.gave_token()
    breaker.answered()
    for _ in range(WORKER_FAULTS):
        assert not breaker.is_open, "an answer begins anew"
        breaker.failed()
    clock.now += WORKER_TRIAL_FIRST_S
    assert breaker.is_trial_due


def test_a_hang_opens_it_at_once() -> None:
    breaker = FaultBreaker(clock=ManualClock())
    breaker.hung()
    assert breaker.is_open


@given(st.lists(st.sampled_from(["failed", "hung", "gave_token", "answered"]) | st.floats(0, 60)))
def test_it_is_open_only_after_faults_and_a_trial_is_never_far(events: list[str | float]) -> None:
    clock = ManualClock()
    breaker = FaultBreaker(clock=clock)
    num_faults = 0
    for event in events:
        if isinstance(event, float):
            clock.now += event
            continue
        getattr(breaker, event)()
        num_faults = 0 if event == "answered" else num_faults + (event in ("failed", "hung"))
        if event == "answered":
            assert not breaker.is_open
        if breaker.is_open:
            assert num_faults > 0
    if breaker.is_open:
        clock.now += WORKER_TRIAL_MOST_S
        assert breaker.is_trial_due
