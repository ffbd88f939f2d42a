"""A real Prometheus over a proxy, workers and a proxy in front of an engine: what it scrapes, shows and alerts on.

redis ◄── proxy, worker one, worker two      Prometheus scrapes all of them with the project's rules
          proxy in front of an engine that is not there
"""

from __future__ import annotations

import asyncio
import json
import re
import urllib.request
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.support.monitoring import dashboard_expressions, panels, plain, rules
from tests.support.ports import free_port
from tests.support.program_fleet import Program, ProgramFleet, all_ready, running_fleet
from tests.support.prometheus import Prometheus, missing, running_prometheus
from tests.support.promql import Selector, named
from tests.support.valkey import Server
from tests.support.waiting import eventually

SOON_S = 30.0
MODEL = "sim"
PROMPT = "A system prompt that every request shares, longer than a few index blocks. " * 20

MAY_BE_EMPTY = {
    "Proxies at the edge": "there is no edge",
    "Lists at the edge": "likewise",
    "Errors by code": "nothing failed",
    "How long a cached block lives": "nothing was evicted",
}
"""Panels without a value in a healthy fleet of this size, and why."""

pytestmark = pytest.mark.skipif(missing is not None, reason=str(missing))


@dataclass(frozen=True, slots=True, kw_only=True)
class Watched:
    """What runs."""

    fleet: ProgramFleet
    proxy: Program
    engines: Program
    """The proxy in front of the engine."""
    workers: tuple[Program, Program]
    prometheus: Prometheus

    async def fires(self, *alerts: str) -> None:
        await self.until(lambda: set(alerts) <= self.prometheus.firing())

    async def is_quiet(self) -> None:
        await self.until(lambda: self.prometheus.firing() == {"EngineDown"})

    async def until(self, condition: Callable[[], bool]) -> None:
        def holds() -> bool:
            try:
                return condition()
            except OSError:  # it does not answer yet
                return False

        await eventually(lambda: asyncio.to_thread(holds), SOON_S)


@asynccontextmanager
async def watched(folder: Path, redis: Server) -> AsyncIterator[Watched]:
    """All is scraped, and every request that was sent is counted."""
    async with running_fleet(folder, redis.url) as fleet:
        workers = (
            fleet.start_worker("one", "--sim-speed", "20"),
            fleet.start_worker("two", "--sim-speed", "20"),
        )
        proxy = await fleet.start_proxy("proxy")
        engines = await fleet.start_proxy("engines", "--engine", f"http://127.0.0.1:{free_port()}")
        addresses = [re.findall(r" ready at (\S+)", await each.said(" ready at "))[-1].rstrip(",") for each in workers]
        await all_ready(proxy, 2)
        targets = {"proxy": [each.url.removeprefix("http://") for each in (proxy, engines)], "worker": addresses}
        with running_prometheus(folder, targets) as prometheus:
            yield Watched(fleet=fleet, proxy=proxy, engines=engines, workers=workers, prometheus=prometheus)


def ask(proxy: Program, question: str) -> int:
    """Its cached tokens."""
    messages = [{"role": "system", "content": PROMPT}, {"role": "user", "content": question}]
    body: dict[str, Any] = {"model": MODEL, "messages": messages, "max_tokens": 4}
    request = urllib.request.Request(
        proxy.url + "/v1/chat/completions", json.dumps(body).encode(), {"content-type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=SOON_S) as answer:
        usage = json.loads(answer.read())["usage"]
    cached: int = usage["prompt_tokens_details"]["cached_tokens"]
    return cached


def empty_panels(prometheus: Prometheus) -> set[str]:
    return {
        panel["title"]
        for panel in panels()
        if not all(prometheus.query(plain(target["expr"])) for target in panel["targets"])
    }


def selectors_without_series(prometheus: Prometheus) -> list[str]:
    """A label, or a value of one, that no program exports is valid PromQL and never true: `outcome="fialed"`."""
    expressions = (*(rule.expression for rule in rules()), *dashboard_expressions())
    wanted = {
        selector
        for expression in expressions
        for selector in named(expression).selectors
        if selector.matchers and selector.name != "ALERTS" and not _is_of_the_edge(selector)
    }
    assert len(wanted) > 10
    return sorted(str(each) for each in wanted if not prometheus.query(str(each)))


def _is_of_the_edge(selector: Selector) -> bool:
    """Which is a service of the compose file, as the label is."""
    matched = {(each.label, each.value) for each in selector.matchers}
    return selector.name.startswith("prefixcache_edge_") or bool({("job", "edge"), ("service", "proxy")} & matched)


async def test_scrapes_all_and_every_panel_has_its_values(tmp_path: Path, valkey: Server) -> None:
    async with watched(tmp_path, valkey) as stack:
        prometheus = stack.prometheus
        await stack.until(lambda: [each.value for each in prometheus.query("up")] == [1.0] * 4)
        assert {each["health"] for each in prometheus.targets()} == {"up"}

        asked, cached = 0, 0
        empty: set[str] = set()

        async def none_is_empty() -> bool:
            """Asks once more and looks."""
            nonlocal asked, cached, empty
            cached += await asyncio.to_thread(ask, stack.proxy, f"question {asked}")
            asked += 1
            empty = await asyncio.to_thread(empty_panels, prometheus) - set(MAY_BE_EMPTY)
            return not empty

        try:
            await eventually(none_is_empty, SOON_S)
        except AssertionError:
            raise AssertionError(f"panels without a value: {sorted(empty)}") from None

        def total(name: str) -> float:
            return sum(each.value for each in prometheus.query(name))

        await stack.until(lambda: total("prefixcache_requests_total") == asked)
        assert total("prefixcache_cached_tokens_total") == total("prefixcache_worker_cached_tokens_total") == cached > 0
        assert await asyncio.to_thread(selectors_without_series, prometheus) == []
        await stack.is_quiet()


async def test_planted_faults_fire_their_alerts_and_end_them(tmp_path: Path, valkey: Server) -> None:
    async with watched(tmp_path, valkey) as stack:
        await asyncio.to_thread(ask, stack.proxy, "question")
        await stack.fires("EngineDown")
        await stack.is_quiet()
        with valkey.paused():
            await stack.fires("RedisUnreachable")
        await stack.is_quiet()
        one, two = stack.workers
        one.kill()
        await stack.fires("InstanceDown", "InstanceLost")
        two.kill()
        await stack.fires("NoWorkerReady")
        stack.proxy.kill()
        stack.engines.kill()
        await stack.fires("NoProxy")
