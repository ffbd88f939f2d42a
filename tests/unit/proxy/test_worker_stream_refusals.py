"""What a worker refuses, and what it is asked to give back."""

from __future__ import annotations

from math import inf, nan

import pytest

from prefixcache.errors import Overloaded, Unavailable
from prefixcache.protocol import Abort, Beat, Fail, FailKind, Hello, Started
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


async def test_one_that_drains_says_so_in_its_beats() -> None:
    wire = Wire()
    wire.receive(Beat(incarnation=1, step=1, running=0, waiting=0))
    assert not wire.stream.is_draining
    wire.receive(Beat(incarnation=1, step=1, running=0, waiting=0, draining=True))
    assert wire.stream.is_draining
    wire.receive(Beat(incarnation=1, step=1, running=0, waiting=0))
    assert wire.stream.is_draining, "for good"


@pytest.mark.parametrize(("told_s", "again_s"), [(0.0, 1), (0.2, 1), (2.1, 3), (1e6, 60), (inf, 1), (nan, 1)])
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


class Stumbling(RecordingSink):
    """Raises a fault of its own when it first hears that its request failed."""

    def on_fail(self, error: Exception) -> None:
        super().on_fail(error)
        if len(self.calls) == 1:
            raise RuntimeError("sending it to another worker failed")


@pytest.mark.parametrize("told", ["refusal", "loss"])
async def test_a_fault_on_the_way_elsewhere_ends_that_request_alone(told: str) -> None:
    wire = Wire()
    stumbling, neighbour = Stumbling(), RecordingSink()
    wire.generate("a", stumbling)
    wire.generate("b", neighbour)
    if told == "refusal":
        wire.receive(Fail(id="a", kind="overloaded", message="full"))
        wire.receive(Started(id="b", cached_tokens=0))
        assert neighbour.calls == [("started", 0)]
    else:
        wire.stream.fail_all(Unavailable("shutting down"))
        assert len(neighbour.calls) == 1, "whoever comes after it hears of it, too"
    assert isinstance(stumbling.calls[1], RuntimeError), "its last word"
