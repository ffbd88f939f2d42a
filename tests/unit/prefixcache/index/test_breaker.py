"""Every edge of the breaker's picture, and that no order of events leads off it."""

from __future__ import annotations

import pytest

from prefixcache.index.breaker import Breaker
from prefixcache.limits import BREAKER_PAUSE_S, BREAKER_STALLS
from tests.support.manual_clock import ManualClock
from tests.support.seeds import seeded


def state_of(breaker: Breaker) -> str:
    return breaker.state


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock(100.0)


@pytest.fixture
def breaker(clock: ManualClock) -> Breaker:
    return Breaker(clock=clock)


@pytest.fixture
def opened(breaker: Breaker) -> Breaker:
    """Open with all that it was owed paid, its pause not over."""
    for _ in range(BREAKER_STALLS):
        breaker.expired()
        breaker.paid()
    assert state_of(breaker) == "open"
    return breaker


@pytest.fixture
def tried(opened: Breaker, clock: ManualClock) -> Breaker:
    clock.now += BREAKER_PAUSE_S
    opened.begin_trial()
    return opened


def test_one_overdue_reply_stops_calls_until_it_comes(breaker: Breaker) -> None:
    assert state_of(breaker) == "closed"
    breaker.expired()
    assert (state_of(breaker), breaker.num_owed, breaker.trial_at) == ("owing", 1, None)
    breaker.paid()
    assert (state_of(breaker), breaker.num_owed) == ("closed", 0)


def test_all_that_expire_together_are_one_stall(breaker: Breaker) -> None:
    for _ in range(3 * BREAKER_STALLS):
        breaker.expired()
    for owed in reversed(range(3 * BREAKER_STALLS)):
        assert state_of(breaker) == "owing"
        breaker.paid()
        assert breaker.num_owed == owed
    assert state_of(breaker) == "closed"


def test_third_stall_in_a_row_opens_though_each_reply_came_late(breaker: Breaker) -> None:
    for _ in range(BREAKER_STALLS - 1):
        breaker.expired()
        breaker.paid()
        assert state_of(breaker) == "closed"
    breaker.expired()
    assert (state_of(breaker), breaker.num_owed) == ("open", 1)
    breaker.expired()
    assert (state_of(breaker), breaker.num_owed) == ("open", 2)


def test_an_answer_in_time_ends_the_row(breaker: Breaker) -> None:
    for _ in range(3 * BREAKER_STALLS):
        breaker.expired()
        breaker.paid()
        breaker.answered()
    assert state_of(breaker) == "closed"


def test_refusal_opens_from_anywhere(breaker: Breaker, clock: ManualClock) -> None:
    breaker.refused()
    assert (state_of(breaker), breaker.trial_at) == ("open", clock.now + BREAKER_PAUSE_S)
    owing = Breaker(clock=clock)
    owing.expired()
    owing.refused()
    assert (state_of(owing), owing.trial_at) == ("open", None)


def test_trial_waits_for_the_pause_and_for_what_is_owed(breaker: Breaker, clock: ManualClock) -> None:
    breaker.expired()
    breaker.expired()
    breaker.refused()
    due = clock.now + BREAKER_PAUSE_S
    clock.now += 5 * BREAKER_PAUSE_S
    for num_owed in (2, 1):
        assert (state_of(breaker), breaker.num_owed, breaker.trial_at) == ("open", num_owed, None)
        breaker.paid()
    assert (state_of(breaker), breaker.trial_at) == ("open", due)


def test_trial_before_its_time_is_a_mistake(opened: Breaker, clock: ManualClock) -> None:
    with pytest.raises(AssertionError, match="no trial is due"):
        opened.begin_trial()
    clock.now += BREAKER_PAUSE_S
    opened.begin_trial()
    with pytest.raises(AssertionError, match="no trial is due"):
        opened.begin_trial()


def test_expiries_and_refusals_of_earlier_calls_do_not_prolong_the_pause(opened: Breaker, clock: ManualClock) -> None:
    due = opened.trial_at
    clock.now += BREAKER_PAUSE_S / 2
    opened.expired()
    assert (state_of(opened), opened.trial_at) == ("open", None)
    opened.paid()
    opened.refused()
    assert opened.trial_at == due


def test_answers_to_earlier_calls_do_not_close(opened: Breaker) -> None:
    opened.answered()
    assert state_of(opened) == "open"


def test_trial_in_time_closes_and_clears_the_row(tried: Breaker) -> None:
    assert (state_of(tried), tried.trial_at) == ("trial", None)
    tried.answered()
    assert state_of(tried) == "trial"
    tried.passed()
    assert state_of(tried) == "closed"
    for _ in range(BREAKER_STALLS - 1):
        tried.expired()
        tried.paid()
    assert state_of(tried) == "closed"


def test_trial_during_which_an_earlier_call_expired_closes_nothing(tried: Breaker, clock: ManualClock) -> None:
    """A loop that was late begins the trial before it finds what is overdue."""
    tried.expired()
    tried.paid()
    tried.passed()
    assert (state_of(tried), tried.trial_at) == ("open", clock.now + BREAKER_PAUSE_S)


def test_expired_trial_opens_anew(tried: Breaker, clock: ManualClock) -> None:
    clock.now += 0.03
    tried.expired()
    assert (state_of(tried), tried.num_owed, tried.trial_at) == ("open", 1, None)
    tried.paid()
    assert tried.trial_at == clock.now + BREAKER_PAUSE_S


def test_refused_trial_opens_anew(tried: Breaker, clock: ManualClock) -> None:
    clock.now += 0.01
    tried.refused()
    assert (state_of(tried), tried.trial_at) == ("open", clock.now + BREAKER_PAUSE_S)


def test_lost_connection_owes_nothing(breaker: Breaker, clock: ManualClock) -> None:
    breaker.lost()
    assert state_of(breaker) == "closed"
    breaker.expired()
    breaker.lost()
    assert (state_of(breaker), breaker.num_owed) == ("closed", 0)
    breaker.expired()
    breaker.refused()
    breaker.lost()
    assert (state_of(breaker), breaker.num_owed, breaker.trial_at) == ("open", 0, clock.now + BREAKER_PAUSE_S)


def test_trial_whose_connection_is_lost_is_made_again_at_once(tried: Breaker, clock: ManualClock) -> None:
    clock.now += 0.01
    tried.lost()
    assert state_of(tried) == "open"
    tried.begin_trial()
    assert state_of(tried) == "trial"


def test_no_order_of_events_gets_stuck(clock: ManualClock) -> None:
    """Whatever happened: once the server answers again, the breaker closes after at most one pause and one trial."""
    rand = seeded("breaker")
    for _ in range(500):
        breaker = Breaker(clock=clock)
        for _ in range(rand.randrange(40)):
            clock.now += rand.choice((0.0, 0.01, BREAKER_PAUSE_S))
            due = breaker.trial_at is not None and clock.now >= breaker.trial_at
            events = [breaker.answered, breaker.expired, breaker.refused, breaker.lost]
            events += [breaker.paid] * 2 if breaker.num_owed else []
            events += [breaker.begin_trial] * 3 if due else []
            events += [breaker.passed] if state_of(breaker) == "trial" else []
            rand.choice(events)()
            assert breaker.num_owed == 0 or state_of(breaker) in ("owing", "open")
            assert breaker.num_owed > 0 or state_of(breaker) != "owing"
        while breaker.num_owed:
            breaker.paid()
        clock.now += BREAKER_PAUSE_S
        if state_of(breaker) == "open":
            breaker.begin_trial()
        if state_of(breaker) == "trial":
            breaker.passed()
        assert state_of(breaker) == "closed"
