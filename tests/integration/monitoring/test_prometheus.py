"""A real Prometheus over a proxy, workers and a proxy in front of an engine: what it scrapes, shows and alerts on.

redis ◄── proxy, worker one, worker two, a worker that loads
          proxy in front of an engine                              Prometheus scrapes all with the project's rules
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import urllib.request
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.support.engine_text import EngineText
from tests.support.lru_engine import EngineSettings, LruEngine, serving_engine
from tests.support.monitoring import dashboard_expressions, panels, plain, rules
from tests.support.ports import free_port
from tests.support.program_fleet import Program, ProgramFleet, all_ready, running_fleet
from tests.support.prometheus import HOLD_S, Prometheus, missing, running_prometheus
from tests.support.promql import Selector, named
from tests.support.valkey import Server
from tests.support.waiting import eventually

SOON_S = 30.0
MODEL = "sim"
PROMPT = "A system prompt that every request shares, longer than a few index blocks. " * 20

BEFORE_THE_FIRST_SCRAPE = {"NoProxy"}
"""Which comes after some seconds: longer than the `for` of the rules here."""
OVER_LATE = {"WorkerCannotPublish", "WorkerLost"}
"""They look back for a minute, or five: whatever follows, they go on."""

MAY_BE_EMPTY = {
    "Firing alerts": "nothing is wrong",
    "Proxies at the edge": "there is no edge",
    "Lists at the edge": "likewise",
    "Errors by code": "nothing failed",
    "How long a cached block lives": "nothing was evicted",
}
"""Panels without a value in a healthy fleet of this size, and why."""

pytestmark = pytest.mark.skipif(missing is not None, reason=str(missing))


async def until(condition: Callable[[], bool]) -> None:
    def holds() -> bool:
        try:
            return condition()
        except OSError:  # it does not answer yet
            return False

    await eventually(lambda: asyncio.to_thread(holds), SOON_S)


@dataclass(frozen=True, slots=True, kw_only=True)
class Watched:
    """What runs."""

    fleet: ProgramFleet
    proxy: Program
    engines: Program
    """The proxy in front of the engine."""
    workers: tuple[Program, Program]
    addresses: tuple[str, str]
    """Of the workers."""
    engine: AsyncExitStack
    """To close it ends the engine."""
    prometheus: Prometheus

    async def fires(self, *alerts: str) -> None:
        """Returns when these do, and no other ones but for those of OVER_LATE."""
        firing: set[str] = set()

        def are_those() -> bool:
            nonlocal firing
            firing = self.prometheus.firing()
            return firing - OVER_LATE == set(alerts)

        try:
            await until(are_those)
        except AssertionError:
            raise AssertionError(f"{sorted(firing)} fire, not {sorted(alerts)}") from None

    def said(self, name: str) -> tuple[Mapping[str, str], str]:
        """Labels and summary of the one alert of that name."""
        [alert] = [each for each in self.prometheus.alerts() if each.name == name]
        return alert.labels, alert.annotations["summary"]


@asynccontextmanager
async def watched(folder: Path, redis: Server) -> AsyncIterator[Watched]:
    """Three workers, of which two are ready; the third one loads for ever."""
    async with AsyncExitStack() as engine, running_fleet(folder, redis.url) as fleet:
        url = await engine.enter_async_context(
            serving_engine(LruEngine(EngineSettings(capacity_blocks=640), EngineText()))
        )
        workers = (
            fleet.start_worker("one", "--sim-speed", "20"),
            fleet.start_worker("two", "--sim-speed", "20"),
        )
        loading = start_loading_worker(fleet, folder)
        proxy = await fleet.start_proxy("proxy")
        engines = await fleet.start_proxy("engines", "--engine", url, "--key-prefix", "engines")
        one, two = [re.findall(r" ready at (\S+)", await each.said(" ready at "))[-1].rstrip(",") for each in workers]
        await all_ready(proxy, 2)
        targets = {"proxy": [place_of(each) for each in (proxy, engines)], "worker": [one, two, loading]}
        with running_prometheus(folder, targets) as prometheus:
            yield Watched(
                fleet=fleet,
                proxy=proxy,
                engines=engines,
                workers=workers,
                addresses=(one, two),
                engine=engine,
                prometheus=prometheus,
            )


def start_loading_worker(fleet: ProgramFleet, folder: Path) -> str:
    """Its address. It never gets to know its model, whose settings nobody writes."""
    model = folder / "model"
    model.mkdir()
    os.mkfifo(model / "config.json")
    address = f"127.0.0.1:{free_port()}"
    fleet.start_worker("loading", "--model", str(model), "--listen", address, runner="torch")
    return address


def place_of(proxy: Program) -> str:
    return proxy.url.removeprefix("http://")


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
        await until(lambda: [each.value for each in prometheus.query("up")] == [1.0] * 5)
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

        await until(lambda: total("prefixcache_requests_total") == asked)
        assert total("prefixcache_cached_tokens_total") == total("prefixcache_worker_cached_tokens_total") == cached > 0
        assert await asyncio.to_thread(selectors_without_series, prometheus) == []
        assert prometheus.fired() <= BEFORE_THE_FIRST_SCRAPE


async def test_planted_faults_fire_their_alerts_and_end_them(tmp_path: Path, valkey: Server) -> None:
    async with watched(tmp_path, valkey) as stack:
        prometheus, (one, two), place = stack.prometheus, stack.workers, place_of(stack.proxy)
        await asyncio.to_thread(ask, stack.proxy, "question")
        await until(lambda: len(prometheus.query("prefixcache_engine_up == 1")) == 1)
        await stack.fires()
        with valkey.paused():
            await stack.fires("RedisUnreachable")
        await stack.fires()

        await one.stop()
        await stack.fires("InstanceDown")
        labels, summary = stack.said("InstanceDown")
        assert labels["instance"] == stack.addresses[0] and labels["severity"] == "warning"
        assert summary == f"worker at {stack.addresses[0]} runs and does not answer its scrape."
        assert "WorkerLost" not in prometheus.fired(), "it took leave"
        two.kill()
        await stack.fires("InstanceDown", "NoWorkerReady")
        await until(lambda: "WorkerLost" in prometheus.firing())
        assert stack.said("WorkerLost")[1] == "A worker was lost, or cut off from a proxy, within the last 5 minutes."

        await stack.engine.aclose()
        await stack.fires("InstanceDown", "NoWorkerReady", "EngineDown")
        labels, summary = stack.said("EngineDown")
        told = f"Engine {labels['engine']} does not answer the proxy at {place_of(stack.engines)}; it gets no request."
        assert labels["instance"] == place_of(stack.engines) and summary == told
        stack.proxy.kill()
        stack.engines.kill()
        await stack.fires("InstanceDown", "NoProxy")
        assert place in {each.labels.get("instance") for each in prometheus.alerts()}


async def test_a_start_is_no_fault(tmp_path: Path, valkey: Server) -> None:
    """A worker that loads, and two proxies that have seen nobody yet."""
    async with running_fleet(tmp_path, valkey.url) as fleet:
        loading = start_loading_worker(fleet, tmp_path)
        proxies = [
            await fleet.start_proxy("proxy"),
            await fleet.start_proxy("engines", "--engine", f"http://127.0.0.1:{free_port()}"),
        ]
        targets = {"proxy": list(map(place_of, proxies)), "worker": [loading]}
        with running_prometheus(tmp_path, targets) as prometheus:

            def looked() -> bool:
                """So often that whatever is to fire has done so: that holds for HOLD_S."""
                seen = prometheus.query("min(count_over_time((up == 1)[1m:1s])) by (job)")
                return {each.labels["job"] for each in seen if each.value >= 3 * HOLD_S} == set(targets)

            await until(looked)
            assert [each.value for each in prometheus.query("prefixcache_worker_loading")] == [1]
            assert [each.value for each in prometheus.query("prefixcache_engine_up")] == [0]
            assert prometheus.fired() <= BEFORE_THE_FIRST_SCRAPE
