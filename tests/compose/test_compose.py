"""The compose file for real: images built, all services healthy in order, the second chat answered from the cache.

Needs a Docker engine with Compose and, the first time, some minutes: `make test-compose`; `make test` leaves it out.
The tests share one stack and stand in order: the last one stops it.
"""

from __future__ import annotations

import http.client
import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest

from tests.support.compose import ROOT, ComposeStack, compose_stack, why_not
from tests.support.waiting import eventually

SYSTEM_PROMPT = (ROOT / "LICENSE").read_text(encoding="utf-8")[:4_000]
ANSWER_TIMEOUT_S = 120.0
USER_ID = "10001"


@pytest.fixture(scope="module")
def stack() -> Iterator[ComposeStack]:
    if reason := why_not():
        pytest.skip(reason)
    with compose_stack() as running:
        yield running


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    status: int
    headers: http.client.HTTPMessage
    body: Any


def ask(stack: ComposeStack, method: str, path: str, body: Any = None) -> Answer:
    connection = http.client.HTTPConnection("127.0.0.1", stack.port, timeout=ANSWER_TIMEOUT_S)
    try:
        connection.request(method, path, json.dumps(body), {"content-type": "application/json"})
        response = connection.getresponse()
        return Answer(status=response.status, headers=response.headers, body=json.loads(response.read()))
    finally:
        connection.close()


def chat(stack: ComposeStack, question: str) -> Answer:
    messages = [{"role": "system", "content": SYSTEM_PROMPT}, {"role": "user", "content": question}]
    body = {"model": "SmolLM2-135M-Instruct", "messages": messages, "temperature": 0, "max_tokens": 8}
    answer = ask(stack, "POST", "/v1/chat/completions", body)
    assert answer.status == 200, answer.body
    return answer


def service_of(container: dict[str, Any]) -> str:
    return str(container["Config"]["Labels"]["com.docker.compose.service"])


def test_every_container_is_healthy_and_started_after_those_it_needs(stack: ComposeStack) -> None:
    containers = stack.containers()
    assert sorted(map(service_of, containers)) == ["proxy", "redis", "worker", "worker"]
    assert {each["State"]["Health"]["Status"] for each in containers} == {"healthy"}
    started: dict[str, list[str]] = {"redis": [], "worker": [], "proxy": []}
    for each in containers:
        started[service_of(each)].append(each["State"]["StartedAt"])
    assert max(started["redis"]) < min(started["worker"])
    assert max(started["worker"]) < min(started["proxy"])


def test_every_worker_has_an_address_of_its_own(stack: ComposeStack) -> None:
    health = ask(stack, "GET", "/health").body
    assert [worker["ready"] for worker in health["workers"]] == [True, True]
    assert len({worker["address"] for worker in health["workers"]}) == 2


async def test_second_chat_is_answered_from_the_cache(stack: ComposeStack) -> None:
    first = chat(stack, "May I sell a product that contains this?")
    assert first.body["choices"][0]["message"]["content"]
    assert first.body["usage"]["prompt_tokens_details"]["cached_tokens"] == 0

    def claims() -> str:
        return stack.run("exec", "-T", "redis", "redis-cli", "--scan", "--pattern", "prefixcache:*:b:*")

    await eventually(claims)
    second = chat(stack, "Must I publish my changes?")
    usage = second.body["usage"]
    assert usage["prompt_tokens_details"]["cached_tokens"] > 0.9 * usage["prompt_tokens"]
    assert second.headers["x-prefixcache-worker"] == first.headers["x-prefixcache-worker"]
    assert second.headers["x-prefixcache-reason"] == "longest_prefix"


def test_programs_run_without_root_and_the_proxy_without_tensors(stack: ComposeStack) -> None:
    for service in ("proxy", "worker"):
        assert stack.run("exec", "-T", service, "id", "-u").strip() == USER_ID
    find = "from importlib.util import find_spec as f; print([n for n in ('torch', 'transformers', 'numpy') if f(n)])"
    assert stack.run("exec", "-T", "proxy", "python", "-c", find).strip() == "[]"


def test_only_the_proxy_is_reached_from_outside_and_only_from_this_machine(stack: ComposeStack) -> None:
    published = {service_of(each): each["HostConfig"]["PortBindings"] for each in stack.containers()}
    assert published.pop("proxy") == {"8000/tcp": [{"HostIp": "127.0.0.1", "HostPort": str(stack.port)}]}
    assert not any(published.values())


def test_programs_end_cleanly_when_told_to_stop(stack: ComposeStack) -> None:
    stack.stop()
    ended = {(service_of(each), each["State"]["ExitCode"]) for each in stack.containers()}
    assert ended == {("redis", 0), ("worker", 0), ("proxy", 0)}
