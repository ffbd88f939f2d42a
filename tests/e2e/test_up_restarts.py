"""`prefixcache up` with simulated workers: what is killed comes back, and Ctrl-C ends it all within seconds."""

from __future__ import annotations

import http.client
import json
import signal
import time
import urllib.request
from collections.abc import Iterator
from typing import Any

import psutil
import pytest

from tests.support.sim_oracle import SimOracle
from tests.support.stack import RunningStack, running_stack
from tests.support.waiting import eventually

BACK_TIMEOUT_S = 30.0
END_WITHIN_S = 10.0
"""Of which three are for the stream in hand."""
MESSAGES = [{"role": "user", "content": "Where does the river begin?"}]


@pytest.fixture
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningStack]:
    with running_stack(tmp_path_factory.mktemp("up"), ["--runner", "sim", "--workers", "2"]) as running:
        yield running


def chat_request(url: str, **fields: Any) -> urllib.request.Request:
    body = {"model": "sim", "messages": MESSAGES, "temperature": 0, "max_tokens": 16, **fields}
    return urllib.request.Request(
        url + "/v1/chat/completions", json.dumps(body).encode(), {"content-type": "application/json"}
    )


def answers_rightly(stack: RunningStack) -> bool:
    try:
        with urllib.request.urlopen(chat_request(stack.url), timeout=30) as answer:
            content = json.loads(answer.read())["choices"][0]["message"]["content"]
    except (OSError, http.client.HTTPException):
        return False
    return bool(content == SimOracle().answer(MESSAGES, max_tokens=16).text)


def workers_ready(stack: RunningStack) -> dict[str, str]:
    """Their addresses."""
    try:
        with urllib.request.urlopen(stack.url + "/health", timeout=10) as answer:
            workers = json.loads(answer.read())["workers"]
    except (OSError, http.client.HTTPException):
        return {}
    return {worker["id"]: worker["address"] for worker in workers if worker["ready"]}


def child(stack: RunningStack, word: str) -> psutil.Process:
    """The only one with that word on its command line."""
    (found,) = [process for process in stack.descendants() if word in " ".join(process.cmdline())]
    return found


@pytest.mark.parametrize(
    ("name", "word"), [("worker-1", "worker-1"), ("proxy", "-m proxy"), ("valkey", "valkey-server")]
)
async def test_what_is_killed_comes_back(stack: RunningStack, name: str, word: str) -> None:
    before = workers_ready(stack)
    assert set(before) == {"worker-1", "worker-2"} and answers_rightly(stack)
    doomed = child(stack, word)
    doomed.kill()
    await eventually(lambda: not doomed.is_running() or doomed.status() == psutil.STATUS_ZOMBIE)
    await eventually(lambda: f"{name} ended by signal SIGKILL; it is started again in 0.5 s" in stack.log.read_text())
    await eventually(lambda: f"{name} is started again" in stack.log.read_text(), BACK_TIMEOUT_S)

    def is_whole_again() -> bool:
        addresses = workers_ready(stack)
        return set(addresses) == set(before) and (name != "worker-1" or addresses["worker-1"] != before["worker-1"])

    await eventually(is_whole_again, BACK_TIMEOUT_S)
    assert child(stack, word).pid != doomed.pid
    assert answers_rightly(stack)
    assert "Traceback" not in stack.log.read_text()


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM])
def test_the_end_comes_within_seconds_though_a_stream_would_take_minutes(stack: RunningStack, how: int) -> None:
    children = stack.descendants()
    with urllib.request.urlopen(
        chat_request(stack.url, stream=True, max_tokens=8_000, ignore_eos=True), timeout=30
    ) as stream:
        assert stream.readline().startswith(b"data: ")
        began = time.monotonic()
        stack.process.send_signal(how)
        rest = stream.read()
        assert b"the proxy is shutting down" in rest and b"[DONE]" not in rest, "told, not cut"
    assert stack.process.wait(END_WITHIN_S) == 0
    assert time.monotonic() - began < END_WITHIN_S
    _, alive = psutil.wait_procs(children, timeout=5.0)
    assert not alive
    assert "Traceback" not in stack.log.read_text()
