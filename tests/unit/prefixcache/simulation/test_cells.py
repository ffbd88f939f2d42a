"""Cells and their rows."""

from __future__ import annotations

import json
from statistics import fmean

import pytest

from prefixcache.errors import ConfigError
from prefixcache.simulation.cells import run_cells
from prefixcache.simulation.costs import PrefillCosts, StepCosts
from prefixcache.simulation.mechanisms import ALL, NONE
from prefixcache.simulation.scenario import Kill
from prefixcache.simulation.setup import Setup
from prefixcache.simulation.table import table
from tests.unit.prefixcache.simulation.traces import chats, coding


def test_rows_are_means_over_seeds_in_the_order_of_the_cells() -> None:
    cells = [Setup().cell(trace, "eta", 4, capacity=0.2) for trace in (chats(), coding())]
    one_by_one = [run_cells([cell], [seed], jobs=1)[0] for cell in cells for seed in (1, 2)]
    together = run_cells(cells, [1, 2], jobs=2)
    assert [row.cell for row in together] == cells
    for place, row in enumerate(together):
        of_seeds = one_by_one[2 * place : 2 * place + 2]
        assert row.outcome.ttft_p99_s == pytest.approx(fmean(each.outcome.ttft_p99_s for each in of_seeds))
        assert row.outcome.hit_rate == pytest.approx(fmean(each.outcome.hit_rate for each in of_seeds))


def test_figures_for_json() -> None:
    [row] = run_cells([Setup().cell(coding(), "longest_prefix", 2, capacity=0.25)], [3], jobs=1)
    figures = json.loads(json.dumps(row.figures()))
    assert {
        "trace": "coding_part",
        "policy": "longest_prefix",
        "workers": 2,
        "capacity": 0.25,
        "load": 0.75,
        "requests": 160,
        "seeds": [3],
    }.items() <= figures.items()
    names = ("hit_rate", "ttft_mean_s", "ttft_p50_s", "ttft_p90_s", "ttft_p99_s", "imbalance", "utilisation")
    assert all(figures[name] > 0 for name in names)
    text = table([row])
    head, line = text.splitlines()
    assert head.split()[:4] == ["trace", "policy", "workers", "capacity"]
    assert line.split()[:5] == ["coding_part", "longest_prefix", "2", "0.250", "0.75"]
    assert f"{figures['hit_rate']:.3f}" in line


def test_a_fleet_is_set_up_as_said() -> None:
    setup = Setup(cache_tokens=51_200, rate=2_000.0, overhead_s=0.5, inter_token_s=0.1, num_proxies=3, rate_error=0.2)
    cell = setup.cell(chats(), "eta", 2, arrival_speed=2.0)
    assert cell.scenario.capacity_blocks == 100
    assert cell.capacity == pytest.approx(200 / chats().num_unique_blocks)
    assert cell.scenario.costs == PrefillCosts(prefill_rate=2_000.0, overhead_s=0.5, inter_token_s=0.1)
    assert (cell.load, cell.scenario.num_proxies, cell.scenario.rate_error) == (None, 3, 0.2)
    assert cell.trace.duration_s == pytest.approx(chats().duration_s / 2)
    assert Setup(steps=StepCosts(speed=2.0)).cell(chats(), "eta", 2).scenario.costs == StepCosts(speed=2.0)


def test_mechanisms_are_those_of_the_policy_unless_said_otherwise() -> None:
    assert Setup().cell(chats(), "eta", 2).mechanisms is None
    changed = Setup(changes=(("steal", False), ("order", "tail")))
    for policy, usual in (("eta", ALL), ("round_robin", NONE)):
        mechanisms = changed.cell(chats(), policy, 2).mechanisms
        assert mechanisms is not None
        assert (mechanisms.steal, mechanisms.order, mechanisms.slices) == (False, "tail", usual.slices)


@pytest.mark.parametrize(
    ("setup", "policy", "workers", "told"),
    [
        (Setup(), "best", 2, "no policy is called 'best'"),
        (Setup(cache_tokens=600), "eta", 2, "a cache of 600 tokens has fewer than 2 blocks of 512 tokens"),
        (Setup(kills=(Kill(worker=3, at_s=1.0),)), "eta", 2, "worker 3 of 2 cannot die"),
        (Setup(kills=(Kill(worker=1, at_s=1.0),)), "eta", 1, "worker 1 of 1 cannot die"),
    ],
)
def test_what_cannot_be_run(setup: Setup, policy: str, workers: int, told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        setup.cell(chats(), policy, workers)
