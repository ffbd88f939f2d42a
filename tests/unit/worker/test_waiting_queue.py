"""Which of the requests that wait goes next, as blocks come and go and time passes."""

from __future__ import annotations

from itertools import pairwise
from random import Random

import pytest

from prefixcache.routing.order import Order, order_key
from tests.support.requests import generate
from tests.support.seeds import seeded
from worker import waiting_queue
from worker.block_pool import BlockPool
from worker.reuse import find_blocks
from worker.runner import RunnerLimits
from worker.sequence import Sequence
from worker.waiting_queue import WaitingQueue

BLOCK = 4
RATE = 100.0
LIMITS = RunnerLimits(
    block_size=BLOCK, num_blocks=1_000, max_model_len=4_000, vocab_size=1_000_000, kv_bytes_per_token=1
)


class World:
    """A queue beside a pool whose blocks are filled and evicted by hand."""

    def __init__(self, num_blocks: int = 64, order: Order = "mean") -> None:
        self.pool = BlockPool(num_blocks, stride=1)
        self.queue = WaitingQueue(self.pool, block_size=BLOCK, order=order)

    def add(self, name: str, prompt: list[int], *, arrived_at: float = 0.0, waited_s: float = 0.0) -> Sequence:
        sequence = sequence_of(name, prompt, arrived_at=arrived_at, waited_s=waited_s)
        self.queue.add(sequence)
        return sequence

    def fill(self, prompt: list[int]) -> None:
        """As if a request had computed the prompt and ended."""
        sequence = sequence_of("filler", prompt)
        table: list[int] = []
        for position in range(len(prompt) // BLOCK):
            value, content = sequence.block_hash(position), sequence.block_content(position)
            found = self.pool.find(table[-1] if table else None, value=value, token_ids=content, root=sequence.root)
            if found is not None:
                self.pool.hold([found])
                table.append(found)
                continue
            table += self.pool.allocate(1) or []
            self.pool.register(table, position, value=value, token_ids=content, root=sequence.root)
        self.pool.release(table)

    def evict(self, count: int) -> None:
        """As if a request had needed room and failed."""
        taken = self.pool.allocate(self.pool.num_free + count)
        assert taken is not None
        self.pool.release(taken)

    def names(self, now: float = 0.0, rate: float | None = RATE) -> list[str]:
        return [candidate.sequence.id for candidate in self.queue.in_order(now=now, prefill_rate=rate)]

    def uncached(self) -> dict[str, int]:
        candidates = self.queue.in_order(now=0.0, prefill_rate=RATE)
        return {candidate.sequence.id: candidate.num_uncached_tokens for candidate in candidates}


def sequence_of(name: str, prompt: list[int], *, arrived_at: float = 0.0, waited_s: float = 0.0) -> Sequence:
    return Sequence("owner", generate(name, prompt, waited_s=waited_s), LIMITS, arrived_at=arrived_at)


def numbers(first: int, count: int) -> list[int]:
    return list(range(first, first + count))


def test_the_shortest_goes_first_and_equals_as_they_came() -> None:
    world = World()
    for name, length in (("a", 40), ("b", 20), ("c", 40), ("d", 7)):
        world.add(name, numbers(1_000 * ord(name), length))
    assert world.names() == ["d", "b", "a", "c"]
    assert [sequence.id for sequence in world.queue] == ["a", "b", "c", "d"]


def test_ten_seconds_of_waiting_make_up_for_three_of_prefill() -> None:
    world = World()
    world.add("long", numbers(0, 100), arrived_at=0.0)
    world.add("short", numbers(1_000, 10), arrived_at=2.9)
    assert world.names(now=3.0) == ["short", "long"]
    world.add("later", numbers(2_000, 10), arrived_at=3.1)
    assert world.names(now=4.0) == ["short", "long", "later"]


def test_the_time_at_the_proxy_counts() -> None:
    world = World()
    world.add("short", numbers(0, 10))
    world.add("long", numbers(1_000, 100), waited_s=9.1)
    assert world.names() == ["long", "short"]


def test_by_the_tail_order_the_ratio_decides() -> None:
    world = World(order="tail")
    world.add("long", numbers(0, 400), arrived_at=0.0)
    world.add("short", numbers(1_000, 4), arrived_at=9.0)
    assert world.names(now=10.0) == ["long", "short"], "10 s for 4 s against 1 s for 0.04 s"
    assert world.names(now=9.2) == ["long", "short"]
    assert World(order="mean").queue.key(sequence_of("x", [1]), 50, now=0.0, prefill_rate=RATE) == 0.5


def test_a_rate_that_was_not_measured_keeps_the_order() -> None:
    world = World()
    world.add("a", numbers(0, 40))
    world.add("b", numbers(1_000, 20))
    assert world.names(rate=None) == ["b", "a"]


def test_what_is_cached_counts_for_nothing_and_the_last_token_never_is() -> None:
    world = World()
    world.fill(numbers(0, 40))
    world.add("equal", numbers(0, 40))
    world.add("longer", [*numbers(0, 40), *numbers(500, 8)])
    world.add("other", numbers(900, 6))
    assert world.uncached() == {"equal": 4, "longer": 8, "other": 6}
    assert world.names() == ["equal", "other", "longer"]
    assert world.queue.num_uncached_tokens == 4 + 8 + 6


def test_prefixes_are_followed_as_they_grow_and_shrink() -> None:
    world = World(num_blocks=16)
    world.add("a", numbers(0, 40))
    assert world.uncached() == {"a": 40}
    world.fill(numbers(0, 24))
    assert world.uncached() == {"a": 16}
    world.evict(2)
    assert world.uncached() == {"a": 24}
    world.fill(numbers(500, 64))
    assert world.uncached() == {"a": 40}


def test_a_preempted_one_goes_first_and_the_oldest_before_the_others() -> None:
    world = World()
    new = world.add("new", [1])
    older, newer = sequence_of("older", numbers(0, 50)), sequence_of("newer", numbers(100, 30))
    world.queue.put_back(newer)
    world.queue.put_back(older)
    assert world.names(now=1e6) == ["older", "newer", "new"]
    assert [candidate.has_begun for candidate in world.queue.in_order(now=0, prefill_rate=None)] == [
        True,
        True,
        False,
    ]
    assert [*world.queue] == [older, newer, new]
    for sequence in (older, new, newer):
        world.queue.remove(sequence)
    assert len(world.queue) == 0
    assert world.queue.num_uncached_tokens == 0


def test_one_that_was_cut_waits_by_the_order_behind_what_is_left_of_it() -> None:
    world = World(num_blocks=16)
    cut = sequence_of("cut", numbers(0, 60))
    world.fill(numbers(0, 40))
    world.queue.put_back_cut(cut, 10)
    assert (world.queue.num_uncached_tokens, world.queue.cut_tokens) == (20, [20])
    world.add("longer", numbers(1_000, 21))
    world.add("shorter", numbers(2_000, 19))
    assert world.names() == ["shorter", "cut", "longer"]
    candidates = world.queue.in_order(now=0.0, prefill_rate=RATE)
    assert [candidate.has_begun for candidate in candidates] == [False, True, False]
    world.evict(4)
    assert world.names() == ["shorter", "longer", "cut"]
    assert (world.queue.num_uncached_tokens, world.queue.cut_tokens) == (19 + 21 + 36, [36])
    assert len(world.queue) == 3 and cut in list(world.queue)
    world.queue.remove(cut)
    assert (world.queue.num_uncached_tokens, world.queue.cut_tokens) == (19 + 21, [])


def test_steps_without_a_choice_go_on_with_a_walk_and_begin_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else a long prompt that is cached is taken for a long prefill at the next choice."""
    monkeypatch.setattr(waiting_queue, "MOST_WALKED_BLOCKS", 8)
    world = World()
    world.fill(numbers(0, 80))
    world.add("long", numbers(0, 81))
    for uncached in (49, 17, 1):
        world.queue.go_on_walking()
        assert world.queue.num_uncached_tokens == uncached
    assert world.uncached() == {"long": 1}
    world.evict(2)
    world.queue.go_on_walking()
    assert world.queue.num_uncached_tokens == 1
    assert world.uncached() == {"long": 9}


def test_one_choice_walks_so_far_and_the_next_ones_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(waiting_queue, "MOST_WALKED_BLOCKS", 8)
    world = World()
    world.fill(numbers(0, 80))
    for name in "abc":
        world.add(name, [*numbers(0, 80), ord(name)])
    lengths = [world.uncached() for _ in range(9)]
    assert lengths[0] == {"a": 81 - 8 * BLOCK, "b": 81, "c": 81}
    assert lengths[-1] == {"a": 1, "b": 1, "c": 1}
    for before, after in pairwise(lengths):
        assert 0 <= sum(before.values()) - sum(after.values()) <= 8 * BLOCK


def test_nothing_is_looked_up_while_the_pool_stays_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World()
    world.fill(numbers(0, 80))
    world.add("a", numbers(0, 81))
    before = world.uncached()
    monkeypatch.setattr(world.pool, "is_findable", lambda value: pytest.fail("looked up again"))
    assert world.uncached() == before


def test_the_order_is_that_of_walking_every_chain_anew() -> None:
    random = seeded("waiting queue")
    for order in ("mean", "tail"):
        _compare_with_walking(random, order)


def _compare_with_walking(random: Random, order: Order) -> None:
    world, waiting, now = World(num_blocks=24, order=order), list[Sequence](), 0.0
    for number in range(400):
        now += random.random()
        action = random.random()
        if action < 0.4:
            waiting.append(world.add(str(number), prompt_of(random), arrived_at=now, waited_s=5 * random.random()))
        elif action < 0.6 and waiting:
            world.queue.remove(waiting.pop(random.randrange(len(waiting))))
        elif action < 0.85:
            world.fill(prompt_of(random))
        else:
            world.evict(random.randrange(1, 1 + min(world.pool.num_idle, 5)) if world.pool.num_idle else 0)
        expected = {sequence.id: walked(world.pool, sequence) for sequence in waiting}
        candidates = world.queue.in_order(now=now, prefill_rate=RATE)
        assert {candidate.sequence.id: candidate.num_uncached_tokens for candidate in candidates} == expected
        assert world.queue.num_uncached_tokens == sum(expected.values())
        keys = [
            order_key(
                order,
                prefill_s=expected[candidate.sequence.id] / RATE,
                waited_s=now - candidate.sequence.waiting_since,
            )
            for candidate in candidates
        ]
        assert keys == sorted(keys) == pytest.approx([candidate.key for candidate in candidates])


def prompt_of(random: Random) -> list[int]:
    """One of a few conversations, cut anywhere."""
    return numbers(1_000 * random.randrange(4), random.randrange(1, 60))


def walked(pool: BlockPool, sequence: Sequence) -> int:
    """Uncached tokens by finding block after block from the first one."""
    return sequence.num_tokens - len(find_blocks(pool, sequence)) * BLOCK
