"""Long random histories on a server and in memory at once, growth far beyond the first round, and lost claims."""

from __future__ import annotations

import random
from collections.abc import Awaitable, Callable

import pytest

from prefixcache.limits import MAX_APPLY_HASHES
from tests.integration.index.worlds import KEYS, RedisWorld, redis_world
from tests.support.index_forest import CHAINS
from tests.support.index_history import ENGINES, KEEPERS, PROXY_IDS, History, Verb, Writer
from tests.support.index_worlds import MemoryWorld
from tests.support.seeds import seeded
from tests.support.valkey import Server

LEASE_S = 100_000.0
NUM_STEPS = 700


class Player:
    """Chooses the next step of a history and its arguments."""

    def __init__(self, rand: random.Random, history: History) -> None:
        self.rand = rand
        self.history = history
        self.weights: dict[Callable[[], Awaitable[None]], float] = {
            self.store: 40,
            self.evict: 20,
            self.all_do_the_same: 2,
            self.resend: 6,
            self.skip_a_batch: 3,
            self.lapse: 6,
            self.renew: 8,
            self.restart: 3,
            self.flush: 0.3,
            self.let_pass: 3,
            self.sweep: 4,
            self.commit: 20,
            self.exchange_loads: 4,
            self.claim: 30,
            self.begin_engine_anew: 1,
            self.renew_engines: 4,
            self.lapse_engine: 2,
        }

    async def play(self, num_steps: int) -> None:
        await self.history.begin()
        for _ in range(num_steps):
            await self.rand.choices(list(self.weights), list(self.weights.values()))[0]()
        await self.history.end()

    def writer(self) -> Writer:
        return self.rand.choice(self.history.writers)

    def piece(self) -> list[int]:
        chain = self.rand.choice(CHAINS)
        return chain[: self.rand.randrange(len(chain) + 1)]

    async def store(self) -> None:
        most = self.rand.choice((1, 7, 64, MAX_APPLY_HASHES))
        await self.history.store(self.writer(), self.piece(), most, self.rand.choice((0, 1, 2, 1_000)))

    async def evict(self) -> None:
        chain = self.rand.choice(CHAINS)
        depth, most = self.rand.randrange(len(chain)), self.rand.choice((1, 7, 64, MAX_APPLY_HASHES))
        await self.history.evict(self.writer(), chain, depth, most, self.rand.choice((0, 1, 2, 1_000)))

    async def all_do_the_same(self) -> None:
        count, is_held = self.rand.randint(1, len(self.history.writers)), self.rand.random() < 0.6
        await self.history.all_do_the_same(count, self.rand.choice(CHAINS), is_held=is_held)

    async def resend(self) -> None:
        await self.history.resend(self.writer(), self.rand.randint(0, 5), self.piece())

    async def skip_a_batch(self) -> None:
        await self.history.skip_a_batch(self.writer(), self.rand.randint(2, 5), self.piece())

    async def lapse(self) -> None:
        await self.history.lapse(self.writer(), self.piece())

    async def renew(self) -> None:
        await self.history.renew(self.writer(), self.piece())

    async def restart(self) -> None:
        await self.history.restart(self.writer(), self.piece())

    async def flush(self) -> None:
        await self.history.flush(self.piece())

    async def let_pass(self) -> None:
        await self.history.let_pass(self.rand.randint(1, 4))

    async def sweep(self) -> None:
        await self.history.sweep(self.rand.randrange(len(KEEPERS)))

    async def commit(self) -> None:
        verbs: tuple[Verb, ...] = ("place", "place", "settle", "release")
        request, proxy = self.rand.randrange(6), self.rand.randrange(len(PROXY_IDS))
        await self.history.commit(self.rand.choice(verbs), request, self.writer(), self.piece(), proxy)

    async def exchange_loads(self) -> None:
        told = [(self.rand.randint(0, len(PROXY_IDS)), self.writer(), self.rand.randint(-3, 3)) for _ in range(10)]
        await self.history.exchange_loads(told, self.piece())

    async def claim(self) -> None:
        engine, proxy = self.rand.choice(ENGINES), self.rand.randrange(len(PROXY_IDS))
        await self.history.claim(engine, self.piece(), proxy)

    async def begin_engine_anew(self) -> None:
        proxies = [self.rand.randrange(len(PROXY_IDS)) for _ in range(self.rand.randint(1, 3))]
        await self.history.begin_anew(self.rand.choice(ENGINES), self.piece(), proxies)

    async def renew_engines(self) -> None:
        await self.history.renew_engines([engine for engine in ENGINES if self.rand.random() < 0.5], self.piece())

    async def lapse_engine(self) -> None:
        await self.history.lapse_engine(self.rand.choice(ENGINES), self.piece())


@pytest.mark.parametrize("num_writers", [8, 40, 64])
async def test_server_answers_as_memory(any_server: Server, num_writers: int) -> None:
    rand = seeded(f"{num_writers} writers")
    async with (
        redis_world(any_server, lease_s=LEASE_S, fields_per_bucket=2) as one,
        redis_world(any_server, lease_s=LEASE_S, fields_per_bucket=2) as two,
    ):
        await Player(rand, History(MemoryWorld(lease_s=LEASE_S), (one, two), num_writers)).play(NUM_STEPS)


async def test_buckets_divide_far_beyond_the_first_round(any_server: Server) -> None:
    """12,000 blocks at 16 a bucket: k goes from 8 to 9, and no claim is lost or found twice on the way."""
    rand = seeded("growth")
    async with redis_world(any_server, fields_per_bucket=16) as real:
        index = real.index
        one, two = (await index.register()).incarnation, (await index.register()).incarnation
        blocks = [rand.getrandbits(64) for _ in range(12_000)]
        batches = [blocks[start : start + MAX_APPLY_HASHES] for start in range(0, len(blocks), MAX_APPLY_HASHES)]
        for batch, some in enumerate(batches, start=1):
            await index.apply(one, batch, some, [])
            await index.apply(two, batch, some[:1], [])
            chain = [*some, *batches[max(batch - 3, 0)]]
            assert (await index.match(chain)).depths == {one: len(chain), two: 1}
        await index.check_integrity({one: len(blocks), two: len(batches)})
        assert any_server.command("HMGET", KEYS.meta, "k", "split") == b"*2\r\n$1\r\n9\r\n$3\r\n238\r\n"
        for batch, some in enumerate(batches, start=1 + len(batches)):
            await index.apply(one, batch, [], some)
        assert (await index.match(batches[0])).depths == {two: 1}


# --- claims that were lost


def steps_after(depth: int) -> int:
    """Most blocks between a probe at or before `depth` and the next one."""
    return max(32, depth // 8)


async def hold(world: RedisWorld, blocks: list[int]) -> int:
    incarnation = (await world.index.register()).incarnation
    for batch, start in enumerate(range(0, len(blocks), MAX_APPLY_HASHES), start=1):
        await world.index.apply(incarnation, batch, blocks[start : start + MAX_APPLY_HASHES], [])
    return incarnation


@pytest.mark.parametrize("num_blocks", [5, 33, 130, 1_500])
async def test_lost_claims_never_deepen_a_match_nor_cost_what_lies_before_them(
    any_server: Server, num_blocks: int
) -> None:
    """The answer is a block that is held, at or beyond the unbroken run from the root."""
    rand = seeded(f"lost claims in {num_blocks}")
    chain = [rand.getrandbits(64) for _ in range(num_blocks)]
    async with redis_world(any_server) as world:
        held: dict[int, set[int]] = {}
        for _ in range(20):
            depth = rand.randint(1, num_blocks)
            lost = set(rand.choices(range(depth), k=rand.choice((1, 3, depth))))
            numbers = [number for number in range(depth) if number not in lost]
            held[await hold(world, [chain[number] for number in numbers])] = set(numbers)
            depths = (await world.index.match(chain)).depths
            for incarnation, numbers_held in held.items():
                unbroken = next(number for number in range(num_blocks + 1) if number not in numbers_held)
                found = depths.get(incarnation, 0)
                assert unbroken <= found
                assert found == 0 or found - 1 in numbers_held


@pytest.mark.parametrize("num_blocks", [5, 33, 130, 1_500])
async def test_one_lost_claim_costs_one_step_of_the_search_at_most(any_server: Server, num_blocks: int) -> None:
    """And nothing if a probe behind it is held, which is always so unless it lies in one of the last two steps."""
    rand = seeded(f"one lost claim in {num_blocks}")
    chain = [rand.getrandbits(64) for _ in range(num_blocks)]
    async with redis_world(any_server) as world:
        for _ in range(20):
            depth = rand.randint(2, num_blocks)
            lost = rand.randrange(depth - 1)
            incarnation = await hold(world, chain[:lost] + chain[lost + 1 : depth])
            found = (await world.index.match(chain)).depths[incarnation]
            assert depth - steps_after(depth) <= found <= depth
            if depth - lost > 2 * steps_after(depth):
                assert found == depth
            await world.index.retire(incarnation)


async def test_two_probes_in_a_row_without_a_live_holder_end_the_search(any_server: Server) -> None:
    """Blocks 0, 1, 3, 7, 15 ... are probed: what lies behind two lost ones of these is not found, behind one it is."""
    chain = list(range(1, 41))
    async with redis_world(any_server) as world:
        one = await hold(world, [block for number, block in enumerate(chain) if number != 3])
        two = await hold(world, [block for number, block in enumerate(chain) if number not in (3, 7)])
        assert (await world.index.match(chain)).depths == {one: 40, two: 40}  # each sees by the other's light
        await world.index.retire(one)
        assert (await world.index.match(chain)).depths == {two: 3}
