"""What passes besides prompts: places, headers, uploads, other protocols, and requests for an engine that is not up."""

from __future__ import annotations

import asyncio
import time

import pytest

import proxy.engines.engine_handler
from prefixcache.limits import MAX_BODY_BYTES, MAX_PREDICTED_COMMAS
from proxy.engines.http_pool import EngineTimeouts
from tests.support.answer_bytes import chat_events, chunk, chunked, stream_head, whole
from tests.support.engine_proxy import MODEL, chat, engine_answers, engine_proxy
from tests.support.raw_http import post, raw_connection
from tests.support.scripted_engine import each, never, when
from tests.support.seeds import seeded
from tests.support.waiting import eventually


async def test_a_redirect_to_the_engine_itself_leads_back_through_the_proxy() -> None:
    async with engine_proxy() as fleet:
        (engine,) = fleet.engines
        engine.script(whole(b"", ("Location", f"{engine.url}/v1/files?x=1"), status=307))
        answer = await fleet.client.get("/v1/files/?x=1", follow_redirects=True)
        assert [each.target for each in fleet.asked()] == ["/v1/files/?x=1", "/v1/files?x=1"]
        assert answer.history[0].headers["location"] == "/v1/files?x=1"
        engine.script(whole(b"", ("Location", "https://example.org/v1"), status=302))
        assert (await fleet.client.get("/v1/files")).headers["location"] == "https://example.org/v1"


async def test_headers_that_the_operator_lets_pass() -> None:
    async with engine_proxy(passed_headers=frozenset([b"x-tenant"])) as fleet:
        fleet.engines[0].script(whole(b"{}", ("X-Tenant", "told"), ("X-Other", "not")))
        answer = await fleet.chat()
        assert "x-other" not in answer.headers and answer.headers["x-tenant"] == "told"
        sent = {"x-tenant": "asked", "x-other": "not"}
        await fleet.client.post("/v1/chat/completions", json=chat(), headers=sent)
        request = fleet.asked()[-1]
        assert (request.header("x-tenant"), request.header("x-other")) == ("asked", None)


@pytest.mark.parametrize("target", ["/v1/realtime?model=demo", "/v1/chat/completions", "/anything"])
async def test_websockets_are_refused_by_name(target: str) -> None:
    handshake = "Connection: keep-alive, Upgrade\r\nUpgrade: WebSocket\r\nSec-WebSocket-Version: 13\r\n"
    key = "Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n"
    method = "POST" if target.endswith("completions") else "GET"
    async with engine_proxy() as fleet, raw_connection(fleet.proxy.port) as client:
        client.send(f"{method} {target} HTTP/1.1\r\nHost: x\r\n{handshake}{key}\r\n".encode())
        status, headers = await client.head()
        assert (status, headers["content-type"]) == (501, "application/json; charset=utf-8")
        body = await client.reader.readexactly(int(headers["content-length"]))
        assert b"WebSockets are not proxied" in body and b"websocket_not_supported" in body
        assert fleet.asked() == []


async def test_another_offer_to_upgrade_is_declined_by_answering() -> None:
    """Java's client offers h2c with every first request."""
    offer = "Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAEAAEAAAAIAAAAB\r\n"
    async with engine_proxy() as fleet, raw_connection(fleet.proxy.port) as client:
        client.send(post("/v1/chat/completions", chat(), headers=offer))
        assert (await client.head())[0] == 200
        assert fleet.asked()[0].header("upgrade") is None


async def test_a_request_for_any_engine_waits_for_one_to_come_up() -> None:
    async with engine_proxy() as fleet:
        (link,) = fleet.fleet.links
        link._go_down("the test says so")
        waiting = asyncio.create_task(fleet.client.post("/rerank", content=b'{"query": "x"}'))
        await eventually(lambda: fleet.proxy.app[proxy.app.ENGINE_HANDLER]._num_without_engine == 1)
        assert not waiting.done() and fleet.asked() == []
        await link.look()
        assert (await waiting).status_code == 200
        assert fleet.asked()[0].target == "/rerank"


async def test_it_waits_so_long_and_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(proxy.engines.engine_handler, "HELD_DOWN_S", 0.2)
    async with engine_proxy() as fleet:
        (engine,) = fleet.engines
        engine.stop_listening()
        engine.close_idle()
        await eventually(lambda: not engine.connections)
        began = asyncio.get_running_loop().time()
        answer = await fleet.client.post("/rerank", content=b'{"query": "x"}')
        assert (answer.status_code, answer.headers["retry-after"]) == (503, "1")
        assert asyncio.get_running_loop().time() - began > 0.15


async def test_no_more_than_some_wait_for_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(proxy.engines.engine_handler, "MAX_HELD_REQUESTS", 1)
    async with engine_proxy() as fleet:
        (link,) = fleet.fleet.links
        link._go_down("the test says so")
        first = asyncio.create_task(fleet.client.post("/rerank"))
        await eventually(lambda: fleet.proxy.app[proxy.app.ENGINE_HANDLER]._num_without_engine == 1)
        assert (await fleet.client.post("/rerank")).status_code == 429
        await link.look()
        assert (await first).status_code == 200


def _upload(num_bytes: int, model: str) -> tuple[bytes, str]:
    """A file and then the model, as curl -F file=.. -F model=.. sends them."""
    part = b'--b\r\nContent-Disposition: form-data; name="%b"%b\r\n\r\n'
    file = part % (b"file", b'; filename="a.wav"') + seeded("upload").randbytes(num_bytes) + b"\r\n"
    return file + part % (b"model", b"") + model.encode() + b"\r\n--b--\r\n", "multipart/form-data; boundary=b"


async def test_an_upload_goes_to_the_engine_of_its_model_as_it_is() -> None:
    async with engine_proxy(engine_answers("whisper"), engine_answers(MODEL)) as fleet:
        content, kind = _upload(3_000_000, "whisper")
        for _ in range(3):
            answer = await fleet.client.post(
                "/v1/audio/transcriptions", content=content, headers={"content-type": kind}
            )
            assert answer.status_code == 200
        assert [each.body == content for each in fleet.asked(fleet.engines[0])] == [True] * 3
        assert fleet.asked()[0].header("content-type") == kind
        content, _ = _upload(10, "no-such-model")
        answer = await fleet.client.post("/v1/audio/transcriptions", content=content, headers={"content-type": kind})
        assert (answer.status_code, answer.json()["error"]["code"]) == (404, "model_not_found")


async def test_an_upload_over_the_limit_is_refused_with_it() -> None:
    async with engine_proxy() as fleet, raw_connection(fleet.proxy.port) as client:
        length = MAX_BODY_BYTES + 1
        client.send(f"POST /v1/audio/transcriptions HTTP/1.1\r\nHost: x\r\nContent-Length: {length}\r\n\r\n".encode())
        status, headers = await client.head()
        body = await client.reader.readexactly(int(headers["content-length"]))
        assert status == 413 and str(MAX_BODY_BYTES).encode() in body and b"request_too_large" in body
        assert fleet.asked() == []


async def test_a_prompt_of_too_many_parts_passes_without_being_taken_apart() -> None:
    content = b'{"model":"demo","prompt":[' + b",".join([b"[1,2]"] * 200_000) + b"]}"
    async with engine_proxy() as fleet:
        answer = await fleet.client.post("/v1/completions", content=content)
        assert answer.status_code == 200 and "x-prefixcache-hit-tokens" not in answer.headers
        assert fleet.asked()[0].body == content


async def test_a_chat_of_too_many_commas_passes_as_it_is_and_as_many_ids_are_predicted() -> None:
    ids = ",".join(["1"] * (MAX_PREDICTED_COMMAS + 2))
    chat_of_many = f'{{"model":"demo","messages":[{{"role":"user","content":"{ids}"}}]}}'
    async with engine_proxy() as fleet:
        for path, content, is_predicted in (
            ("/v1/chat/completions", chat_of_many, False),
            ("/v1/completions", f'{{"model":"demo","prompt":[{ids}]}}', True),
        ):
            answer = await fleet.client.post(path, content=content)
            assert answer.status_code == 200 and ("x-prefixcache-hit-tokens" in answer.headers) == is_predicted
            assert fleet.asked()[-1].body == content.encode()


async def test_gaps_between_the_pieces_of_a_stream_are_counted() -> None:
    events = chat_events(["a", "b", "c"])
    go = asyncio.Event()
    async with engine_proxy() as fleet:
        fleet.engines[0].script(stream_head(), chunk(events[0]), when(go), each(map(chunk, events[1:])), chunked([]))
        asked_at = time.perf_counter()
        asking = asyncio.create_task(fleet.chat(stream=True))
        await eventually(lambda: fleet.proxy.metric("prefixcache_time_to_first_token_seconds_count") == 1)
        name = "prefixcache_inter_token_latency_seconds"
        assert fleet.proxy.metric(f"{name}_count") == 0
        began = time.perf_counter()
        await asyncio.sleep(0.05)
        waited_s = time.perf_counter() - began
        go.set()
        await asking
        assert 2 <= fleet.proxy.metric(f"{name}_count", model=MODEL) <= len(events) - 1
        assert waited_s <= fleet.proxy.metric(f"{name}_sum", model=MODEL) <= time.perf_counter() - asked_at
        num_gaps = fleet.proxy.metric(f"{name}_count")
        await fleet.chat(stream=False)
        await fleet.client.post("/v1/embeddings", json={"model": MODEL, "input": "x"})
        assert fleet.proxy.metric(f"{name}_count") == num_gaps, "of streams alone"


@pytest.mark.parametrize("begun", [False, True])
async def test_how_long_an_engine_may_be_silent_is_set(begun: bool) -> None:
    timeouts = EngineTimeouts(first_byte_s=None if begun else 0.2, gap_s=0.2 if begun else None)
    async with engine_proxy(timeouts=timeouts) as fleet:
        fleet.engines[0].script(stream_head(), *([chunk(chat_events(["a"])[0])] if begun else []), never())
        async with raw_connection(fleet.proxy.port) as client:
            client.send(post("/v1/chat/completions", chat(stream=True)))
            status, _ = await client.head()
            assert status == (200 if begun else 504)
            assert await client.read_to(b'"engine_timeout"')
