"""What pending claims and load look like on a server, how long they stand there, and what is made of others' bytes."""

from __future__ import annotations

import struct
from collections.abc import Awaitable, Callable

import pytest
from msgspec.structs import replace

from prefixcache.limits import LOAD_KEY_S, LOAD_RECORD_S, PENDING_S, PENDING_SETTLED_S
from prefixcache.load import (
    WORKER_WRITER,
    IncarnationLoad,
    ProxyLoad,
    WorkerLoad,
    proxy_writer,
    records_of,
    stored_load,
    stored_record,
)
from tests.integration.index.worlds import KEYS, RedisWorld, redis_world
from tests.support.index_commits import PROXY_ONE, PROXY_TWO, commit_of
from tests.support.valkey import Server

CHAIN = [0x0101010101010101 * number for number in range(1, 6)]
BOUNDARY = f"{KEYS.pending}{CHAIN[0]:016x}"
ANCIENT_MS = 1
ONE, TWO = proxy_writer(PROXY_ONE), proxy_writer(PROXY_TWO)
THREE = b"\xff\xfe\0\0\0\0\0\0"
WORKER = WorkerLoad(
    version=5, rest_s=0.0, prefill_rate=1.0, inter_token_latency_s=0.0, available_blocks=1, oldest_age_s=0.0
)


def ttl_s(server: Server, key: str) -> float:
    """Negative without a TTL, or without the key."""
    return int(server.command("PTTL", key).strip()[1:]) / 1_000


def strings(reply: bytes) -> list[bytes]:
    """Of a raw reply with one string, or several."""
    found: list[bytes] = []
    while reply:
        line, _, reply = reply.partition(b"\r\n")
        if line.startswith(b"$") and line != b"$-1":
            found.append(reply[: int(line[1:])])
            reply = reply[int(line[1:]) + 2 :]
    return found


def pending_entries(server: Server, key: str = BOUNDARY) -> list[tuple[int, bytes]]:
    (value,) = strings(server.command("GET", key)) or (b"",)
    return [(incarnation, request_id) for incarnation, _, request_id in struct.iter_unpack(">IQ12s", value)]


def load_records(server: Server, incarnation: int) -> dict[bytes, bytes]:
    (value,) = strings(server.command("GET", f"{KEYS.loads}{incarnation}")) or (b"",)
    return records_of(value)


def put_load(server: Server, incarnation: int, records: dict[bytes, bytes]) -> None:
    server.command("SET", f"{KEYS.loads}{incarnation}", stored_load(records))


def end_ms_in(server: Server, left_s: float) -> int:
    return int(strings(server.command("TIME"))[0]) * 1_000 + round(left_s * 1_000)


async def one_of(world: RedisWorld) -> int:
    return (await world.index.register()).incarnation


# --- pending claims


async def test_pending_claims_are_24_bytes_an_incarnation_at_each_boundary(any_server: Server) -> None:
    async with redis_world(any_server) as world:
        one, two = await one_of(world), await one_of(world)
        await world.index.commit(commit_of("place", 1, CHAIN, one))
        await world.index.commit(commit_of("place", 2, CHAIN[:3], two))
        assert pending_entries(any_server) == [(one, b"\0" * 11 + b"\1"), (two, b"\0" * 11 + b"\2")]
        deepest = f"{KEYS.pending}{CHAIN[4]:016x}"
        assert pending_entries(any_server, deepest) == [(one, b"\0" * 11 + b"\1")]
        await world.index.commit(commit_of("place", 3, CHAIN, one))
        assert pending_entries(any_server) == [(two, b"\0" * 11 + b"\2"), (one, b"\0" * 11 + b"\3")]


async def test_pending_claims_go_with_the_last_one(any_server: Server) -> None:
    async with redis_world(any_server) as world:
        one, two = await one_of(world), await one_of(world)
        await world.index.commit(commit_of("place", 1, CHAIN, one))
        assert PENDING_S - 5 < ttl_s(any_server, BOUNDARY) <= PENDING_S
        await world.index.commit(commit_of("settle", 1, CHAIN, one))
        assert PENDING_SETTLED_S - 1 < ttl_s(any_server, BOUNDARY) <= PENDING_SETTLED_S
        await world.index.commit(commit_of("place", 2, CHAIN, two))
        assert PENDING_S - 5 < ttl_s(any_server, BOUNDARY) <= PENDING_S
        await world.index.commit(commit_of("settle", 1, CHAIN, one))
        assert PENDING_S - 5 < ttl_s(any_server, BOUNDARY) <= PENDING_S
        await world.index.commit(commit_of("release", 2, CHAIN, two))
        assert 0 < ttl_s(any_server, BOUNDARY) <= PENDING_SETTLED_S
        await world.index.commit(commit_of("release", 1, CHAIN, one))
        assert any_server.command("EXISTS", BOUNDARY) == b":0\r\n"


async def test_a_writer_drops_claims_that_ended(any_server: Server) -> None:
    async with redis_world(any_server) as world:
        one, two = await one_of(world), await one_of(world)
        ended = struct.pack(">IQ12s", two, ANCIENT_MS, b"e" * 12)
        any_server.command("SET", BOUNDARY, ended)
        await world.index.commit(commit_of("place", 1, CHAIN, one))
        assert [incarnation for incarnation, _ in pending_entries(any_server)] == [one]


async def test_nothing_is_written_by_a_late_end(any_server: Server) -> None:
    async with redis_world(any_server) as world:
        one = await one_of(world)
        await world.index.commit(commit_of("place", 2, CHAIN, one))
        with any_server.monitored() as commands:
            await world.index.commit(commit_of("settle", 1, CHAIN, one))
            await world.index.commit(commit_of("release", 1, CHAIN, one))
            written = {words[0].upper() for words in commands()} - {"TIME", "MGET", "ZMSCORE", "GET"}
        assert written == set(), "neither claims nor, with version 0 again, load"


# --- load


async def test_load_stands_for_thirty_seconds_after_its_last_record(any_server: Server) -> None:
    async with redis_world(any_server) as world:
        one = await one_of(world)
        key = f"{KEYS.loads}{one}"
        writers: list[Callable[[int], object]] = [
            lambda version: world.index.exchange_loads(PROXY_ONE, {one: ProxyLoad(version=version)}, []),
            lambda version: world.index.commit(commit_of("place", 1, CHAIN, one, load=ProxyLoad(version=version))),
        ]
        for version, write in enumerate(writers):
            await write(version)  # type: ignore[misc]  # awaitables of several kinds
            assert LOAD_KEY_S - 5 < ttl_s(any_server, key) <= LOAD_KEY_S
            any_server.command("PEXPIRE", key, 10_000)
        await world.index.renew(one)
        assert ttl_s(any_server, key) <= 10
        await world.index.renew(one, WORKER)
        assert LOAD_KEY_S - 5 < ttl_s(any_server, key) <= LOAD_KEY_S
        await world.index.retire(one)
        assert any_server.command("EXISTS", key) == b":0\r\n"


async def test_load_is_an_entry_a_writer_and_the_last_one_stands_last(any_server: Server) -> None:
    async with redis_world(any_server) as world:
        one = await one_of(world)
        await world.index.exchange_loads(PROXY_ONE, {one: ProxyLoad(version=1)}, [])
        await world.index.renew(one, WORKER)
        await world.index.exchange_loads(PROXY_TWO, {one: ProxyLoad(version=1)}, [])
        before = load_records(any_server, one)
        assert list(before) == [ONE, WORKER_WRITER, TWO]
        assert before[WORKER_WRITER].endswith(WORKER.payload())
        again = ProxyLoad(version=2, running=3)
        await world.index.commit(commit_of("place", 1, CHAIN, one, load=again))
        after = load_records(any_server, one)
        assert list(after) == [WORKER_WRITER, TWO, ONE]
        assert after[ONE].endswith(again.payload())
        assert [after[writer] for writer in (WORKER_WRITER, TWO)] == [before[writer] for writer in (WORKER_WRITER, TWO)]


async def test_every_writer_reads_a_load_once_and_writes_it_once(any_server: Server) -> None:
    async with redis_world(any_server) as world:
        one = await one_of(world)
        await world.index.renew(one, WORKER)
        key = f"{KEYS.loads}{one}".encode()
        writers: list[Callable[[], Awaitable[object]]] = [
            lambda: world.index.renew(one, replace(WORKER, version=6)),
            lambda: world.index.commit(commit_of("place", 1, CHAIN, one, load=ProxyLoad(version=1))),
            lambda: world.index.exchange_loads(PROXY_ONE, {one: ProxyLoad(version=2)}, []),
        ]
        for write in writers:
            with any_server.monitored() as commands:
                await write()
                touched = [words[0].upper() for words in commands() if words[0] != "EVALSHA" and key.decode() in words]
            assert len(touched) == 2 and touched[0] in ("GET", "MGET") and touched[1] == "SET", touched


async def test_every_writer_drops_the_records_of_others_that_have_ended(any_server: Server) -> None:
    async with redis_world(any_server, lease_s=3_600) as world:
        one = await one_of(world)
        writers: list[Callable[[], Awaitable[object]]] = [
            lambda: world.index.renew(one, WORKER),
            lambda: world.index.commit(commit_of("place", 1, CHAIN, one, load=ProxyLoad(version=1))),
            lambda: world.index.exchange_loads(PROXY_ONE, {one: ProxyLoad(version=1)}, []),
        ]
        own = [WORKER_WRITER, ONE, ONE]
        ended = stored_record(ProxyLoad(version=1).payload(), end_ms=end_ms_in(any_server, -0.001), version=1)
        stands = stored_record(ProxyLoad(version=1).payload(), end_ms=end_ms_in(any_server, 60), version=1)
        for place in range(3):
            for writer, write in zip(own, writers, strict=True):
                records = [(TWO, stands), (THREE, stands)]
                records.insert(place, (b"has been", ended))
                put_load(any_server, one, dict(records))
                await write()
                assert list(load_records(any_server, one)) == [TWO, THREE, writer]
                assert load_records(any_server, one)[TWO] == stands


async def test_a_renewal_without_load_leaves_it_as_it_stands(any_server: Server) -> None:
    async with redis_world(any_server) as world:
        one = await one_of(world)
        records = {ONE: stored_record(b"", end_ms=ANCIENT_MS, version=1)}
        put_load(any_server, one, records)
        await world.index.renew(one)
        assert load_records(any_server, one) == records


@pytest.mark.parametrize(
    "damaged",
    [b"", b"\1", b"\1" + b"\xff" * 15, b"\2" + bytes(60), b"\xff" * 60],
    ids=["empty", "format alone", "a byte of the head missing", "2", "255"],
)
async def test_records_of_unknown_format_are_ignored_and_give_way(any_server: Server, damaged: bytes) -> None:
    async with redis_world(any_server) as world:
        one = await one_of(world)
        await world.index.apply(one, 1, CHAIN, [])
        put_load(any_server, one, dict.fromkeys((WORKER_WRITER, ONE, THREE), damaged))
        await _has_no_load_and_takes_one(world, one)


@pytest.mark.parametrize("value", [b"", b"\1", bytes(8), b"\xff" * 9, b"\xff" * 300, bytes(10_000)], ids=len)
async def test_a_damaged_value_is_ignored_and_gives_way(any_server: Server, value: bytes) -> None:
    async with redis_world(any_server) as world:
        one = await one_of(world)
        await world.index.apply(one, 1, CHAIN, [])
        any_server.command("SET", f"{KEYS.loads}{one}", value)
        await _has_no_load_and_takes_one(world, one)


async def _has_no_load_and_takes_one(world: RedisWorld, incarnation: int) -> None:
    assert (await world.index.match(CHAIN)).loads == {}
    assert await world.index.exchange_loads(PROXY_TWO, {}, [incarnation]) == {}
    await world.index.exchange_loads(PROXY_ONE, {incarnation: ProxyLoad(version=0, running=3)}, [])
    await world.index.renew(incarnation, WORKER)
    assert (await world.index.match(CHAIN)).loads == {
        incarnation: IncarnationLoad(worker=WORKER, proxies={PROXY_ONE: ProxyLoad(version=0, running=3)})
    }
    await world.index.check_integrity()


async def test_a_value_cut_short_keeps_what_is_whole(any_server: Server) -> None:
    async with redis_world(any_server) as world:
        one = await one_of(world)
        load = ProxyLoad(version=4, running=3)
        record = stored_record(load.payload(), end_ms=end_ms_in(any_server, LOAD_RECORD_S), version=4)
        whole = stored_load({TWO: record, THREE: record})
        for length in range(len(whole) // 2, len(whole)):
            any_server.command("SET", f"{KEYS.loads}{one}", whole[:length])
            assert await world.index.exchange_loads(PROXY_ONE, {}, [one]) == {
                one: IncarnationLoad(proxies={PROXY_TWO: load})
            }
            await world.index.exchange_loads(PROXY_ONE, {one: load}, [])
            assert list(load_records(any_server, one)) == [TWO, ONE]


async def test_longer_payloads_of_a_later_version_are_read(any_server: Server) -> None:
    async with redis_world(any_server) as world:
        one = await one_of(world)
        load = ProxyLoad(version=4, running=3)
        end_ms = end_ms_in(any_server, LOAD_RECORD_S)
        record = stored_record(load.payload() + b"added later", end_ms=end_ms, version=4)
        put_load(any_server, one, {ONE: record, TWO: record})
        loads = await world.index.exchange_loads(PROXY_TWO, {}, [one])
        assert loads == {one: IncarnationLoad(proxies={PROXY_ONE: load, PROXY_TWO: load})}
        await world.index.exchange_loads(PROXY_ONE, {one: ProxyLoad(version=3, running=9)}, [])
        assert await world.index.exchange_loads(PROXY_TWO, {}, [one]) == loads, "its version counts all the same"
        await world.index.exchange_loads(PROXY_ONE, {one: ProxyLoad(version=5)}, [])
        assert load_records(any_server, one)[TWO] == record, "others leave it whole"


async def test_a_record_without_payload_says_nothing_and_its_version_counts(any_server: Server) -> None:
    async with redis_world(any_server) as world:
        one = await one_of(world)
        records = {ONE: stored_record(b"", end_ms=end_ms_in(any_server, LOAD_RECORD_S), version=7)}
        put_load(any_server, one, records)
        assert await world.index.exchange_loads(PROXY_ONE, {one: ProxyLoad(version=7)}, [one]) == {}
        assert load_records(any_server, one) == records
        await world.index.exchange_loads(PROXY_ONE, {one: ProxyLoad(version=8)}, [])
        assert load_records(any_server, one)[ONE].endswith(ProxyLoad(version=8).payload())


async def test_nobody_writes_as_the_worker(any_server: Server) -> None:
    async with redis_world(any_server) as world:
        one = await one_of(world)
        for proxy_id in ("0" * 16, "a1", ""):
            with pytest.raises(ValueError, match="not the id of a proxy"):
                await world.index.exchange_loads(proxy_id, {one: ProxyLoad(version=1)}, [])
            with pytest.raises(ValueError, match="not the id of a proxy"):
                await world.index.commit(commit_of("place", 1, CHAIN, one, proxy_id=proxy_id))
