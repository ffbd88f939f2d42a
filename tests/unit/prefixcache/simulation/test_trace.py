"""Parts of a trace and faster ones."""

from __future__ import annotations

from tests.unit.prefixcache.simulation.traces import request, trace


def test_a_part_begins_at_zero() -> None:
    part = trace(*(request([n], at=60.0 * n) for n in range(5))).between(60.0, 180.0)
    assert [(each.arrival_s, each.blocks) for each in part.requests] == [(0.0, (1,)), (60.0, (2,))]


def test_a_faster_one_thinks_faster_too() -> None:
    faster = trace(request([1], at=10.0, think_s=5.0, output=9)).faster(2.0)
    [only] = faster.requests
    assert (only.arrival_s, only.think_s, only.output_tokens) == (5.0, 2.5, 9)
