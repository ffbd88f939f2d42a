"""Random histories on Redis and on the dumb truth at once: every answer and every match must be the same."""

from __future__ import annotations

import random

import pytest

from prefixcache.limits import MAX_APPLY_HASHES
from tests.integration.index.worlds import KEYS, redis_world
from tests.support.index_worlds import MemoryWorld, World
from tests.support.seeds import seeded
from tests.support.valkey import Server


class Worker:
    """One writer as both worlds know it; `name` stands for its present incarnation in answers."""

    def __init__(self, name: int) -> None:
        self.name = name
        self.ids: dict[str, int] = {}
        self.batch = 0
        self.held: set[int] = set()


class History:
    """Takes random steps in two worlds and compares what they say."""

    def __init__(self, rand: random.Random, worlds: tuple[World, World], num_workers: int) -> None:
        self.rand = rand
        self.worlds = worlds
        roots = [self.hashes(rand.choice((2, 8, 40))) for _ in range(4)]
        self.chains = [rand.choice(roots) + self.hashes(rand.choice((1, 3, 30, 120))) for _ in range(50)]
        self.workers = [Worker(number) for number in range(num_workers)]
        self.steps = (self.hold_prefix, self.hold_anything, self.resend, self.skip_one, self.lapse, self.renew)

    def hashes(self, number: int) -> list[int]:
        return [self.rand.getrandbits(64) for _ in range(number)]

    async def run(self, num_steps: int) -> None:
        for worker in self.workers:
            await self.register(worker)
        for _ in range(num_steps):
            step = self.rand.choices((*self.steps, self.restart, self.flush), (60, 10, 8, 4, 8, 12, 3, 0.3))[0]
            await step(self.rand.choice(self.workers))
            await self.compare(self.rand.choice(self.chains))

    async def compare(self, chain: list[int]) -> None:
        known = [{worker.ids[world.name]: worker.name for worker in self.workers} for world in self.worlds]
        matches = [await world.index.match(chain) for world in self.worlds]
        first, second = (
            {names[incarnation]: depth for incarnation, depth in match.items()}
            for names, match in zip(known, matches, strict=True)
        )
        assert first == second

    async def register(self, worker: Worker) -> None:
        for world in self.worlds:
            worker.ids[world.name] = (await world.index.register()).incarnation
        worker.batch, worker.held = 0, set()

    async def apply(self, worker: Worker, batch: int, stored: list[int], removed: list[int]) -> str:
        """Sends to both worlds and returns the status they agree on."""
        answers = [await world.index.apply(worker.ids[world.name], batch, stored, removed) for world in self.worlds]
        assert answers[0].status == answers[1].status
        return answers[0].status

    async def become(self, worker: Worker, wanted: set[int]) -> None:
        """Announces the difference between what is held and what shall be, in as many batches as it takes."""
        changes = [(block, block in wanted) for block in wanted ^ worker.held]
        self.rand.shuffle(changes)
        for start in range(0, len(changes), MAX_APPLY_HASHES):
            some = changes[start : start + MAX_APPLY_HASHES]
            stored = [block for block, added in some if added]
            removed = [block for block, added in some if not added]
            worker.batch += 1
            assert await self.apply(worker, worker.batch, stored, removed) == "ok"
        worker.held = wanted

    async def hold_prefix(self, worker: Worker) -> None:
        """As a cache does: leaves come and go."""
        chain = self.rand.choice(self.chains)
        depth = self.rand.randrange(len(chain) + 1)
        await self.become(worker, (worker.held | set(chain[:depth])) - set(chain[depth:]))

    async def hold_anything(self, worker: Worker) -> None:
        """Holes, lost claims, and claims that never were."""
        chain = self.rand.choice(self.chains)
        some = set(self.rand.sample(chain, self.rand.randrange(len(chain) + 1)))
        await self.become(worker, worker.held ^ some)

    async def resend(self, worker: Worker) -> None:
        if worker.batch:
            chain = self.rand.choice(self.chains)
            assert await self.apply(worker, self.rand.randint(1, worker.batch), chain[:3], chain[3:6]) == "old"

    async def skip_one(self, worker: Worker) -> None:
        chain = self.rand.choice(self.chains)
        assert await self.apply(worker, worker.batch + self.rand.randint(2, 5), chain[:3], chain[3:6]) == "gap"

    async def lapse(self, worker: Worker) -> None:
        for world in self.worlds:
            world.expire(worker.ids[world.name])

    async def renew(self, worker: Worker) -> None:
        for world in self.worlds:
            assert await world.index.renew(worker.ids[world.name])

    async def restart(self, worker: Worker) -> None:
        for world in self.worlds:
            await world.index.retire(worker.ids[world.name])
            assert not await world.index.renew(worker.ids[world.name])
        assert await self.apply(worker, worker.batch + 1, self.chains[0][:1], []) == "dead"
        await self.register(worker)

    async def flush(self, _worker: Worker) -> None:
        for world in self.worlds:
            world.flush()
        for worker in self.workers:
            assert await self.apply(worker, worker.batch + 1, self.chains[0][:1], []) == "dead"
            await self.register(worker)


@pytest.mark.parametrize(("num_workers", "num_steps"), [(8, 700), (40, 700)])
async def test_redis_answers_as_memory(any_server: Server, num_workers: int, num_steps: int) -> None:
    rand = seeded(f"{num_workers} workers")
    memory = MemoryWorld(lease_s=3_600)
    async with redis_world(any_server, lease_s=3_600, fields_per_bucket=2) as real:
        await History(rand, (memory, real), num_workers).run(num_steps)
        await memory.index.check_integrity()


async def test_buckets_divide_far_beyond_the_first_round(any_server: Server) -> None:
    """12,000 blocks at four a bucket: k goes from 8 to 11, and no claim is lost or found twice on the way."""
    rand = seeded("growth")
    async with redis_world(any_server, fields_per_bucket=4) as real:
        index = real.index
        one, two = (await index.register()).incarnation, (await index.register()).incarnation
        blocks = [rand.getrandbits(64) for _ in range(12_000)]
        for batch, start in enumerate(range(0, len(blocks), MAX_APPLY_HASHES), start=1):
            some = blocks[start : start + MAX_APPLY_HASHES]
            await index.apply(one, batch, some, [])
            await index.apply(two, batch, some[:1], [])
            number = len(blocks[max(start - 300, 0) : start])
            assert await index.match(blocks[start - number : start + 300]) == {one: number + len(some), two: number + 1}
        await index.check_integrity()
        assert any_server.command("HGET", KEYS.meta, "k") == b"$2\r\n11\r\n"
        for batch, start in enumerate(range(0, len(blocks), MAX_APPLY_HASHES), start=1 + len(blocks) // 256 + 1):
            await index.apply(one, batch, [], blocks[start : start + MAX_APPLY_HASHES])
        assert await index.match(blocks[:300]) == {two: MAX_APPLY_HASHES + 1}
