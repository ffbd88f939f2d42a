"""Proxies that come, go, take leave and hang: the list follows, and what is in hand goes on."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp
import psutil

from prefixcache.cli.children import end
from tests.support.answer_bytes import LAST_CHUNK, chunk, json_answer, stream_head
from tests.support.edge import RunningEdge, needs_nginx, running_edge
from tests.support.edge_proxies import ScriptedProxy, scripted_proxy
from tests.support.ports import free_port
from tests.support.raw_http import RawConnection, post, raw_connection
from tests.support.scripted_engine import when
from tests.support.waiting import eventually

pytestmark = needs_nginx
CHAT = "/v1/chat/completions"


@asynccontextmanager
async def stream_in_hand(
    edge: RunningEdge, *proxies: ScriptedProxy
) -> AsyncIterator[tuple[RawConnection, asyncio.Event]]:
    """A stream that has begun, and what lets it end."""
    goes_on = asyncio.Event()
    for proxy in proxies:
        proxy.steps = (stream_head(), chunk(b"1"), when(goes_on), chunk(b"2"), LAST_CHUNK)
    async with raw_connection(edge.port) as client:
        client.send(post(CHAT, b"{}"))
        await client.head()
        assert await client.chunk() == b"1"
        for proxy in proxies:
            proxy.steps = ()
        yield client, goes_on


async def who_answers(edge: RunningEdge, num_requests: int = 6) -> set[int]:
    async with aiohttp.ClientSession() as session:
        answers = [await session.post(edge.url + CHAT, data=b"{}") for _ in range(num_requests)]
        assert {answer.status for answer in answers} == {200}
        return {(await answer.json())["proxy"] for answer in answers}


async def test_a_proxy_that_turns_gets_nothing_new_and_keeps_its_streams(tmp_path: Path) -> None:
    async with scripted_proxy() as one, scripted_proxy() as other:
        async with running_edge(tmp_path, [one.port, other.port]) as edge:
            await edge.lists_only(one.port, other.port)
            assert await who_answers(edge) == {one.port, other.port}
            async with stream_in_hand(edge, one, other) as (client, goes_on):
                one.ready = other.ready = False
                leaving, staying = one, other
                staying.ready = True
                await edge.lists_only(staying.port)
                assert await who_answers(edge) == {staying.port}
                leaving.ready = True
                await edge.lists_only(one.port, other.port)
                assert await who_answers(edge) == {one.port, other.port}
                goes_on.set()
                assert await client.chunks() == [b"2"]


async def test_a_proxy_that_is_gone_leaves_the_list(tmp_path: Path) -> None:
    async with scripted_proxy() as one:
        async with scripted_proxy() as other, running_edge(tmp_path, [one.port, other.port]) as edge:
            await edge.lists_only(one.port, other.port)
            other.server.stop_listening()
            assert await who_answers(edge) <= {one.port, other.port}, "no request is lost before the list knows"
            await edge.lists_only(one.port)


async def test_the_last_one_that_fails_stays_in_the_list(tmp_path: Path) -> None:
    async with scripted_proxy() as one, running_edge(tmp_path, [one.port]) as edge:
        one.ready = False
        await eventually(lambda: len(one.server.requests) > 3)
        assert await who_answers(edge) == {one.port}
        assert edge.lists() == [f"127.0.0.1:{one.port}"]


async def test_a_proxy_that_comes_later_joins(tmp_path: Path) -> None:
    async with scripted_proxy() as one:
        late = free_port()
        async with running_edge(tmp_path, [one.port, late]) as edge:
            assert await who_answers(edge) == {one.port}

            async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
                await reader.readuntil(b"\r\n\r\n")
                writer.write(json_answer({"proxy": late}, ("connection", "close")))
                writer.close()

            server = await asyncio.start_server(answer, "127.0.0.1", late)
            await edge.lists_only(one.port, late)
            assert await who_answers(edge) == {one.port, late}
            server.close()
            await server.wait_closed()


async def test_a_stream_ends_whole_when_the_edge_is_told_to_stop(tmp_path: Path) -> None:
    async with scripted_proxy() as one, running_edge(tmp_path, [one.port]) as edge:
        async with stream_in_hand(edge, one) as (client, goes_on):
            edge.process.terminate()

            async def refuses() -> bool:
                try:
                    _, writer = await asyncio.open_connection("127.0.0.1", edge.port)
                except ConnectionRefusedError:
                    return True
                writer.transport.abort()
                return False

            await eventually(refuses)
            goes_on.set()
            assert await client.chunks() == [b"2"]
        assert await asyncio.to_thread(edge.process.wait, 10) == 0


async def test_it_ends_with_an_error_when_nginx_dies(tmp_path: Path) -> None:
    async with scripted_proxy() as one, running_edge(tmp_path, [one.port]) as edge:
        master = edge.nginx_master()
        orphans = master.children()  # in a container they end with its first process
        master.kill()
        assert await asyncio.to_thread(edge.process.wait, 10) == 1
        assert edge.said("nginx has ended with status -9")
        for each in orphans:
            each.kill()


async def test_nginx_does_not_outlive_the_supervisor(tmp_path: Path) -> None:
    async with scripted_proxy() as one, running_edge(tmp_path, [one.port]) as edge:
        master = edge.nginx_master()
        os.kill(edge.process.pid, signal.SIGKILL)
        await asyncio.to_thread(psutil.wait_procs, [master], 10)
        assert not master.is_running()
        await asyncio.to_thread(end, edge.process, patience_s=1.0)
