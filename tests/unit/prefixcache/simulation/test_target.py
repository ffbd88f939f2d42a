"""The fewest workers for a target."""

from __future__ import annotations

from dataclasses import replace

import pytest

from prefixcache.errors import ConfigError
from prefixcache.simulation.cells import Row, run_cells
from prefixcache.simulation.setup import Setup
from prefixcache.simulation.target import Target, fewest_workers
from tests.unit.prefixcache.simulation.traces import chats


@pytest.mark.parametrize(
    ("text", "figure", "most_s"),
    [("p99<=2s", "p99", 2.0), (" mean <= 250 ms ", "mean", 0.25), ("max<=.5s", "max", 0.5)],
)
def test_targets(text: str, figure: str, most_s: float) -> None:
    target = Target.parse(text)
    assert (target.figure, target.most_s) == (figure, most_s)
    assert Target.parse(str(target)) == target


@pytest.mark.parametrize("text", ["p99<2s", "p98<=2s", "p99<=2", "", "p99<=s"])
def test_what_is_no_target(text: str) -> None:
    with pytest.raises(ConfigError, match="is no target; it must be like p99<=2s"):
        Target.parse(text)


def _row(ttft_s: float) -> Row:
    cell = Setup(rate=1_000.0).cell(chats(), "round_robin", 1)
    [row] = run_cells([cell], [1], jobs=1)
    return replace(row, outcome=replace(row.outcome, ttft_p99_s=ttft_s))


@pytest.mark.parametrize("needed", [1, 2, 3, 7, 8, 9, 31, 32])
def test_the_search_finds_the_least(needed: int) -> None:
    row, tried = _row(1.0), list[int]()

    def run(num_workers: int) -> Row:
        tried.append(num_workers)
        return replace(row, outcome=replace(row.outcome, ttft_p99_s=10.0 * needed / num_workers))

    found, rows = fewest_workers(run, Target.parse("p99<=10s"), least=1, most=32)
    assert found is not None and found.outcome.ttft_p99_s == 10.0
    assert len(tried) == len(set(tried)) == len(rows) <= 11
    assert needed == 1 or needed - 1 in tried


def test_the_search_keeps_to_its_bounds() -> None:
    row, tried = _row(100.0), list[int]()

    def run(num_workers: int) -> Row:
        tried.append(num_workers)
        return row

    assert fewest_workers(run, Target.parse("p99<=2s"), least=3, most=20)[0] is None
    assert tried == [3, 6, 12, 20]
    assert fewest_workers(run, Target.parse("p99<=100s"), least=5, most=20)[0] is row
    assert tried[4:] == [5]
