"""Ten lists at once, then few, until the storm is over."""

from __future__ import annotations

from edge.reload_pace import ReloadPace
from prefixcache.limits import EDGE_CALM_S, EDGE_RELOADS, EDGE_RELOADS_S


def reloads(pace: ReloadPace, times: list[float]) -> list[float]:
    """Those at which a list that changes all the time is taken."""
    taken = []
    for now in times:
        if pace.allows(now):
            pace.reloaded(now)
            taken.append(now)
    return taken


def test_a_list_that_changes_now_and_then_is_taken_at_once() -> None:
    times = [float(10 * number) for number in range(40)]
    assert reloads(ReloadPace(), times) == times


def test_one_that_changes_every_second_is_slowed_down() -> None:
    taken = reloads(ReloadPace(), [float(second) for second in range(600)])
    assert taken[:EDGE_RELOADS] == list(range(EDGE_RELOADS))
    assert taken[EDGE_RELOADS] == EDGE_RELOADS - 1 + EDGE_CALM_S
    for first in taken:
        in_a_minute = [now for now in taken if first <= now < first + EDGE_RELOADS_S]
        assert len(in_a_minute) <= EDGE_RELOADS + EDGE_RELOADS_S / EDGE_CALM_S


def test_after_a_calm_time_it_is_quick_again() -> None:
    pace = ReloadPace()
    reloads(pace, [0.1 * number for number in range(EDGE_RELOADS)])
    assert not pace.allows(2.0)
    assert pace.allows(EDGE_RELOADS_S)
