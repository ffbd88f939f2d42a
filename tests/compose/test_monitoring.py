"""The profile `monitoring`: it finds every replica by itself, and a fault that is planted fires its alert, and ends it.

The tests share one stack with simulated workers and stand in order.
"""

from __future__ import annotations

import asyncio
import json
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest

from tests.compose.findings import Findings
from tests.compose.gated import SIMULATED
from tests.support.compose import ComposeStack, removed_afterwards, stack_of
from tests.support.monitoring import MONITORING, dashboard
from tests.support.ports import free_port
from tests.support.program_fleet import get_json
from tests.support.prometheus import Prometheus
from tests.support.waiting import eventually

FOUND_WITHIN_S = 45.0
"""A name is resolved every 5 s and a target scraped every 5 s, on a machine that has other things to do."""
FIRES_WITHIN_S = 90.0
"""A scrape that times out, 30 s of `for`, an evaluation."""
LOST_WITHIN_S = 60.0
LOST = {"WorkerLost", "ProxyLost"}
"""They stay for five minutes: what they tell of is over at once."""
FOUND = {"edge": 1, "proxy": 2, "worker": 2}
PORT_VARIABLES = ("PROMETHEUS_PORT", "GRAFANA_PORT")


@dataclass(frozen=True, slots=True, kw_only=True)
class Watched:
    stack: ComposeStack
    prometheus: Prometheus
    grafana_url: str


@pytest.fixture(scope="module")
def watched(images: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Watched]:
    """Two proxies and two workers; not started yet."""
    gate = tmp_path_factory.mktemp("gate")
    gate.chmod(0o755)
    (gate / "open").touch()
    ports = {name: str(free_port()) for name in PORT_VARIABLES}
    stack = stack_of(
        "monitoring",
        files=[SIMULATED],
        environment={"GATE": str(gate), "MONITORING_BIND": "127.0.0.1", **ports},
        profiles=["monitoring"],
        scale={"redis": 1, "worker": 2, "proxy": 2, "edge": 1},
    )
    prometheus = Prometheus(url=f"http://127.0.0.1:{ports['PROMETHEUS_PORT']}")
    with removed_afterwards(stack):
        yield Watched(stack=stack, prometheus=prometheus, grafana_url=f"http://127.0.0.1:{ports['GRAFANA_PORT']}")


async def until(condition: Callable[[], bool], timeout_s: float) -> float:
    """Seconds until it held."""
    began_at = time.monotonic()

    def holds() -> bool:
        try:
            return condition()
        except OSError:  # a port that is not open yet
            return False

    await eventually(lambda: asyncio.to_thread(holds), timeout_s)
    return time.monotonic() - began_at


def answering(prometheus: Prometheus) -> dict[str, int]:
    """Number of targets that answer, by service."""
    found = prometheus.query("count by (service) (up == 1)")
    return {each.labels["service"]: int(each.value) for each in found if each.labels}


async def test_comes_up_with_the_rest_and_finds_every_replica(watched: Watched, findings: Findings) -> None:
    began_at = time.monotonic()
    await asyncio.to_thread(watched.stack.up)
    up_s = time.monotonic() - began_at
    found_s = await until(lambda: answering(watched.prometheus) == FOUND, FOUND_WITHIN_S)
    findings.healthy_after_s["simulated workers, monitoring"] = {"`up --wait` returns": up_s, "all scraped": found_s}
    await until(lambda: {each["health"] for each in watched.prometheus.targets()} == {"up"}, FOUND_WITHIN_S)
    assert watched.prometheus.fired() == set(), "a start is no fault"


async def test_counts_what_was_asked_through_the_edge(watched: Watched) -> None:
    body = json.dumps({"model": "sim", "prompt": "hello", "max_tokens": 4}).encode()
    request = urllib.request.Request(f"{watched.stack.url}/v1/completions", body, {"content-type": "application/json"})
    for _ in range(8):
        with await asyncio.to_thread(urllib.request.urlopen, request) as answer:
            assert answer.status == 200

    def counted() -> bool:
        """The health checks ask, too."""
        found = watched.prometheus.query('sum(prefixcache_requests_total{code="200"})')
        return bool(found) and found[0].value >= 8

    await until(counted, FOUND_WITHIN_S)
    assert [each.value for each in watched.prometheus.query("prefixcache_edge_proxies_ready")] == [2]
    memory = watched.prometheus.query("max(prefixcache_redis_memory_limit_bytes)")
    assert [each.value for each in memory] == [512 << 20], "REDIS_MAXMEMORY's default"


async def test_replicas_that_come_and_go_are_followed_and_no_fault(watched: Watched) -> None:
    await asyncio.to_thread(watched.stack.up, worker=3, proxy=3)
    await until(lambda: answering(watched.prometheus) == FOUND | {"worker": 3, "proxy": 3}, FOUND_WITHIN_S)
    await asyncio.to_thread(watched.stack.up, worker=2, proxy=2)
    await until(lambda: answering(watched.prometheus) == FOUND, FOUND_WITHIN_S)
    counted = ("prefixcache_workers_lost_total", "prefixcache_edge_proxies_lost_total")
    assert [each.value for name in counted for each in watched.prometheus.query(f"sum({name})")] == [0, 0]
    assert watched.prometheus.fired() == set()


@pytest.mark.parametrize(("service", "alert"), [("worker", "WorkerLost"), ("proxy", "ProxyLost")])
async def test_who_is_killed_is_lost_within_a_minute(
    service: str, alert: str, watched: Watched, findings: Findings
) -> None:
    before = watched.prometheus.firing()
    watched.stack.containers(service)[0].kill()
    findings.alerts_after_s[alert] = await until(lambda: alert in watched.prometheus.firing(), LOST_WITHIN_S)
    assert watched.prometheus.firing() == before | {alert}
    await asyncio.to_thread(watched.stack.up)


async def test_planted_faults_fire_their_alerts_and_end_them(watched: Watched, findings: Findings) -> None:
    """Redis and a worker stand still, as on a machine that swaps."""
    prometheus = watched.prometheus
    (redis,), worker = watched.stack.containers("redis"), watched.stack.containers("worker")[0]
    redis.pause()
    worker.pause()
    both = {"RedisUnreachable", "InstanceDown"}
    follow = LOST | {"WorkerCannotPublish", "RoutedWithoutIndex", "ProxySeesFewerWorkers"}  # and some outlast the fault
    try:
        redis_s = await until(lambda: "RedisUnreachable" in prometheus.firing(), FIRES_WITHIN_S)
        worker_s = redis_s + await until(lambda: prometheus.firing() - follow == both, FIRES_WITHIN_S)
        [down] = [each for each in prometheus.alerts() if each.name == "InstanceDown"]
        [network] = worker.inspected["NetworkSettings"]["Networks"].values()
        instance = f"{network['IPAddress']}:7001"
        assert (down.labels["instance"], down.labels["service"]) == (instance, "worker")
        assert down.annotations["summary"] == f"worker at {instance} runs and does not answer its scrape."
    finally:
        redis.unpause()
        worker.unpause()
    await until(lambda: not prometheus.firing() - follow, FIRES_WITHIN_S)
    findings.alerts_after_s.update(RedisUnreachable=redis_s, InstanceDown=worker_s)


async def test_grafana_has_its_dashboard_without_a_hand_on_it(watched: Watched) -> None:
    health = await get_json(f"{watched.grafana_url}/api/health")
    assert health["database"] == "ok"
    answer: Any = await get_json(f"{watched.grafana_url}/api/dashboards/uid/{dashboard()['uid']}")
    if "provisioned" in answer:  # a stand-in for the image: it only lists the files that Grafana would read
        folder = MONITORING / "grafana" / "provisioning"
        files = {f"/etc/grafana/provisioning/{path.relative_to(folder)}" for path in folder.rglob("*.yml")}
        assert set(answer["provisioned"]) == files
    else:
        assert len(answer["dashboard"]["panels"]) == len(dashboard()["panels"])
        with pytest.raises(urllib.error.HTTPError):
            await get_json(f"{watched.grafana_url}/api/admin/settings")
    [grafana] = watched.stack.containers("grafana")
    assert json.loads(grafana.execute("cat", "/etc/grafana/dashboards/prefixcache.json")) == dashboard()


@pytest.mark.parametrize("service", ["prometheus", "grafana"])
def test_is_reached_from_this_machine_alone_and_may_do_little(watched: Watched, service: str) -> None:
    [container] = watched.stack.containers(service)
    host = container.inspected["HostConfig"]
    ports = [binding["HostIp"] for bindings in host["PortBindings"].values() for binding in bindings]
    assert ports == ["127.0.0.1"]
    assert container.execute("id", "-u").strip() != "0"
    assert host["ReadonlyRootfs"] and host["CapDrop"] == ["ALL"]
    assert host["Memory"] > 0 and host["PidsLimit"] > 0
