"""From clean volumes, with a model that loads for a minute: healthy means that a chat is answered, and not before."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Mapping

from tests.compose.findings import Findings
from tests.compose.gated import GatedStack
from tests.support.bare_client import Reply, ask, post_bytes
from tests.support.compose import ComposeStack
from tests.support.seen_answer import SeenAnswer
from tests.support.sim_oracle import SimOracle
from tests.support.sim_requests import CHAT
from tests.support.waiting import eventually

LOAD_S = 60.0
"""Far more than what a health check is retried for once it counts."""
PROBE_EVERY_S = 1.0
NUM_PROBES = 10
UP_WITHIN_S = 60.0
"""Of the gate's opening."""
BODY = {
    "model": "sim",
    "messages": [{"role": "user", "content": "Is anybody there?"}],
    "max_tokens": 8,
    "temperature": 0,
}


async def get(stack: ComposeStack, path: str) -> Reply:
    return await ask(stack.port, f"GET {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n".encode())


async def chat(stack: ComposeStack) -> Reply:
    return await ask(stack.port, post_bytes(CHAT, BODY))


def healthy_by_service(stack: ComposeStack) -> dict[str, set[bool]]:
    found: dict[str, set[bool]] = {}
    for container in stack.containers():
        found.setdefault(container.service, set()).add(container.is_healthy)
    return found


async def test_rw_140_healthy_means_that_a_chat_is_answered(simulated: GatedStack, findings: Findings) -> None:
    stack = simulated.stack
    # From the edge's first answer on, everybody is told to come again: no reset, no 502.
    await eventually(lambda: _is_answered(stack), LOAD_S)
    for _ in range(NUM_PROBES):
        await _is_told_to_come_again(stack)
        await asyncio.sleep(PROBE_EVERY_S)
    await asyncio.sleep(max(0.0, simulated.began_at + LOAD_S - time.monotonic()))
    await _is_told_to_come_again(stack)
    assert simulated.up.poll() is None, "nothing is up before a chat is answered"
    assert healthy_by_service(stack) == {"redis": {True}, "worker": {False}, "proxy": {False}, "edge": {False}}

    opened_at = time.monotonic()
    simulated.open()
    findings.healthy_after_s["a model that loads for over 60 s, from its end"] = await _watch(simulated, opened_at)
    reply = await chat(stack)
    assert reply.status == 200, reply
    assert SeenAnswer.of_whole(reply.content).differs(SimOracle().answers(BODY)) is None


async def _is_answered(stack: ComposeStack) -> bool:
    return (await get(stack, "/ready")).status is not None


async def _is_told_to_come_again(stack: ComposeStack) -> None:
    ready, reply = await asyncio.gather(get(stack, "/ready"), chat(stack))
    assert (ready.end, ready.status) == ("complete", 503), ready
    assert (reply.end, reply.status) == ("complete", 503), reply
    assert int(reply.headers["retry-after"]) >= 1, reply
    error = json.loads(reply.content)["error"]
    assert error["message"] and error["code"], reply


async def _watch(simulated: GatedStack, opened_at: float) -> Mapping[str, float]:
    """Seconds until all of a service is healthy, and until `up` returned; what a proxy's health says is true."""
    stack, up = simulated.stack, simulated.up
    after_s: dict[str, float] = {}

    async def is_up() -> bool:
        is_over = up.poll() is not None
        for service, healthy in (await asyncio.to_thread(healthy_by_service, stack)).items():
            if healthy == {True} and service != "redis" and service not in after_s:
                after_s[service] = time.monotonic() - opened_at
                if service in ("proxy", "edge"):
                    assert (await chat(stack)).status == 200
        return is_over

    await eventually(is_up, UP_WITHIN_S)
    assert up.returncode == 0
    assert set(after_s) == {"worker", "proxy", "edge"}, "`up` waits for all of them"
    return {**after_s, "`up --wait` returns": time.monotonic() - opened_at}
