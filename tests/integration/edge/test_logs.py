"""What the logs hold of a request: never its query or its body, and nothing that passes for a field of their own."""

from __future__ import annotations

from pathlib import Path

from tests.support.answer_bytes import json_answer
from tests.support.edge import RunningEdge, needs_nginx, running_edge
from tests.support.edge_proxies import scripted_proxy
from tests.support.raw_http import post, raw_connection
from tests.support.scripted_engine import close
from tests.support.waiting import eventually

pytestmark = needs_nginx
CHAT = "/v1/chat/completions"
SECRET = "secret-of-the-client"


async def send(edge: RunningEdge, request: bytes) -> int:
    async with raw_connection(edge.port) as client:
        client.send(request)
        return (await client.head())[0]


async def test_hold_no_query_and_no_body(tmp_path: Path) -> None:
    path = f"{CHAT}?key={SECRET}"
    async with scripted_proxy() as proxy, running_edge(tmp_path, [proxy.port]) as edge:
        large = SECRET.encode() * 10_000
        assert await send(edge, post(path, large, headers=f"Referer: http://{SECRET}/\r\n")) == 200
        proxy.steps = (close(),)
        assert await send(edge, post(path, b"{}", headers=f"Referer: http://{SECRET}/\r\n")) == 503
        assert await send(edge, f"GET {CHAT}#{SECRET} HTTP/1.1\r\nHost: x\r\n\r\n".encode()) == 503
        assert await send(edge, f"GET /a?{SECRET} b HTTP/1.1\r\nHost: x\r\n\r\n".encode()) == 400
        assert await send(edge, f"?{SECRET} / HTTP/1.1\r\n\r\n".encode()) == 400
        assert await send(edge, f"GET / HTTP/1.1\r\nHost: x\r\n{SECRET}\0: 1\r\n\r\n".encode()) == 400
        await eventually(lambda: edge.said(rf"POST {CHAT} 503 .* id=\"-\""))
        await eventually(lambda: edge.said(r"upstream prematurely closed connection .*, client: 127.0.0.1, server:\n"))
        await eventually(lambda: len(edge.said(r" 400 bytes=")) == 3)
    assert SECRET not in edge.log.read_text()


async def test_a_request_id_is_no_field_of_the_log(tmp_path: Path) -> None:
    async with scripted_proxy() as proxy, running_edge(tmp_path, [proxy.port]) as edge:
        proxy.steps = (json_answer({}, ("x-request-id", 'mine" proxy="theirs')),)
        assert await send(edge, post(CHAT, b"{}")) == 200
        await eventually(lambda: edge.said(r'id="mine\\x22 proxy=\\x22theirs"\n'))
