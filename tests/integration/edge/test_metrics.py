"""The edge's own metrics: on a port of their own, and true."""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import aiohttp
import pytest

from tests.support.edge import needs_nginx, running_edge
from tests.support.edge_proxies import scripted_proxy
from tests.support.ports import free_port
from tests.support.scraping import scraped
from tests.support.waiting import eventually

pytestmark = needs_nginx
FOLLOWS_WITHIN_S = 15.0


@pytest.fixture
def folder() -> Iterator[Path]:
    """Open to all: started by root, nginx works as another user, and reads the metrics there."""
    with tempfile.TemporaryDirectory(prefix="edge-") as name:
        os.chmod(name, 0o755)
        yield Path(name)


async def test_tell_how_many_proxies_there_are_and_how_many_are_ready(folder: Path) -> None:
    port = free_port()
    url = f"http://127.0.0.1:{port}"

    async def value(name: str) -> float:
        return (await scraped(url, f"prefixcache_edge_{name}"))[""]

    async with scripted_proxy() as one, scripted_proxy() as other:
        environment = {"EDGE_METRICS_LISTEN": f"127.0.0.1:{port}"}
        async with running_edge(folder, [one.port, other.port], environment=environment) as edge:
            assert (await value("proxies_known"), await value("proxies_ready")) == (2, 2)
            assert await value("reloads_total") == 0
            first = await value("looked_timestamp_seconds")
            assert abs(time.time() - first) < FOLLOWS_WITHIN_S
            other.ready = False

            async def is_told() -> bool:
                return (await value("proxies_ready"), await value("reloads_total")) == (1, 1)

            await eventually(is_told, FOLLOWS_WITHIN_S)
            assert await value("proxies_known") == 2
            assert await value("looked_timestamp_seconds") > first
            async with aiohttp.ClientSession() as session:
                assert (await session.get(f"{edge.url}/metrics")).status == 404, "clients have no business there"
                answer = await session.get(f"{url}/metrics")
                assert answer.headers["content-type"] == "text/plain; version=0.0.4"
                assert (await session.get(f"{url}/v1/models")).status == 404, "nor is anything else served here"


async def test_count_a_proxy_that_was_killed_and_is_back_before_anybody_missed_it(folder: Path) -> None:
    async with scripted_proxy() as one, scripted_proxy() as other, running_edge(folder, [one.port, other.port]) as edge:
        one.ready = False
        await edge.lists_only(other.port)
        one.ready, one.process = True, "b"
        await edge.lists_only(one.port, other.port)
        assert edge.metric("proxies_lost_total") == 0, "it took leave before it was replaced"
        one.process = "c"
        await eventually(lambda: edge.metric("proxies_lost_total") == 1, FOLLOWS_WITHIN_S)
        one.ready, one.process = False, "d"
        await edge.lists_only(other.port)
        assert edge.metric("proxies_lost_total") == 2, "the new one is not ready yet"
