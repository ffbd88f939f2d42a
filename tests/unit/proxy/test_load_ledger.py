"""What a proxy has placed on one worker, phase by phase."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prefixcache.limits import LOAD_RECORD_S
from prefixcache.load import NO_WAITING
from proxy.load_ledger import LedgerEntry, LoadLedger
from tests.support.manual_clock import ManualClock


def _ledger(slice_s: float = math.inf) -> tuple[LoadLedger, ManualClock]:
    clock = ManualClock(100.0)
    return LoadLedger(clock, slice_s=slice_s), clock


def _is_zero(ledger: LoadLedger) -> bool:
    record = ledger.record()
    return (record.running, record.prefilling_s, record.waiting_s) == (0, 0.0, NO_WAITING) and ledger.is_idle


def test_a_generation_walks_through_its_phases() -> None:
    ledger, clock = _ledger()
    entry = ledger.place(2.5)
    assert (ledger.num_waiting, ledger.num_running, sum(ledger.waiting_s()), ledger.prefilling_s()) == (1, 0, 2.5, 0.0)
    assert ledger.record().waiting_s == (0.0, 0.0, 2.5, 0.0, 0.0)
    clock.now += 10
    assert sum(ledger.waiting_s()) == 2.5, "what waits does not get less"
    entry.started()
    assert (ledger.num_waiting, ledger.num_running, sum(ledger.waiting_s()), ledger.prefilling_s()) == (0, 1, 0.0, 2.5)
    clock.now += 1
    assert ledger.prefilling_s() == 1.5
    assert (ledger.record().running, ledger.record().prefilling_s) == (1, 1.5)
    entry.first_token()
    assert (ledger.num_running, ledger.prefilling_s()) == (1, 0.0)
    entry.gone()
    assert _is_zero(ledger)


@pytest.mark.parametrize(
    ("prefill_s", "place"), [(0.0, 0), (0.25, 0), (0.3, 1), (1.0, 1), (4.0, 2), (16.0, 3), (16.1, 4), (1000.0, 4)]
)
def test_what_waits_is_told_by_class(prefill_s: float, place: int) -> None:
    ledger, _ = _ledger()
    ledger.place(prefill_s)
    assert ledger.record().waiting_s == tuple(prefill_s if n == place else 0.0 for n in range(5))


def test_a_worker_prefills_one_after_the_other() -> None:
    ledger, clock = _ledger()
    first, second, third = (ledger.place(seconds) for seconds in (1.0, 2.0, 4.0))
    for entry in (first, second):
        entry.started()
    clock.now += 1.5
    assert ledger.prefilling_s() == 1.5, "two side by side take the time of both"
    third.started()
    assert ledger.prefilling_s() == 5.5
    second.first_token()
    assert ledger.prefilling_s() == 4.0, "it was faster than expected"
    clock.now += 100
    assert ledger.prefilling_s() == 0.0
    assert ledger.num_running == 3
    late = ledger.place(1.0)
    late.started()
    assert ledger.prefilling_s() == 1.0, "time that passed before counts for nobody"


def test_a_sliced_prefill_makes_room_after_its_slice_and_what_is_left_of_it_waits() -> None:
    ledger, clock = _ledger(slice_s=2.0)
    long = ledger.place(21.0)
    assert ledger.waiting_s() == (0.0, 0.0, 0.0, 0.0, 21.0)
    long.started()
    assert (ledger.prefilling_s(), ledger.waiting_s()) == (2.0, (0.0, 0.0, 0.0, 0.0, 19.0))
    clock.now += 1.5
    assert (ledger.prefilling_s(), ledger.waiting_s()) == (0.5, (0.0, 0.0, 0.0, 0.0, 19.0))
    clock.now += 4.0
    assert (ledger.prefilling_s(), ledger.waiting_s()) == (0.5, (0.0, 0.0, 0.0, 15.0, 0.0)), "its own length by now"
    assert ledger.ahead_s() == 15.5
    clock.now += 13.0
    assert (ledger.prefilling_s(), ledger.ahead_s()) == (2.5, 2.5), "the last of it is not cut any more"


def test_short_prefills_go_between_the_slices() -> None:
    ledger, clock = _ledger(slice_s=2.0)
    long, short = ledger.place(20.0), ledger.place(0.5)
    long.started()
    clock.now += 2.0
    short.started()
    assert (ledger.prefilling_s(), ledger.waiting_s()) == (0.5, (0.0, 0.0, 0.0, 0.0, 18.0)), "all of it waits"
    clock.now += 0.25
    assert (ledger.prefilling_s(), ledger.ahead_s()) == (0.25, 18.25)
    short.first_token()
    assert (ledger.prefilling_s(), ledger.ahead_s()) == (2.0, 18.0)
    assert ledger.record().waiting_s == (0.0, 0.0, 0.0, 16.0, 0.0)
    assert ledger.num_prefilling == 1


def test_of_several_sliced_ones_the_least_is_computed_first_and_each_counts_by_its_own_length() -> None:
    ledger, clock = _ledger(slice_s=2.0)
    long, middle = ledger.place(40.0), ledger.place(12.0)
    long.started()
    clock.now += 2.0
    middle.started()
    assert (ledger.prefilling_s(), ledger.waiting_s()) == (2.0, (0.0, 0.0, 0.0, 10.0, 38.0))
    clock.now += 3.0
    assert (ledger.prefilling_s(), ledger.waiting_s()) == (1.0, (0.0, 0.0, 0.0, 8.0, 38.0))
    short = ledger.place(3.5)
    short.started()
    assert (ledger.prefilling_s(), ledger.waiting_s()) == (2.0, (0.0, 0.0, 1.5, 9.0, 38.0))
    clock.now += 3.5
    assert (ledger.prefilling_s(), ledger.waiting_s()) == (1.0, (0.0, 0.0, 0.0, 8.0, 38.0))
    short.first_token()
    middle.gone()
    assert (ledger.prefilling_s(), ledger.waiting_s()) == (2.0, (0.0, 0.0, 0.0, 0.0, 36.0))


@pytest.mark.parametrize(("prefill_s", "is_sliced"), [(3.0, False), (3.1, True)])
def test_a_prefill_that_may_pass_is_not_sliced(prefill_s: float, is_sliced: bool) -> None:
    ledger, _ = _ledger(slice_s=2.0)
    ledger.place(prefill_s).started()
    assert (ledger.prefilling_s() < prefill_s) == is_sliced
    whole, _ = _ledger()
    whole.place(prefill_s).started()
    assert whole.prefilling_s() == prefill_s, "where nothing is sliced"


@given(
    st.lists(st.floats(0, 50), max_size=6),
    st.lists(st.floats(0, 50), max_size=6),
    st.lists(st.floats(0, 30), max_size=5),
)
def test_slices_change_when_but_never_how_much(
    started: list[float], waiting: list[float], passing: list[float]
) -> None:
    """Against one that does not slice."""
    ledgers = [_ledger(slice_s=2.0), _ledger()]
    for ledger, clock in ledgers:
        for seconds in started:
            ledger.place(seconds).started()
        for seconds in waiting:
            ledger.place(seconds)
        for seconds in passing:
            clock.now += seconds
            assert ledger.ahead_s() == pytest.approx(ledger.prefilling_s() + sum(ledger.waiting_s()), abs=1e-5)
    (sliced, _), (whole, _) = ledgers
    assert sliced.ahead_s() == pytest.approx(whole.ahead_s(), abs=1e-5)
    assert sliced.prefilling_s() <= whole.prefilling_s() + 1e-5


def test_versions_grow_also_from_one_ledger_to_the_next() -> None:
    clock = ManualClock(5.0)
    one = LoadLedger(clock)
    versions = [one.record().version, one.record().version]
    clock.now += 1
    versions.append(one.record().version)
    clock.now += 1
    versions.append(LoadLedger(clock).record().version)
    assert versions == sorted(set(versions))


def test_an_idle_ledger_is_told_as_long_as_an_older_record_may_stand() -> None:
    ledger, clock = _ledger()
    assert not ledger.needs_report()
    entry = ledger.place(1.0)
    clock.now += 100
    assert ledger.needs_report()
    entry.gone()
    assert ledger.needs_report()
    clock.now += LOAD_RECORD_S - 0.1
    assert ledger.needs_report()
    clock.now += 0.2
    assert not ledger.needs_report()


calls = st.sampled_from(["started", "first_token", "gone"])


@given(
    st.lists(st.floats(0, 50), min_size=1, max_size=6),
    st.lists(st.tuples(st.integers(0, 5), calls, st.floats(0, 3)), max_size=30),
)
def test_any_order_of_calls_ends_at_zero(prefills: list[float], acts: list[tuple[int, str, float]]) -> None:
    ledger, clock = _ledger()
    entries = [ledger.place(seconds) for seconds in prefills]
    phases = dict.fromkeys(range(len(entries)), 0)
    for which, call, passed in acts:
        which %= len(entries)
        clock.now += passed
        _call(entries[which], call)
        phases[which] = max(phases[which], {"started": 1, "first_token": 2, "gone": 3}[call])
        assert ledger.num_waiting == sum(phase == 0 for phase in phases.values())
        assert ledger.num_running == sum(phase in (1, 2) for phase in phases.values())
        record = ledger.record()
        assert sum(record.waiting_s) == pytest.approx(
            sum(prefills[n] for n, phase in phases.items() if phase == 0), abs=1e-5
        )
        assert 0 <= record.prefilling_s <= sum(prefills[n] for n, phase in phases.items() if phase == 1) + 1e-5
    for entry in entries:
        entry.gone()
    assert _is_zero(ledger)


def _call(entry: LedgerEntry, call: str) -> None:
    getattr(entry, call)()
