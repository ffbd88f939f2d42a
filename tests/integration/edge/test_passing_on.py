"""Requests and answers through the edge: whole, as they come, to a proxy that answers, and never a false end."""

from __future__ import annotations

import asyncio
import contextlib
import io
import socket
from pathlib import Path

import aiohttp
import pytest

from prefixcache.limits import AWAY_RETRY_AFTER_S
from tests.support.answer_bytes import LAST_CHUNK, chunk, json_answer, stream_head
from tests.support.edge import needs_nginx, running_edge
from tests.support.edge_proxies import NOT_READY, scripted_proxy
from tests.support.raw_http import post, raw_connection
from tests.support.scripted_engine import close, never, reset, tell, when
from tests.support.waiting import eventually

pytestmark = needs_nginx
CHAT = "/v1/chat/completions"


async def test_an_answer_comes_as_the_proxy_wrote_it(tmp_path: Path) -> None:
    async with scripted_proxy() as proxy, running_edge(tmp_path, [proxy.port]) as edge:
        proxy.steps = (json_answer({"a": 1}, ("x-prefixcache-worker", "w1"), status=429),)
        async with aiohttp.ClientSession() as session:
            answer = await session.post(edge.url + CHAT + "?a=b", data=b"{}", headers={"X-Forwarded-For": "10.1.1.1"})
            assert (answer.status, await answer.json()) == (429, {"a": 1})
        assert answer.headers["x-prefixcache-worker"] == "w1"
        assert answer.headers["Connection"] == "close"
        assert answer.headers["Server"] == "nginx"
        (request,) = proxy.asked
        assert (request.method, request.target, request.body) == ("POST", CHAT + "?a=b", b"{}")
        assert request.header("x-forwarded-for") == "10.1.1.1, 127.0.0.1"
        assert request.header("connection") is None
        await eventually(lambda: edge.said(rf"POST {CHAT} 429 "))


async def test_each_piece_of_a_stream_arrives_before_the_next_is_written(tmp_path: Path) -> None:
    goes_on = asyncio.Event()
    async with (
        scripted_proxy() as proxy,
        running_edge(tmp_path, [proxy.port]) as edge,
        raw_connection(edge.port) as client,
    ):
        proxy.steps = (stream_head(), chunk(b"data: 1\n\n"), when(goes_on), chunk(b"data: 2\n\n"), LAST_CHUNK)
        client.send(post(CHAT, b"{}"))
        status, headers = await client.head()
        assert (status, headers["transfer-encoding"]) == (200, "chunked")
        assert await client.chunk() == b"data: 1\n\n"
        goes_on.set()
        assert await client.chunks() == [b"data: 2\n\n"]


@pytest.mark.parametrize("end", [close(), reset()], ids=["FIN", "RST"])
async def test_a_stream_that_is_cut_is_never_ended(tmp_path: Path, end: object) -> None:
    async with scripted_proxy() as proxy, scripted_proxy() as other:
        async with running_edge(tmp_path, [proxy.port, other.port]) as edge, raw_connection(edge.port) as client:
            for each in (proxy, other):
                each.steps = (stream_head(), chunk(b"data: 1\n\n"), end)  # type: ignore[assignment]  # a step
            client.send(post(CHAT, b"{}"))
            await client.head()
            assert await client.chunk() == b"data: 1\n\n"
            assert await client.read_all() == b""
            assert len(proxy.asked) + len(other.asked) == 1, "what has begun is not repeated"


@pytest.mark.parametrize("end", [close(), reset()], ids=["FIN", "RST"])
@pytest.mark.parametrize("size", [2, 3_000_000])
async def test_a_proxy_that_fails_before_its_first_byte_is_replaced(tmp_path: Path, end: object, size: int) -> None:
    body = b"x" * size
    async with scripted_proxy() as one, scripted_proxy() as other:
        async with running_edge(tmp_path, [one.port, other.port]) as edge, aiohttp.ClientSession() as session:
            one.steps = (end,)  # type: ignore[assignment]  # a step
            for _ in range(4):
                answer = await session.post(edge.url + CHAT, data=io.BytesIO(body))
                assert (answer.status, await answer.json()) == (200, {"proxy": other.port})
        assert one.asked, "it was tried"
        assert [request.body for request in other.asked] == [body] * 4


@pytest.mark.parametrize(("status", "num_asked"), [(503, 2), (429, 1), (500, 1), (502, 1), (400, 1)])
async def test_only_unavailable_is_asked_elsewhere(tmp_path: Path, status: int, num_asked: int) -> None:
    async with scripted_proxy() as one, scripted_proxy() as other:
        async with running_edge(tmp_path, [one.port, other.port]) as edge, aiohttp.ClientSession() as session:
            for proxy in (one, other):
                proxy.steps = (json_answer({"from": "a proxy"}, status=status),)
            answer = await session.post(edge.url + CHAT, data=b"{}")
            assert (answer.status, await answer.json()) == (status, {"from": "a proxy"})
            assert len(one.asked) + len(other.asked) == num_asked


async def test_the_proxy_with_fewer_requests_gets_the_next(tmp_path: Path) -> None:
    async with scripted_proxy() as one, scripted_proxy() as other:
        async with running_edge(tmp_path, [one.port, other.port]) as edge, raw_connection(edge.port) as held:
            goes_on = asyncio.Event()
            one.steps = other.steps = (when(goes_on), json_answer({}))
            held.send(post(CHAT, b"{}"))
            await eventually(lambda: one.asked or other.asked)
            busy, idle = (one, other) if one.asked else (other, one)
            idle.steps = ()
            async with aiohttp.ClientSession() as session:
                for _ in range(5):
                    answer = await session.post(edge.url + CHAT, data=b"{}")
                    assert await answer.json() == {"proxy": idle.port}
            assert len(busy.asked) == 1
            goes_on.set()
            assert (await held.head())[0] == 200


async def test_a_client_that_leaves_takes_its_request_along(tmp_path: Path) -> None:
    begun = asyncio.Event()
    async with scripted_proxy() as proxy, running_edge(tmp_path, [proxy.port]) as edge:
        proxy.steps = (tell(begun), never())
        async with raw_connection(edge.port) as client:
            client.send(post(CHAT, b"{}"))
            await begun.wait()
            before = len(proxy.server.connections)
        await eventually(lambda: len(proxy.server.connections) < before)


async def test_without_a_proxy_that_answers_it_is_503_with_retry_after(tmp_path: Path) -> None:
    async with scripted_proxy() as proxy:
        gone = proxy.port
    async with running_edge(tmp_path, [gone]) as edge, aiohttp.ClientSession() as session:
        for path in (CHAT, "/ready"):
            answer = await session.get(edge.url + path)
            assert (answer.status, answer.headers["Retry-After"]) == (503, str(AWAY_RETRY_AFTER_S))
            assert (await answer.json())["error"]["code"] == "unavailable"
    async with running_edge(tmp_path, ["nowhere.invalid:8000"]) as edge, aiohttp.ClientSession() as session:
        answer = await session.post(edge.url + CHAT, data=b"{}")
        assert (answer.status, answer.headers["Retry-After"]) == (503, str(AWAY_RETRY_AFTER_S))


async def test_a_host_that_does_not_answer_at_all_is_no_proxy_either(tmp_path: Path) -> None:
    with contextlib.ExitStack() as sockets:
        full = sockets.enter_context(socket.create_server(("127.0.0.1", 0), backlog=0))
        for _ in range(2):  # what it does not accept fills its queue, and nobody else hears of it
            waiting = sockets.enter_context(socket.socket())
            waiting.setblocking(False)
            waiting.connect_ex(full.getsockname())
        async with running_edge(tmp_path, [full.getsockname()[1]]) as edge, aiohttp.ClientSession() as session:
            answer = await session.post(edge.url + CHAT, data=b"{}")
            assert (answer.status, answer.headers["Retry-After"]) == (503, str(AWAY_RETRY_AFTER_S))
            await eventually(lambda: edge.said(rf"POST {CHAT} 503 .* proxy_status=\"504\""))


async def test_while_no_proxy_is_ready_its_own_words_pass(tmp_path: Path) -> None:
    async with scripted_proxy() as proxy:
        proxy.ready = False
        proxy.steps = (json_answer({"error": {"message": NOT_READY}}, ("retry-after", "7"), status=503),)
        async with running_edge(tmp_path, [proxy.port]) as edge, aiohttp.ClientSession() as session:
            answer = await session.post(edge.url + CHAT, data=b"{}")
            assert (answer.status, answer.headers["Retry-After"]) == (503, "7")
            assert (await answer.json())["error"]["message"] == NOT_READY
