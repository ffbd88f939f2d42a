"""The compose file as it is, with the demo model: in order, in few privileges, and the second chat is cached.

The tests share one stack and stand in order: the first one starts it, the last one stops it.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from typing import Any

import openai
import pytest
from openai.types.chat import ChatCompletion

from tests.compose.findings import Findings
from tests.support.compose import ROOT, ComposeStack
from tests.support.containers import docker
from tests.support.program_fleet import get_json
from tests.support.waiting import eventually

MODEL = "SmolLM2-135M-Instruct"
SYSTEM_PROMPT = (ROOT / "LICENSE").read_text(encoding="utf-8")[:4_000]
ANSWER_TIMEOUT_S = 120.0
BASE = "python:3.11-slim-bookworm"
OWN = ("proxy", "worker", "edge")
CHECK_TIMEOUT_S = 10.0
NUM_CHECKS = 5
"""One each 3 s: a chat is asked for meanwhile, and what came of it is kept."""
PROXY_MOST_BYTES = 400_000_000
"""Above the base."""


def client_of(stack: ComposeStack) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=f"{stack.url}/v1", api_key="unused", timeout=ANSWER_TIMEOUT_S)


async def chat(stack: ComposeStack, question: str) -> tuple[ChatCompletion, Any]:
    """Answer and headers."""
    messages: Any = [{"role": "system", "content": SYSTEM_PROMPT}, {"role": "user", "content": question}]
    async with client_of(stack) as client:
        raw = await client.chat.completions.with_raw_response.create(
            model=MODEL, messages=messages, temperature=0, max_tokens=8
        )
    return raw.parse(), raw.headers


async def test_up_returns_when_a_chat_is_answered(real: ComposeStack, findings: Findings) -> None:
    began_at = time.monotonic()
    await asyncio.to_thread(real.up)
    findings.healthy_after_s["the demo model, images built"] = {"`up --wait` returns": time.monotonic() - began_at}
    answer, _ = await chat(real, "May I use it?")
    assert answer.choices[0].message.content


def test_every_container_is_healthy_and_started_after_those_it_needs(real: ComposeStack) -> None:
    containers = real.containers()
    assert sorted(each.name for each in containers) == ["edge-1", "proxy-1", "redis-1", "worker-1", "worker-2"]
    assert all(each.is_healthy for each in containers)
    started: dict[str, list[str]] = {}
    for each in containers:
        started.setdefault(each.service, []).append(each.started_at)
    assert max(started["redis"]) < min(started["worker"])
    assert max(started["worker"]) < min(started["proxy"])
    assert max(started["proxy"]) < min(started["edge"])


async def test_every_worker_has_an_address_of_its_own(real: ComposeStack) -> None:
    health = await get_json(f"{real.url}/health")
    assert [worker["ready"] for worker in health["workers"]] == [True, True]
    assert len({worker["address"] for worker in health["workers"]}) == 2


async def test_second_chat_is_answered_from_the_cache(real: ComposeStack) -> None:
    first, first_headers = await chat(real, "May I sell a product that contains this?")
    assert first.choices[0].message.content

    def claims() -> str:
        return real.run("exec", "-T", "redis", "redis-cli", "--scan", "--pattern", "prefixcache:*:b:*")

    await eventually(claims)
    second, second_headers = await chat(real, "Must I publish my changes?")
    assert second.usage is not None and second.usage.prompt_tokens_details is not None
    assert (second.usage.prompt_tokens_details.cached_tokens or 0) > 0.9 * second.usage.prompt_tokens
    assert second_headers["x-prefixcache-worker"] == first_headers["x-prefixcache-worker"]
    assert second_headers["x-prefixcache-reason"] == "longest_prefix"


async def test_a_stream_comes_piece_by_piece(real: ComposeStack) -> None:
    """The edge holds nothing back."""
    arrivals: list[float] = []
    async with client_of(real) as client:
        messages: Any = [{"role": "user", "content": "Count from one to twenty."}]
        async for chunk in await client.chat.completions.create(
            model=MODEL, messages=messages, temperature=0, max_tokens=32, stream=True
        ):
            if chunk.choices and chunk.choices[0].delta.content:
                arrivals.append(time.monotonic())
    assert len(arrivals) >= 8
    assert arrivals[-1] - arrivals[0] > 0.1


async def test_errors_pass_the_edge_as_they_are(real: ComposeStack) -> None:
    async with client_of(real) as client:
        with pytest.raises(openai.NotFoundError) as caught:
            await client.chat.completions.create(model="nobody's", messages=[{"role": "user", "content": "hi"}])
    assert caught.value.code == "model_not_found"


async def test_a_full_tmp_makes_nobody_unhealthy(real: ComposeStack) -> None:
    """Nor are they asked for more tokens: what a check found is kept."""
    real.run("exec", "-T", "proxy", "sh", "-c", "! head --bytes=1G /dev/zero >/tmp/full")
    [proxy] = real.containers("proxy")
    before = {check["Start"] for check in proxy.checks}
    seen: dict[str, Mapping[str, Any]] = {}

    def are_enough() -> bool:
        [now] = real.containers("proxy")
        seen.update({check["Start"]: check for check in now.checks if check["Start"] not in before})
        return len(seen) > NUM_CHECKS

    await eventually(are_enough, NUM_CHECKS * CHECK_TIMEOUT_S)
    real.run("exec", "-T", "proxy", "rm", "/tmp/full")
    assert [check for check in seen.values() if check["ExitCode"] or "not kept" in check["Output"]] == []


@pytest.mark.parametrize("service", OWN)
def test_programs_run_without_root_and_write_nowhere(real: ComposeStack, service: str) -> None:
    assert real.run("exec", "-T", service, "id", "-u").strip() != "0"
    [container, *_] = real.containers(service)
    host = container.inspected["HostConfig"]
    assert host["ReadonlyRootfs"] and host["CapDrop"] == ["ALL"]
    assert any(option.startswith("no-new-privileges") for option in host["SecurityOpt"])
    assert host["Memory"] > 0 and host["PidsLimit"] > 0
    assert host["RestartPolicy"]["Name"] == "unless-stopped"


def test_the_proxy_has_no_tensors(real: ComposeStack) -> None:
    find = "from importlib.util import find_spec as f; print([n for n in ('torch', 'transformers', 'numpy') if f(n)])"
    assert real.run("exec", "-T", "proxy", "python", "-c", find).strip() == "[]"


def test_only_the_edge_is_reached_from_outside_and_only_from_this_machine(real: ComposeStack) -> None:
    published = {each.service: each.inspected["HostConfig"]["PortBindings"] for each in real.containers()}
    assert published.pop("edge") == {"8000/tcp": [{"HostIp": "127.0.0.1", "HostPort": str(real.port)}]}
    assert not any(published.values())


def test_no_setting_is_kept_in_an_image(images: None) -> None:
    for service in OWN:
        environment = docker("image", "inspect", "--format", "{{json .Config.Env}}", f"prefixcache-{service}")
        assert not any(word in environment for word in ("SECRET", "TOKEN", "API_KEYS"))


def test_images_have_the_size_that_is_promised(images: None, findings: Findings) -> None:
    base = _size(BASE)
    for service in OWN:
        size = _size(f"prefixcache-{service}")
        findings.image_sizes[f"prefixcache-{service}"] = (size, size - base)
    assert findings.image_sizes["prefixcache-proxy"][1] <= PROXY_MOST_BYTES


def _size(image: str) -> int:
    return int(docker("image", "inspect", "--format", "{{.Size}}", image))


def test_programs_end_cleanly_when_told_to_stop(real: ComposeStack) -> None:
    real.stop()
    ended = {(each.service, each.inspected["State"]["ExitCode"]) for each in real.containers()}
    assert ended == {("redis", 0), ("worker", 0), ("proxy", 0), ("edge", 0)}
