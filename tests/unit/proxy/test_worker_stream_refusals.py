"""What a worker refuses, and what it is asked to give back."""

from __future__ import annotations

import pytest

from prefixcache.errors import Overloaded
from prefixcache.protocol import Abort, Fail, FailKind, Hello, Started
from tests.unit.proxy.test_worker_stream import SPACE, RecordingSink, Wire


@pytest.mark.parametrize("kind", ["refused", "overloaded", "draining", "worker_fault"])
async def test_only_one_that_drains_says_something_about_the_requests_to_come(kind: FailKind) -> None:
    wire = Wire()
    assert not wire.stream.is_draining
    wire.generate("a", RecordingSink())
    wire.receive(Fail(id="a", kind=kind, message="told"))
    assert wire.stream.is_draining == (kind == "draining")
    wire.generate("b", RecordingSink())
    wire.receive(Fail(id="b", kind="overloaded", message="told"))
    assert wire.stream.is_draining == (kind == "draining"), "for good"


@pytest.mark.parametrize(("told_s", "again_s"), [(0.0, 1), (0.2, 1), (2.1, 3), (1e6, 60)])
async def test_when_to_come_again_to_an_overloaded_worker(told_s: float, again_s: int) -> None:
    wire = Wire()
    sink = RecordingSink()
    wire.generate("a", sink)
    wire.receive(Fail(id="a", kind="overloaded", message="full", retry_after_s=told_s))
    (told,) = sink.calls
    assert isinstance(told, Overloaded) and told.retry_after_s == again_s


async def test_a_request_is_asked_back_only_while_it_waits() -> None:
    wire = Wire()
    sink = RecordingSink()
    wire.generate("a", sink)
    wire.stream.abort_if_waiting("a")
    assert wire.sent()[-1] == Abort(id="a", if_waiting=True)
    wire.receive(Started(id="a", cached_tokens=0))
    num_sent = len(wire.sent())
    wire.stream.abort_if_waiting("a")
    wire.stream.abort_if_waiting("never sent")
    assert len(wire.sent()) == num_sent


@pytest.mark.parametrize(("minor", "knows"), [(0, False), (1, False), (2, True), (9, True)])
async def test_who_can_be_asked_for_a_request_back(minor: int, knows: bool) -> None:
    wire = Wire(hello=False)
    assert not wire.stream.knows_if_waiting
    wire.receive(Hello(namespace=SPACE, incarnation=5, minor=minor))
    assert wire.stream.knows_if_waiting == knows
