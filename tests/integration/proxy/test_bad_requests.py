"""Requests that are refused: always in OpenAI's envelope, and nobody else notices."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from prefixcache.limits import LARGE_BODY_BYTES, MAX_BODY_BYTES, MAX_BODY_LISTS, MAX_HEADER_LINE_BYTES
from tests.support.fake_worker import FakeWorker, says, token_ids
from tests.support.memory_store import MemoryStore
from tests.support.proxy_harness import body, running_proxy
from tests.support.raw_http import post, raw_connection
from tests.support.tiny_tokenizer import tiny_tokenizer_files

PATH = "/v1/chat/completions"
PROMPT_TOKENS = len(token_ids("<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n"))


def _error(answer: bytes) -> dict[str, Any]:
    error: dict[str, Any] = json.loads(answer)["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["message"] and error["type"]
    return error


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"not json",
        b"[" * 1000 + b"]" * 1000,
        b'{"model": "tiny", "messages": [{"role": "user", "content": "\\ud83c tail"}], "stream": true}',
        b'{"model": "tiny", "messages": [{"role": "user", "content": "\xff"}]}',
        b'{"model": "tiny", "messages": [{"role": "user", "content": "x"}], "temperature": NaN}',
    ],
)
async def test_bodies_that_are_no_json(store: MemoryStore, content: bytes) -> None:
    async with FakeWorker.open(store, script=says("hi")), running_proxy(store) as proxy:
        await proxy.ready()
        async with raw_connection(proxy.port) as connection:
            connection.send(post(PATH, content, headers="Connection: close\r\n"))
            status, _ = await connection.head()
            assert status == 400
            assert _error(await connection.read_all())["type"] == "invalid_request_error"
        assert (await proxy.chat()).status_code == 200


@pytest.mark.parametrize(
    ("fields", "status", "param", "code"),
    [
        ({"model": "no-such-model"}, 404, "model", "model_not_found"),
        ({"max_tokens": -1}, 400, "max_tokens", None),
        ({"tools": [{"type": "function"}]}, 400, "tools", None),
        ({"messages": []}, 400, "messages", None),
        ({"max_tokens": 4096}, 400, "messages", "context_length_exceeded"),
        ({"messages": [{"role": "user", "content": "hello " * 5000}]}, 400, "messages", "context_length_exceeded"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
async def test_refusals_are_the_same_in_both_modes(
    store: MemoryStore, fields: dict[str, Any], status: int, param: str, code: str | None, stream: bool
) -> None:
    async with FakeWorker.open(store, script=says("hi")) as worker, running_proxy(store) as proxy:
        await proxy.ready()
        answer = await proxy.chat(stream=stream, **fields)
        assert answer.status_code == status
        assert answer.headers["content-type"].startswith("application/json")
        error = _error(answer.content)
        assert (error["param"], error["code"]) == (param, code)
        assert worker.generates == []
        label = "" if status == 404 or code is None else "tiny"
        assert proxy.metric("prefixcache_requests_total", code=str(status), model=label) == 1


@pytest.mark.parametrize(
    ("room", "max_tokens", "status"), [(0, None, 400), (1, None, 200), (1, 1, 200), (1, 2, 400), (0, 1, 400)]
)
async def test_the_context_to_the_token(store: MemoryStore, room: int, max_tokens: int | None, status: int) -> None:
    limit = PROMPT_TOKENS + room
    async with FakeWorker.open(store, script=says("hi"), max_model_len=limit) as worker, running_proxy(store) as proxy:
        await proxy.ready()
        answer = await proxy.chat(max_tokens=max_tokens)
        assert answer.status_code == status
        if status == 400:
            assert f"{limit} tokens" in _error(answer.content)["message"]
        else:
            assert worker.generates[0].max_tokens == 1
            assert answer.json()["choices"][0]["finish_reason"] == "length"


async def test_a_template_that_refuses_is_a_400_with_its_message(store: MemoryStore) -> None:
    files = tiny_tokenizer_files(chat_template="{{ raise_exception('roles must alternate') }}")
    async with FakeWorker.open(store, files=files) as worker, running_proxy(store) as proxy:
        await proxy.ready()
        for stream in (False, True):
            answer = await proxy.chat(stream=stream)
            assert answer.status_code == 400
            assert "roles must alternate" in _error(answer.content)["message"]
        assert worker.generates == []


async def test_a_body_over_the_limit_is_refused_before_it_is_read(store: MemoryStore) -> None:
    async with running_proxy(store) as proxy, raw_connection(proxy.port) as connection:
        head = f"POST {PATH} HTTP/1.1\r\nHost: x\r\nContent-Length: {MAX_BODY_BYTES + 1}\r\n\r\n"
        connection.send(head.encode())
        status, headers = await connection.head()
        assert status == 413
        answer = await connection.reader.readexactly(int(headers["content-length"]))
        assert _error(answer)["code"] == "request_too_large"


async def test_a_chunked_body_obeys_the_same_limit(store: MemoryStore) -> None:
    async with running_proxy(store) as proxy:
        piece = b" " * (1 << 20)

        async def content() -> Any:
            for _ in range(MAX_BODY_BYTES // len(piece) + 1):
                yield piece

        answer = await proxy.client.post(PATH, content=content())
        assert answer.status_code == 413
        assert _error(answer.content)["code"] == "request_too_large"


async def test_a_body_of_many_megabytes_is_read(store: MemoryStore) -> None:
    async with FakeWorker.open(store, script=says("hi")), running_proxy(store) as proxy:
        await proxy.ready()
        content = json.dumps(body()).encode() + b" " * (20 << 20)
        answer = await proxy.client.post(PATH, content=content)
        assert answer.status_code == 200


async def test_a_body_that_is_not_what_its_encoding_says(store: MemoryStore) -> None:
    async with running_proxy(store) as proxy, raw_connection(proxy.port) as connection:
        connection.send(post(PATH, b"not gzip at all", headers="Content-Encoding: gzip\r\nConnection: close\r\n"))
        status, _ = await connection.head()
        assert status == 400
        _error(await connection.read_all())


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/", 404),
        ("GET", "/v1/nothing", 404),
        ("POST", "/v1/tokenize", 404),
        ("GET", "/v1/completions", 405),
        ("GET", "/v1/chat/completions/", 404),
        ("GET", "/a%0Ab", 404),
        ("GET", "/v1/chat/completions", 405),
        ("DELETE", "/v1/models", 405),
        ("POST", "/cache/stats", 405),
    ],
)
async def test_paths_and_methods(store: MemoryStore, method: str, path: str, status: int) -> None:
    async with running_proxy(store) as proxy:
        answer = await proxy.client.request(method, path)
        assert answer.status_code == status
        assert _error(answer.content)["type"] == "invalid_request_error"
        assert len(answer.headers["x-request-id"]) == 32
        assert ("allow" in answer.headers) == (status == 405)


async def test_lines_of_a_head_are_as_long_as_the_edge_lets_them_be(store: MemoryStore) -> None:
    fits = "a" * (MAX_HEADER_LINE_BYTES - 100)
    async with running_proxy(store) as proxy:
        for path, header, status in (
            (f"/v1/models?{fits}", fits, 200),
            (f"/v1/models?{fits}{'a' * 100}", "a", 400),
            ("/v1/models", f"{fits}{'a' * 101}", 400),
        ):
            async with raw_connection(proxy.port) as connection:
                connection.send(f"GET {path} HTTP/1.1\r\nHost: x\r\nA: {header}\r\n\r\n".encode())
                assert (await connection.head())[0] == status


async def test_without_any_worker_it_is_503_not_404(store: MemoryStore) -> None:
    async with running_proxy(store) as proxy:
        answer = await proxy.chat()
        assert answer.status_code == 503
        assert answer.headers["retry-after"] == "1"
        assert _error(answer.content)["code"] == "unavailable"
        ready = await proxy.client.get("/ready")
        assert ready.status_code == 503
        assert ready.json()["workers_ready"] == 0
        health = await proxy.client.get("/health")
        assert health.status_code == 200 and health.json()["workers"] == []
        assert (await proxy.client.get("/v1/models")).json() == {"object": "list", "data": []}


async def test_a_stream_beside_bad_requests_is_undisturbed(store: MemoryStore) -> None:
    async with FakeWorker.open(store) as worker, running_proxy(store) as proxy:
        await proxy.ready()
        streaming = asyncio.create_task(proxy.events())
        frame = await worker.next_generate()
        for token_id in token_ids("hello"):
            worker.step(frame.id, [token_id])
            answers = await asyncio.gather(
                proxy.client.post(PATH, content=b"{"),
                proxy.client.post(PATH, content=b"[" * 100_000),
                proxy.chat(n=0),
            )
            assert [answer.status_code for answer in answers] == [400, 400, 400]
        worker.end(frame.id)
        assert (await streaming)[-1] == "[DONE]"


async def test_large_bodies_that_are_refused_make_way_for_the_next_one(store: MemoryStore) -> None:
    """Each has its turn at being taken apart, and gives it back whatever it is refused for."""
    chat = {"model": "tiny", "messages": [{"role": "user", "content": "hello " * (LARGE_BODY_BYTES // 5)}]}
    many = {"model": "tiny", "prompt": [[]] * (MAX_BODY_LISTS + 1)}
    unknown = {**chat, "model": "no-such-model"}
    asked = [
        (PATH, chat),
        ("/v1/completions", many),
        (PATH, unknown),
        (PATH, {**chat, "messages": 1, "x": "y" * LARGE_BODY_BYTES}),
    ] * 2
    async with FakeWorker.open(store, script=says("hi")), running_proxy(store) as proxy:
        await proxy.ready()
        answers = await asyncio.gather(*(proxy.client.post(path, json=sent) for path, sent in asked))
        assert [answer.status_code for answer in answers] == [400, 413, 404, 400] * 2
        assert all(_error(answer.content) for answer in answers)
        assert "lists and objects" in _error(answers[1].content)["message"]
        assert (await proxy.chat()).status_code == 200
