"""Class deploy-lifecycle: an open port is not yet an answer, and nobody has to be started in an order."""

from __future__ import annotations

import json
from pathlib import Path
from signal import SIGCONT, SIGSTOP
from typing import Any

from tests.support.bare_client import Reply, ask, post_bytes
from tests.support.own_server import OwnServer, binary_of
from tests.support.program_fleet import Program, all_ready, get_json, running_fleet
from tests.support.seen_answer import SeenAnswer
from tests.support.sim_oracle import SimOracle

CHAT = "/v1/chat/completions"
BODY: dict[str, Any] = {
    "model": "sim",
    "messages": [{"role": "user", "content": "Is anybody there?"}],
    "max_tokens": 8,
    "temperature": 0,
}
PROBES = 3
"""In each state before the first worker can answer."""


async def _get(proxy: Program, path: str) -> Reply:
    return await ask(_port(proxy), f"GET {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n".encode())


async def _chat(proxy: Program) -> Reply:
    return await ask(_port(proxy), post_bytes(CHAT, BODY))


def _port(proxy: Program) -> int:
    return int(proxy.url.rpartition(":")[2])


async def _is_told_to_come_again(proxy: Program) -> None:
    """Alive, not ready, and whoever asks all the same is told when to come again."""
    for _ in range(PROBES):
        assert (await _get(proxy, "/health")).status == 200
        assert (await _get(proxy, "/ready")).status == 503
        reply = await _chat(proxy)
        assert (reply.end, reply.status) == ("complete", 503), reply
        assert int(reply.headers["retry-after"]) >= 1
        error = json.loads(reply.content)["error"]
        assert error["message"] and error["type"] == "server_error" and error["code"] == "unavailable"


async def _answers(proxy: Program) -> None:
    assert (await _get(proxy, "/ready")).status == 200
    reply = await _chat(proxy)
    assert (reply.end, reply.status) == ("complete", 200), reply
    assert SeenAnswer.of_whole(reply.content).differs(SimOracle().answers(BODY)) is None


async def test_rw_140_ready_means_that_a_chat_is_answered_in_any_order_of_starts(tmp_path: Path) -> None:
    """Proxy, then Redis, then a worker that takes its time; `tests/compose/test_start.py` plays it with containers."""
    binary = binary_of("valkey")
    assert binary is not None
    redis = OwnServer(binary, tmp_path)
    try:
        async with running_fleet(tmp_path, redis.url) as fleet:
            proxy = await fleet.start_proxy("proxy")
            await _is_told_to_come_again(proxy)
            await redis.start()
            await _is_told_to_come_again(proxy)
            worker = fleet.start_worker("w0")
            worker.process.send_signal(SIGSTOP)
            await _is_told_to_come_again(proxy)
            worker.process.send_signal(SIGCONT)
            await all_ready(proxy, 1)
            await _answers(proxy)

            fleet.start_worker("late")
            await all_ready(proxy, 2)
            worker.kill()
            await _answers(proxy)
            fleet.restart(worker)
            await all_ready(proxy, 2)
            assert len({each["incarnation"] for each in (await get_json(proxy.url + "/health"))["workers"]}) == 2
            await _answers(proxy)
    finally:
        redis.stop()
