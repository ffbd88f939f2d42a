"""Redis that is slow, silent, full, locked or gone: every call ends in time, and no call gets another's reply."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from prefixcache.errors import IndexUnavailable
from prefixcache.index import redis_client
from prefixcache.index.redis_client import RedisClient
from prefixcache.limits import INDEX_CONNECTIONS, INDEX_DEADLINE_S, INDEX_WRITE_TIMEOUT_S
from prefixcache.load import ProxyLoad, WorkerLoad
from tests.integration.index.worlds import KEYS, redis_world
from tests.support.index_commits import PROXY_ONE, commit_of
from tests.support.seeds import seeded
from tests.support.valkey import Server
from tests.support.waiting import eventually

PATIENT_S = 5.0
WORKER_LOAD = WorkerLoad(
    version=1, rest_s=1.0, prefill_rate=1.0, inter_token_latency_s=0.0, available_blocks=1, oldest_age_s=0.0
)


@asynccontextmanager
async def connected(url: str) -> AsyncIterator[RedisClient]:
    client = RedisClient(url)
    try:
        yield client
    finally:
        await client.aclose()


@pytest.fixture
async def client(any_server: Server) -> AsyncIterator[RedisClient]:
    async with connected(any_server.url) as client:
        yield client


async def echo(client: RedisClient, number: int, deadline_s: float = PATIENT_S) -> None:
    """Fails if the reply is not one's own."""
    word = b"%08d" % number
    assert await client.command("ECHO", word, deadline_s=deadline_s) == word


async def every_slot_answers(client: RedisClient) -> None:
    """As many calls as there are connections, at once: none is lost, and none holds an old reply."""
    await asyncio.gather(*(echo(client, number) for number in range(INDEX_CONNECTIONS)))


async def calls_ended() -> None:
    """Also those whose caller stopped waiting: no task but the test's own is left."""
    await eventually(lambda: asyncio.all_tasks() == {asyncio.current_task()})


def num_connections(server: Server) -> int:
    """Of others than the asking one."""
    return server.command("CLIENT", "LIST").count(b"id=") - 1


async def test_silent_server_costs_the_deadline_and_no_reply_is_mixed_up(
    any_server: Server, client: RedisClient
) -> None:
    await every_slot_answers(client)
    with any_server.paused():
        started = time.perf_counter()
        calls = [echo(client, 100 + number, INDEX_DEADLINE_S) for number in range(2 * INDEX_CONNECTIONS)]
        answers = await asyncio.gather(*calls, return_exceptions=True)
        took_s = time.perf_counter() - started
    assert all(isinstance(answer, IndexUnavailable) for answer in answers), answers
    assert took_s < INDEX_WRITE_TIMEOUT_S  # which bounds calls, not callers
    for start in range(0, 400, 40):
        await asyncio.gather(*(echo(client, 1_000 + start + number) for number in range(40)))
    assert num_connections(any_server) <= INDEX_CONNECTIONS


async def test_reply_that_came_while_the_loop_was_busy_is_taken(any_server: Server, client: RedisClient) -> None:
    await every_slot_answers(client)
    call = asyncio.ensure_future(echo(client, 1, INDEX_DEADLINE_S))
    for _ in range(5):
        await asyncio.sleep(0)
    time.sleep(10 * INDEX_DEADLINE_S)  # noqa: ASYNC251  # what holds the loop up is the point
    await call


async def test_late_replies_are_read_and_their_connections_kept(any_server: Server, client: RedisClient) -> None:
    await every_slot_answers(client)
    await eventually(lambda: num_connections(any_server) == INDEX_CONNECTIONS)
    with any_server.paused():
        with pytest.raises(IndexUnavailable, match="30 ms"):
            await echo(client, 1, INDEX_DEADLINE_S)
    await calls_ended()
    await every_slot_answers(client)
    assert num_connections(any_server) == INDEX_CONNECTIONS


async def test_reply_that_never_comes_closes_its_connection(
    any_server: Server, client: RedisClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(redis_client, "INDEX_WRITE_TIMEOUT_S", 0.1)
    await every_slot_answers(client)
    with any_server.paused():
        with pytest.raises(IndexUnavailable):
            await echo(client, 1, INDEX_DEADLINE_S)
        await calls_ended()
    await eventually(lambda: num_connections(any_server) == INDEX_CONNECTIONS - 1)
    for number in range(100):
        await echo(client, number)
    await every_slot_answers(client)


async def test_callers_that_are_cancelled_anywhere_lose_nothing(any_server: Server, client: RedisClient) -> None:
    rand = seeded("cancellation")
    await every_slot_answers(client)
    loop = asyncio.get_running_loop()
    for start in range(0, 600, 60):
        tasks = [loop.create_task(echo(client, start + number)) for number in range(60)]
        for task in tasks:
            if rand.random() < 0.7:
                loop.call_later(rand.uniform(0, 0.004), task.cancel)
                if rand.random() < 0.5:
                    loop.call_later(rand.uniform(0, 0.004), task.cancel)
        for answer in await asyncio.gather(*tasks, return_exceptions=True):
            assert answer is None or isinstance(answer, asyncio.CancelledError | IndexUnavailable), answer
    await calls_ended()
    await every_slot_answers(client)
    assert num_connections(any_server) <= INDEX_CONNECTIONS


@pytest.mark.parametrize("turns", range(4))
async def test_close_ends_every_call_with_an_error(any_server: Server, turns: int) -> None:
    """Those in flight, those that wait for a connection, those not begun, and those that come later."""
    client = RedisClient(any_server.url)
    await every_slot_answers(client)
    with any_server.paused():
        calls = [asyncio.ensure_future(echo(client, number)) for number in range(2 * INDEX_CONNECTIONS)]
        for _ in range(turns):
            await asyncio.sleep(0)
        await client.aclose()
        answers = await asyncio.gather(*calls, return_exceptions=True)
    assert all(isinstance(answer, IndexUnavailable) for answer in answers), answers
    with pytest.raises(IndexUnavailable, match="closed"):
        await echo(client, 1)
    await eventually(lambda: num_connections(any_server) == 0)


async def test_server_that_accepts_and_says_nothing(tmp_path_factory: pytest.TempPathFactory) -> None:
    path = tmp_path_factory.mktemp("s") / "silent"

    async def swallow(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()
        writer.close()

    server = await asyncio.start_unix_server(swallow, path)
    client = RedisClient(f"unix://user:secret@{path}")
    try:
        started = time.perf_counter()
        with pytest.raises(IndexUnavailable):
            await client.command("PING", deadline_s=INDEX_DEADLINE_S)
        assert time.perf_counter() - started < INDEX_WRITE_TIMEOUT_S
    finally:
        await client.aclose()
        server.close()
        await server.wait_closed()


async def test_closed_connections_are_opened_anew(any_server: Server, client: RedisClient) -> None:
    await every_slot_answers(client)
    any_server.command("CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes")
    await eventually(lambda: num_connections(any_server) == 0)
    await every_slot_answers(client)


async def test_forgotten_scripts_are_sent_again(any_server: Server) -> None:
    async with redis_world(any_server) as world:
        one = (await world.index.register()).incarnation
        await world.index.apply(one, 1, [1, 2], [])
        any_server.command("SCRIPT", "FLUSH")
        assert (await world.index.match([1, 2])).depths == {one: 2}
        assert (await world.index.apply(one, 2, [3], [])).status == "ok"


async def test_password_is_asked_for_in_plain_words(any_server: Server) -> None:
    path = any_server.url.removeprefix("unix://")
    any_server.command("ACL", "SETUSER", "reader", "on", ">pass", "+@all", "-set", "~*")
    any_server.command("ACL", "SETUSER", "default", "resetpass", ">word")
    try:
        for url in (f"unix://{path}", f"unix://:wrong@{path}", f"unix://reader:word@{path}"):
            async with connected(url) as client:
                with pytest.raises(IndexUnavailable, match="password") as caught:
                    await client.command("PING", deadline_s=PATIENT_S)
            assert "wrong" not in str(caught.value) and "word@" not in str(caught.value)
        async with connected(f"unix://reader:pass@{path}") as client:
            await echo(client, 1)
            with pytest.raises(IndexUnavailable, match="permission"):
                await client.command("SET", "a", "b", deadline_s=PATIENT_S)
    finally:
        async with connected(f"unix://:word@{path}") as client:
            await client.command("ACL", "DELUSER", "reader", deadline_s=PATIENT_S)
            await client.command("ACL", "SETUSER", "default", "nopass", deadline_s=PATIENT_S)


async def test_tcp_and_database_number(any_server: Server, unused_tcp_port: int) -> None:
    any_server.command("CONFIG", "SET", "port", unused_tcp_port)
    try:
        async with connected(f"redis://127.0.0.1:{unused_tcp_port}/3") as client:
            await client.command("SET", "here", "yes", deadline_s=PATIENT_S)
        assert any_server.command("EXISTS", "here") == b":0\r\n"
        async with connected(f"{any_server.url}?db=3") as client:
            assert await client.command("GET", "here", deadline_s=PATIENT_S) == b"yes"
    finally:
        any_server.command("CONFIG", "SET", "port", 0)


async def test_batch_refused_for_lack_of_memory_leaves_nothing_behind(any_server: Server) -> None:
    async with redis_world(any_server) as world:
        one = (await world.index.register()).incarnation
        assert (await world.index.apply(one, 1, [1], [])).status == "ok"
        any_server.command("CONFIG", "SET", "maxmemory", 1)
        try:
            with pytest.raises(IndexUnavailable, match="maxmemory"):
                await world.index.apply(one, 2, [2, 3], [1])
            assert (await world.index.match([1, 2, 3])).depths == {one: 1}
        finally:
            any_server.command("CONFIG", "SET", "maxmemory", 0)
        assert (await world.index.apply(one, 2, [2, 3], [1])).status == "ok"
        assert (await world.index.match([1, 2, 3])).depths == {one: 3}


async def test_server_without_memory_keeps_its_workers_and_their_load(any_server: Server) -> None:
    """Leases and loads are written all the same: all leases gone at once would be nobody's death."""
    async with redis_world(any_server) as world:
        one = (await world.index.register()).incarnation
        assert (await world.index.apply(one, 1, [1], [])).status == "ok"
        world.expire(one)
        any_server.command("CONFIG", "SET", "maxmemory", 1)
        try:
            assert await world.index.renew(one, WORKER_LOAD)
            own = {one: ProxyLoad(version=1, running=3)}
            loads = await world.index.exchange_loads(PROXY_ONE, own, [one])
            assert loads[one].worker is not None and loads[one].proxies[PROXY_ONE].running == 3
            assert (await world.index.match([1])).depths == {one: 1}
            another = (await world.index.register()).incarnation
            assert await world.index.renew(another)
            await world.index.retire(one)
            assert (await world.index.match([1])).depths == {}
        finally:
            any_server.command("CONFIG", "SET", "maxmemory", 0)


async def test_connections_to_what_became_a_replica_are_made_anew(any_server: Server) -> None:
    """The name may lead to another server by now, which who stays connected never learns."""
    async with connected(any_server.url) as client:
        before = await client.command("CLIENT", "ID", deadline_s=PATIENT_S)
        any_server.command("REPLICAOF", "127.0.0.1", 1)
        try:
            with pytest.raises(IndexUnavailable, match="read only replica"):
                await client.command("SET", "k", "v", deadline_s=PATIENT_S)
            assert await client.command("CLIENT", "ID", deadline_s=PATIENT_S) != before
        finally:
            any_server.command("REPLICAOF", "NO", "ONE")
        await every_slot_answers(client)


async def test_every_key_of_a_script_carries_the_hash_tag(any_server: Server) -> None:
    async with redis_world(any_server, fields_per_bucket=1) as world:
        with any_server.monitored() as commands:
            incarnations = [(await world.index.register()).incarnation for _ in range(14)]
            for incarnation in incarnations:
                await world.index.apply(incarnation, 1, range(1, 10), [])
                await world.index.apply(incarnation, 2, range(0, 2**64, 2**57), range(1, 5))
                assert await world.index.renew(incarnation)
                await world.index.commit(commit_of("place", incarnation, range(1, 10), incarnation))
            family = await world.index.open_family("engine")
            assert await world.index.claim("engine", family.anchor, range(1, 10), capacity=1)
            assert await world.index.families(["engine"], renew=["engine"])
            await world.index.match(range(1, 10), candidates=incarnations[:4])
            await world.index.exchange_loads(PROXY_ONE, {incarnations[0]: ProxyLoad(version=1)}, incarnations)
            await world.index.sweep("keeper")
            await world.index.retire(incarnations[0])
            keys = [words[1] for words in commands() if words[0] != "TIME"]
    assert len(keys) > 1_000
    assert [key for key in keys if not key.startswith(f"{KEYS.base}:")] == []
    kinds = {key.removeprefix(f"{KEYS.base}:").split(":")[0] for key in keys}
    assert kinds == {"meta", "live", "seq", "gen", "n", "b", "h", "l", "p", "keeper"}
