"""/tokenize and /detokenize, /v1/models, and what a browser is allowed."""

from __future__ import annotations

from typing import Any

import openai
import pytest

from prefixcache.limits import MAX_TOKENIZE_CHARS
from tests.support.fake_worker import FakeWorker, says, token_ids
from tests.support.memory_store import MemoryStore
from tests.support.proxy_harness import running_proxy
from tests.support.raw_http import raw_connection

CHAT = "<|im_start|>user\nhello<|im_end|>\n"
PAGE = "https://chat.example.org"


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"prompt": "hello <|im_end|> né \N{BALLOON}"}, "hello <|im_end|> né \N{BALLOON}"),
        ({"prompt": ""}, ""),
        ({"prompt": "the answer " * 20_000}, "the answer " * 20_000),
        ({"messages": [{"role": "user", "content": "hello"}]}, CHAT + "<|im_start|>assistant\n"),
        ({"messages": [{"role": "user", "content": "hello"}], "add_generation_prompt": False}, CHAT),
    ],
)
async def test_there_and_back(store: MemoryStore, fields: dict[str, Any], text: str) -> None:
    async with FakeWorker.open(store), running_proxy(store) as proxy:
        await proxy.ready()
        tokenized = (await proxy.client.post("/tokenize", json={"model": "tiny", **fields})).json()
        assert tokenized["tokens"] == list(token_ids(text))
        assert tokenized == {"tokens": tokenized["tokens"], "count": len(token_ids(text)), "max_model_len": 4096}
        body = {"model": "tiny", "tokens": tokenized["tokens"]}
        assert (await proxy.client.post("/detokenize", json=body)).json() == {"prompt": text}


def _user(content: str) -> dict[str, str]:
    return {"role": "user", "content": content}


async def test_refusals(store: MemoryStore) -> None:
    async with FakeWorker.open(store), running_proxy(store) as proxy:
        await proxy.ready()
        for path, body, status, param in (
            ("/tokenize", {"model": "none", "prompt": "x"}, 404, "model"),
            ("/tokenize", {"model": "tiny"}, 400, "prompt"),
            ("/tokenize", {"model": "tiny", "prompt": "x" * (MAX_TOKENIZE_CHARS + 1)}, 400, "prompt"),
            ("/tokenize", {"model": "tiny", "messages": [_user("x" * MAX_TOKENIZE_CHARS)]}, 400, "messages"),
            ("/detokenize", {"model": "tiny", "tokens": [5] * (MAX_TOKENIZE_CHARS + 1)}, 400, "tokens"),
            ("/detokenize", {"model": "tiny", "tokens": [512]}, 400, "tokens[0]"),
            ("/detokenize", {"model": "tiny", "tokens": [5] * 10**5 + [-1]}, 400, "tokens[100000]"),
        ):
            answer = await proxy.client.post(path, json=body)
            assert (answer.status_code, answer.json()["error"]["param"]) == (status, param)
        assert proxy.metric("prefixcache_requests_total") == 0, "no request for tokens"


async def test_models_and_their_aliases(store: MemoryStore) -> None:
    async with (
        FakeWorker.open(store, worker_id="w1", model="org/one", served_names=("org/one", "first"), script=says("1")),
        FakeWorker.open(store, worker_id="w2", model="org/one", served_names=("org/one",), script=says("1")),
        FakeWorker.open(store, worker_id="w3", model="two", max_model_len=100, script=says("2")) as two,
        running_proxy(store) as proxy,
        openai.AsyncOpenAI(base_url=proxy.url + "/v1", api_key="unused", max_retries=0) as client,
    ):
        await proxy.ready(3)
        models = (await proxy.client.get("/v1/models")).json()["data"]
        assert [(model["id"], model["root"], model["max_model_len"]) for model in models] == [
            ("first", "org/one", 4096),
            ("org/one", "org/one", 4096),
            ("two", "two", 100),
        ]
        assert {(model["object"], model["owned_by"], model["parent"]) for model in models} == {
            ("model", "prefixcache", None)
        }
        for model in models:
            assert (await proxy.client.get(f"/v1/models/{model['id']}")).json() == model
        assert (await client.models.retrieve("org/one")).created == int(models[1]["created"])
        with pytest.raises(openai.NotFoundError) as missing:
            await client.models.retrieve("three")
        assert missing.value.code == "model_not_found"
        for name, text in (("first", "1"), ("org/one", "1"), ("two", "2")):
            answer = await client.completions.create(model=name, prompt="x")
            assert (answer.model, answer.choices[0].text) == (name, text)
        assert set((await proxy.client.get("/cache/stats")).json()["models"]) == {"org/one", "two"}
        assert len(two.generates) == 1


async def test_browsers_are_told_nothing_by_default(store: MemoryStore) -> None:
    async with running_proxy(store) as proxy:
        asks = {"origin": PAGE, "access-control-request-method": "POST"}
        preflight = await proxy.client.options("/v1/chat/completions", headers=asks)
        assert preflight.status_code == 405
        answer = await proxy.client.get("/v1/models", headers={"origin": PAGE})
        assert not [name for name in (*preflight.headers, *answer.headers) if name.startswith("access-control")]


@pytest.mark.parametrize("origins", [(PAGE,), ("*",), ("http://other", PAGE)])
async def test_pages_of_named_origins_may_ask(store: MemoryStore, origins: tuple[str, ...]) -> None:
    async with FakeWorker.open(store, script=says("hi")), running_proxy(store, cors_origins=origins) as proxy:
        await proxy.ready()
        allowed = "*" if origins == ("*",) else PAGE
        preflight = await proxy.client.options(
            "/v1/chat/completions",
            headers={
                "origin": PAGE,
                "access-control-request-method": "POST",
                "access-control-request-headers": "authorization,content-type,x-stainless-os",
            },
        )
        assert preflight.status_code == 204
        assert preflight.headers["access-control-allow-origin"] == allowed
        assert preflight.headers["access-control-allow-headers"] == "authorization,content-type,x-stainless-os"
        assert "POST" in preflight.headers["access-control-allow-methods"]
        for stream in (False, True):
            body = {"model": "tiny", "messages": [{"role": "user", "content": "x"}], "stream": stream}
            answer = await proxy.client.post("/v1/chat/completions", json=body, headers={"origin": PAGE})
            assert answer.headers["access-control-allow-origin"] == allowed
            assert "x-prefixcache-worker" in answer.headers["access-control-expose-headers"]
        refused = await proxy.client.post("/v1/chat/completions", content=b"{", headers={"origin": PAGE})
        assert (refused.status_code, refused.headers["access-control-allow-origin"]) == (400, allowed)
        stranger = await proxy.client.get("/v1/models", headers={"origin": "https://evil.example.org"})
        assert ("access-control-allow-origin" in stranger.headers) == (allowed == "*")
        assert (stranger.headers.get("vary") == "Origin") == (allowed != "*")
        plain = await proxy.client.get("/v1/models")
        assert "access-control-allow-origin" not in plain.headers


@pytest.mark.parametrize(
    "data",
    [
        b"nonsense\r\n\r\n",
        b"GET / HTTP/9.9\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nContent-Length: x\r\n\r\n",
        b"GET /" + b"a" * 20_000 + b" HTTP/1.1\r\n\r\n",
        b"GET / HTTP/1.1\r\nbad header\r\n\r\n",
    ],
)
async def test_what_is_no_http_gets_the_envelope_too(
    store: MemoryStore, data: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    async with running_proxy(store) as proxy, raw_connection(proxy.port) as connection:
        connection.send(data)
        status, headers = await connection.head()
        assert status == 400
        assert headers["content-type"].startswith("application/json")
        assert b'"error":' in await connection.read_all()
    assert not [record for record in caplog.records if record.exc_info]
