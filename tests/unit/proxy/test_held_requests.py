"""The queue of requests for which no worker is there."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from prefixcache.errors import NoWorkerReady, Overloaded, Unavailable
from prefixcache.metrics import ProxyMetrics
from proxy import held_requests
from proxy.held_requests import HeldRequests, Patience
from tests.support.manual_clock import ManualClock
from tests.support.waiting import eventually

ERROR = NoWorkerReady("nobody is there")


@pytest.fixture(autouse=True)
def _quick_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(held_requests, "HELD_POLL_S", 0.001)


class World:
    """A queue, and the models whose workers are there."""

    def __init__(self, most_held: int = 8, clock: Callable[[], float] | None = None) -> None:
        self.there: set[str] = set()
        self.asked: list[str] = []
        self.metrics = ProxyMetrics()
        self.queue = HeldRequests(
            self._is_there, self.metrics, patience_s=5.0, most_held=most_held, clock=clock or ManualClock(0.0)
        )
        self.gone_on: list[str] = []

    def _is_there(self, name: str) -> bool:
        self.asked.append(name)
        return name in self.there

    async def ask(self, name: str, model: str = "m", patience: Patience | None = None) -> None:
        await (patience or self.queue.patience()).wait(model, ERROR)
        self.gone_on.append(name)

    def start(self, name: str, model: str = "m") -> asyncio.Task[None]:
        return asyncio.create_task(self.ask(name, model))

    def count(self, outcome: str) -> float:
        return float(self.metrics.held_requests.labels(outcome)._value.get())


async def test_in_order_and_each_when_its_own_model_is_there() -> None:
    world = World()
    tasks = [world.start(name, model) for name, model in (("a", "m"), ("b", "other"), ("c", "m"))]
    await eventually(lambda: {"m", "other"} <= set(world.asked))
    assert world.gone_on == []
    world.there.add("m")
    await asyncio.gather(tasks[0], tasks[2])
    assert world.gone_on == ["a", "c"] and world.queue.num_held == 1
    world.there.add("other")
    await tasks[1]
    assert (world.gone_on, world.queue.num_held, world.count("placed")) == (["a", "c", "b"], 0, 3)


async def test_nobody_is_asked_for_while_nobody_waits() -> None:
    world = World()
    world.there.add("m")
    await world.ask("a")
    num_asked = len(world.asked)
    assert world.queue._next_look is None
    await world.ask("b")
    assert len(world.asked) == num_asked + 1


async def test_whoever_comes_back_at_once_waits_for_the_next_look() -> None:
    """What was said to be there has taken nothing: asking it again and again would not help."""
    world = World()
    world.there.add("m")
    patience = world.queue.patience()
    for turn in range(3):
        await world.ask("a", patience=patience)
        assert len(world.asked) == turn + 1


async def test_the_bound() -> None:
    world = World(most_held=2)
    tasks = [world.start(name) for name in "ab"]
    await eventually(lambda: world.queue.num_held == 2)
    with pytest.raises(Overloaded) as caught:
        await world.ask("c")
    assert caught.value.retry_after_s == 5
    tasks[0].cancel()
    await asyncio.gather(tasks[0], return_exceptions=True)
    late = world.start("d")
    await eventually(lambda: world.queue.num_held == 2)
    world.there.add("m")
    await asyncio.gather(tasks[1], late)
    assert world.gone_on == ["b", "d"]
    assert (world.count("refused"), world.count("left"), world.count("placed")) == (1, 1, 2)


async def test_patience_is_one_for_all_waits_of_a_request() -> None:
    clock = ManualClock(0.0)
    world = World(clock=clock)
    patience = world.queue.patience()
    for _ in range(2):
        waiting = asyncio.create_task(world.ask("a", patience=patience))
        await eventually(lambda: world.queue.num_held == 1)
        clock.now += 2.5
        world.there.add("m")
        await waiting
        world.there.clear()
    with pytest.raises(NoWorkerReady) as caught:
        await world.ask("a", patience=patience)
    assert caught.value is ERROR
    assert (world.count("expired"), world.queue.num_held) == (1, 0)


async def test_all_are_turned_away() -> None:
    world = World()
    tasks = [world.start(name) for name in "ab"]
    await eventually(lambda: world.queue.num_held == 2)
    world.queue.turn_away(Unavailable("shutting down"))
    late = world.start("c")
    for result in await asyncio.gather(*tasks, late, return_exceptions=True):
        assert type(result) is Unavailable
    assert (world.queue.num_held, world.count("refused")) == (0, 3)


async def test_whoever_asks_the_same_is_asked_for_once_and_each_may_leave() -> None:
    world = World()
    answers = {"x": False, "y": False}
    asked: list[str] = []

    def is_there(key: str) -> bool:
        asked.append(key)
        return answers[key]

    held = [
        world.queue.hold(key, lambda key=key: is_there(key), ERROR, 5.0)  # type: ignore[misc]  # a default argument
        for key in ("x", "x", "y", "x")
    ]
    await eventually(lambda: "y" in asked)
    assert asked == ["x", "y"] * (len(asked) // 2)
    held[1].cancel()
    answers["x"] = True
    await eventually(lambda: held[3].done())
    assert [each.done() for each in held] == [True, True, False, True]
    held[2].cancel()
    await eventually(lambda: world.queue.num_held == 0)
    assert (world.count("placed"), world.count("left")) == (2, 2)


async def test_each_waits_for_its_own_room_and_all_are_asked_for_at_once() -> None:
    world = World()
    rooms = [0]
    asked: list[int] = []

    def most_room() -> int:
        asked.append(rooms[-1])
        return rooms[-1]

    held = [world.queue.hold("x", most_room, ERROR, 5.0, least_room=least) for least in (10, 30, 20)]
    for room, gone_on in ((9, [False] * 3), (20, [True, False, True]), (40, [True] * 3)):
        rooms.append(room)
        await eventually(lambda: asked and asked[-1] == rooms[-1])
        assert [each.done() for each in held] == gone_on
    assert world.count("placed") == 3


async def test_a_wait_that_is_left_counts_against_the_patience_of_its_request() -> None:
    clock = ManualClock(0.0)
    world = World(clock=clock)
    patience = world.queue.patience()
    held = patience.hold("key", lambda: False, ERROR)
    clock.now += 2.0
    held.cancel()
    await asyncio.sleep(0)
    assert patience._left_s == 3.0
