"""Text completions over real sockets: prompts of all kinds, echo, several prompts and choices, and the real client."""

from __future__ import annotations

import asyncio
from typing import Any

import openai
import pytest

from prefixcache.hashing import block_hashes, index_hashes
from prefixcache.index.memory_index import MemoryIndex
from prefixcache.protocol import Generate
from prefixcache.rendering.renderer import Renderer
from prefixcache.types import unpack_tokens
from tests.support.fake_worker import FakeWorker, Script, says, token_ids
from tests.support.folding import folded_completion
from tests.support.memory_store import MemoryStore
from tests.support.proxy_harness import RunningProxy, events_of, running_proxy
from tests.support.raw_http import post, raw_connection
from tests.support.tiny_tokenizer import TINY_EOS_ID, tiny_tokenizer_files
from tests.support.waiting import eventually

PATH = "/v1/completions"
RENDERER = Renderer(tiny_tokenizer_files())
TEXT = "Hello world, né \N{BALLOON} is the answer!"


async def _complete(proxy: RunningProxy, **fields: Any) -> dict[str, Any]:
    answer = await proxy.client.post(PATH, json={"model": "tiny", "prompt": "hello", **fields})
    assert answer.status_code == 200, answer.text
    body: dict[str, Any] = answer.json()
    return body


async def _events(proxy: RunningProxy, **fields: Any) -> list[Any]:
    body = {"model": "tiny", "prompt": "hello", "stream": True, "stream_options": {"include_usage": True}, **fields}
    answer = await proxy.client.post(PATH, json=body)
    assert answer.status_code == 200, answer.text
    events = events_of(answer.text)
    assert events[-1] == "[DONE]"
    return events[:-1]


def _without_id(answer: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in answer.items() if name not in ("id", "created")}


def _says_its_prompt(frame: Generate) -> Script:
    """An answer that tells prompt and choice."""
    text = RENDERER.decode(unpack_tokens(frame.prompt_ids))
    return Script(ids=token_ids(f"{text} {frame.choice}"), cached_tokens=16 if frame.choice else 0)


@pytest.mark.parametrize(
    ("prompt", "ids"),
    [
        ("hello <|im_end|> world", [token_ids("hello <|im_end|> world")]),
        (["one", "two"], [token_ids("one"), token_ids("two")]),
        ([40, 2, 41], [(40, 2, 41)]),
        ([[40], [41, 42]], [(40,), (41, 42)]),
    ],
)
async def test_what_the_worker_is_asked(store: MemoryStore, prompt: Any, ids: list[tuple[int, ...]]) -> None:
    async with FakeWorker.open(store, script=says("hi")) as worker, running_proxy(store) as proxy:
        await proxy.ready()
        await _complete(proxy, prompt=prompt)
    assert [tuple(unpack_tokens(frame.prompt_ids)) for frame in worker.generates] == ids
    assert {frame.max_tokens for frame in worker.generates} == {16}, "OpenAI's default"
    assert len({frame.sampling.seed for frame in worker.generates}) == len(ids), "a prompt given twice may differ"


@pytest.mark.parametrize(("room", "max_tokens"), [(5, 5), (16, 16), (100, 16)])
async def test_the_usual_length_gives_way_to_the_context(store: MemoryStore, room: int, max_tokens: int) -> None:
    limit = len(token_ids("hello")) + room
    async with FakeWorker.open(store, script=says(TEXT), max_model_len=limit) as worker, running_proxy(store) as proxy:
        await proxy.ready()
        answer = await _complete(proxy)
        assert worker.generates[0].max_tokens == max_tokens
        assert answer["usage"]["completion_tokens"] == min(max_tokens, len(token_ids(TEXT)))


@pytest.mark.parametrize("fields", [{}, {"logprobs": 2}, {"echo": True}, {"stop": [" is", "zzz"], "logprobs": 0}])
@pytest.mark.parametrize("n", [1, 3])
async def test_folding_the_stream_gives_the_whole(store: MemoryStore, fields: dict[str, Any], n: int) -> None:
    async with FakeWorker.open(store, script=_says_its_prompt) as worker, running_proxy(store) as proxy:
        await proxy.ready()
        asked = {"prompt": ["one is", "two\N{BALLOON}"], "n": n, "seed": 1, "max_tokens": 50, **fields}
        whole = await _complete(proxy, **asked)
        events = await _events(proxy, **asked)
        await eventually(lambda: worker.num_active == 0)
    assert _without_id(folded_completion(events)) == _without_id(whole)
    assert [choice["index"] for choice in whole["choices"]] == list(range(2 * n))
    for index, choice in enumerate(whole["choices"]):
        prompt = asked["prompt"][index // n]
        text = f"{prompt} {index % n}".partition(" is")[0] if "stop" in fields else f"{prompt} {index % n}"
        assert choice["text"] == (prompt if "echo" in fields else "") + text
        assert choice["finish_reason"] == "stop"
    usage = whole["usage"]
    assert usage["prompt_tokens"] == len(token_ids("one is")) + len(token_ids("two\N{BALLOON}")), "once a prompt"
    assert usage["prompt_tokens_details"]["cached_tokens"] == 0, "what the first choice found"
    frames = worker.generates[: 2 * n]
    assert [frame.choice for frame in frames] == [*range(n), *range(n)]
    assert len({frame.id for frame in frames}) == 2 * n


async def test_log_probabilities_are_aligned_with_the_text(store: MemoryStore) -> None:
    async with FakeWorker.open(store, script=says(TEXT)), running_proxy(store) as proxy:
        await proxy.ready()
        (choice,) = (await _complete(proxy, logprobs=2, max_tokens=100))["choices"]
        (cut,) = (await _complete(proxy, logprobs=2, max_tokens=100, stop="the"))["choices"]
    ids = token_ids(TEXT)
    logprobs = choice["logprobs"]
    assert logprobs["token_logprobs"] == [-id / 8 for id in ids]
    assert [len(top) for top in logprobs["top_logprobs"]] == [2] * len(ids)
    for token, offset in zip(logprobs["tokens"], logprobs["text_offset"], strict=True):
        if not token.startswith("bytes:"):
            assert choice["text"][offset:].startswith(token)
    assert [token for token in logprobs["tokens"] if token.startswith("bytes:")][-4:] == [
        f"bytes:\\x{byte:02x}" for byte in "\N{BALLOON}".encode()
    ]
    assert cut["text"] == TEXT[: TEXT.index("the")]
    num_kept = len(cut["logprobs"]["tokens"])
    assert cut["logprobs"]["text_offset"] == logprobs["text_offset"][:num_kept]
    assert cut["logprobs"]["text_offset"][-1] < len(cut["text"]) <= logprobs["text_offset"][num_kept]


async def test_echo_alone_asks_no_worker(store: MemoryStore) -> None:
    async with FakeWorker.open(store, script=says("hi")) as worker, running_proxy(store) as proxy:
        await proxy.ready()
        asked = {"prompt": ["hello", "world"], "n": 2, "echo": True, "max_tokens": 0}
        whole = await _complete(proxy, **asked)
        events = await _events(proxy, **asked)
        assert worker.generates == []
        by_ids = await _complete(proxy, prompt=[*token_ids(TEXT), TINY_EOS_ID], echo=True, max_tokens=0)
    assert [choice["text"] for choice in whole["choices"]] == ["hello", "hello", "world", "world"]
    assert {choice["finish_reason"] for choice in whole["choices"]} == {"length"}
    assert whole["usage"]["completion_tokens"] == 0
    assert _without_id(folded_completion(events)) == _without_id(whole)
    assert by_ids["choices"][0]["text"] == TEXT


async def test_a_long_echo_reaches_a_slow_client_whole(store: MemoryStore) -> None:
    """Far more than a stream may leave unread later on."""
    prompt = "the answer " * 20_000
    async with FakeWorker.open(store, script=says("hi"), max_model_len=10**6), running_proxy(store) as proxy:
        await proxy.ready()
        async with raw_connection(proxy.port, receive_buffer_bytes=4096) as connection:
            asked = {"model": "tiny", "prompt": prompt, "echo": True, "n": 10, "stream": True}
            connection.send(post(PATH, asked))
            assert (await connection.head())[0] == 200
            data = b""
            async with asyncio.timeout(20):
                while not data.endswith(b"0\r\n\r\n"):
                    data += await connection.reader.read(1 << 16)
        assert data.count(prompt.encode()) == 10


async def test_each_prompt_goes_where_its_own_prefix_is(store: MemoryStore) -> None:
    async with (
        FakeWorker.open(store, worker_id="w1", script=says("hi")) as one,
        FakeWorker.open(store, worker_id="w2", script=says("hi")) as two,
        running_proxy(store) as proxy,
    ):
        await proxy.ready(2)
        prompts = ["one " * 100, "two " * 100]
        await _complete(proxy, prompt=prompts)
        assert len(one.generates) == len(two.generates) == 1, "what was placed before counts as load"
        for worker in (one, two):
            (frame,) = worker.generates
            hashes = index_hashes(block_hashes(frame.root, frame.prompt_ids, 16), 4)
            await _index(store, worker).apply(worker.record.incarnation, 1, hashes, [])
        first = {worker.record.worker_id: worker.generates[0].prompt_ids for worker in (one, two)}
        for order in (prompts, prompts[::-1]):
            answer = await proxy.client.post(PATH, json={"model": "tiny", "prompt": order})
            assert sorted(answer.headers["x-prefixcache-worker"].split(", ")) == ["w1", "w2"]
            assert answer.headers["x-prefixcache-reason"] == "longest_prefix"
        for worker in (one, two):
            assert {frame.prompt_ids for frame in worker.generates} == {first[worker.record.worker_id]}
            assert len(worker.generates) == 3


def _index(store: MemoryStore, worker: FakeWorker) -> MemoryIndex:
    index = store.index(worker.record.namespace)
    assert isinstance(index, MemoryIndex)
    return index


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("fields", "param", "code"),
    [
        ({"prompt": ""}, "prompt", None),
        ({"prompt": [[1], []]}, "prompt[1]", None),
        ({"prompt": [512]}, "prompt[0]", None),
        ({"prompt": [[1], [-1]]}, "prompt[1][0]", None),
        ({"logit_bias": {"512": 1}}, "logit_bias", None),
        ({"stop_token_ids": [512]}, "stop_token_ids[0]", None),
        ({"suffix": "x"}, "suffix", None),
        ({"echo": True, "logprobs": 1}, "logprobs", None),
        ({"prompt": ["a", "hello " * 5000]}, "prompt[1]", "context_length_exceeded"),
        ({"max_tokens": 4096}, "prompt", "context_length_exceeded"),
    ],
)
async def test_refusals(store: MemoryStore, fields: dict[str, Any], param: str, code: str | None, stream: bool) -> None:
    async with FakeWorker.open(store, script=says("hi")) as worker, running_proxy(store) as proxy:
        await proxy.ready()
        body = {"model": "tiny", "prompt": "hello", "stream": stream, **fields}
        answer = await proxy.client.post(PATH, json=body)
        assert answer.status_code == 400
        error = answer.json()["error"]
        assert (error["param"], error["code"]) == (param, code)
        assert worker.generates == []
        assert proxy.metric("prefixcache_request_errors_total", code=code or "invalid_request") == 1


async def test_the_openai_client(store: MemoryStore) -> None:
    async with (
        FakeWorker.open(store, script=says(TEXT)),
        running_proxy(store) as proxy,
        openai.AsyncOpenAI(base_url=proxy.url + "/v1", api_key="unused", max_retries=0) as client,
    ):
        await proxy.ready()
        whole = await client.completions.create(
            model="tiny",
            prompt=["a", "b"],
            n=2,
            best_of=2,
            max_tokens=100,
            logprobs=2,
            logit_bias={"5": 1},
            presence_penalty=0.5,
            frequency_penalty=-0.5,
            extra_body={"top_k": 5, "min_p": 0.1, "repetition_penalty": 1.1, "min_tokens": 1, "ignore_eos": True},
        )
        assert [choice.index for choice in whole.choices] == [0, 1, 2, 3]
        assert {choice.text for choice in whole.choices} == {TEXT}
        assert whole.choices[0].logprobs is not None and whole.choices[0].logprobs.text_offset is not None
        stream = await client.completions.create(
            model="tiny", prompt="a", max_tokens=100, stream=True, stream_options={"include_usage": True}
        )
        chunks = [chunk async for chunk in stream]
        assert "".join(chunk.choices[0].text for chunk in chunks if chunk.choices) == TEXT
        assert chunks[-1].usage is not None and chunks[-1].choices == []
        with pytest.raises(openai.BadRequestError) as refused:
            await client.completions.create(model="tiny", prompt="a", suffix="b")
        assert refused.value.param == "suffix"
