"""Calls on the path of a request: coalesced, in order, over in time, and none with another's reply."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import time
from contextlib import AsyncExitStack

import pytest

from prefixcache.errors import IndexUnavailable
from prefixcache.index import breaker
from prefixcache.index import hot_client as hot_client_module
from prefixcache.limits import BREAKER_PAUSE_S, BREAKER_STALLS, INDEX_DEADLINE_S
from tests.support.hot_calls import APPEND, ECHO, PATIENT_S, echo, echoes, hot_client, script, until_answered
from tests.support.redis_relay import redis_relay
from tests.support.seeds import seeded
from tests.support.valkey import Server
from tests.support.waiting import eventually


async def test_calls_of_one_turn_are_one_write_and_come_back_in_order(any_server: Server) -> None:
    async with redis_relay(any_server.url) as relay, hot_client(f"redis://127.0.0.1:{relay.port}") as client:
        await echo(client, 1)
        relay.requests.clear()
        done: list[asyncio.Future[bytes]] = []
        calls = [asyncio.ensure_future(client.run(ECHO, "k", number)) for number in range(50)]
        for call in calls:
            call.add_done_callback(done.append)
        assert await asyncio.gather(*calls) == [b"%d" % number for number in range(50)]
        assert len(relay.requests) == 1
        assert done == calls


async def test_posts_are_done_in_order_with_the_calls_around_them(any_server: Server) -> None:
    async with hot_client(any_server.url) as client:
        for number in range(20):
            client.post(APPEND, "list", number)
        assert await client.run(APPEND, "list", "last") == 21
        client.post(APPEND, "list", "after")
    values = any_server.command("LRANGE", "list", 0, -1).split(b"\r\n")[2::2]
    assert values == [*(b"%d" % number for number in range(20)), b"last", b"after"], "the last one on closing"


async def test_posts_are_on_their_way_before_the_connection_closes(
    any_server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hot_client_module, "INDEX_DEADLINE_S", PATIENT_S)
    async with hot_client(any_server.url) as client:
        client.post(APPEND, "list", bytes(1_000_000))  # more than a socket takes at once
    assert any_server.command("LLEN", "list") == b":1\r\n"


async def test_arguments_of_every_kind_and_size(any_server: Server) -> None:
    async with hot_client(any_server.url) as client:
        for argument, reply in ((b"", b""), (b"\r\n\x00\xff", b"\r\n\x00\xff"), ("é", "é".encode()), (-7, b"-7")):
            assert await client.run(ECHO, "k", argument) == reply
        large = seeded("bytes").randbytes(3_000_000)
        assert await client.run(ECHO, "k", large) == large
        assert await client.run(script("return {1, false, {ARGV[1], {}}}"), "k", "a") == [1, None, [b"a", []]]


async def test_late_reply_is_dropped_and_the_next_call_gets_its_own(any_server: Server) -> None:
    async with hot_client(any_server.url, deadline_s=INDEX_DEADLINE_S) as client:
        await until_answered(client)
        with any_server.paused():
            with pytest.raises(IndexUnavailable, match="within 30 ms"):
                await echo(client, 2)
            assert not client.is_available
            with pytest.raises(IndexUnavailable, match="nothing is sent"):
                await echo(client, 3)
        await eventually(lambda: client.is_available)
        for number in range(100, 120):
            with contextlib.suppress(IndexUnavailable):
                await echo(client, number)
        await until_answered(client)


async def test_frozen_server_costs_each_caller_one_delay_at_most(
    any_server: Server, caplog: pytest.LogCaptureFixture
) -> None:
    """Sixty requests, each a lookup and a commit, while the server stands still for longer than a connection may."""
    waits_s: list[float] = []

    async def request(number: int) -> None:
        begun_at = time.perf_counter()
        for _ in range(2):
            with pytest.raises(IndexUnavailable):
                await echo(client, number)
        waits_s.append(time.perf_counter() - begun_at)

    caplog.set_level(logging.INFO)
    async with hot_client(any_server.url, deadline_s=INDEX_DEADLINE_S) as client:
        await until_answered(client)
        with any_server.paused():
            stopped_at = time.monotonic()
            await asyncio.gather(*(request(number) for number in range(5)))
            for number in range(5, 50):
                await request(number)
            assert sum(wait_s > INDEX_DEADLINE_S / 2 for wait_s in waits_s) == 5
            assert not client.is_available
            await eventually(lambda: time.monotonic() - stopped_at > 1.5)
            for number in range(50, 60):
                await request(number)
        resumed_at = time.monotonic()
        await eventually(lambda: client.is_available)
        assert time.monotonic() - resumed_at < 2.0
        await until_answered(client)
    assert len(waits_s) == 60
    assert sorted(waits_s)[-1] < 2 * INDEX_DEADLINE_S, waits_s
    assert [record.levelname for record in caplog.records if record.name.startswith("prefixcache")][-1] == "INFO"
    assert len(caplog.records) <= 4, caplog.text


async def test_short_freeze_is_over_when_the_late_replies_came(any_server: Server) -> None:
    async with redis_relay(any_server.url) as relay:
        async with hot_client(f"redis://127.0.0.1:{relay.port}", deadline_s=INDEX_DEADLINE_S) as client:
            await until_answered(client)
            with any_server.paused():
                answers = await asyncio.gather(*(echo(client, n) for n in range(20)), return_exceptions=True)
                assert all(isinstance(answer, IndexUnavailable) for answer in answers)
            resumed_at = time.monotonic()
            await eventually(lambda: client.is_available)
            assert time.monotonic() - resumed_at < BREAKER_PAUSE_S / 2
            await until_answered(client)
            assert relay.num_accepted == 1, "no reason to connect again"


async def test_posts_of_a_short_stall_are_done_after_it(any_server: Server) -> None:
    async with hot_client(any_server.url, deadline_s=INDEX_DEADLINE_S) as client:
        await until_answered(client)
        with any_server.paused():
            client.post(APPEND, "list", 0)
            await eventually(lambda: not client.is_available)
            for number in range(1, 10):
                client.post(APPEND, "list", number)
        await eventually(lambda: client.is_available)
        assert await client.run(APPEND, "list", "next") == 11
        await until_answered(client)
    values = any_server.command("LRANGE", "list", 0, -1).split(b"\r\n")[2::2]
    assert values == [*(b"%d" % number for number in range(10)), b"next"]


async def test_server_that_is_always_late_is_given_up(any_server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(breaker, "BREAKER_PAUSE_S", 0.2)
    async with redis_relay(any_server.url) as relay:
        async with hot_client(f"redis://127.0.0.1:{relay.port}", deadline_s=INDEX_DEADLINE_S) as client:
            relay.delay_s = 2 * INDEX_DEADLINE_S
            for number in range(BREAKER_STALLS):
                await eventually(lambda: client.is_available)
                with pytest.raises(IndexUnavailable, match="30 ms"):
                    await echo(client, number)
            num_seen = len(relay.requests)
            await eventually(lambda: len(relay.requests) >= num_seen + 2)
            assert b"#!lua" in relay.requests[-1], "trials, which come too late as well"
            assert not client.is_available
            relay.delay_s = 0.0
            await eventually(lambda: client.is_available)
            await until_answered(client)
            assert relay.num_accepted == 1


async def test_paused_clients_are_a_frozen_server(any_server: Server) -> None:
    async with hot_client(any_server.url, deadline_s=INDEX_DEADLINE_S) as client:
        await until_answered(client)
        any_server.command("CLIENT", "PAUSE", 200, "ALL")
        with pytest.raises(IndexUnavailable, match="30 ms"):
            await echo(client, 2)
        await eventually(lambda: client.is_available)
        await until_answered(client)


@pytest.mark.parametrize("num_turns", [0, 1, 2, 3])
async def test_late_loop_expires_nothing_that_was_answered(any_server: Server, num_turns: int) -> None:
    async with hot_client(any_server.url, deadline_s=INDEX_DEADLINE_S) as client:
        await until_answered(client)
        calls = [asyncio.ensure_future(echo(client, number)) for number in range(20)]
        for _ in range(num_turns):
            await asyncio.sleep(0)
        time.sleep(0.1)  # noqa: ASYNC251  # what holds the loop up is the point
        await asyncio.gather(*calls)
        assert client.is_available


async def test_loop_that_is_late_in_the_turn_of_the_timer_expires_nothing(any_server: Server) -> None:
    """What blocks stands before the timer in the same turn, so that the loop has not looked at the socket since."""
    loop = asyncio.get_running_loop()
    async with hot_client(any_server.url, deadline_s=0.1) as client:
        await until_answered(client)
        any_server.command("CLIENT", "PAUSE", 150, "ALL")
        call = asyncio.ensure_future(echo(client, 2))
        loop.call_later(0.02, time.sleep, 0.1)  # beyond the deadline, still without a reply
        loop.call_later(0.05, time.sleep, 0.4)  # the reply comes; the timer is the next callback of this turn
        await call
        assert client.is_available


async def test_scripts_flushed_on_the_living_server_are_nobody_s_trouble(any_server: Server) -> None:
    async with hot_client(any_server.url) as client:
        await echoes(client)
        any_server.command("SCRIPT", "FLUSH")
        await echoes(client)
        any_server.command("SCRIPT", "FLUSH")
        for number in range(3):
            client.post(APPEND, "list", number)
        await eventually(lambda: any_server.command("LLEN", "list") == b":3\r\n")
        assert any_server.command("LINDEX", "list", 2) == b"$1\r\n2\r\n"
        assert client.is_available


async def test_emptied_server_goes_on(any_server: Server) -> None:
    async with hot_client(any_server.url) as client:
        await client.run(APPEND, "list", 1)
        any_server.flush()
        assert await client.run(APPEND, "list", 1) == 1


async def test_error_replies_fail_their_own_call_alone(any_server: Server) -> None:
    wrong_type = script("return redis.call('GET', KEYS[1])")
    async with hot_client(any_server.url) as client:
        await client.run(APPEND, "list", 1)
        client.post(wrong_type, "list")
        answers = await asyncio.gather(
            echo(client, 1), client.run(wrong_type, "list"), client.run(script("no lua"), "k"), return_exceptions=True
        )
        assert answers[0] is None
        assert isinstance(answers[1], IndexUnavailable) and "WRONGTYPE" in str(answers[1])
        assert isinstance(answers[2], IndexUnavailable) and "compiling" in str(answers[2])
        any_server.command("CONFIG", "SET", "maxmemory", 1)
        try:
            with pytest.raises(IndexUnavailable, match="used up its maxmemory"):
                await client.run(APPEND, "list", 1)
            await echo(client, 2)
        finally:
            any_server.command("CONFIG", "SET", "maxmemory", 0)
        assert client.is_available


async def test_server_that_became_a_replica_is_not_available_until_it_is_primary_again(
    any_server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(breaker, "BREAKER_PAUSE_S", 0.1)
    async with hot_client(any_server.url) as client:
        await client.run(APPEND, "list", 1)
        any_server.command("REPLICAOF", "127.0.0.1", 1)
        try:
            with pytest.raises(IndexUnavailable, match="READONLY"):
                await client.run(APPEND, "list", 1)
            assert not client.is_available
            until = time.monotonic() + 0.5
            while time.monotonic() < until:  # trials are refused as the call was
                assert not client.is_available
                await asyncio.sleep(0.01)
        finally:
            any_server.command("REPLICAOF", "NO", "ONE")
        await eventually(lambda: client.is_available)
        assert await client.run(APPEND, "list", 2) == 2


@pytest.mark.parametrize("lacking", ["~* +@all -@scripting", "~other:* +@all"])
async def test_user_who_may_not_look_up_is_told_of_and_served_once_he_may(
    any_server: Server, lacking: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(breaker, "BREAKER_PAUSE_S", 0.05)
    caplog.set_level(logging.INFO, hot_client_module.__name__)
    any_server.command("ACL", "SETUSER", "limited", "on", ">pass", *lacking.split())
    try:
        async with hot_client(any_server.url.replace("unix://", "unix://limited:pass@")) as client:
            with pytest.raises(IndexUnavailable, match="lacks a permission"):
                await echo(client, 1)
            until = time.monotonic() + 0.3
            while time.monotonic() < until:  # trials are refused as the call was
                assert not client.is_available
                await asyncio.sleep(0.01)
            messages = [record.message for record in caplog.records if record.name == hot_client_module.__name__]
            assert ["lacks a permission" in message for message in messages] == [True]
            any_server.command("ACL", "SETUSER", "limited", "~*", "+@all")
            await eventually(lambda: client.is_available)
            await echo(client, 2)
    finally:
        any_server.command("ACL", "DELUSER", "limited")


async def test_callers_that_are_cancelled_anywhere_cost_nobody_a_reply(any_server: Server) -> None:
    rand = seeded("cancellation")
    loop = asyncio.get_running_loop()
    async with hot_client(any_server.url) as client:
        for start in range(0, 2_000, 100):
            tasks = [loop.create_task(echo(client, start + number)) for number in range(100)]
            for task in tasks:
                if rand.random() < 0.7:
                    loop.call_later(rand.uniform(0, 0.004), task.cancel)
                if rand.random() < 0.2:
                    client.post(ECHO, "k", rand.random().hex())
            for answer in await asyncio.gather(*tasks, return_exceptions=True):
                assert answer is None or isinstance(answer, asyncio.CancelledError), answer
        await echoes(client)


@pytest.mark.parametrize("num_turns", range(4))
@pytest.mark.parametrize("deadline_s", [PATIENT_S, INDEX_DEADLINE_S / 3])
async def test_close_ends_every_call(
    any_server: Server, num_turns: int, deadline_s: float, caplog: pytest.LogCaptureFixture
) -> None:
    """Those in flight, those not begun and those that come later."""
    async with AsyncExitStack() as stack:
        client = await stack.enter_async_context(hot_client(any_server.url, deadline_s=deadline_s))
        await until_answered(client)
        with any_server.paused():
            calls = [asyncio.ensure_future(echo(client, number)) for number in range(20)]
            for _ in range(num_turns):
                await asyncio.sleep(0)
            begun_at = time.perf_counter()
            await stack.aclose()
            assert time.perf_counter() - begun_at < 1.0
            answers = await asyncio.gather(*calls, return_exceptions=True)
    assert all(isinstance(answer, IndexUnavailable) for answer in answers), answers
    with pytest.raises(IndexUnavailable, match="closed"):
        await echo(client, 1)
    client.post(ECHO, "k", "nobody hears it")
    assert not client.is_available
    gc.collect()
    assert "never retrieved" not in caplog.text
