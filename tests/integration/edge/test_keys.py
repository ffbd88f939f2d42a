"""API keys at the edge: who has none is told so, nobody behind it sees one, and the health check has its own."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from pathlib import Path

import aiohttp
import pytest

from tests.support.answer_bytes import json_answer
from tests.support.edge import ROOT, RunningEdge, needs_nginx, running_edge
from tests.support.edge_proxies import scripted_proxy
from tests.support.raw_http import raw_connection
from tests.support.scripted_engine import ReceivedRequest, Step

pytestmark = needs_nginx
CHAT = "/v1/chat/completions"
KEY, KEY_IN_FILE = "sk-Letters.and~Digits+42/=", "another-key-from-a-file"


async def test_only_who_shows_a_key_is_served(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text(f"{KEY_IN_FILE}\n")
    environment = {"API_KEYS": f"{KEY}, 0123456789abcdef", "API_KEYS_FILE": str(file)}
    async with scripted_proxy() as proxy, running_edge(tmp_path, [proxy.port], environment=environment) as edge:
        async with aiohttp.ClientSession() as session:

            async def status(authorization: str | None, *, method: str = "POST", path: str = CHAT) -> int:
                headers = {} if authorization is None else {"Authorization": authorization}
                data = b"{}" if method == "POST" else None
                async with session.request(method, edge.url + path, headers=headers, data=data) as answer:
                    if answer.status == 401:
                        assert (await answer.json())["error"]["code"] == "invalid_api_key"
                        assert answer.headers["WWW-Authenticate"] == "Bearer"
                    return answer.status

            for wrong in (
                None,
                "",
                KEY,
                f"Bearer {KEY.lower()}",
                f"Bearer {KEY}x",
                f"Basic {KEY}",
                "Bearer sk-Letters",
            ):
                assert await status(wrong) == 401, wrong
            assert await status(None, method="GET", path="/health") == 401
            assert not proxy.asked
            for right in (KEY, KEY_IN_FILE, "0123456789abcdef"):
                assert await status(f"Bearer {right}") == 200
            for scheme in ("bearer ", "BEARER  ", "Bearer\t", "\tbEaReR \t"):
                assert await status(f"{scheme}{KEY}\t ") == 200, scheme
            for header, told in ((KEY, 200), (KEY[:-1], 401), (f"Bearer {KEY}", 401)):
                async with session.post(edge.url + CHAT, headers={"X-Api-Key": header}, data=b"{}") as answer:
                    assert answer.status == told, "as Anthropic's clients show theirs"
            assert {request.header("authorization") for request in proxy.asked} == {None}
            assert {request.header("x-api-key") for request in proxy.asked} == {None}
            assert await status(None, method="GET", path="/ready") == 200, "balancers ask without a key"
        assert not edge.said("sk-Letters|another-key")
        assert edge.said("INFO edge: 3 API keys: ")
        assert (edge.run_dir / "nginx.conf").stat().st_mode & 0o077 == 0


async def test_a_browsers_preflight_has_no_key_and_no_body(tmp_path: Path) -> None:
    origin, asks = "Origin: http://a.page\r\n", "Access-Control-Request-Method: POST\r\n"
    async with scripted_proxy() as proxy, running_edge(tmp_path, [proxy.port], environment={"API_KEYS": KEY}) as edge:
        for headers, status in (
            (origin + asks, 200),
            (origin + asks + "Content-Length: 0\r\n", 200),
            (origin + asks + "Content-Length: 1\r\n", 401),
            (origin + asks + "Transfer-Encoding: chunked\r\n", 401),
            (origin, 401),
            (asks, 401),
            ("", 401),
        ):
            async with raw_connection(edge.port) as client:
                client.send(f"OPTIONS {CHAT} HTTP/1.1\r\nHost: x\r\n{headers}\r\n".encode())
                assert (await client.head())[0] == status, headers
        assert [request.method for request in proxy.asked] == ["OPTIONS"] * 2


async def test_who_shows_no_key_is_answered_before_his_body_is_read(tmp_path: Path) -> None:
    async with scripted_proxy() as proxy, running_edge(tmp_path, [proxy.port], environment={"API_KEYS": KEY}) as edge:
        for more in ("Content-Length: 1000000\r\n", "Transfer-Encoding: chunked\r\n"):
            async with raw_connection(edge.port) as client:
                client.send(f"POST {CHAT} HTTP/1.1\r\nHost: x\r\n{more}\r\n".encode())
                assert (await client.head())[0] == 401
        assert not proxy.asked


async def test_without_keys_authorization_is_the_proxys(tmp_path: Path) -> None:
    async with scripted_proxy() as proxy, running_edge(tmp_path, [proxy.port]) as edge:
        async with aiohttp.ClientSession() as session:
            await session.post(edge.url + CHAT, headers={"Authorization": "Bearer theirs"}, data=b"{}")
        assert proxy.asked[0].header("authorization") == "Bearer theirs"
        assert edge.said("INFO edge: no API key: everybody on this machine is served")


@pytest.mark.parametrize("keys", ["", KEY])
async def test_the_health_check_passes_the_edge_by_a_key_of_its_own(tmp_path: Path, keys: str) -> None:
    async with scripted_proxy() as proxy:

        def answer(request: ReceivedRequest) -> tuple[Step, ...]:
            if request.target == "/v1/models":
                return (json_answer({"data": [{"id": "m"}]}),)
            return (json_answer({"choices": []}),)

        proxy.server.answer = answer
        async with running_edge(tmp_path, [proxy.port], environment={"API_KEYS": keys}) as edge:
            done = await asyncio.to_thread(probe, edge, tmp_path)
            assert (done.returncode, done.stdout) == (0, "m answers\n")
            if keys:
                (edge.run_dir / "probe-key").write_text("0123456789abcdef0")
                (tmp_path / f"prefixcache-probe-{edge.port}.json").unlink()
                done = await asyncio.to_thread(probe, edge, tmp_path)
                assert done.returncode == 1 and "401" in done.stdout


def probe(edge: RunningEdge, folder: Path) -> subprocess.CompletedProcess[str]:
    paths = [str(folder), str(edge.run_dir / "probe-key")]
    command = [sys.executable, "-P", "-m", "prefixcache.probe", "proxy", edge.address, *paths]
    environment = {"PYTHONPATH": str(ROOT)}
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=30, check=False)


async def test_a_key_that_is_too_short_is_refused_and_not_shown(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="API key 2 of 2 has 5 characters"):
        async with running_edge(tmp_path, [1], environment={"API_KEYS": f"{KEY},short"}):
            pass
    assert "short" not in (tmp_path / "edge.log").read_text()


async def test_a_setting_without_a_key_in_it_starts_nothing(tmp_path: Path) -> None:
    for environment, words in (
        ({"API_KEYS": " ,"}, "error: API_KEYS holds no key"),
        ({"API_KEYS_FILE": str(tmp_path)}, "error: API_KEYS_FILE: .* is a folder"),
    ):
        with pytest.raises(AssertionError, match=words):
            async with running_edge(tmp_path, [1], environment=environment):
                pass


async def test_serving_everybody_beyond_this_machine_is_warned_of(tmp_path: Path) -> None:
    async with running_edge(tmp_path, [1], environment={"EDGE_PUBLISHED": "0.0.0.0"}) as edge:
        assert edge.said("WARNING edge: no API key: everybody who reaches 0.0.0.0 is served")
