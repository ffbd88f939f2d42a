"""Sizes of fleets to compare policies with."""

from __future__ import annotations

import pytest

from prefixcache.simulation.costs import PrefillCosts
from prefixcache.simulation.policies import new_fleet
from prefixcache.simulation.scenario import Scenario
from prefixcache.simulation.sizes import capacity_blocks, prefill_rate
from tests.unit.prefixcache.simulation.traces import BLOCK, chats, coding, request, trace


def test_caches_hold_their_share_of_the_unique_blocks() -> None:
    made = trace(*(request(range(10 * n, 10 * n + 10)) for n in range(10)))
    assert [capacity_blocks(made, 0.5, workers) for workers in (1, 4, 8)] == [50, 12, 6]
    assert capacity_blocks(made, 0.01, 8) == 2


def test_rates_make_the_bound_as_busy_as_wanted() -> None:
    made = trace(request((1, 2, 3), at=0.0), request((1, 2, 3), at=50.0), request((4,), at=100.0))
    computed = 3 * BLOCK + 100 + 100 + BLOCK + 100
    assert prefill_rate(made, 2, 10, 0.5) == pytest.approx(computed / 100.0 / 2 / 0.5)
    chat = chats()
    rate = prefill_rate(chat, 4, 300, 0.6)
    scenario = Scenario(num_workers=4, capacity_blocks=300, costs=PrefillCosts(prefill_rate=rate, overhead_s=0.0))
    fleet = new_fleet("pooled", chat, scenario, None, seed=1)
    fleet.run()
    busy_s = sum(worker.engine.busy_s for worker in fleet.workers)
    assert busy_s / 4 / chat.duration_s == pytest.approx(0.6, abs=0.03)


def test_sessions_get_a_rate_for_each_request() -> None:
    assert prefill_rate(coding(), 8, 100, 0.75) == pytest.approx(7.9 * 160 / 8)
    assert prefill_rate(coding(), 8, 100, 0.375) == pytest.approx(2 * 7.9 * 160 / 8)
