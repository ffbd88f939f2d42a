"""Which engine is asked: by prefix, by model, and who comes after one that failed."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import openai
import pytest

import proxy.engines.engine_handler
import proxy.engines.held_queue
from tests.support.answer_bytes import (
    chat_answer,
    chat_events,
    chat_stream,
    chunk,
    chunked,
    json_answer,
    stream_head,
    usage,
    whole,
)
from tests.support.engine_proxy import MODEL, EngineProxy, chat, engine_answers, engine_proxy
from tests.support.raw_http import post, raw_connection
from tests.support.scripted_engine import ReceivedRequest, ScriptedEngine, Step, close, reset, tell, when
from tests.support.waiting import eventually

LONG = "tell me more about it. " * 100


def _busy(proxy: EngineProxy) -> Sequence[int]:
    return [len(proxy.asked(engine)) for engine in proxy.engines]


def _streams(request: ReceivedRequest) -> Sequence[Step]:
    """Streams where a stream is asked for."""
    told = usage(600, 1, 0)
    return (chat_stream(["a"], usage=told) if b'"stream":true' in request.body else chat_answer("a", usage=told),)


async def test_a_chat_stays_where_its_beginning_is() -> None:
    async with engine_proxy(*(engine_answers(then=_streams) for _ in range(4))) as proxy:
        for number in range(6):
            first = await proxy.chat(f"{number} {LONG}", stream=True)
            messages: list[dict[str, Any]] = chat(f"{number} {LONG}")["messages"]
            for turn in range(3):
                messages += [{"role": "assistant", "content": "a"}, {"role": "user", "content": f"and {turn}"}]
                answer = await proxy.chat(messages=messages, stream=bool(turn % 2))
                assert answer.headers["x-prefixcache-worker"] == first.headers["x-prefixcache-worker"]
                assert int(answer.headers["x-prefixcache-hit-tokens"]) > 0
                assert answer.headers["x-prefixcache-reason"] == "longest_prefix"
        assert max(_busy(proxy)) < 24, "not all on one engine"


def _has_few_tokens_a_byte(request: ReceivedRequest) -> Sequence[Step]:
    """One for ten bytes, where a proxy begins with one for four; all of what was there before is cached."""
    num_tokens = len(request.body) // 10
    return (chat_answer("a", usage=usage(num_tokens, 1, num_tokens - 20)),)


async def test_a_wrong_guess_of_the_tokens_of_a_byte_is_no_sign_of_a_small_cache() -> None:
    async with engine_proxy(engine_answers(then=_has_few_tokens_a_byte)) as proxy:
        (link,) = proxy.fleet.links
        messages: list[dict[str, Any]] = chat(LONG)["messages"]
        for turn in range(6):
            await proxy.chat(messages=messages)
            await eventually(lambda: link.num_claims > 0)
            messages += [{"role": "assistant", "content": "a"}, {"role": "user", "content": f"and {turn}"}]
        assert link.claims.kept_share == 1.0


async def test_a_burst_of_one_prompt_meets_on_one_engine() -> None:
    async with engine_proxy(*(engine_answers(then=_streams) for _ in range(3))) as proxy:
        answers = await asyncio.gather(*(proxy.chat(LONG, stream=True) for _ in range(8)))
        assert len({answer.headers["x-prefixcache-worker"] for answer in answers}) == 1


async def test_models_are_told_apart_by_name() -> None:
    both = engine_answers("a", "b")
    async with engine_proxy(engine_answers("a"), engine_answers("b"), both) as proxy:
        for _ in range(8):
            await proxy.client.post("/v1/chat/completions", json=chat(model="a"))
            await proxy.client.post("/v1/completions", json={"model": "b", "prompt": "x"})
        only_a, only_b, _ = proxy.engines
        assert {b'"model":"a"' in request.body for request in proxy.asked(only_a)} == {True}
        assert {b'"model":"b"' in request.body for request in proxy.asked(only_b)} == {True}
        names = [model["id"] for model in (await proxy.client.get("/v1/models")).json()["data"]]
        assert names == ["a", "b"]
        answer = await proxy.client.post("/v1/chat/completions", json=chat(model="c"))
        assert (answer.status_code, answer.json()["error"]["code"]) == (404, "model_not_found")


async def _without_idle_connections(proxy: EngineProxy) -> None:
    """On one that was used before a request would be sent twice to the same engine."""
    for engine in proxy.engines:
        engine.close_idle()
    pools = [proxy.link(engine).pool for engine in proxy.engines]
    await eventually(lambda: not any(pool.num_idle for pool in pools))


def _failing(how: str) -> Sequence[Step]:
    faults: dict[str, Sequence[Step]] = {
        "closed": (close(),),
        "reset": (reset(),),
        "500": (json_answer({"error": "x"}, status=500),),
        "503": (json_answer({"error": "x"}, status=503),),
        "dies after its head": (stream_head(), reset()),
        "no http": (b"SSH-2.0-OpenSSH_9.6\r\n\r\n", close()),
    }
    return faults[how]


FAULTS = ["closed", "reset", "500", "503", "dies after its head", "no http"]


@pytest.mark.parametrize("how", FAULTS)
async def test_after_a_fault_before_the_first_byte_another_engine_answers(how: str) -> None:
    async with engine_proxy(*(engine_answers(then=_streams) for _ in range(3))) as proxy:
        first = await proxy.chat(LONG, stream=True)
        holder = next(e for e in proxy.engines if proxy.link(e).engine_id == first.headers["x-prefixcache-worker"])
        for _ in range(2):
            holder.script(*_failing(how))  # a connection that was idle is tried twice
        answer = await proxy.chat(LONG, stream=True)
        assert answer.status_code == 200
        assert answer.content == b"".join(chat_events(["a"]))
        assert answer.headers["x-prefixcache-worker"] != first.headers["x-prefixcache-worker"]
        holder._scripts.clear()
        assert all(proxy.link(engine).ledger.is_idle for engine in proxy.engines)


@pytest.mark.parametrize("how", ["closed", "dies after its head"])
async def test_the_second_fault_is_told(how: str) -> None:
    async with engine_proxy(*(engine_answers() for _ in range(3))) as proxy:
        await _without_idle_connections(proxy)
        for engine in proxy.engines:
            engine.script(*_failing(how))
        answer = await proxy.chat()
        assert (answer.status_code, answer.json()["error"]["code"]) == (502, "engine_fault")
        assert len(proxy.asked()) == 2


async def test_the_second_5xx_is_the_engines_own() -> None:
    async with engine_proxy(*(engine_answers() for _ in range(3))) as proxy:
        for engine in proxy.engines:
            engine.script(json_answer({"error": {"message": "mine"}}, status=500))
        answer = await proxy.chat(stream=True)
        assert (answer.status_code, answer.json()) == (500, {"error": {"message": "mine"}})
        assert len(proxy.asked()) == 2


async def test_the_only_engine_s_5xx_passes_at_once() -> None:
    async with engine_proxy() as proxy:
        proxy.engines[0].script(json_answer({"detail": "mine"}, status=503))
        answer = await proxy.chat()
        assert (answer.status_code, answer.json()) == (503, {"detail": "mine"})


async def test_an_engine_that_refuses_connections_is_left_out_and_the_others_answer() -> None:
    async with engine_proxy(engine_answers(), engine_answers()) as proxy:
        gone, stays = proxy.engines
        await _stop(gone)
        answers = [await proxy.chat(f"{number} {LONG}") for number in range(6)]
        assert {answer.status_code for answer in answers} == {200}
        assert len(proxy.asked(stays)) == 6
        assert not proxy.link(gone).is_up


async def test_without_any_engine_a_request_is_held_and_then_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(proxy.engines.engine_handler, "HELD_DOWN_S", 0.3)
    async with engine_proxy() as fleet:
        await _stop(fleet.engines[0])
        began = asyncio.get_running_loop().time()
        answer = await fleet.chat()
        assert answer.status_code == 503
        assert answer.json()["error"]["code"] in ("unavailable", "engine_unreachable")
        assert answer.headers["retry-after"] == "1"
        assert asyncio.get_running_loop().time() - began > 0.2


async def _stop(engine: ScriptedEngine) -> None:
    """Its port refuses from now on."""
    engine.stop_listening()
    engine.close_idle()
    await eventually(lambda: not engine.connections)


async def test_a_full_queue_is_told_with_the_time_to_come_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(proxy.engines.held_queue, "HELD_BATCH_S", -1.0)
    go, asked = asyncio.Event(), asyncio.Event()
    async with engine_proxy() as fleet:
        engine = fleet.engines[0]
        held = fleet.link(engine).held
        held._most_held = 2
        engine.script(tell(asked), when(go), chat_stream(["a"]))
        waiting = [asyncio.create_task(fleet.chat(LONG, stream=True)) for _ in range(3)]
        await asyncio.wait_for(asked.wait(), 5.0)
        await eventually(lambda: held.num_waiting == 2)
        assert len(fleet.asked()) == 1, "one prefill in hand"
        refused = await fleet.chat(LONG, stream=True)
        assert (refused.status_code, refused.json()["error"]["code"]) == (429, "rate_limit_exceeded")
        assert int(refused.headers["retry-after"]) >= 1
        go.set()
        assert {answer.status_code for answer in await asyncio.gather(*waiting)} == {200}


async def test_the_shorter_one_of_those_that_wait_goes_first(monkeypatch: pytest.MonkeyPatch) -> None:
    go, asked = asyncio.Event(), asyncio.Event()
    async with engine_proxy() as fleet:
        engine = fleet.engines[0]
        engine.script(tell(asked), when(go), chat_stream(["a"]))
        tasks = [asyncio.create_task(fleet.chat("first " + LONG, stream=True))]
        await asyncio.wait_for(asked.wait(), 5.0)
        held = fleet.link(engine).held
        for text in ("second " + 20 * LONG, "third " + LONG):
            tasks.append(asyncio.create_task(fleet.chat(text, stream=True)))
            await eventually(lambda: held.num_waiting == len(tasks) - 1)
        go.set()
        await asyncio.gather(*tasks)
        order = [request.body.partition(b'"content":"')[2][:5] for request in fleet.asked()]
        assert order == [b"first", b"third", b"secon"]


async def test_a_client_that_leaves_while_it_is_held_leaves_no_trace() -> None:
    go, asked = asyncio.Event(), asyncio.Event()
    async with engine_proxy() as fleet:
        engine = fleet.engines[0]
        engine.script(tell(asked), when(go), chat_stream(["a"]))
        first = asyncio.create_task(fleet.chat("first " + LONG, stream=True))
        await asyncio.wait_for(asked.wait(), 5.0)
        held = fleet.link(engine).held
        async with raw_connection(fleet.proxy.port) as client:
            client.send(post("/v1/chat/completions", chat("second " + LONG, stream=True)))
            await eventually(lambda: held.num_waiting == 1)
        await eventually(lambda: held.num_waiting == 0)
        go.set()
        assert (await first).status_code == 200
        assert len(fleet.asked()) == 1
        assert fleet.link(engine).ledger.is_idle


@pytest.mark.parametrize("is_stream", [True, False])
async def test_the_official_client(is_stream: bool) -> None:
    async with engine_proxy(engine_answers(then=_streams)) as fleet:
        async with openai.AsyncOpenAI(base_url=f"{fleet.proxy.url}/v1", api_key="k", max_retries=0) as client:
            messages: Any = chat(LONG)["messages"]
            if is_stream:
                chunks = [
                    each
                    async for each in await client.chat.completions.create(model=MODEL, messages=messages, stream=True)
                ]
                assert "".join(each.choices[0].delta.content or "" for each in chunks) == "a"
            else:
                answer = await client.chat.completions.create(model=MODEL, messages=messages)
                assert answer.choices[0].message.content == "a"
            assert fleet.asked()[-1].header("authorization") == "Bearer k"


async def test_the_official_client_learns_of_an_engine_that_died() -> None:
    async with engine_proxy() as fleet:
        fleet.engines[0].script(stream_head(), chunk(b"".join(chat_events(["a"], is_done=False))), reset())
        async with openai.AsyncOpenAI(base_url=f"{fleet.proxy.url}/v1", api_key="k", max_retries=0) as client:
            with pytest.raises(openai.APIError):
                stream = await client.chat.completions.create(model=MODEL, messages=chat()["messages"], stream=True)
                async for _ in stream:
                    pass


@pytest.mark.parametrize(
    ("method", "target", "content"),
    [
        ("GET", "/v1/embeddings?x=1&y=%2F%20", b""),
        ("POST", "/v1/embeddings", b'{"model":"demo","input":"x"}'),
        ("POST", "/rerank", b'{"query":"x"}'),
        ("POST", "/tokenize", b'{"model":"demo","prompt":"x"}'),
        ("POST", "/v1/audio/transcriptions", b"--x\r\nContent-Disposition: form-data\r\n\r\n\x00\xff\r\n--x--"),
        ("DELETE", "/v1/responses/resp_1", b""),
        ("PUT", "/anything/%C3%A4?q", b"\x00\x01"),
        ("PATCH", "/a//b/../c", b"{"),
        ("OPTIONS", "/v1/chat/completions", b""),
        ("POST", "/v1/chat/completions", b"{not json"),
        ("POST", "/v1/chat/completions", b"[1, 2]"),
        ("POST", "/v1/chat/completions", b'{"messages": [], "x": 1e999}'),
        ("POST", "/v1/chat/completions", b' { "model" : "demo", "messages" : 3, "unknown" : [1.0, 1e2, "\\u00e4"] } '),
        ("POST", "/v1/responses", b'{"model":"demo","input":"x"}'),
    ],
)
async def test_other_paths_methods_and_bodies_pass_as_they_are(method: str, target: str, content: bytes) -> None:
    async with engine_proxy(
        engine_answers(then=lambda _: (whole(b"\x00ok", ("content-type", "x/y"), status=207),))
    ) as fleet:
        fields = f"Host: x\r\nContent-Type: application/json\r\nContent-Length: {len(content)}"
        head = f"{method} {target} HTTP/1.1\r\n{fields}\r\n\r\n"
        async with raw_connection(fleet.proxy.port) as client:
            client.send(head.encode() + content)
            status, headers = await client.head()
            assert (status, headers["content-type"], headers["content-length"]) == (207, "x/y", "3")
            assert await client.reader.readexactly(3) == b"\x00ok"
        request = fleet.asked()[-1]
        assert (request.method, request.target, request.body) == (method, target, content)


async def test_a_head_request_has_the_engines_length_and_no_body() -> None:
    async with engine_proxy(
        engine_answers(then=lambda _: (b"HTTP/1.1 200 OK\r\nContent-Length: 99\r\n\r\n",))
    ) as fleet:
        answer = await fleet.client.head("/v1/files/x")
        assert (answer.status_code, answer.headers["content-length"], answer.content) == (200, "99", b"")
        assert (await fleet.client.get("/health")).status_code == 200


async def test_an_answer_without_a_body_and_one_without_a_length() -> None:
    async with engine_proxy() as fleet:
        fleet.engines[0].script(b"HTTP/1.1 204 No Content\r\n\r\n")
        answer = await fleet.client.delete("/v1/files/x")
        assert (answer.status_code, answer.content) == (204, b"")
        fleet.engines[0].script(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n", chunked([b"a", b"b"]))
        assert (await fleet.client.get("/v1/files/y")).content == b"ab"


async def test_a_request_of_no_known_kind_is_not_sent_twice_after_a_fault() -> None:
    async with engine_proxy(engine_answers(), engine_answers()) as fleet:
        await _without_idle_connections(fleet)
        for engine in fleet.engines:
            engine.script(reset())
        answer = await fleet.client.post("/v1/fine_tuning/jobs", json={"model": MODEL})
        assert answer.status_code == 502
        assert len(fleet.asked()) == 1


async def test_own_paths_stay_own() -> None:
    async with engine_proxy() as fleet:
        for path in ("/health", "/ready", "/metrics", "/cache/stats", "/v1/models", f"/v1/models/{MODEL}"):
            assert (await fleet.client.get(path)).status_code == 200
        assert fleet.asked() == []
