"""RedisStore: secret and registry, and a server that is not there yet."""

from __future__ import annotations

import asyncio
import logging
import secrets
import traceback
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import msgspec
import pytest

from prefixcache.errors import ConfigError, IndexUnavailable
from prefixcache.index.base import Match
from prefixcache.index.redis_client import RedisClient
from prefixcache.index.redis_registry import RedisRegistry
from prefixcache.registry import Registry, WorkerRecord
from prefixcache.store import RedisStore
from tests.support.index_commits import PROXY_ONE, commit_of
from tests.support.memory_store import MemoryStore
from tests.support.valkey import Server
from tests.support.waiting import eventually

NAMESPACE = "0123456789abcdef"


def record(worker_id: str, incarnation: int, namespace: str = NAMESPACE) -> WorkerRecord:
    return WorkerRecord(
        worker_id=worker_id,
        address="127.0.0.1:1",
        namespace=namespace,
        incarnation=incarnation,
        protocol=(1, 0),
        model="m",
        revision="r",
        served_names=("m", "alias"),
        tokenizer_fingerprint="f" * 64,
        vocab_size=100,
        max_model_len=64,
        stop_token_ids=(1, 2),
        block_size=16,
        stride=4,
        num_blocks=8,
        kv_bytes_per_token=10,
        started_at=1.5,
    )


@asynccontextmanager
async def closing(url: str) -> AsyncIterator[RedisClient]:
    client = RedisClient(url)
    try:
        yield client
    finally:
        await client.aclose()


@pytest.fixture
async def store(any_server: Server) -> AsyncIterator[RedisStore]:
    async with RedisStore.open(any_server.url, key_prefix="deploy", match_deadline_s=1.0) as store:
        yield store


@pytest.fixture(params=["memory", "redis"])
async def any_store(request: pytest.FixtureRequest, valkey: Server) -> AsyncIterator[RedisStore | MemoryStore]:
    if request.param == "memory":
        yield MemoryStore()
    else:
        async with RedisStore.open(valkey.url, match_deadline_s=1.0) as store:
            yield store


async def test_secret_that_stands_is_read_from_a_server_without_memory(any_server: Server, store: RedisStore) -> None:
    standing = await store.deployment_secret(None)
    any_server.command("CONFIG", "SET", "maxmemory", 1)
    try:
        assert await store.deployment_secret(None) == standing
    finally:
        any_server.command("CONFIG", "SET", "maxmemory", 0)


async def test_secret_and_records_find_room_on_a_server_without_memory(any_server: Server, store: RedisStore) -> None:
    """They are as few as processes: without them nobody is served."""
    any_server.command("CONFIG", "SET", "maxmemory", 1)
    try:
        secret = await store.deployment_secret(None)
        assert await store.deployment_secret(None) == secret
        any_server.flush()
        assert await store.deployment_secret(secret) == secret
        registry = store.registry()
        one = record("one", (await store.index(NAMESPACE).register()).incarnation)
        await registry.announce(one)
        assert await live_of(registry) == {"one": one}
        again = record("one", (await store.index(NAMESPACE).register()).incarnation)
        await registry.announce(again, replace=False)
        assert await live_of(registry) == {"one": one}
        await registry.announce(again)
        assert await live_of(registry) == {"one": again}
        await registry.withdraw(again)
        assert await live_of(registry) == {}
        assert await registry.namespaces() == {NAMESPACE}
        await registry.forget_namespace(NAMESPACE)
        assert await registry.namespaces() == set()
    finally:
        any_server.command("CONFIG", "SET", "maxmemory", 0)


async def test_refused_write_of_the_secret_does_not_tell_it(any_server: Server, store: RedisStore) -> None:
    """The message goes into the log."""
    secret = secrets.token_hex(16)
    any_server.command("REPLICAOF", "127.0.0.1", 1)
    try:
        with pytest.raises(IndexUnavailable, match="read only replica") as raised:
            await store.deployment_secret(secret.encode())
    finally:
        any_server.command("REPLICAOF", "NO", "ONE")
    assert secret not in "".join(traceback.format_exception(raised.value))


async def test_memory_is_what_the_server_says(any_server: Server, store: RedisStore) -> None:
    limit_bytes = 1 << 30
    any_server.command("CONFIG", "SET", "maxmemory", limit_bytes)
    try:
        memory = await store.memory()
    finally:
        any_server.command("CONFIG", "SET", "maxmemory", 0)
    assert memory is not None
    assert memory.limit_bytes == limit_bytes and 100_000 < memory.used_bytes < limit_bytes


async def test_every_call_finds_an_absent_server_unavailable() -> None:
    async with RedisStore.open("unix:///nowhere/valkey.sock") as store:
        index, registry = store.index(NAMESPACE), store.registry()
        calls = [
            store.ping(),
            store.deployment_secret(None),
            store.memory(),
            index.register(),
            index.renew(1),
            index.retire(1),
            index.match([1]),
            index.apply(1, 1, [1], []),
            index.commit(commit_of("place", 1, [1], 1)),
            index.exchange_loads(PROXY_ONE, {}, [1]),
            index.sweep("keeper"),
            index.check_integrity(),
            registry.announce(record("w", 1)),
            registry.withdraw(record("w", 1)),
            registry.live_workers(),
        ]
        for call in calls:
            with pytest.raises(IndexUnavailable, match="/nowhere"):
                await call
        index.post(commit_of("release", 1, [1], 1))
        assert not store.index_available


@pytest.mark.parametrize("key_prefix", ["", "a{b}"])
async def test_unusable_key_prefix_is_refused(key_prefix: str) -> None:
    with pytest.raises(ConfigError):
        async with RedisStore.open("redis://localhost", key_prefix=key_prefix):
            pass


async def test_index_of_a_namespace_is_one_object(store: RedisStore) -> None:
    assert store.index(NAMESPACE) is store.index(NAMESPACE)


async def test_namespaces_and_deployments_do_not_see_each_other(any_server: Server, store: RedisStore) -> None:
    one, other = store.index(NAMESPACE), store.index("fedcba9876543210")
    incarnation = (await one.register()).incarnation
    await one.apply(incarnation, 1, [1], [])
    assert await other.match([1]) == Match()
    async with RedisStore.open(any_server.url, key_prefix="another", match_deadline_s=1.0) as another:
        assert await another.index(NAMESPACE).match([1]) == Match()
        assert await another.deployment_secret(b"a") == b"a"
    assert await store.deployment_secret(b"b") == b"b"
    await one.check_integrity()
    await other.check_integrity()


async def test_index_is_available_while_calls_on_the_path_of_a_request_are_answered(
    any_server: Server,
) -> None:
    async with RedisStore.open(any_server.url) as store:
        assert store.index_available
        with any_server.paused():
            with pytest.raises(IndexUnavailable, match="30 ms"):
                await store.index(NAMESPACE).match([1])
            assert not store.index_available
        await eventually(lambda: store.index_available)
    assert not store.index_available


async def test_calls_of_all_namespaces_share_one_connection(any_server: Server, store: RedisStore) -> None:
    indexes = [store.index(f"{number:016x}") for number in range(20)]
    await asyncio.gather(*(index.match([1]) for index in indexes))
    assert any_server.command("CLIENT", "LIST").count(b"cmd=evalsha") == 1


async def test_ping(store: RedisStore) -> None:
    await store.ping()


# --- deployment secret


async def test_secret_is_made_once_and_shared(any_store: RedisStore | MemoryStore) -> None:
    first = await any_store.deployment_secret(None)
    assert len(first) == 32
    assert await any_store.deployment_secret(None) == first


async def test_standing_secret_wins(any_store: RedisStore | MemoryStore) -> None:
    assert await any_store.deployment_secret(b"first") == b"first"
    assert await any_store.deployment_secret(b"second") == b"first"
    assert await any_store.deployment_secret(None) == b"first"


async def test_adopting_another_secret_is_logged(store: RedisStore, caplog: pytest.LogCaptureFixture) -> None:
    await store.deployment_secret(b"first")
    await store.deployment_secret(b"first")
    await store.deployment_secret(None)
    assert caplog.text == ""
    await store.deployment_secret(b"second")
    assert "another deployment secret" in caplog.text
    assert "first" not in caplog.text and "second" not in caplog.text


async def test_secret_is_put_back_after_a_flush(any_server: Server, store: RedisStore) -> None:
    secret = await store.deployment_secret(None)
    any_server.flush()
    assert await store.deployment_secret(secret) == secret
    assert await store.deployment_secret(None) == secret


# --- registry


async def test_announced_workers_with_a_lease_are_live(any_store: RedisStore | MemoryStore) -> None:
    registry, index = any_store.registry(), any_store.index(NAMESPACE)
    assert list(await registry.live_workers()) == []
    one, two = [record(name, (await index.register()).incarnation) for name in ("one", "two")]
    for each in (one, two, record("never", two.incarnation + 1_000)):
        await registry.announce(each)
    assert await live_of(registry) == {"one": one, "two": two}
    await index.retire(one.incarnation)
    assert await live_of(registry) == {"two": two}
    again = record("one", (await index.register()).incarnation)
    await registry.announce(again, replace=False)
    assert await live_of(registry) == {"two": two}, "another one stands there"
    await registry.announce(again)
    assert await live_of(registry) == {"one": again, "two": two}
    await registry.withdraw(one)
    await registry.withdraw(record("nobody", again.incarnation))
    assert await live_of(registry) == {"one": again, "two": two}, "another one has the name by now"
    await registry.withdraw(again)
    assert await live_of(registry) == {"two": two}


async def test_lease_counts_in_the_record_s_own_namespace(any_store: RedisStore | MemoryStore) -> None:
    registry = any_store.registry()
    incarnation = (await any_store.index(NAMESPACE).register()).incarnation
    await registry.announce(record("here", incarnation))
    await registry.announce(record("elsewhere", incarnation, namespace="fedcba9876543210"))
    assert set(await live_of(registry)) == {"here"}


async def test_worker_with_an_expired_lease_is_not_live_until_it_renews(any_server: Server, store: RedisStore) -> None:
    registry, index = store.registry(), store.index(NAMESPACE)
    incarnation = (await index.register()).incarnation
    await registry.announce(record("one", incarnation))
    any_server.command("ZADD", f"deploy:{{{NAMESPACE}}}:live", "XX", 1, incarnation)
    assert list(await registry.live_workers()) == []
    await index.renew(incarnation)
    assert set(await live_of(registry)) == {"one"}


MALFORMED = {
    "no json": b"{",
    "no object": b"[]",
    "deep": b"[" * 100_000,
    "no text": b'"\xff"',
    "fields missing": b'{"worker_id":"fields missing"}',
    "another's name": msgspec.json.encode(record("good", 1)),
    "bad namespace": msgspec.json.encode(record("bad namespace", 1, namespace="x}:live")),
    "no incarnation": msgspec.json.encode(record("no incarnation", 0)),
    "huge incarnation": msgspec.json.encode(record("huge incarnation", 2**40)),
}


async def test_malformed_records_are_skipped_and_logged_once(
    any_server: Server, caplog: pytest.LogCaptureFixture
) -> None:
    now_s = 100.0
    async with RedisStore.open(any_server.url, key_prefix="deploy") as store, closing(any_server.url) as client:
        registry = RedisRegistry(client, "deploy", clock=lambda: now_s)
        good = record("good", (await store.index(NAMESPACE).register()).incarnation)
        await registry.announce(good)
        for worker_id, content in MALFORMED.items():
            any_server.command("HSET", "deploy:reg", worker_id, content)
        any_server.command("HSET", "deploy:reg", b"\xff", content)
        with caplog.at_level(logging.WARNING):
            for _ in range(5):
                assert await live_of(registry) == {"good": good}
            assert len(caplog.records) == 1
            assert f"{len(MALFORMED) + 1} malformed" in caplog.text
            now_s += 61.0
            await registry.live_workers()
            assert len(caplog.records) == 2


async def test_unknown_fields_of_a_record_are_ignored(any_server: Server, store: RedisStore) -> None:
    one = record("one", (await store.index(NAMESPACE).register()).incarnation)
    later = msgspec.json.decode(msgspec.json.encode(one)) | {"added_later": [1, 2]}
    any_server.command("HSET", "deploy:reg", "one", msgspec.json.encode(later))
    assert await live_of(store.registry()) == {"one": one}


async def live_of(registry: Registry) -> dict[str, WorkerRecord]:
    return {record.worker_id: record for record in await registry.live_workers()}


async def test_a_program_that_looks_nothing_up_opens_no_connection_for_it(any_server: Server) -> None:
    async with RedisStore.open(any_server.url, key_prefix="deploy", looks_up=False) as store:
        index = store.index(NAMESPACE)
        registration = await index.register()
        assert await index.renew(registration.incarnation)
        assert any_server.command("CLIENT", "LIST").count(b"name=prefixcache") == 0
        assert not store.index_available
        with pytest.raises(IndexUnavailable):
            await index.match([1])
