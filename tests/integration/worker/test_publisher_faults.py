"""What a worker claims on a real server after each fault is exactly what its pool holds, under ids never used before.

Each test serves random prompts on a small pool while the fault happens, so that batches with stored and removed blocks
are under way, and waits afterwards until claims and pool are equal.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from random import Random

import pytest

from prefixcache.errors import IndexUnavailable, IntegrityError
from prefixcache.store import RedisStore
from tests.support.own_server import OwnServer, binary_of
from tests.support.redis_relay import redis_relay
from tests.support.relay import relay_to
from tests.support.requests import generate
from tests.support.scripted_runner import ScriptedRunner
from tests.support.seeds import seeded
from tests.support.stream_client import StreamClient, connected
from tests.support.valkey import Server
from tests.support.waiting import eventually
from tests.support.worker_harness import RunningWorker, running_worker

NUM_BLOCKS = 128
"""32 index blocks; the prompts of a test fill it several times."""


@dataclass(slots=True, kw_only=True)
class World:
    """A worker under load, and a connection of the test's own to look at the index."""

    running: RunningWorker
    client: StreamClient
    store: RedisStore
    random: Random
    num_served: int = 0
    incarnations: list[int] = field(default_factory=list)
    """Every one seen, in order."""

    async def serve(self, num_requests: int) -> None:
        """Random prompts of a few families, one after the other."""
        for _ in range(num_requests):
            self.num_served += 1
            name, length = f"r{self.num_served}", self.random.randrange(64, 900)
            family = self.random.randrange(12) * 400
            self.client.send(generate(name, [(family + token) % 5_000 for token in range(length)], max_tokens=1))
            await self.client.ended(name)
            self.note_incarnation()

    def note_incarnation(self) -> int:
        incarnation = self.running.record.incarnation
        if not self.incarnations or incarnation != self.incarnations[-1]:
            assert not self.incarnations or incarnation > self.incarnations[-1], "an id was given twice"
            self.incarnations.append(incarnation)
        return incarnation

    async def agrees(self) -> bool:
        """Whether the claims of the worker's present incarnation are exactly the index blocks of its pool."""
        incarnation, held = self.note_incarnation(), self.running.engine.index_changes.held()
        index = self.store.index(self.running.record.namespace)
        try:
            for block in held:
                if (await index.match([block])).depths.get(incarnation) != 1:
                    return False
            # All of the pool is claimed: with no more claims than that, nothing else is.
            await index.check_integrity({incarnation: len(held)})
        except (IndexUnavailable, IntegrityError):
            return False
        return incarnation == self.running.record.incarnation

    async def settled(self, timeout_s: float = 15.0) -> None:
        await eventually(self.agrees, timeout_s)
        incarnation, held = self.note_incarnation(), self.running.engine.index_changes.held()
        await self.store.index(self.running.record.namespace).check_integrity({incarnation: len(held)})

    async def another_incarnation_than(self, before: int) -> None:
        await eventually(lambda: self.note_incarnation() != before, 10.0)

    async def batches_flow(self) -> None:
        """Serves until a further batch was answered."""
        published = self.running.worker.metrics.published_hashes.labels("removed")
        before = published._value.get()
        while published._value.get() == before:
            await self.serve(1)


@asynccontextmanager
async def world(url: str, *, through: str | None = None, index_check_s: float = 60.0) -> AsyncIterator[World]:
    """A worker on the server at `url`, reached over `through` where that is given."""
    random = seeded("publisher faults")
    async with RedisStore.open(url, match_deadline_s=1.0) as store, RedisStore.open(through or url) as workers:
        runner = ScriptedRunner(num_blocks=NUM_BLOCKS, vocab_size=5_000)
        async with (
            running_worker(runner, store=workers, index_check_s=index_check_s) as running,
            connected(running.address, namespace=running.record.namespace) as client,
        ):
            made = World(running=running, client=client, store=store, random=random)
            await made.batches_flow()
            await made.settled()
            yield made
        left = await store.index(running.record.namespace).match(list(running.engine.index_changes.held()))
        assert running.record.incarnation not in left.depths, "a worker that ended claims nothing"


@pytest.fixture(params=["valkey", "redis"])
def binary(request: pytest.FixtureRequest) -> Path:
    found = binary_of(request.param)
    if found is None:
        pytest.skip(f"no {request.param} server on this machine")
    return found


@asynccontextmanager
async def own_server(binary: Path, folder: Path, *, is_durable: bool = False) -> AsyncIterator[OwnServer]:
    server = OwnServer(binary, folder, is_durable=is_durable)
    await server.start()
    try:
        yield server
    finally:
        server.stop()


async def command(server: OwnServer, *words: str) -> None:
    reader, writer = await asyncio.open_unix_connection(str(server.path))
    writer.write(" ".join(words).encode() + b"\r\n")
    assert (await reader.readline()).startswith(b"+OK")
    writer.close()


# --- a server that loses its content, or its time -----------------------------------------------------------


async def test_a_server_that_was_killed_and_comes_back_empty(binary: Path, tmp_path: Path) -> None:
    async with own_server(binary, tmp_path) as server, world(server.url) as made:
        server.kill()
        await made.serve(20)
        await server.start()
        await made.batches_flow()
        await made.settled()
        assert len(made.incarnations) == 2


async def test_a_server_that_was_killed_and_comes_back_with_everything(binary: Path, tmp_path: Path) -> None:
    async with own_server(binary, tmp_path, is_durable=True) as server, world(server.url) as made:
        for _ in range(2):
            await made.batches_flow()
            server.kill()
            await made.serve(20)
            await server.start()
            await made.batches_flow()
            await made.settled()
        assert len(made.incarnations) == 1, "nothing was lost, so nothing is announced again"


@pytest.mark.parametrize("is_idle", [False, True], ids=["busy", "idle"])
async def test_a_server_that_comes_back_with_an_older_copy(binary: Path, tmp_path: Path, is_idle: bool) -> None:
    """Its last batch number is below the one that it acknowledged; an idle worker finds out by asking."""
    async with own_server(binary, tmp_path) as server, world(server.url, index_check_s=0.5) as made:
        await command(server, "SAVE")
        await made.batches_flow()
        await made.settled()
        server.kill()
        await server.start()
        if not is_idle:
            await made.batches_flow()
        await made.another_incarnation_than(made.incarnations[0])
        await made.settled()
        assert len(made.incarnations) == 2


async def test_everything_is_flushed_again_and_again(any_server: Server) -> None:
    async with world(any_server.url) as made:
        for number in range(1, 4):
            any_server.flush()
            await made.another_incarnation_than(made.incarnations[-1])
            assert len(made.incarnations) == number + 1
            await made.serve(made.random.randrange(10))
        await made.settled()


async def test_a_server_that_stands_still_for_ten_seconds(any_server: Server) -> None:
    """Longer than a lease: the batch that it had in its socket and every resend of it count once."""
    async with world(any_server.url) as made:
        with any_server.paused():
            failures = made.running.worker.metrics.publish_failures
            until = asyncio.get_running_loop().time() + 10.0
            while asyncio.get_running_loop().time() < until:
                await made.serve(1)
                await asyncio.sleep(0.05)
            assert failures._value.get() >= 3
        await made.settled()
        await made.batches_flow()
        await made.settled()
        assert len(made.incarnations) == 1, "an expired lease comes back"


async def test_scripts_that_the_server_forgot(any_server: Server) -> None:
    async with world(any_server.url) as made:
        for _ in range(5):
            any_server.command("SCRIPT", "FLUSH")
            await made.batches_flow()
        await made.settled()
        assert len(made.incarnations) == 1
        assert made.running.worker.metrics.publish_failures._value.get() == 0


# --- a network that cuts and delays -------------------------------------------------------------------------


async def test_replies_that_are_cut_in_the_middle(any_server: Server) -> None:
    async with redis_relay(any_server.url) as relay:
        through = f"redis://127.0.0.1:{relay.port}"
        async with world(any_server.url, through=through) as made:
            for cut_after in (0, 1, 3, 5, 9, 17, 30):
                relay.cut_after_bytes = cut_after
                await made.serve(2)
                await eventually(lambda: relay.cut_after_bytes is None)
            await made.batches_flow()
            await made.settled()
            assert len(made.incarnations) == 1, "a batch sent again is answered as old"


@pytest.mark.parametrize("is_flushed", [False, True], ids=["successor", "new incarnation"])
async def test_a_batch_that_arrives_after_its_successor_changes_nothing(any_server: Server, is_flushed: bool) -> None:
    """
    worker ── batch n ──► held in the network ─ ─ ─ ─ ─ ─ ─ ─ ─ ─ ─ ─ ─ ─ ─► server: old, or dead
           ── batch n again, on another connection ──► ok
           ── batch n + 1, which removes what n stored ──► ok
    """
    refusal = b"dead" if is_flushed else b"old"
    path = any_server.url.removeprefix("unix://")
    async with relay_to(path) as relay, world(any_server.url, through=f"redis://{relay.address}") as made:
        for _ in range(20):  # As often a renewal is held in place of a batch.
            with relay.holding():
                await made.serve(3)
                await eventually(lambda: relay.num_held > 0)
                if is_flushed:
                    any_server.flush()
                    await made.another_incarnation_than(made.incarnations[-1])
                await made.batches_flow()
                await made.settled()
            await eventually(lambda: relay.num_held == 0)
            await made.settled()
            if any(refusal in reply for reply in relay.late_replies):
                break
        else:
            pytest.fail(f"no held batch was refused: {relay.late_replies}")
        await made.batches_flow()
        await made.settled()
