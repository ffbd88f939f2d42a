"""All records of the registry at once, and their removal: in memory and on a real server."""

from __future__ import annotations

from collections.abc import AsyncIterator

import msgspec
import pytest

from prefixcache.store import RedisStore
from tests.support.memory_store import MemoryStore
from tests.support.valkey import Server
from tests.support.worker_records import worker_record

NAMESPACE, OTHER = "0123456789abcdef", "fedcba9876543210"


@pytest.fixture(params=["memory", "valkey", "redis"])
async def store(request: pytest.FixtureRequest) -> AsyncIterator[RedisStore | MemoryStore]:
    if request.param == "memory":
        yield MemoryStore()
    else:
        server = request.getfixturevalue(f"{request.param}_process")
        server.flush()
        async with RedisStore.open(server.url, key_prefix="deploy") as redis_store:
            yield redis_store


async def test_every_record_is_read_with_whether_it_has_a_lease(store: RedisStore | MemoryStore) -> None:
    registry = store.registry()
    assert await registry.workers() == {}
    retired, live = [
        worker_record(worker_id=name, incarnation=(await store.index(NAMESPACE).register()).incarnation)
        for name in ("retired", "live")
    ]
    elsewhere = worker_record(worker_id="elsewhere", namespace=OTHER, incarnation=live.incarnation)
    for record in (retired, live, elsewhere):
        await registry.announce(record)
    await store.index(NAMESPACE).retire(retired.incarnation)
    assert await registry.workers() == {retired: False, live: True, elsewhere: False}
    assert list(await registry.live_workers()) == [live]


async def test_a_record_with_a_newer_one_in_its_place_is_not_removed(store: RedisStore | MemoryStore) -> None:
    registry = store.registry()
    old = worker_record(worker_id="w", incarnation=1)
    new = worker_record(worker_id="w", incarnation=2)
    await registry.announce(old)
    assert await registry.workers() == {old: False}
    await registry.announce(new)
    await registry.withdraw(old)
    assert await registry.workers() == {new: False}
    await registry.withdraw(old)
    assert await registry.workers() == {new: False}
    await registry.withdraw(new)
    assert await registry.workers() == {}


async def test_a_record_of_another_version_can_be_removed(any_server: Server) -> None:
    """It has fields that are unknown here: what is compared is what was read."""
    record = worker_record(worker_id="w")
    later = msgspec.json.encode(msgspec.json.decode(msgspec.json.encode(record)) | {"added_later": [1, 2]})
    any_server.command("HSET", "deploy:reg", "w", later)
    async with RedisStore.open(any_server.url, key_prefix="deploy") as store:
        assert await store.registry().workers() == {record: False}
        await store.registry().withdraw(record)
        assert await store.registry().workers() == {}
        any_server.command("HSET", "deploy:reg", "w", later)
        assert await store.registry().workers() == {record: False}
        any_server.command("HSET", "deploy:reg", "w", msgspec.json.encode(worker_record(worker_id="w", model="new")))
        await store.registry().withdraw(record)
        assert len(await store.registry().workers()) == 1


async def test_malformed_records_are_not_read(any_server: Server) -> None:
    any_server.command("HSET", "deploy:reg", "w", b"{")
    async with RedisStore.open(any_server.url, key_prefix="deploy") as store:
        assert await store.registry().workers() == {}


@pytest.mark.parametrize(
    "fields",
    [
        {"address": ""},
        {"address": "host:"},
        {"address": "host:80/x"},
        {"address": "host:80\r\nINFO a forged line"},
        {"address": "h ost:80"},
        {"address": "h" * 256 + ":80"},
        {"max_model_len": 0},
        {"max_model_len": 2**31},
        {"model": "a\nb"},
        {"revision": "\x1b[31m"},
        {"served_names": ("tiny", "a\x00b")},
    ],
)
async def test_records_of_what_no_worker_says_of_itself_are_not_read(
    any_server: Server, fields: dict[str, object]
) -> None:
    sound, other = worker_record(worker_id="sound"), worker_record(worker_id="other", **fields)
    for record in (sound, other):
        any_server.command("HSET", "deploy:reg", record.worker_id, msgspec.json.encode(record))
    async with RedisStore.open(any_server.url, key_prefix="deploy") as store:
        assert list(await store.registry().workers()) == [sound]


async def test_a_namespace_is_named_until_it_is_forgotten(store: RedisStore | MemoryStore) -> None:
    registry = store.registry()
    one, other = worker_record(worker_id="one"), worker_record(worker_id="other", namespace=OTHER)
    for record in (one, other):
        await registry.announce(record, replace=False)
        await registry.withdraw(record)
    assert set(await registry.namespaces()) == {one.namespace, OTHER}
    await registry.forget_namespace(OTHER)
    await registry.forget_namespace(OTHER)
    assert set(await registry.namespaces()) == {one.namespace}
