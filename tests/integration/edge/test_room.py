"""What clients may hold of the edge: so many requests, so much memory for each, and without a key their heads alone."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

from edge.capacity import IN_HAND_BYTES, WAITING_BYTES
from prefixcache.limits import EDGE_HEADER_BUFFERS, MAX_HEADER_LINE_BYTES, RETRY_AFTER_S
from tests.support.answer_bytes import LAST_CHUNK, chunk, stream_head
from tests.support.edge import RunningEdge, needs_nginx, running_edge
from tests.support.edge_proxies import ScriptedProxy, scripted_proxy
from tests.support.raw_http import RawConnection, post, raw_connection
from tests.support.scripted_engine import never, when
from tests.support.waiting import eventually

pytestmark = needs_nginx
CHAT = "/v1/chat/completions"
KEY = "0123456789abcdef"
NUM_SLOW = 300
LARGE = 300_000


@asynccontextmanager
async def stream_in_hand(edge: RunningEdge, proxy: ScriptedProxy) -> AsyncIterator[asyncio.Event]:
    """A stream that has begun; it must go on when the event is set, and end whole."""
    goes_on = asyncio.Event()
    proxy.steps = (stream_head(), chunk(b"1"), when(goes_on), chunk(b"2"), LAST_CHUNK)
    async with raw_connection(edge.port) as client:
        client.send(post(CHAT, b"{}", headers=f"Authorization: Bearer {KEY}\r\n"))
        assert (await client.head())[0] == 200 and await client.chunk() == b"1"
        proxy.steps = ()
        yield goes_on
        goes_on.set()
        assert await client.chunks() == [b"2"]


@asynccontextmanager
async def clients(edge: RunningEdge, num_clients: int) -> AsyncIterator[list[RawConnection]]:
    async with AsyncExitStack() as stack:
        yield [await stack.enter_async_context(raw_connection(edge.port)) for _ in range(num_clients)]


def long_head(start: str) -> bytes:
    """As long as one may be; `start`: its first line and some headers."""
    rest = EDGE_HEADER_BUFFERS * MAX_HEADER_LINE_BYTES - len(start) - 1_000
    lines = "".join(f"X-Long: {'x' * (rest // EDGE_HEADER_BUFFERS - 20)}\r\n" for _ in range(EDGE_HEADER_BUFFERS))
    return f"{start}{lines}\r\n".encode()


async def test_slow_senders_without_a_key_hold_their_heads_alone(tmp_path: Path) -> None:
    async with scripted_proxy() as proxy, running_edge(tmp_path, [proxy.port], environment={"API_KEYS": KEY}) as edge:
        async with stream_in_hand(edge, proxy), clients(edge, NUM_SLOW) as slow:
            before = edge.nginx_rss_bytes()
            for number, client in enumerate(slow):
                path = "/ready" if number % 2 else CHAT
                client.send(long_head(f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Length: {LARGE}\r\n"))
                client.send(bytes(LARGE - 10))
            statuses = [(await client.head())[0] for client in slow]
            assert statuses == [405 if number % 2 else 401 for number in range(NUM_SLOW)]
            assert edge.nginx_rss_bytes() - before < NUM_SLOW * WAITING_BYTES
        assert len(proxy.asked) == 1


async def test_slow_bodies_lie_in_files(tmp_path: Path) -> None:
    async with scripted_proxy() as proxy, running_edge(tmp_path, [proxy.port]) as edge:
        async with stream_in_hand(edge, proxy), clients(edge, NUM_SLOW) as slow:
            before = edge.nginx_rss_bytes()
            for client in slow:
                client.send(long_head(f"POST {CHAT} HTTP/1.1\r\nHost: x\r\nContent-Length: {LARGE}\r\n"))
                client.send(bytes(LARGE - 10))
            await eventually(lambda: edge.num_open_bodies() == NUM_SLOW, 30.0)
            for client in slow:
                await client.writer.drain()
            assert edge.nginx_rss_bytes() - before < NUM_SLOW * IN_HAND_BYTES
            for client in slow:
                client.send(bytes(10))
            assert {(await client.head())[0] for client in slow} == {200}
            after = edge.nginx_rss_bytes() - before
            print(f"{after / NUM_SLOW:,.0f} bytes each of {IN_HAND_BYTES:,}")
            assert after < NUM_SLOW * IN_HAND_BYTES
        assert [len(request.body) for request in proxy.asked[1:]] == [LARGE] * NUM_SLOW


async def test_one_request_too_many_is_told_to_come_again(tmp_path: Path) -> None:
    async with scripted_proxy() as proxy, scripted_proxy() as other:
        environment = {"EDGE_CLIENTS": "2", "API_KEYS": KEY}
        async with running_edge(tmp_path, [proxy.port, other.port], environment=environment) as edge:
            assert edge.said("at most 2 requests in hand")
            other.ready = False
            await edge.lists_only(proxy.port)
            async with stream_in_hand(edge, proxy), stream_in_hand(edge, proxy):
                for _ in range(2):
                    status, headers, error = await asked(edge)
                    assert (status, headers["retry-after"]) == (429, str(RETRY_AFTER_S))
                    assert (error["type"], error["code"]) == ("rate_limit_error", "rate_limit_exceeded")
                    other.ready = True
                    await edge.lists_only(
                        *sorted([proxy.port, other.port])
                    )  # whose processes count those of the old one
                async with raw_connection(edge.port) as client:
                    client.send(b"GET /ready HTTP/1.1\r\nHost: x\r\n\r\n")
                    assert (await client.head())[0] == 200, "full is not gone"
            await eventually(lambda: is_served(edge))


async def test_what_a_process_had_in_hand_is_not_counted_for_ever(tmp_path: Path) -> None:
    async with scripted_proxy() as proxy:
        proxy.steps = (stream_head(), chunk(b"1"), never())
        async with running_edge(tmp_path, [proxy.port], environment={"EDGE_CLIENTS": "2"}) as edge:
            async with clients(edge, 2) as streams:
                for client in streams:
                    client.send(post(CHAT, b"{}"))
                    assert (await client.head())[0] == 200
                proxy.steps = ()
                assert not await is_served(edge)
                for process in edge.nginx_master().children():
                    process.kill()
                assert [await client.chunk() for client in streams] == [b"1", b"1"]
                assert {await client.read_all() for client in streams} == {b""}, "cut, not ended"
            await eventually(lambda: is_served(edge), 15.0)
            assert edge.said("worker process \\d+ exited on signal 9")


async def asked(edge: RunningEdge) -> tuple[int, dict[str, str], dict[str, str]]:
    async with raw_connection(edge.port) as client:
        client.send(post(CHAT, b"{}", headers=f"Authorization: Bearer {KEY}\r\n"))
        status, headers = await client.head()
        body = json.loads(await client.read_all())
        return status, headers, body.get("error", {})


async def is_served(edge: RunningEdge) -> bool:
    return (await asked(edge))[0] == 200
