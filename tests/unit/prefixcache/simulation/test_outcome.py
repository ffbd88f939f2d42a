"""Figures of a run."""

from __future__ import annotations

import random

import numpy
import pytest

from prefixcache.simulation.costs import PrefillCosts
from prefixcache.simulation.outcome import outcome, percentile
from prefixcache.simulation.policies import new_fleet
from prefixcache.simulation.scenario import Scenario
from tests.unit.prefixcache.simulation.traces import BLOCK, request, trace


def test_percentiles_are_those_of_numpy() -> None:
    chance = random.Random(5)
    for length in (1, 2, 3, 99, 100, 101):
        values = sorted(chance.random() for _ in range(length))
        for share in (0.0, 0.5, 0.9, 0.99, 1.0):
            assert percentile(values, share) == pytest.approx(float(numpy.percentile(values, 100 * share)))


def test_figures_of_two_workers() -> None:
    costs = PrefillCosts(prefill_rate=1_000.0, overhead_s=0.0, inter_token_s=0.1)
    made = trace(
        request((1, 2), rest=76, output=9), request((1, 2), at=2.0, rest=76, output=9), request((1, 2), at=4.0)
    )
    fleet = new_fleet("round_robin", made, Scenario(num_workers=2, capacity_blocks=9, costs=costs), None, seed=1)
    fleet.run()
    result = outcome(fleet)
    # 1.1 s for the first on each worker, 0.1 s for the third, of which two blocks are there.
    assert result.hit_rate == pytest.approx(2 * BLOCK / (3 * 2 * BLOCK + 76 + 76 + 100))
    assert (result.ttft_p50_s, result.ttft_max_s) == pytest.approx((1.1, 1.1))
    assert result.ttft_mean_s == pytest.approx((1.1 + 1.1 + 0.1) / 3)
    assert result.imbalance == pytest.approx(2 * 1_200 / 2_300)
    assert result.utilisation == pytest.approx(2.3 / 2 / (4.1 + 10 * 0.1))
    assert (result.steals, result.slices) == (0, 0)
