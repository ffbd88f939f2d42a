"""Who goes when: exact numbers, and a simulation against a sorted list."""

from __future__ import annotations

import asyncio
import itertools
import random

import pytest

from prefixcache.errors import EngineUnreachable, Overloaded
from prefixcache.limits import HELD_BATCH_S
from proxy.engines.held_queue import HeldQueue, Turn, order_key
from tests.support.manual_clock import ManualClock
from tests.support.seeds import seeded
from tests.support.waiting import eventually

LONG = 2.0


def _may_go(turn: Turn) -> bool:
    return turn._come.done()


@pytest.mark.parametrize(
    ("first", "second", "waited_s", "winner"),
    [
        (1.0, 0.5, 0.0, "second"),
        (1.0, 0.5, 1.6, "second"),
        (1.0, 0.5, 1.7, "first"),
        (1.0, 1.0, 0.1, "first"),
    ],
)
async def test_least_u_less_three_tenths_of_the_wait_goes_first(
    first: float, second: float, waited_s: float, winner: str
) -> None:
    clock = ManualClock(50.0)
    queue = HeldQueue(clock=clock)
    in_hand = queue.join(LONG, is_stream=True)
    turns = {"first": queue.join(first, is_stream=True)}
    clock.now += waited_s
    turns["second"] = queue.join(second, is_stream=True)
    assert not any(map(_may_go, turns.values()))
    in_hand.prefilled()
    assert [name for name, turn in turns.items() if _may_go(turn)] == [winner]
    assert (queue.num_waiting, queue.num_in_hand) == (1, 1)


async def test_of_equal_ones_the_earlier_goes_first() -> None:
    queue = HeldQueue(clock=ManualClock(1.0))
    turns = [queue.join(LONG, is_stream=True) for _ in range(4)]
    for turn in turns:
        assert _may_go(turn)
        turn.prefilled()


async def test_short_ones_go_together_up_to_one_step() -> None:
    queue = HeldQueue(clock=ManualClock(1.0))
    share = HELD_BATCH_S / 4
    turns = [queue.join(share, is_stream=True) for _ in range(6)]
    assert [_may_go(turn) for turn in turns] == [True] * 4 + [False] * 2
    turns[2].prefilled()
    assert [_may_go(turn) for turn in turns] == [True] * 5 + [False]


async def test_a_long_one_goes_alone() -> None:
    queue = HeldQueue(clock=ManualClock(1.0))
    long = queue.join(LONG, is_stream=True)
    nothing = queue.join(0.0, is_stream=True)
    assert _may_go(long) and not _may_go(nothing), (
        "nothing is put behind a long prefill, where it could not be overtaken any more"
    )
    long.prefilled()
    assert _may_go(nothing)


async def test_a_whole_answer_gives_way_after_its_estimate_a_stream_with_its_first_byte() -> None:
    queue = HeldQueue()
    whole = queue.join(0.2, is_stream=False)
    assert whole.most_in_hand_s == pytest.approx(0.35)
    stream = queue.join(0.2, is_stream=True)
    assert stream.most_in_hand_s == 30.0
    assert queue.join(5.0, is_stream=True).most_in_hand_s == 50.0
    began = asyncio.get_running_loop().time()
    await asyncio.wait_for(stream.come(), 5.0)
    assert 0.3 <= asyncio.get_running_loop().time() - began < 2.0
    assert queue.num_in_hand == 1
    whole.prefilled()
    assert queue.num_in_hand == 1, "it has left already"


async def test_it_is_bounded_and_says_when_to_come_again() -> None:
    queue = HeldQueue(most_held=3, clock=ManualClock(1.0))
    turns = [queue.join(1.5, is_stream=True) for _ in range(4)]
    with pytest.raises(Overloaded, match="3 requests wait") as refused:
        queue.join(0.0, is_stream=True)
    assert (refused.value.retry_after_s, refused.value.status) == (6, 429)
    turns[3].prefilled()
    queue.join(0.0, is_stream=True)
    busy = HeldQueue(most_held=0, clock=ManualClock(1.0))
    with pytest.raises(Overloaded) as refused:
        busy.join(1e6, is_stream=True)
    assert refused.value.retry_after_s == 1, "what is not in it does not count"


async def test_turned_away_all_that_wait_get_the_error_and_what_is_in_hand_stays() -> None:
    queue = HeldQueue()
    in_hand = queue.join(LONG, is_stream=True)
    waiting = [asyncio.create_task(_held(queue)) for _ in range(3)]
    await eventually(lambda: queue.num_waiting == 3)
    queue.turn_away(EngineUnreachable("down"))
    for result in await asyncio.gather(*waiting, return_exceptions=True):
        assert isinstance(result, EngineUnreachable)
    assert (queue.num_waiting, queue.num_in_hand) == (0, 1)
    in_hand.prefilled()
    assert _may_go(queue.join(LONG, is_stream=True))


async def _held(queue: HeldQueue, prefill_s: float = LONG) -> None:
    with queue.join(prefill_s, is_stream=True) as turn:
        await turn.come()


@pytest.mark.parametrize("turns_of_the_loop", [0, 1, 2, 3])
async def test_cancelled_at_any_moment_it_leaves_nothing(turns_of_the_loop: int) -> None:
    queue = HeldQueue()
    in_hand = queue.join(LONG, is_stream=True)
    cancelled, next_one = (asyncio.create_task(_held(queue)) for _ in range(2))
    await eventually(lambda: queue.num_waiting == 2)
    in_hand.prefilled()
    for _ in range(turns_of_the_loop):
        await asyncio.sleep(0)
    cancelled.cancel()
    await asyncio.gather(cancelled, return_exceptions=True)
    await asyncio.wait_for(next_one, 5.0)
    assert (queue.num_waiting, queue.num_in_hand) == (0, 0)


async def test_one_that_is_cancelled_and_then_called_upon_in_the_same_turn() -> None:
    queue = HeldQueue()
    in_hand = queue.join(LONG, is_stream=True)
    task, other = asyncio.create_task(_held(queue)), asyncio.create_task(_held(queue))
    await eventually(lambda: queue.num_waiting == 2)
    task.cancel()
    in_hand.prefilled()
    await asyncio.wait_for(other, 5.0)
    assert (queue.num_waiting, queue.num_in_hand) == (0, 0)


async def test_against_a_sorted_list() -> None:
    """At every moment the least key waits least, and what is in hand is one, or fits one step."""
    rng = seeded("held queue")
    clock = ManualClock(1_000.0)
    queue = HeldQueue(clock=clock)
    numbers = itertools.count()
    waiting: list[tuple[float, int, float, Turn]] = []
    in_hand: dict[int, tuple[float, Turn]] = {}

    def send_on() -> None:
        waiting.sort()
        while waiting:
            _, number, prefill_s, turn = waiting[0]
            if in_hand and sum(other for other, _ in in_hand.values()) + prefill_s > HELD_BATCH_S + 1e-9:
                return
            waiting.pop(0)
            in_hand[number] = (prefill_s, turn)

    for _ in range(3_000):
        clock.now += rng.expovariate(2.0)
        action = rng.random()
        if action < 0.5:
            prefill_s = round(rng.choice([rng.uniform(0, 0.03), rng.uniform(0, 3)]), 4)
            turn = queue.join(prefill_s, is_stream=True)
            waiting.append((order_key(prefill_s, clock.now), next(numbers), prefill_s, turn))
        elif action < 0.9 and in_hand:
            in_hand.pop(rng.choice(list(in_hand)))[1].prefilled()
        elif waiting:
            waiting.pop(rng.randrange(len(waiting)))[3].prefilled()
        send_on()
        assert all(_may_go(turn) for _, turn in in_hand.values())
        assert not any(_may_go(each[3]) for each in waiting)
        assert (queue.num_waiting, queue.num_in_hand) == (len(waiting), len(in_hand))
    for turn in [*(each[3] for each in waiting), *(each[1] for each in in_hand.values())]:
        turn.prefilled()
    assert (queue.num_waiting, queue.num_in_hand, queue.ahead_s) == (0, 0, 0)


def _mean_wait(rng: random.Random, order: str) -> float:
    """Of jobs on one server: a tenth of them long, at four fifths of its time."""
    jobs = [(arrival, 4.0 if rng.random() < 0.1 else 0.1) for arrival in _arrivals(rng, 4_000, mean_s=0.6)]
    now, total = 0.0, 0.0
    waiting: list[tuple[float, float]] = []
    while jobs or waiting:
        while jobs and (jobs[0][0] <= now or not waiting):
            waiting.append(jobs.pop(0))
        now = max(now, min(arrival for arrival, _ in waiting))
        ready = [job for job in waiting if job[0] <= now]
        job = min(ready, key=lambda job: order_key(job[1], job[0]) if order == "held" else job[0])
        waiting.remove(job)
        total += now - job[0]
        now += job[1]
    return total / 4_000


def _arrivals(rng: random.Random, count: int, *, mean_s: float) -> list[float]:
    return list(itertools.accumulate(rng.expovariate(1 / mean_s) for _ in range(count)))


def test_the_order_is_worth_having() -> None:
    seed = 5
    held, in_order = (_mean_wait(random.Random(seed), order) for order in ("held", "fifo"))
    assert held < 0.7 * in_order
