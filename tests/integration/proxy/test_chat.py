"""Chat completions over real sockets, with a worker that answers what a test says."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from prefixcache.hashing import block_hashes, index_hashes
from prefixcache.protocol import Generate
from prefixcache.rendering.renderer import Renderer
from prefixcache.types import unpack_tokens
from tests.support.fake_worker import FakeWorker, Script, says, token_ids
from tests.support.memory_store import MemoryStore
from tests.support.proxy_harness import RunningProxy, running_proxy, text_of
from tests.support.tiny_tokenizer import tiny_tokenizer_files
from tests.support.waiting import eventually

RENDERER = Renderer(tiny_tokenizer_files())
TEXT = "Hello world, né \N{BALLOON} is the answer!"


async def test_whole_and_streamed_are_the_same_answer(store: MemoryStore) -> None:
    async with FakeWorker.open(store, script=says(TEXT)) as worker, running_proxy(store) as proxy:
        await proxy.ready()
        response = await proxy.chat(seed=1)
        whole = response.json()
        events = await proxy.events(seed=1, stream_options={"include_usage": True})
    assert response.status_code == 200
    assert whole["choices"][0]["message"] == {"role": "assistant", "content": TEXT, "refusal": None}
    assert whole["choices"][0]["finish_reason"] == "stop"
    assert whole["object"] == "chat.completion" and whole["id"].startswith("chatcmpl-")
    assert whole["usage"]["completion_tokens"] == len(token_ids(TEXT))

    assert events[-1] == "[DONE]"
    chunks = events[:-1]
    assert chunks[0]["choices"][0]["delta"]["role"] == "assistant"
    assert text_of(events) == TEXT
    finished = [chunk["choices"][0]["finish_reason"] for chunk in chunks if chunk["choices"]]
    assert finished[-1] == "stop" and set(finished[:-1]) == {None}
    assert chunks[-1]["choices"] == [] and chunks[-1]["usage"] == whole["usage"]
    assert all(chunk["usage"] is None for chunk in chunks[:-1])
    for name in ("id", "created", "model", "system_fingerprint", "object"):
        assert len({chunk[name] for chunk in chunks}) == 1
    assert chunks[0]["system_fingerprint"] == whole["system_fingerprint"]
    assert chunks[0]["id"] != whole["id"]
    first, second = worker.generates
    assert (first.prompt_ids, first.root, first.sampling) == (second.prompt_ids, second.root, second.sampling)


@pytest.mark.parametrize(("cached_tokens", "reuse"), [(0, "none"), (1, "part"), (1_000, "most")])
async def test_ttft_is_told_apart_by_what_was_reused(store: MemoryStore, cached_tokens: int, reuse: str) -> None:
    async with (
        FakeWorker.open(store, script=says(TEXT, cached_tokens=cached_tokens)),
        running_proxy(store) as proxy,
    ):
        await proxy.ready()
        await proxy.chat()
        await proxy.events()
        name = "prefixcache_time_to_first_token_by_reuse_seconds_count"
        assert proxy.metric(name, reuse=reuse) == proxy.metric(name) == 2


async def test_without_the_option_a_stream_has_no_usage(store: MemoryStore) -> None:
    async with FakeWorker.open(store, script=says("hi")), running_proxy(store) as proxy:
        await proxy.ready()
        for fields in ({}, {"stream_options": {"include_usage": False}}, {"stream_options": None}):
            events = await proxy.events(**fields)
            assert all("usage" not in event for event in events[:-1])


async def test_what_the_worker_is_asked(store: MemoryStore) -> None:
    async with FakeWorker.open(store, script=says("hi"), max_model_len=500) as worker, running_proxy(store) as proxy:
        await proxy.ready()
        await proxy.chat(seed=-1, temperature=0, top_p=0.5, max_tokens=9)
        await proxy.chat()
        await proxy.chat()
    asked, plain, again = worker.generates
    assert (asked.sampling.seed, asked.sampling.temperature, asked.sampling.top_p) == (2**64 - 1, 0, 0.5)
    assert asked.max_tokens == 9
    assert asked.stop_token_ids == worker.record.stop_token_ids
    assert asked.output_ids == b""
    assert (plain.sampling.temperature, plain.sampling.top_p) == (1, 1)
    assert plain.max_tokens == 500 - len(plain.prompt_ids) // 4
    assert plain.sampling.seed != again.sampling.seed, "made by the proxy"
    assert len({frame.id for frame in worker.generates}) == 3
    ids = unpack_tokens(asked.prompt_ids)
    assert tuple(ids) == token_ids("<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n")


async def test_the_salt_changes_the_root_alone(store: MemoryStore) -> None:
    async with FakeWorker.open(store, script=says("hi")) as worker, running_proxy(store) as proxy:
        await proxy.ready()
        for salt in (None, "a", "b", "a", ""):
            await proxy.chat(cache_salt=salt)
    roots = [frame.root for frame in worker.generates]
    assert roots[0] == roots[4] and roots[1] == roots[3] and len(set(roots)) == 3
    assert len({frame.prompt_ids for frame in worker.generates}) == 1


async def test_headers(store: MemoryStore) -> None:
    async with FakeWorker.open(store, script=says("hi")), running_proxy(store) as proxy:
        await proxy.ready()
        given = {"x-request-id": "my id 7"}
        body = {"model": "tiny", "messages": [{"role": "user", "content": "hello"}]}
        for stream in (False, True):
            answer = await proxy.client.post(
                "/v1/chat/completions", json={**body, "stream": stream}, headers={**given, "accept-encoding": "gzip"}
            )
            assert answer.headers["x-request-id"] == "my id 7"
            assert answer.headers["x-prefixcache-worker"] == "w1"
            assert answer.headers["x-prefixcache-hit-tokens"] == "0"
            assert answer.headers["x-prefixcache-reason"] == "no_prefix"
            assert "content-encoding" not in answer.headers
        assert answer.headers["content-type"].startswith("text/event-stream")
        assert answer.headers["cache-control"] == "no-cache"
        assert answer.headers["x-accel-buffering"] == "no"
        assert "content-length" not in answer.headers
        odd = await proxy.client.post("/v1/chat/completions", json=body, headers={"x-request-id": "x" * 129})
        assert len(odd.headers["x-request-id"]) == 32


@pytest.mark.parametrize("ids_a_step", [1, 2, 7, 1000])
@pytest.mark.parametrize("stop", ["world", [" is", "né \N{BALLOON}"], "answer!", ["zzz"]])
async def test_stop_strings(store: MemoryStore, stop: Any, ids_a_step: int) -> None:
    ids = token_ids(TEXT)
    stops = [stop] if isinstance(stop, str) else stop
    places = [TEXT.index(candidate) for candidate in stops if candidate in TEXT]
    expected = TEXT[: min(places)] if places else TEXT

    def script(frame: Generate) -> Script:
        return Script(ids=ids, reason="length", ids_a_step=ids_a_step, cached_tokens=8)

    async with FakeWorker.open(store, script=script) as worker, running_proxy(store) as proxy:
        await proxy.ready()
        whole = (await proxy.chat(stop=stop, max_tokens=len(ids))).json()
        events = await proxy.events(stop=stop, max_tokens=len(ids), stream_options={"include_usage": True})
        assert len(worker.aborts) == (2 if places else 0)
        await eventually(lambda: worker.num_active == 0)
    assert whole["choices"][0]["message"]["content"] == text_of(events) == expected
    assert whole["choices"][0]["finish_reason"] == ("stop" if places else "length")
    assert events[-3]["choices"][0]["finish_reason"] == ("stop" if places else "length")
    assert events[-2]["usage"] == whole["usage"]
    assert whole["usage"]["prompt_tokens_details"] == {"cached_tokens": 8}
    completing = next(n for n in range(len(ids) + 1) if not places or any(s in _text(ids[:n]) for s in stops))
    assert whole["usage"]["completion_tokens"] == (completing if places else len(ids))


def _text(ids: tuple[int, ...]) -> str:
    return RENDERER.detokenizer().feed(ids)


async def test_max_tokens_cut_the_answer(store: MemoryStore) -> None:
    async with FakeWorker.open(store, script=says(TEXT)), running_proxy(store) as proxy:
        await proxy.ready()
        whole = (await proxy.chat(max_tokens=2, max_completion_tokens=3)).json()
    assert whole["choices"][0]["finish_reason"] == "length"
    assert whole["usage"]["completion_tokens"] == 3


async def test_a_prediction_sends_a_prompt_where_its_blocks_are(store: MemoryStore) -> None:
    """The claims of a worker's current incarnation count, not those of an earlier one; what was sent there does."""

    def messages(number: int) -> list[dict[str, str]]:
        """Prompts that share five index blocks and something of the sixth."""
        return [{"role": "system", "content": "word " * 165 + f"{number} " * 200}, {"role": "user", "content": "hello"}]

    async with (
        FakeWorker.open(store, worker_id="w1", script=says("hi", cached_tokens=256)) as one,
        FakeWorker.open(store, worker_id="w2", script=says("hi", cached_tokens=128)) as two,
        running_proxy(store) as proxy,
    ):
        await proxy.ready(2)
        first = await proxy.chat(messages=messages(1))
        holder = one if first.headers["x-prefixcache-worker"] == "w1" else two
        (frame,) = holder.generates
        await _claim(store, holder, frame, index_blocks=5)
        for number in (2, 3, 4):
            answer = await proxy.chat(messages=messages(number))
            assert answer.headers["x-prefixcache-worker"] == holder.record.worker_id
            assert answer.headers["x-prefixcache-hit-tokens"] == "320"
            assert answer.headers["x-prefixcache-reason"] == "longest_prefix"
        holder.beat(incarnation=holder.record.incarnation + 100)
        await eventually(lambda: any(link.incarnation > 100 for link in proxy.fleet.links))
        answer = await proxy.chat(messages=messages(5))
        assert answer.headers["x-prefixcache-worker"] == holder.record.worker_id
        assert answer.headers["x-prefixcache-reason"] == "own_placements"
        assert answer.headers["x-prefixcache-hit-tokens"] == "320", "the deepest boundary among the five blocks"
        assert proxy.metric("prefixcache_predicted_hit_tokens_total") == 3 * 320, "the index predicted nothing of it"
        assert proxy.metric("prefixcache_own_placement_decisions_total", cause="announced_again") == 1
        missed, cached = "prefixcache_missed_tokens_total", 256 if holder is one else 128
        assert proxy.metric(missed, why="gone") == 4 * (320 - cached), "expected there, and it had less"
        computed = proxy.metric("prefixcache_prompt_tokens_total") - proxy.metric("prefixcache_cached_tokens_total")
        assert proxy.metric(missed) == computed


async def _claim(store: MemoryStore, worker: FakeWorker, frame: Generate, *, index_blocks: int) -> None:
    hashes = index_hashes(block_hashes(frame.root, frame.prompt_ids, 16), 4)
    await store.index(worker.record.namespace).apply(worker.record.incarnation, 1, hashes[:index_blocks], [])


async def test_usage_statistics_and_metrics_agree(store: MemoryStore) -> None:
    cached = iter([0, 16, 32, 48])

    def script(frame: Generate) -> Script:
        return Script(ids=token_ids("hello"), cached_tokens=next(cached))

    async with FakeWorker.open(store, script=script), running_proxy(store) as proxy:
        await proxy.ready()
        messages = [{"role": "user", "content": "word " * 100}]
        usages = [(await proxy.chat(messages=messages)).json()["usage"] for _ in range(3)]
        events = await proxy.events(messages=messages, stream_options={"include_usage": True})
        usages.append(events[-2]["usage"])
        prompt_tokens = sum(usage["prompt_tokens"] for usage in usages)
        statistics = (await proxy.client.get("/cache/stats")).json()
        expected = {"prompt_tokens": prompt_tokens, "cached_tokens": 96, "hit_rate": 96 / prompt_tokens}
        assert statistics["total"] == {"1m": expected, "15m": expected, "since_start": expected}
        assert statistics["models"] == {"tiny": statistics["total"]}
        assert proxy.metric("prefixcache_prompt_tokens_total", model="tiny") == prompt_tokens
        assert proxy.metric("prefixcache_cached_tokens_total", model="tiny") == 96
        assert proxy.metric("prefixcache_generation_tokens_total") == sum(u["completion_tokens"] for u in usages)
        assert proxy.metric("prefixcache_requests_total", model="tiny", code="200") == 4
        assert proxy.metric("prefixcache_time_to_first_token_seconds_count") == 4
        assert proxy.metric("prefixcache_e2e_request_latency_seconds_count") == 4
        gaps = sum(usage["completion_tokens"] - 1 for usage in usages)
        assert proxy.metric("prefixcache_inter_token_latency_seconds_count") == gaps


async def test_streams_side_by_side_keep_their_own_texts(store: MemoryStore) -> None:
    def script(frame: Generate) -> Script:
        number = _number_of(frame)
        return Script(ids=token_ids(f"{number} is \N{BALLOON} " * 20), cached_tokens=0)

    async def one(proxy: RunningProxy, number: int) -> None:
        events = await proxy.events(messages=[{"role": "user", "content": f"n{number}"}])
        assert text_of(events) == f"{number} is \N{BALLOON} " * 20
        assert events[-1] == "[DONE]"

    async with FakeWorker.open(store, script=script) as worker, running_proxy(store) as proxy:
        await proxy.ready()
        await asyncio.gather(*(one(proxy, number) for number in range(32)))
        assert proxy.metric("prefixcache_num_requests_running") == 0
        assert worker.num_connections == 1


def _number_of(frame: Generate) -> int:
    text = RENDERER.detokenizer().feed(unpack_tokens(frame.prompt_ids))
    return int(text.split("\nn")[1].split("\n")[0].split("assistant")[0])


async def test_prompts_of_a_megabyte(store: MemoryStore) -> None:
    async with FakeWorker.open(store, script=says("ok"), max_model_len=10**7) as worker, running_proxy(store) as proxy:
        await proxy.ready()
        answer = await proxy.chat(messages=[{"role": "user", "content": "x1 " * 350_000}])
        assert answer.status_code == 200
        assert answer.json()["usage"]["prompt_tokens"] == len(worker.generates[0].prompt_ids) // 4 > 5 * 10**5


async def test_the_status_line_waits_for_the_first_token(store: MemoryStore) -> None:
    async with FakeWorker.open(store) as worker, running_proxy(store) as proxy:
        await proxy.ready()
        streaming = asyncio.create_task(proxy.chat(stream=True))
        frame = await worker.next_generate()
        worker.accepted(frame.id)
        worker.started(frame.id)
        worker.fail(frame.id, "overloaded", retry_after_s=6.5)
        answer = await streaming
        assert answer.status_code == 429
        assert answer.headers["retry-after"] == "7"
        assert answer.headers["content-type"].startswith("application/json")
        assert answer.json()["error"]["code"] == "rate_limit_exceeded"
        assert proxy.metric("prefixcache_requests_total", code="429") == 1
