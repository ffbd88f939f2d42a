"""Where tokenizing runs, and what a missing answer of the index costs."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Iterator
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any

import pytest

from prefixcache.errors import ContextLengthExceeded, InvalidRequest, RequestTooLarge
from prefixcache.hashing import block_hashes, index_hashes
from prefixcache.index.base import Match
from prefixcache.limits import (
    LARGE_BODY_BYTES,
    MAX_BODY_LISTS,
    OFFLOAD_BODY_BYTES,
    TOKENIZE_INLINE_CHARS,
    TOKENIZE_THREADS,
)
from prefixcache.metrics import ProxyMetrics, exposition
from prefixcache.rendering.renderer import Renderer
from prefixcache.types import pack_tokens, unpack_tokens
from proxy import prediction
from proxy.chat_request import ChatRequest, parse_chat_request
from proxy.completion_request import CompletionRequest, RawPrompt
from proxy.model import Model
from proxy.prediction import AnyRequest, Predictor, Prompt, PromptReader
from proxy.sampling_fields import GenerationOptions
from proxy.warnings_log import QuietLog
from tests.support.memory_store import FaultyIndex
from tests.support.tiny_tokenizer import TINY_EOS_ID, TINY_TEMPLATE, tiny_tokenizer_files
from tests.support.waiting import eventually
from tests.support.worker_records import worker_record

SEED = 9
MOST_TOKENS = 1_000_000


class CountingExecutor(Executor):
    """Counts what was handed to its one thread."""

    def __init__(self) -> None:
        self.threads: list[str] = []
        self._pool = ThreadPoolExecutor(1)

    def submit(self, function: Any, /, *arguments: Any, **named: Any) -> Future[Any]:
        def counted() -> Any:
            self.threads.append(threading.current_thread().name)
            return function(*arguments, **named)

        return self._pool.submit(counted)

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        self._pool.shutdown(wait=wait, cancel_futures=cancel_futures)


@pytest.fixture
def executor() -> Iterator[CountingExecutor]:
    executor = CountingExecutor()
    yield executor
    executor.shutdown()


def _model(chat_template: str = TINY_TEMPLATE) -> Model:
    files = tiny_tokenizer_files(chat_template=chat_template)
    record = worker_record(tokenizer_fingerprint=files.fingerprint)
    return Model.of(record, Renderer(files), FaultyIndex())


def _chat(text: str, **fields: Any) -> ChatRequest:
    options = GenerationOptions(model="tiny", **fields)
    return ChatRequest(options=options, messages=({"role": "user", "content": text},))


def _completion(*prompts: RawPrompt, **fields: Any) -> CompletionRequest:
    return CompletionRequest(options=GenerationOptions(model="tiny"), prompts=prompts, in_list=True, **fields)


async def _read_one(reader: PromptReader, model: Model, asked: AnyRequest, *, body_bytes: int = 1) -> Prompt:
    (prompt,) = await reader.read(model, asked, body_bytes=body_bytes, seed=SEED, most_tokens=MOST_TOKENS)
    return prompt


async def test_short_text_is_read_inline(executor: CountingExecutor) -> None:
    model, chat = _model(), _chat("hello " * 50)
    prompt = await _read_one(PromptReader(executor), model, chat, body_bytes=400)
    assert executor.threads == []
    ids = model.renderer.encode(model.renderer.render(chat.messages))
    assert prompt.packed == pack_tokens(ids)
    assert prompt.num_tokens == len(ids)
    assert prompt.root == model.root_hash(seed=SEED, cache_salt="")
    assert prompt.index_hashes == index_hashes(block_hashes(prompt.root, prompt.packed, 16), 4)


@pytest.mark.parametrize("body_bytes", [400, OFFLOAD_BODY_BYTES])
async def test_long_text_is_read_in_a_thread(executor: CountingExecutor, body_bytes: int) -> None:
    model, chat = _model(), _chat("hello " * TOKENIZE_INLINE_CHARS)
    prompt = await _read_one(PromptReader(executor), model, chat, body_bytes=body_bytes)
    assert len(executor.threads) == 1
    assert prompt.packed == pack_tokens(model.renderer.encode(model.renderer.render(chat.messages)))


async def test_big_bodies_are_parsed_in_a_thread(executor: CountingExecutor) -> None:
    reader = PromptReader(executor)
    small = b'{"model": "m", "messages": [{"role": "user", "content": "x"}]}'
    big = small.replace(b"x", b"x" * OFFLOAD_BODY_BYTES)
    assert await reader.parse(parse_chat_request, small) == parse_chat_request(small)
    assert executor.threads == []
    assert await reader.parse(parse_chat_request, big) == parse_chat_request(big)
    assert len(executor.threads) == 1
    with pytest.raises(InvalidRequest):
        await reader.parse(parse_chat_request, big + b"}")


async def test_the_salt_changes_every_hash(executor: CountingExecutor) -> None:
    model, reader = _model(), PromptReader(executor)
    text = "hello " * 100
    plain, salted = [await _read_one(reader, model, _chat(text, cache_salt=salt)) for salt in ("", "tenant")]
    (other_seed,) = await reader.read(model, _chat(text), body_bytes=1, seed=SEED + 1, most_tokens=MOST_TOKENS)
    assert plain.packed == salted.packed == other_seed.packed
    assert plain.index_hashes
    assert not set(plain.index_hashes) & (set(salted.index_hashes) | set(other_seed.index_hashes))


async def test_a_template_that_refuses_and_one_that_writes_nothing(executor: CountingExecutor) -> None:
    reader = PromptReader(executor)
    with pytest.raises(InvalidRequest, match="roles must alternate"):
        await reader.read(
            _model("{{ raise_exception('roles must alternate') }}"),
            _chat("x"),
            body_bytes=1,
            seed=SEED,
            most_tokens=MOST_TOKENS,
        )
    with pytest.raises(InvalidRequest, match="empty prompt"):
        await reader.read(_model("{# nothing #}"), _chat("x"), body_bytes=1, seed=SEED, most_tokens=MOST_TOKENS)


@pytest.mark.parametrize("body_bytes", [1, OFFLOAD_BODY_BYTES])
@pytest.mark.parametrize(
    ("asked", "field"), [(_chat("a" * 4000), "messages"), (_completion("short", "a" * 4000), r"prompt\[1\]")]
)
async def test_what_must_be_too_long_is_refused_before_it_is_tokenized(
    executor: CountingExecutor, monkeypatch: pytest.MonkeyPatch, asked: AnyRequest, field: str, body_bytes: int
) -> None:
    model = _model()
    monkeypatch.setattr(Renderer, "encode", lambda *_: pytest.fail("it was tokenized"))
    with pytest.raises(ContextLengthExceeded, match=rf"maximum context length is 100 tokens. However, {field} has at"):
        await PromptReader(executor).read(model, asked, body_bytes=body_bytes, seed=SEED, most_tokens=100)


@pytest.mark.parametrize("body_bytes", [1, OFFLOAD_BODY_BYTES])
async def test_prompts_of_a_completion(executor: CountingExecutor, body_bytes: int) -> None:
    model, reader = _model(), PromptReader(executor)
    ids = [40, 41, TINY_EOS_ID]
    prompts = await reader.read(
        model, _completion("hello", ids, echo=True), body_bytes=body_bytes, seed=SEED, most_tokens=MOST_TOKENS
    )
    text, given = prompts
    assert text.packed == pack_tokens(model.renderer.encode(model.renderer.raw("hello")))
    assert given.packed == pack_tokens(ids)
    assert (text.field, given.field) == ("prompt[0]", "prompt[1]")
    assert text.echo == "hello"
    assert given.echo == model.renderer.detokenizer().feed(ids)
    assert text.root == given.root == model.root_hash(seed=SEED, cache_salt="")
    with pytest.raises(InvalidRequest) as caught:
        await reader.read(
            model, _completion([model.vocab_size]), body_bytes=body_bytes, seed=SEED, most_tokens=MOST_TOKENS
        )
    assert caught.value.param == "prompt[0][0]"


async def test_an_echo_has_its_limit(executor: CountingExecutor, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prediction, "MAX_ECHO_CHARS", 9)
    model, reader = _model(), PromptReader(executor)
    assert await reader.read(
        model, _completion("hello", "four", echo=True), body_bytes=1, seed=SEED, most_tokens=MOST_TOKENS
    )
    assert await reader.read(model, _completion("hello", "fives"), body_bytes=1, seed=SEED, most_tokens=MOST_TOKENS)
    with pytest.raises(InvalidRequest) as caught:
        await reader.read(
            model, _completion("hello", "fives", echo=True), body_bytes=1, seed=SEED, most_tokens=MOST_TOKENS
        )
    assert caught.value.param == "echo"


@pytest.mark.parametrize(
    ("template", "text"),
    [
        (TINY_TEMPLATE, "<|im_start|>user\nab<|im_end|>\n<|im_start|>assistant\n"),
        ("{% for m in messages %}{{ m.role + ': ' + m.content }}{% endfor %}", "user: a\nb"),
    ],
)
async def test_parts_are_joined_for_a_template_that_takes_text_only(
    executor: CountingExecutor, template: str, text: str
) -> None:
    model = _model(template)
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    chat = ChatRequest(options=GenerationOptions(model="tiny"), messages=({"role": "user", "content": parts},))
    prompt = await _read_one(PromptReader(executor), model, chat)
    assert model.renderer.decode(unpack_tokens(prompt.packed)) == text


@pytest.mark.parametrize(
    ("body", "arguments", "text"),
    [
        ("{% for key in c.function.arguments %}{{ key }}{% endfor %}", '{"a": 1, "b": 2}', "ab"),
        ("{{ c.function.arguments | tojson }}", '{"a":"é"}', '{"a": "é"}'),
        ("{{ c.function.arguments | tojson }}", "", "{}"),
        ("{{ 'x' + c.function.arguments }}", '{"a":1}', 'x{"a":1}'),
    ],
)
async def test_arguments_of_tool_calls_are_what_the_template_takes(
    executor: CountingExecutor, body: str, arguments: str, text: str
) -> None:
    model = _model("{% for m in messages %}{% for c in m.tool_calls %}" + body + "{% endfor %}{% endfor %}")
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": arguments}}
    messages = ({"role": "user", "content": "x"}, {"role": "assistant", "content": None, "tool_calls": [call]})
    chat = ChatRequest(options=GenerationOptions(model="tiny"), messages=messages)
    prompt = await _read_one(PromptReader(executor), model, chat)
    assert model.renderer.decode(unpack_tokens(prompt.packed)) == text


async def test_matches_of_many_prompts_come_in_their_order() -> None:
    predictor = Predictor(ProxyMetrics(), QuietLog(logging.getLogger("test")))
    index = FaultyIndex()
    registration = await index.register()
    await index.apply(registration.incarnation, 1, list(range(1, 31)), [])
    prompts = [
        Prompt(packed=b"", root=0, index_hashes=list(range(1, 1 + depth)), field="prompt") for depth in range(30)
    ]
    matches = await predictor.all_matches(index, prompts)
    depths = [match.depths.get(registration.incarnation, 0) for match in matches if match is not None]
    assert depths == list(range(30))


async def test_matches_are_timed_and_failures_counted(caplog: pytest.LogCaptureFixture) -> None:
    metrics = ProxyMetrics()
    predictor = Predictor(metrics, QuietLog(logging.getLogger("test")))
    index = FaultyIndex()
    registration = await index.register()
    await index.apply(registration.incarnation, 1, [11, 12], [])
    assert await predictor.match(index, []) == Match()
    assert index.faults.num_calls == 2, "nothing to ask for"
    match = await predictor.match(index, [11, 12, 13])
    assert match is not None and match.depths == {registration.incarnation: 2}
    index.faults.unavailable = True
    for _ in range(5):
        assert await predictor.match(index, [11]) is None, "no answer is not the same as nobody"
    text = exposition(metrics.registry).decode()
    assert "prefixcache_index_lookup_failures_total 5.0" in text
    assert "prefixcache_index_lookup_seconds_count 6.0" in text
    assert len(caplog.records) == 1, "said once, not with every request"


async def test_other_exceptions_of_an_index_are_not_hidden() -> None:
    class BrokenIndex(FaultyIndex):
        async def match(self, hashes: Any, **_: Any) -> Any:
            await asyncio.sleep(0)
            raise RuntimeError("a bug")

    with pytest.raises(RuntimeError):
        await Predictor(ProxyMetrics(), QuietLog(logging.getLogger("test"))).match(BrokenIndex(), [1])


# --- large bodies -----------------------------------------------------------------------------------------


async def _turns_of_the_loop() -> None:
    """Whoever can go on has done so."""
    for _ in range(10):
        await asyncio.sleep(0)


async def test_large_bodies_are_taken_apart_one_after_the_other(executor: CountingExecutor) -> None:
    reader = PromptReader(executor)
    first, second, small = ExitStack(), ExitStack(), ExitStack()
    await reader.take_turn(first, LARGE_BODY_BYTES)
    waiting = asyncio.create_task(reader.take_turn(second, LARGE_BODY_BYTES))
    await reader.take_turn(small, LARGE_BODY_BYTES - 1)
    await _turns_of_the_loop()
    assert not waiting.done()
    first.close()
    await waiting
    first.close()  # a second time gives nobody else's turn away
    third = asyncio.create_task(reader.take_turn(ExitStack(), LARGE_BODY_BYTES))
    await _turns_of_the_loop()
    assert not third.done()
    second.close()
    await third


async def test_of_others_that_go_to_a_thread_some_are_taken_apart_at_once(executor: CountingExecutor) -> None:
    reader = PromptReader(executor)
    turns = [ExitStack() for _ in range(2 * TOKENIZE_THREADS)]
    for turn in turns:
        await reader.take_turn(turn, OFFLOAD_BODY_BYTES)
    waiting = asyncio.create_task(reader.take_turn(ExitStack(), LARGE_BODY_BYTES - 1))
    await reader.take_turn(ExitStack(), LARGE_BODY_BYTES)
    await reader.take_turn(ExitStack(), OFFLOAD_BODY_BYTES - 1)
    await _turns_of_the_loop()
    assert not waiting.done()
    turns[0].close()
    await asyncio.wait_for(waiting, 5)


async def test_whoever_leaves_while_waiting_for_a_turn_has_none(executor: CountingExecutor) -> None:
    reader = PromptReader(executor)
    first = ExitStack()
    await reader.take_turn(first, LARGE_BODY_BYTES)
    gone, turn = ExitStack(), ExitStack()
    waiting = asyncio.create_task(reader.take_turn(gone, LARGE_BODY_BYTES))
    await asyncio.sleep(0)
    waiting.cancel()
    await asyncio.wait({waiting})
    gone.close()
    first.close()
    await asyncio.wait_for(reader.take_turn(turn, LARGE_BODY_BYTES), 5)


async def test_a_turn_lasts_as_long_as_a_thread_is_at_work(executor: CountingExecutor) -> None:
    reader = PromptReader(executor)
    at_work, goes_on = threading.Event(), threading.Event()

    def parse(body: bytes) -> None:
        at_work.set()
        goes_on.wait()

    async def ask() -> None:
        with ExitStack() as turn:
            await reader.take_turn(turn, LARGE_BODY_BYTES)
            await reader.parse(parse, bytes(LARGE_BODY_BYTES))

    gone = asyncio.create_task(ask())
    await eventually(at_work.is_set)
    gone.cancel()
    await asyncio.wait({gone})
    second = asyncio.create_task(reader.take_turn(ExitStack(), LARGE_BODY_BYTES))
    try:
        await _turns_of_the_loop()
        assert not second.done(), "what the thread reads is still held"
    finally:
        goes_on.set()
    await asyncio.wait_for(second, 5)


async def test_a_body_of_too_many_parts_is_refused_before_it_is_parsed(executor: CountingExecutor) -> None:
    def parse(body: bytes) -> None:
        raise AssertionError("it was parsed")

    with pytest.raises(RequestTooLarge, match="131072 lists and objects"):
        await PromptReader(executor).parse(parse, b"[" * (MAX_BODY_LISTS + 1))
    assert executor.threads == []
