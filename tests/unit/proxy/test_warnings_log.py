"""Warnings that repeat."""

from __future__ import annotations

import logging

import pytest

from proxy.warnings_log import QuietLog
from tests.support.manual_clock import ManualClock


def test_each_kind_once_in_a_while_with_the_number_left_out(caplog: pytest.LogCaptureFixture) -> None:
    clock = ManualClock(100.0)
    log = QuietLog(logging.getLogger("test"), clock=clock)
    for _ in range(4):
        log.warning("a", "no answer from %s", "redis")
    log.warning("b", "another kind")
    clock.now += 9.9
    log.warning("a", "no answer from %s", "redis")
    clock.now += 0.2
    log.warning("a", "no answer from %s", "redis")
    clock.now += 10.0
    log.warning("a", "no answer from %s", "redis")
    assert [record.getMessage() for record in caplog.records] == [
        "no answer from redis",
        "another kind",
        "no answer from redis (4 more like it since the last line)",
        "no answer from redis",
    ]


def test_kinds_whose_time_is_over_are_forgotten() -> None:
    clock = ManualClock(0.0)
    log = QuietLog(logging.getLogger("test"), clock=clock)
    for number in range(1_000):
        log.warning(f"connect worker-{number}", "not reachable")
        clock.now += 1.0
    assert log.num_kinds < 100
