"""Paths that nginx reads otherwise than whoever is behind it: none of them gets by without a key."""

from __future__ import annotations

from pathlib import Path

from aiohttp import web

from tests.support.edge import needs_nginx, running_edge
from tests.support.edge_proxies import scripted_proxy
from tests.support.raw_http import raw_connection

pytestmark = needs_nginx
KEY = "0123456789abcdef"
LEADS_TO_READY = (
    "/ready",
    "/ready?key=value",
    "/ready#/v1/models",
    "/%72eady",
    "/v1/../ready",
    "/sleep/../ready",
    "/sleep/%2e%2e/ready",
    "/sleep%2f..%2fready",
    "/./ready",
    "http://x/ready",
    "http://x/sleep/../ready",
)
LEADS_ELSEWHERE = (
    "/",
    "/sleep",
    "//ready",
    "/ready/",
    "/ready/.",
    "/ready/x/..",
    "/Ready",
    "/ready;x",
    "/ready%20",
    "/ready%3fx",
    "/ready%23x",
    "/ready/../sleep",
    "/ready/%2e%2e/sleep",
    "/ready\\..\\sleep",
    "/sleep#/../ready",
    "/sleep?/../ready",
    "/v1/x/..//ready",
    "/%2fready",
    "/.edge/../sleep",
    "http://x",
    "http://x?/ready",
    "http://ready/sleep",
    "http://x//ready",
)

LEADS_TO_METRICS = (
    *("/metrics", "/metrics?x", "/metrics#x", "/%6detrics", "/x/../metrics", "/x/%2e%2e/metrics", "/./metrics"),
    *("http://x/metrics", "//metrics", "/x/..//metrics", "/%2fmetrics", "/metrics/", "/metrics;x", "/metrics%20"),
)


async def status_of(port: int, target: str, *headers: str) -> int:
    async with raw_connection(port) as client:
        client.send("\r\n".join([f"GET {target} HTTP/1.1", "Host: x", *headers, "", ""]).encode())
        return (await client.head())[0]


async def test_without_a_key_a_proxy_is_asked_for_nothing_but_its_readiness(tmp_path: Path) -> None:
    async with scripted_proxy() as proxy, running_edge(tmp_path, [proxy.port], environment={"API_KEYS": KEY}) as edge:
        for target in LEADS_TO_READY:
            assert await status_of(edge.port, target) == 200, target
            assert proxy.asked.pop().target == "/ready", target
        for target in LEADS_ELSEWHERE:
            assert await status_of(edge.port, target) == 401, target
        assert not proxy.asked


async def test_with_a_key_a_path_passes_as_it_was_written(tmp_path: Path) -> None:
    """An engine may tell %2F from a slash."""
    async with scripted_proxy() as proxy, running_edge(tmp_path, [proxy.port], environment={"API_KEYS": KEY}) as edge:
        for target in ("/v1/models/a%2Fb", "//ready", "/ready/../sleep?x=%2e", "/a//b/./c"):
            assert await status_of(edge.port, target, f"Authorization: Bearer {KEY}") == 200, target
            assert proxy.asked.pop().target == target


async def test_no_way_leads_to_the_metrics_of_a_proxy(tmp_path: Path) -> None:
    """By the router of the real proxies."""
    reached: list[str] = []

    async def metrics(request: web.Request) -> web.Response:
        reached.append(request.rel_url.raw_path)
        return web.Response()

    app = web.Application()
    app.router.add_get("/metrics", metrics)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    try:
        async with running_edge(tmp_path, [runner.addresses[0][1]]) as edge:
            for target in LEADS_TO_METRICS:
                assert await status_of(edge.port, target) == 404, target
        assert not reached
    finally:
        await runner.cleanup()
