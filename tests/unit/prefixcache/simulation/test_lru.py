"""The simulated cache is the worker's block pool."""

from __future__ import annotations

import random

import pytest

from prefixcache.errors import IntegrityError
from prefixcache.simulation.lru import LruCache, UnpinnedCache
from tests.support.seeds import seeded
from tests.unit.prefixcache.simulation.traces import chains
from worker.block_pool import BlockPool

ROOT = 7


class PoolUser:
    """Uses a block pool as a worker does: match, allocate, register, release."""

    def __init__(self, capacity_blocks: int, clock: list[float]) -> None:
        self.pool = BlockPool(capacity_blocks, stride=4, clock=lambda: clock[0])

    def depth(self, chain: tuple[int, ...], most: int) -> int:
        return len(self._found(chain[:most]))

    def can_hold(self, chain: tuple[int, ...]) -> bool:
        found = self._found(chain)
        return len(chain) - len(found) <= self.pool.num_available - self.pool.count_idle(found)

    def hold(self, chain: tuple[int, ...]) -> list[int]:
        table = self._found(chain)
        self.pool.hold(table)
        taken = self.pool.allocate(len(chain) - len(table))
        assert taken is not None
        table += taken
        for position in range(len(table) - len(taken), len(table)):
            name = chain[position]
            assert self.pool.register(table, position, value=name, token_ids=b"%d" % name, root=ROOT)
        return table

    def release(self, table: list[int]) -> None:
        self.pool.release(table)

    def _found(self, chain: tuple[int, ...]) -> list[int]:
        found: list[int] = []
        for name in chain:
            block = self.pool.find(found[-1] if found else None, value=name, token_ids=b"%d" % name, root=ROOT)
            if block is None:
                break
            found.append(block)
        return found


@pytest.mark.parametrize("most_at_once", [1, 6])
def test_it_holds_what_the_block_pool_holds(most_at_once: int) -> None:
    chance = seeded("lru")
    for _ in range(30):
        _play(chance, most_at_once)


def _play(chance: random.Random, most_at_once: int) -> None:
    """Requests that come and go in any order: depth, room, free blocks and the age of what goes first agree."""
    clock = [0.0]
    capacity = chance.randint(8, 40)
    workload = chains(chance, 40, longest=8)
    lru, user = LruCache(capacity), PoolUser(capacity, clock)
    held: list[tuple[tuple[int, ...], list[int]]] = []
    for _ in range(300):
        clock[0] += 1.0
        chain = chance.choice(workload)
        assert lru.depth(chain, len(chain)) == user.depth(chain, len(chain))
        assert lru.can_hold(chain) == user.can_hold(chain)
        if len(held) < most_at_once and lru.can_hold(chain):
            lru.hold(chain)
            held.append((chain, user.hold(chain)))
        elif held:
            chain, table = held.pop(chance.randrange(len(held)))
            lru.release(chain, clock[0])
            user.release(table)
        assert lru.num_free == user.pool.num_free
        assert lru.num_evictions == user.pool.num_evictions
        assert lru.evicted_next_used_at == user.pool.evicted_next_used_at
        for other in workload:
            assert lru.depth(other, len(other)) == user.depth(other, len(other))


def test_what_is_evicted_is_told_deepest_first() -> None:
    lru = LruCache(5)
    assert lru.hold((1, 2, 3)) == ()
    lru.release((1, 2, 3), 1.0)
    assert lru.hold((1, 4)) == ()
    lru.release((1, 4), 2.0)
    assert lru.evicted_next_used_at == 1.0
    assert lru.hold((5, 6, 7)) == [3, 2]
    assert lru.depth((1, 2, 3), 3) == 1
    assert lru.depth((1, 4), 2) == 2


def test_a_match_is_never_deeper_than_it_may_be() -> None:
    lru = LruCache(8)
    lru.hold((1, 2, 3))
    assert [lru.depth((1, 2, 3), most) for most in range(4)] == [0, 1, 2, 3]
    assert lru.depth((1, 2, 9), 3) == 2


def test_room_is_beside_what_is_in_use() -> None:
    lru = LruCache(5)
    lru.hold((1, 2, 3))
    assert lru.can_hold((4, 5)) and not lru.can_hold((4, 5, 6))
    assert lru.can_hold((1, 2, 3, 4, 5))
    with pytest.raises(IntegrityError, match="6 blocks are in use, 5 is the capacity"):
        lru.hold((4, 5, 6))


def test_a_pool_evicts_what_is_in_use() -> None:
    pool = UnpinnedCache(5)
    assert pool.hold((1, 2, 3)) == ()
    assert pool.can_hold((4, 5, 6, 7))
    assert pool.hold((4, 5, 6, 7)) == [3, 2]
    assert (pool.depth((1, 2, 3), 3), pool.num_free) == (1, 0)
    # Its end is a use, too: the chain is there again.
    pool.release((1, 2, 3), 9.0)
    assert (pool.depth((1, 2, 3), 3), pool.depth((4, 5, 6, 7), 4)) == (3, 2)
    assert not pool.can_hold((1, 2, 3, 4, 5, 6))
