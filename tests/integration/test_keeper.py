"""The keeper on real servers: dead workers leave nothing behind, the living lose nothing."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable

from prefixcache.index.keys import NamespaceKeys
from prefixcache.keeper import Keeper
from prefixcache.limits import DEAD_AFTER_S, KEEPER_S, MAX_APPLY_HASHES, RECORD_DEAD_AFTER_S, SWEEP_FIELDS
from prefixcache.registry import WorkerRecord
from prefixcache.store import RedisStore
from tests.integration.index.passed_time import let_pass
from tests.support.manual_clock import ManualClock
from tests.support.seeds import seeded
from tests.support.valkey import Server
from tests.support.waiting import eventually
from tests.support.worker_records import worker_record

PREFIX, NAMESPACE, OTHER = "deploy", "0123456789abcdef", "fedcba9876543210"
STEP_S = KEEPER_S - 1


class Deployment:
    """Stored moments and the keeper's clock move together; nobody waits."""

    def __init__(self, server: Server, store: RedisStore) -> None:
        self.server = server
        self.store = store
        self.clock = ManualClock(1_000.0)
        self.keeper = Keeper(store, keeper_id="k1", clock=self.clock)

    async def start(self, worker_id: str, namespace: str, blocks: list[int]) -> WorkerRecord:
        index = self.store.index(namespace)
        incarnation = (await index.register()).incarnation
        for batch, first in enumerate(range(0, len(blocks), MAX_APPLY_HASHES), start=1):
            await index.apply(incarnation, batch, blocks[first : first + MAX_APPLY_HASHES], [])
        record = worker_record(worker_id=worker_id, namespace=namespace, incarnation=incarnation)
        await self.store.registry().announce(record)
        return record

    async def let_pass(self, passed_s: float, living: Iterable[WorkerRecord]) -> None:
        for _ in range(round(passed_s / STEP_S)):
            self.clock.now += STEP_S
            for namespace in (NAMESPACE, OTHER):
                let_pass(self.server, NamespaceKeys(key_prefix=PREFIX, namespace=namespace), STEP_S)
            for record in living:
                assert await self.store.index(record.namespace).renew(record.incarnation)
            await self.keeper.turn()

    def num_claims(self, record: WorkerRecord) -> int:
        keys = NamespaceKeys(key_prefix=PREFIX, namespace=record.namespace)
        reply = self.server.command("HGET", keys.claims_held, record.incarnation)
        return 0 if reply == b"$-1\r\n" else int(reply.split(b"\r\n")[1])


async def test_a_dead_worker_leaves_nothing_behind(any_server: Server) -> None:
    rand = seeded("blocks")
    async with RedisStore.open(any_server.url, key_prefix=PREFIX) as store:
        deployment = Deployment(any_server, store)
        blocks = [rand.getrandbits(64) for _ in range(3 * SWEEP_FIELDS)]
        living = await deployment.start("living", NAMESPACE, blocks[: SWEEP_FIELDS // 2])
        dead = await deployment.start("dead", NAMESPACE, blocks)
        elsewhere = await deployment.start("elsewhere", OTHER, blocks[:100])
        await deployment.keeper.turn()
        await deployment.let_pass(DEAD_AFTER_S, [living])
        assert deployment.num_claims(dead) == len(blocks), "hidden, not dead yet"

        await deployment.let_pass(2 * STEP_S, [living])
        assert [deployment.num_claims(record) for record in (dead, elsewhere)] == [0, 0]
        assert set(await store.registry().workers()) == {living, dead, elsewhere}
        assert (await store.index(NAMESPACE).match(blocks)).depths == {living.incarnation: SWEEP_FIELDS // 2}
        for namespace in (NAMESPACE, OTHER):
            await store.index(namespace).check_integrity()

        await deployment.let_pass(RECORD_DEAD_AFTER_S, [living])
        assert await store.registry().workers() == {living: True}


async def test_a_server_that_stood_still_killed_nobody(any_server: Server) -> None:
    """All leases ended long ago by the server's clock; nobody watched it."""
    async with RedisStore.open(any_server.url, key_prefix=PREFIX) as store:
        deployment = Deployment(any_server, store)
        worker = await deployment.start("w", NAMESPACE, [1, 2, 3])
        await deployment.keeper.turn()
        let_pass(any_server, NamespaceKeys(key_prefix=PREFIX, namespace=NAMESPACE), 10 * DEAD_AFTER_S)
        await deployment.keeper.turn()
        assert await store.index(NAMESPACE).renew(worker.incarnation)
        assert (await store.index(NAMESPACE).match([1, 2, 3])).depths == {worker.incarnation: 3}


async def test_a_retired_worker_is_swept_at_once_after_its_record_is_gone(any_server: Server) -> None:
    async with RedisStore.open(any_server.url, key_prefix=PREFIX) as store:
        deployment = Deployment(any_server, store)
        worker = await deployment.start("w", NAMESPACE, [1, 2, 3])
        await deployment.keeper.turn()
        await store.registry().withdraw(worker)
        await store.index(NAMESPACE).retire(worker.incarnation)
        await deployment.keeper.turn()
        assert deployment.num_claims(worker) == 0
        await store.index(NAMESPACE).check_integrity()


async def test_the_keeper_outlives_an_emptied_and_a_frozen_server(any_server: Server) -> None:
    async with RedisStore.open(any_server.url, key_prefix=PREFIX) as store:
        deployment = Deployment(any_server, store)
        running = asyncio.create_task(Keeper(store, keeper_id="k1").run())
        try:
            worker = await deployment.start("w", NAMESPACE, [1, 2, 3])
            await eventually(lambda: any_server.command("EXISTS", f"{PREFIX}:{{{NAMESPACE}}}:keeper") == b":1\r\n")
            any_server.flush()
            with any_server.paused():
                await asyncio.sleep(0.1)
            again = await deployment.start("w", NAMESPACE, [1, 2, 3])
            assert again.incarnation != worker.incarnation
            await eventually(lambda: any_server.command("EXISTS", f"{PREFIX}:{{{NAMESPACE}}}:keeper") == b":1\r\n")
            assert not running.done()
        finally:
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)
