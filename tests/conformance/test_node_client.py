"""The official client on Node: one script of calls, everything it saw checked here.

The client is installed once by npm, as its lock file says, into pytest's cache.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.cases.world import MODEL, World
from tests.conformance.schema import chat_chunk, chat_completion, completion, completion_chunk
from tests.support.folding import folded_chat
from tests.support.waiting import eventually

SOURCE = Path(__file__).parent / "node"
INSTALL_TIMEOUT_S = 120
RUN_TIMEOUT_S = 30
NO_NETWORK = ("ENOTFOUND", "ECONNREFUSED", "ETIMEDOUT", "EAI_AGAIN", "ENETUNREACH", "ECONNRESET")


@pytest.fixture(scope="session")
def node_folder(pytestconfig: pytest.Config) -> Path:
    """A folder with the installed client and the script."""
    node, npm = shutil.which("node"), shutil.which("npm")
    if node is None or npm is None:
        pytest.skip("node and npm are not on PATH (on Debian: apt-get install nodejs npm)")
    lock = (SOURCE / "package-lock.json").read_bytes()
    assert pytestconfig.cache is not None
    folder = pytestconfig.cache.mkdir(f"openai-node-{hashlib.sha256(lock).hexdigest()[:16]}")
    for name in ("package.json", "package-lock.json", "client.mjs"):
        shutil.copy(SOURCE / name, folder)
    if not (folder / "node_modules" / "openai").is_dir():
        _install(npm, folder)
    return folder


def _install(npm: str, folder: Path) -> None:
    command = [npm, "ci", "--no-audit", "--no-fund", "--ignore-scripts"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=INSTALL_TIMEOUT_S, check=False)
    if done.returncode and any(word in done.stderr for word in NO_NETWORK):
        pytest.skip(f"npm cannot reach a registry: {done.stderr[-300:]}")
    assert done.returncode == 0, done.stderr


async def _seen(folder: Path, url: str) -> dict[str, Any]:
    process = await asyncio.create_subprocess_exec(
        "node", "client.mjs", url, MODEL, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    try:
        async with asyncio.timeout(RUN_TIMEOUT_S):
            output, errors = await process.communicate()
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    assert process.returncode == 0, errors.decode()
    seen: dict[str, Any] = json.loads(output)
    return seen


async def test_the_node_client(world: World, node_folder: Path) -> None:
    seen = await _seen(node_folder, world.proxy.url + "/v1")
    whole = chat_completion(seen["whole"])
    chunks = [chat_chunk(chunk) for chunk in seen["chunks"]]
    again = chat_completion(folded_chat(seen["chunks"]))
    assert again.choices == whole.choices and chunks[-1].usage is not None
    assert seen["worker"] == "w0"
    _check_choices(seen)
    text = completion(seen["completion"]).choices[0].text
    assert "".join(completion_chunk(chunk).choices[0].text for chunk in seen["completionChunks"]) == text
    assert seen["models"] == [MODEL]
    _check_errors(seen)
    assert seen["readBeforeAbort"] >= 3
    await eventually(lambda: world.num_running == 0)
    assert world.proxy.metric("prefixcache_num_requests_running") == 0
    assert world.proxy.metric("prefixcache_requests_total", code="499") == 2


def _check_choices(seen: dict[str, Any]) -> None:
    choices = chat_completion(seen["choices"]).choices
    assert [choice["message"]["content"] for choice in seen["accumulated"]["choices"]] == [
        choice.message.content for choice in choices
    ]
    for choice in choices:
        assert choice.logprobs is not None and choice.logprobs.content
        assert all(len(token.top_logprobs) == 2 for token in choice.logprobs.content)


def _check_errors(seen: dict[str, Any]) -> None:
    shared = {"type": "invalid_request_error", "hasRequestId": True}
    bad = {"class": "BadRequestError", "status": 400, **shared}
    assert seen["notFound"] == {
        "class": "NotFoundError", "status": 404, "code": "model_not_found", "param": "model", **shared
    }  # fmt: skip
    assert seen["badRequest"] == {**bad, "code": None, "param": "max_tokens"}
    assert seen["tooLong"] == {**bad, "code": "context_length_exceeded", "param": "messages"}
    assert seen["wrongPath"] == {
        "class": "NotFoundError", "status": 404, "code": "unknown_url", "param": None, **shared
    }  # fmt: skip
    assert seen["timeout"]["class"] == "APIConnectionTimeoutError"
