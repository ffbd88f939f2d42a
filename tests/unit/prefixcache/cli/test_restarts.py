"""When a child starts again, and when not: on a clock of the test's own."""

from __future__ import annotations

import signal

import pytest

from prefixcache.cli.restarts import (
    EXIT_CONFIG,
    FIRST_PAUSE_S,
    LASTING_S,
    MOST_FAILED_STARTS,
    MOST_PAUSE_S,
    GivenUp,
    Restarts,
    how,
)
from tests.support.seeds import seeded

KILLED = -signal.SIGKILL


def pauses(restarts: Restarts, lives_s: list[float], code: int = KILLED) -> list[float]:
    """After each of these lives."""
    now, found = 100.0, []
    for life_s in lives_s:
        restarts.started(now)
        now += life_s
        found.append(restarts.ended(code, now))
        now += found[-1]
    return found


def test_the_pauses_double_up_to_the_longest() -> None:
    assert pauses(Restarts(was_ready=True), [1.0] * 9) == [0.5, 1, 2, 4, 8, 16, 30, 30, 30]


def test_after_a_life_that_lasted_they_begin_anew() -> None:
    lives = [1.0, 1.0, LASTING_S, 1.0, LASTING_S - 0.1, LASTING_S + 1]
    assert pauses(Restarts(was_ready=True), lives) == [0.5, 1, 0.5, 1, 2, 0.5]


def test_a_pause_is_no_life() -> None:
    """However long it was dead: only what it lived counts."""
    restarts = Restarts(was_ready=True)
    restarts.started(0.0)
    assert restarts.ended(KILLED, 1.0) == FIRST_PAUSE_S
    restarts.started(10 * LASTING_S)
    assert restarts.ended(KILLED, 10 * LASTING_S + 1) == 2 * FIRST_PAUSE_S


def test_wrong_settings_stay_wrong() -> None:
    restarts = Restarts()
    restarts.started(0.0)
    with pytest.raises(GivenUp, match="a setting is wrong"):
        restarts.ended(EXIT_CONFIG, 1.0)


def test_settings_that_have_served_are_not_wrong() -> None:
    """Its port was taken while it was dead, or memory is short: that passes."""
    restarts = Restarts()
    restarts.ready()
    assert pauses(restarts, [1.0] * 4, EXIT_CONFIG) == [0.5, 1, 2, 4]


@pytest.mark.parametrize("code", [0, 1, KILLED, -signal.SIGSEGV])
def test_what_never_got_ready_is_given_up_at_the_fifth_death(code: int) -> None:
    restarts = Restarts()
    assert len(pauses(restarts, [1.0] * (MOST_FAILED_STARTS - 1), code)) == 4
    with pytest.raises(GivenUp, match="for the 5th time before it was ready once"):
        restarts.ended(code, 1_000.0)


def test_what_was_ready_once_never_is() -> None:
    restarts = Restarts()
    pauses(restarts, [1.0] * (MOST_FAILED_STARTS - 1))
    restarts.ready()
    found = pauses(restarts, [seeded("lives").uniform(0.0, 2 * LASTING_S) for _ in range(200)])
    assert all(FIRST_PAUSE_S <= pause_s <= MOST_PAUSE_S for pause_s in found)


def test_ends_in_words() -> None:
    assert (how(0), how(1), how(KILLED)) == ("with exit code 0", "with exit code 1", "by signal SIGKILL")
    assert how(-40) == "by signal 40"
