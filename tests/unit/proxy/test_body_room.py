"""Room is taken in the order of coming, never beyond its bound, and comes back whatever becomes of who has it."""

from __future__ import annotations

import asyncio
import random

import pytest

from prefixcache.errors import Overloaded
from prefixcache.limits import AWAY_RETRY_AFTER_S
from proxy.body_room import BodyRoom
from proxy.departure import shutting_down
from tests.support.seeds import seeded
from tests.support.waiting import eventually


def takes(room: BodyRoom, num_bytes: int) -> asyncio.Task[None]:
    return asyncio.create_task(room.take(num_bytes))


async def test_who_does_not_fit_waits_and_nobody_overtakes() -> None:
    room = BodyRoom(10)
    await room.take(6)
    large, small = takes(room, 5), takes(room, 1)
    await eventually(lambda: room.num_waiting == 2)
    assert (room.num_bytes, large.done(), small.done()) == (6, False, False)
    room.give_back(1)
    await large
    assert room.num_bytes == 10 and not small.done()
    room.give_back(5)
    await small
    assert (room.num_bytes, room.num_waiting) == (6, 0)


async def test_who_leaves_makes_way_for_the_next_one() -> None:
    room = BodyRoom(10)
    await room.take(6)
    large, small = takes(room, 10), takes(room, 4)
    await eventually(lambda: room.num_waiting == 2)
    large.cancel()
    await small
    assert (room.num_bytes, room.num_waiting) == (10, 0)


async def test_who_leaves_when_it_was_let_in_gives_back() -> None:
    room = BodyRoom(10)
    await room.take(10)
    waiting = takes(room, 10)
    await eventually(lambda: room.num_waiting == 1)
    room.give_back(10)
    assert room.num_bytes == 10 and not waiting.done()
    waiting.cancel()
    await asyncio.wait({waiting})
    assert room.num_bytes == 0


async def test_it_waits_so_long_and_no_more_than_some() -> None:
    room = BodyRoom(10, most_waiting=1, patience_s=0.0)
    await room.take(10)
    waiting = takes(room, 1)
    await asyncio.sleep(0)
    with pytest.raises(Overloaded) as refused:
        await room.take(1)
    assert refused.value.retry_after_s == AWAY_RETRY_AFTER_S
    with pytest.raises(Overloaded):
        await waiting
    assert (room.num_bytes, room.num_waiting) == (10, 0)


async def test_at_the_end_all_are_told() -> None:
    room = BodyRoom(10)
    await room.take(10)
    waiting = takes(room, 1)
    await eventually(lambda: room.num_waiting == 1)
    error = shutting_down()
    room.turn_away(error)
    for coming in (waiting, takes(room, 1)):
        with pytest.raises(type(error)) as told:
            await coming
        assert told.value is error
    room.give_back(10)
    assert room.num_bytes == 0


async def test_any_order_of_coming_leaving_and_going() -> None:
    source: random.Random = seeded("body room")
    for _ in range(200):
        room = BodyRoom(20)
        tasks: dict[asyncio.Task[None], int] = {}
        for _ in range(40):
            if tasks and source.random() < 0.4:
                task = source.choice(list(tasks))
                num_bytes = tasks.pop(task)
                if task.done():
                    room.give_back(num_bytes)
                else:
                    task.cancel()
            else:
                num_bytes = source.randrange(21)
                tasks[takes(room, num_bytes)] = num_bytes
            for _ in range(source.randrange(3)):
                await asyncio.sleep(0)
            assert room.num_bytes <= 20
        while tasks:
            await eventually(lambda tasks=tasks: any(task.done() for task in tasks))  # type: ignore[misc]  # the loop's
            for task in [task for task in tasks if task.done()]:
                room.give_back(tasks.pop(task))
        await eventually(lambda room=room: (room.num_bytes, room.num_waiting) == (0, 0))  # type: ignore[misc]  # the loop's
