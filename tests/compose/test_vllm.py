"""The profiles of engines: `vllm` with a scripted engine in the place of vLLM's image, `gpu` as far as it is defined.

    client ──► edge-engine (ENGINE_PORT) ──► proxy-engine ──► vllm (scripted)      Prometheus scrapes all three

The tests of `vllm` share one stack and stand in order.
"""

from __future__ import annotations

import asyncio
import json
import secrets
import subprocess
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import openai
import pytest

from prefixcache.limits import AWAY_RETRY_AFTER_S
from tests.support.compose import ROOT, ComposeStack, removed_afterwards, stack_of, why_not
from tests.support.ports import free_port
from tests.support.prometheus import Prometheus
from tests.support.waiting import eventually

SCRIPTED = ROOT / "tests" / "compose" / "scripted_vllm.yml"
MODEL = "scripted/model"
KEY = secrets.token_hex(24)
SYSTEM_PROMPT = "You answer with numbers and nothing else, whatever you are asked. " * 30
SOON_S = 60.0
UP_S = 120.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Served:
    stack: ComposeStack
    url: str
    """Of edge-engine."""
    prometheus: Prometheus
    gate: Path
    """The engine loads until this file is there."""

    def client(self) -> openai.AsyncOpenAI:
        return openai.AsyncOpenAI(base_url=f"{self.url}/v1", api_key=KEY, timeout=SOON_S, max_retries=0)


@pytest.fixture(scope="module")
def served(images: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """Redis, the engine, its proxy and edge, and Prometheus, and none of the other services; not started yet."""
    folder = tmp_path_factory.mktemp("gate")
    folder.chmod(0o755)
    keys = folder / "keys"
    keys.write_text(f"{KEY}\n")
    keys.chmod(0o644)
    ports = {"ENGINE_PORT": free_port(), "PROMETHEUS_PORT": free_port()}
    environment = {
        "GATE": str(folder),
        "VLLM_MODEL": MODEL,
        "MONITORING_BIND": "127.0.0.1",
        "API_KEYS_FILE": str(keys),
        "EDGE_BODIES": "1m",
    }
    stack = stack_of(
        "vllm",
        files=[SCRIPTED],
        environment=environment | {name: str(port) for name, port in ports.items()},
        profiles=["vllm", "monitoring"],
    )
    with removed_afterwards(stack):
        yield Served(
            stack=stack,
            url=f"http://127.0.0.1:{ports['ENGINE_PORT']}",
            prometheus=Prometheus(url=f"http://127.0.0.1:{ports['PROMETHEUS_PORT']}"),
            gate=folder / "open",
        )


def messages(question: str) -> Any:
    return [{"role": "system", "content": SYSTEM_PROMPT}, {"role": "user", "content": question}]


async def test_asks_to_come_again_until_the_engine_has_loaded_and_then_answers(served: Served) -> None:
    up = served.stack.begin("up", "--detach", "--no-build", "--wait", "edge-engine", "prometheus")
    try:
        async with served.client() as client:
            refused: list[openai.APIStatusError] = []

            async def is_refused() -> bool:
                try:
                    await client.chat.completions.create(model=MODEL, messages=messages("too early"))
                except openai.APIConnectionError:  # its port is not open yet
                    return False
                except openai.APIStatusError as error:
                    refused.append(error)
                return bool(refused)

            await eventually(is_refused, SOON_S)
            assert refused[0].status_code == 503 and int(refused[0].response.headers["retry-after"]) >= 1
        assert up.poll() is None, "`up --wait` does not return before a chat is answered"
        served.gate.touch()
        output, _ = await asyncio.to_thread(up.communicate, timeout=UP_S)
        assert up.returncode == 0, output
    finally:
        up.kill()
    running = {each.service for each in served.stack.containers()}
    assert running == {"redis", "vllm", "proxy-engine", "edge-engine", "prometheus"}
    async with served.client() as client:
        answer = await client.chat.completions.create(model=MODEL, messages=messages("Count."))
    assert answer.choices[0].message.content == "one two three four"


async def test_the_second_prompt_is_cached_and_counted_as_such(served: Served) -> None:
    async with served.client() as client:
        first = await client.chat.completions.with_raw_response.create(model=MODEL, messages=messages("And once more?"))
        text, usage = "", None
        stream = await client.chat.completions.create(
            model=MODEL, messages=messages("And again?"), stream=True, stream_options={"include_usage": True}
        )
        async for chunk in stream:
            text += "".join(choice.delta.content or "" for choice in chunk.choices)
            usage = chunk.usage or usage
    assert first.headers["x-prefixcache-reason"] in ("longest_prefix", "pending_prefix")
    assert text.split() == ["one", "two", "three", "four"]
    assert usage is not None and usage.prompt_tokens_details is not None
    assert (usage.prompt_tokens_details.cached_tokens or 0) > 0.8 * usage.prompt_tokens


def status_of(url: str, *, key: str | None = None, body: bytes | None = None) -> tuple[int, str | None]:
    """And its Retry-After."""
    request = urllib.request.Request(url, body, {"Authorization": f"Bearer {key}"} if key else {})
    try:
        with urllib.request.urlopen(request, timeout=SOON_S) as answer:
            return answer.status, None
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.headers["Retry-After"]


async def test_keys_stand_before_every_path_of_the_engine(served: Served) -> None:
    async def status(path: str, **more: Any) -> int:
        return (await asyncio.to_thread(status_of, served.url + path, **more))[0]

    assert await status("/ready") == 200
    for path in ("/v1/models", "/health", "/sleep", "/sleep/../ready/", "//ready"):
        assert await status(path) == await status(path, key=KEY[:-1]) == 401, path
    assert await status("/v1/models", key=KEY) == 200
    assert await status("/sleep", body=b"") == 401
    assert await status("/sleep", key=KEY, body=b"") == 200, "of the engine's own paths none is left out"
    published = {each.service: each.inspected["HostConfig"]["PortBindings"] for each in served.stack.containers()}
    assert {service for service, ports in published.items() if ports} == {"edge-engine", "prometheus"}


async def test_where_bodies_find_no_room_a_client_is_told_to_come_again(served: Served) -> None:
    large = json.dumps({"model": MODEL, "messages": messages("x" * 2_000_000)}).encode()
    found = await asyncio.to_thread(status_of, f"{served.url}/v1/chat/completions", key=KEY, body=large)
    assert found == (503, str(AWAY_RETRY_AFTER_S))
    async with served.client() as client:
        answer = await client.chat.completions.create(model=MODEL, messages=messages("Small enough?"))
    assert answer.choices[0].message.content == "one two three four"


async def test_edge_engine_and_proxy_are_scraped_and_no_worker_is_missed(served: Served) -> None:
    def value(expression: str) -> float:
        return sum(each.value for each in served.prometheus.query(expression))

    def are_scraped() -> bool:
        try:
            return (
                value('up{job="engine", service="vllm"}') == 1
                and value('up{job="proxy", service="proxy-engine"}') == 1
                and value('up{job="edge", service="edge-engine"}') == 1
                and value("prefixcache_engine_up") == 1
                and value(f'prefixcache_cached_tokens_total{{model="{MODEL}"}}') > 0
            )
        except OSError:
            return False

    await eventually(lambda: asyncio.to_thread(are_scraped), SOON_S)
    assert served.prometheus.fired() <= {"RequestsFail"}, "of those who came too early; to load is no fault"


def test_workers_on_a_gpu_are_the_same_program_with_another_torch() -> None:
    if reason := why_not():
        pytest.skip(reason)
    done = subprocess.run(
        ["docker", "compose", "--profile", "gpu", "config", "--format", "json"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    services = json.loads(done.stdout)["services"]
    on_gpu, on_cpu = services["worker-gpu"], services["worker"]
    (device,) = on_gpu["deploy"]["resources"]["reservations"]["devices"]
    assert device == {"driver": "nvidia", "count": 1, "capabilities": ["gpu"]}
    assert on_gpu["build"]["dockerfile"] == on_cpu["build"]["dockerfile"]
    assert on_gpu["build"]["args"]["TORCH_BACKEND"] != on_cpu["build"]["args"]["TORCH_BACKEND"]
    assert on_gpu["image"] != on_cpu["image"], "one would overwrite the other"
    assert on_gpu["environment"]["PREFIXCACHE_DEVICE"] == "cuda"
    shared = {"PREFIXCACHE_REDIS", "PREFIXCACHE_MODEL", "PREFIXCACHE_WORKER_TOKEN"}
    assert {name: on_gpu["environment"][name] for name in shared} == {
        name: on_cpu["environment"][name] for name in shared
    }
    assert on_gpu["healthcheck"] == on_cpu["healthcheck"]
