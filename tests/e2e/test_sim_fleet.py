"""Sixteen simulated workers on one machine, as `prefixcache up --runner sim` starts them, under 200 chats at a time."""

from __future__ import annotations

import json
import os
import statistics
import time
import urllib.request
from collections.abc import Iterator
from typing import Any

import psutil
import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.support.chat_load import ChatLoad
from tests.support.seeds import seeded
from tests.support.sim_oracle import SimOracle
from tests.support.stack import RunningStack, running_stack
from tests.support.waiting import eventually

NUM_WORKERS = 16
NUM_CLIENTS = 200
DURATION_S = float(os.environ.get("FLEET_SECONDS", "60"))


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningStack]:
    # Half as fast as by default, so that a machine of two cores carries 200 chats and the test's own clients.
    with running_stack(
        tmp_path_factory.mktemp("fleet"),
        ["--runner", "sim", "--workers", str(NUM_WORKERS)],
        environment={"PREFIXCACHE_SIM_SPEED": "0.5"},
    ) as running:
        yield running


def get(url: str) -> str:
    with urllib.request.urlopen(url, timeout=30) as answer:
        text: str = answer.read().decode()
        return text


def metric(url: str, name: str) -> float:
    """The sum of a metric over all its labels."""
    families = text_string_to_metric_families(get(url + "/metrics"))
    return sum(sample.value for family in families for sample in family.samples if sample.name == name)


def worker_urls(fleet: RunningStack) -> list[str]:
    workers: list[dict[str, Any]] = json.loads(get(fleet.url + "/health"))["workers"]
    assert len(workers) == NUM_WORKERS
    return [f"http://{worker['address']}" for worker in workers]


def cpu_s(processes: list[psutil.Process]) -> float:
    return sum(times.user + times.system for times in (process.cpu_times() for process in processes))


def test_it_starts_small_and_its_curl_line_works(fleet: RunningStack) -> None:
    workers = [process for process in fleet.descendants() if "worker" in process.cmdline()]
    assert len(workers) == NUM_WORKERS
    resident = [process.memory_info().rss for process in workers]
    print(
        f"ready after {fleet.start_s:.1f} s, {cpu_s(fleet.descendants()):.1f} s of CPU, {max(resident) >> 20} MiB each"
    )
    assert max(resident) < 100 * 2**20
    (command,) = [line for line in fleet.output.splitlines() if line.startswith("curl ")]
    url, body = command.split()[1], command.split(" -d ")[1].strip("'")
    request = urllib.request.Request(url, body.encode(), {"content-type": "application/json"})
    with urllib.request.urlopen(request, timeout=60) as answer:
        content = json.loads(answer.read())["choices"][0]["message"]["content"]
    messages = json.loads(body)["messages"]
    assert content.isprintable()
    greedy = json.loads(body) | {"temperature": 0}
    request = urllib.request.Request(url, json.dumps(greedy).encode(), {"content-type": "application/json"})
    with urllib.request.urlopen(request, timeout=60) as answer:
        content = json.loads(answer.read())["choices"][0]["message"]["content"]
    assert content == SimOracle().answer(messages, max_tokens=greedy["max_tokens"]).text


async def test_two_hundred_chats_for_a_minute(fleet: RunningStack) -> None:
    urls = worker_urls(fleet)
    names = (
        "prefixcache_prompt_tokens_total",
        "prefixcache_cached_tokens_total",
        "prefixcache_generation_tokens_total",
    )
    stats = json.loads(get(fleet.url + "/cache/stats"))["total"]["since_start"]
    before = [stats["prompt_tokens"], stats["cached_tokens"], *(metric(fleet.url, name) for name in names)]
    cpu_before, began = cpu_s(fleet.descendants()), time.monotonic()

    load = ChatLoad(fleet.url, seeded("sim fleet"))
    await load.run(num_clients=NUM_CLIENTS, duration_s=DURATION_S)

    took_s, tally = time.monotonic() - began, load.tally
    hit_rate = tally.cached_tokens / tally.prompt_tokens
    print(
        f"{sum(tally.chats.values())} chats in {took_s:.1f} s ({dict(tally.chats)}): "
        f"{tally.completion_tokens / took_s:.0f} output tokens/s, {tally.prompt_tokens / took_s:.0f} prompt tokens/s, "
        f"hit rate {hit_rate:.2f}, TTFT median {statistics.median(tally.ttft_s):.2f} s, "
        f"{(cpu_s(fleet.descendants()) - cpu_before) / took_s:.2f} cores beside the clients'"
    )
    assert min(tally.chats[kind] for kind in ("whole", "streamed", "cut while whole", "cut while streamed")) > 20
    assert hit_rate > 0.3
    assert sum(cached > 0.7 * prompt for prompt, cached in tally.shared) > 0.5 * len(tally.shared)

    stats = json.loads(get(fleet.url + "/cache/stats"))["total"]["since_start"]
    after = [stats["prompt_tokens"], stats["cached_tokens"], *(metric(fleet.url, name) for name in names)]
    counted = [new - old for new, old in zip(after, before, strict=True)]
    seen = [tally.prompt_tokens, tally.cached_tokens]
    assert counted == [*seen, *seen, tally.completion_tokens]

    await eventually(lambda: sum(metric(url, "prefixcache_worker_requests_running") for url in urls) == 0, 20.0)
    for gauge in ("requests_waiting", "requests_running"):
        assert metric(fleet.url, f"prefixcache_num_{gauge}") == 0
        assert [metric(url, f"prefixcache_worker_{gauge}") for url in urls] == [0] * NUM_WORKERS
    assert [metric(url, "prefixcache_kv_cache_usage") for url in urls] == [0] * NUM_WORKERS
    assert sum(metric(url, "prefixcache_worker_cached_tokens_total") for url in urls) >= tally.cached_tokens
    assert "Traceback" not in fleet.log.read_text()


def test_an_idle_fleet_rests(fleet: RunningStack) -> None:
    workers = [process for process in fleet.descendants() if "worker" in process.cmdline()]
    before = cpu_s(workers)
    time.sleep(5.0)  # the span that is measured
    each = (cpu_s(workers) - before) / 5.0 / NUM_WORKERS
    print(f"an idle worker takes {each:.2%} of a core")
    assert each < 0.02
