"""Whatever a client sends, what the edge answers itself has the shape of OpenAI's errors."""

from __future__ import annotations

import io
import json
from pathlib import Path

import aiohttp

from prefixcache.limits import AWAY_RETRY_AFTER_S, MAX_BODY_BYTES
from tests.support.edge import needs_nginx, running_edge
from tests.support.edge_proxies import scripted_proxy
from tests.support.raw_http import post, raw_connection

pytestmark = needs_nginx
CHAT = "/v1/chat/completions"
HOST = "HTTP/1.1\r\nHost: x\r\n"
LONG = f"{'a' * 9_000}\r\n"
"""Two of them fit."""

HOSTILE = {
    "too large": (f"POST {CHAT} {HOST}Content-Length: {MAX_BODY_BYTES + 1}\r\n\r\n", 413, "request_too_large"),
    "garbage": ("garbage\r\n\r\n", 400, None),
    "no host": ("GET / HTTP/1.1\r\n\r\n", 400, None),
    "a blank in the path": (f"GET /a b {HOST}\r\n", 400, None),
    "two lengths": (f"POST {CHAT} {HOST}Content-Length: 1\r\nContent-Length: 2\r\n\r\n", 400, None),
    "length and chunks": (f"POST {CHAT} {HOST}Content-Length: 1\r\nTransfer-Encoding: chunked\r\n\r\n", 400, None),
    "no chunk": (f"POST {CHAT} {HOST}Transfer-Encoding: chunked\r\n\r\nzz\r\n", 400, None),
    "above the root": (f"GET /../ready {HOST}\r\n", 400, None),
    "a zero in the path": (f"GET /%00 {HOST}\r\n", 400, None),
    "a long URL": (f"GET /{'a' * 20_000} {HOST}\r\n", 414, "url_too_long"),
    "a long header": (f"GET / {HOST}A: {'a' * 20_000}\r\n\r\n", 431, "headers_too_long"),
    "many headers": (f"GET / {HOST}{f'A: {LONG}' * 4}\r\n", 431, "headers_too_long"),
    "metrics": (f"GET /metrics {HOST}\r\n", 404, "unknown_url"),
    "an answer by its own place": (f"GET /.edge/502 {HOST}\r\n", 404, "unknown_url"),
    "TRACE": (f"TRACE / {HOST}\r\n", 405, "method_not_allowed"),
    "CONNECT": (f"CONNECT x:80 {HOST}\r\n", 400, None),
    "an unknown coding": (f"POST {CHAT} {HOST}Transfer-Encoding: gzip\r\n\r\n", 501, "not_implemented"),
    "another HTTP": ("GET / HTTP/3.0\r\nHost: x\r\n\r\n", 505, "http_version_not_supported"),
    "HTTP/2": ("PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", 400, None),
}


async def test_to_what_no_proxy_should_see(tmp_path: Path) -> None:
    async with scripted_proxy() as proxy, running_edge(tmp_path, [proxy.port]) as edge:
        for name, (request, status, code) in HOSTILE.items():
            async with raw_connection(edge.port) as client:
                client.send(request.encode())
                found, headers = await client.head()
                assert (found, headers["content-type"], headers["connection"]) == (
                    status,
                    "application/json",
                    "close",
                ), name
                error = json.loads(await client.reader.readexactly(int(headers["content-length"])))["error"]
                assert error["message"] and (error["type"], error["code"]) == ("invalid_request_error", code), name
        assert not proxy.asked


async def test_what_a_proxy_takes_passes(tmp_path: Path) -> None:
    async with (
        scripted_proxy() as proxy,
        running_edge(tmp_path, [proxy.port]) as edge,
        aiohttp.ClientSession() as session,
    ):
        answer = await session.post(edge.url + CHAT, data=io.BytesIO(bytes(MAX_BODY_BYTES)))
        assert answer.status == 200, "the largest body"
        answer = await session.get(edge.url + f"/{'a' * 16_000}", headers={"A": "a" * 16_000})
        assert answer.status == 200, "the longest lines"
        answer = await session.get(edge.url + "/v1/models", headers={"If-Match": '"a"', "Range": "bytes=900-"})
        assert answer.status == 200, "conditions are the proxy's"


async def test_where_a_body_finds_no_room_its_client_is_told_to_come_again(tmp_path: Path) -> None:
    """A full EDGE_TMP_DIR; here one that is gone."""
    bodies = tmp_path / "bodies"
    bodies.mkdir()
    async with scripted_proxy() as proxy:
        async with running_edge(tmp_path, [proxy.port], environment={"EDGE_TMP_DIR": str(bodies)}) as edge:
            (bodies / "edge-bodies").rmdir()
            async with raw_connection(edge.port) as client:
                client.send(post(CHAT, bytes(100_000)))
                status, headers = await client.head()
                assert (status, headers["retry-after"]) == (503, str(AWAY_RETRY_AFTER_S))
                assert json.loads(await client.read_all())["error"]["code"] == "unavailable"
            async with raw_connection(edge.port) as client:
                client.send(post(CHAT, bytes(1_000)))
                assert (await client.head())[0] == 200, "short ones need no room there"


async def test_readiness_is_only_asked_for_and_takes_no_body(tmp_path: Path) -> None:
    async with scripted_proxy() as proxy, running_edge(tmp_path, [proxy.port]) as edge:

        async def answer_to(method: str, header: str = "") -> tuple[int, dict[str, str]]:
            """Before a byte of a body has come."""
            async with raw_connection(edge.port) as client:
                client.send(f"{method} /ready {HOST}{header}\r\n".encode())
                return await client.head()

        for method in ("POST", "PUT", "DELETE", "PATCH", "OPTIONS"):
            status, headers = await answer_to(method, "Content-Length: 5\r\n")
            assert (status, headers["allow"]) == (405, "get, head"), method
        for header in ("Content-Length: 5\r\n", "Transfer-Encoding: chunked\r\n"):
            assert (await answer_to("GET", header))[0] == 413, header
        assert not proxy.asked
        assert (await answer_to("HEAD", "Content-Length: 0\r\n"))[0] == 200
        assert [request.method for request in proxy.asked] == ["HEAD"]
