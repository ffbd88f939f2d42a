"""Where tokenizing runs, and what a missing answer of the index costs."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Iterator
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from typing import Any

import pytest

from prefixcache.errors import InvalidRequest
from prefixcache.hashing import block_hashes, index_hashes
from prefixcache.limits import OFFLOAD_BODY_BYTES, TOKENIZE_INLINE_CHARS
from prefixcache.metrics import ProxyMetrics, exposition
from prefixcache.rendering.renderer import Renderer
from prefixcache.types import pack_tokens
from proxy.chat_request import ChatRequest, parse_chat_request
from proxy.model import Model
from proxy.prediction import Predictor, PromptReader
from proxy.warnings_log import QuietLog
from tests.support.memory_index import MemoryIndex
from tests.support.tiny_tokenizer import TINY_TEMPLATE, tiny_tokenizer_files
from tests.support.worker_records import worker_record

SEED = 9


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
    return Model.of(record, Renderer(files), MemoryIndex())


def _chat(text: str, **fields: Any) -> ChatRequest:
    return ChatRequest(model="tiny", messages=({"role": "user", "content": text},), **fields)


async def test_short_text_is_read_inline(executor: CountingExecutor) -> None:
    model, chat = _model(), _chat("hello " * 50)
    prompt = await PromptReader(executor).read(model, chat, body_bytes=400, seed=SEED)
    assert executor.threads == []
    ids = model.renderer.encode(model.renderer.render(chat.messages))
    assert prompt.packed == pack_tokens(ids)
    assert prompt.num_tokens == len(ids)
    assert prompt.root == model.root_hash(seed=SEED, cache_salt="")
    assert prompt.index_hashes == index_hashes(block_hashes(prompt.root, prompt.packed, 16), 4)


@pytest.mark.parametrize("body_bytes", [400, OFFLOAD_BODY_BYTES])
async def test_long_text_is_read_in_a_thread(executor: CountingExecutor, body_bytes: int) -> None:
    model, chat = _model(), _chat("hello " * TOKENIZE_INLINE_CHARS)
    prompt = await PromptReader(executor).read(model, chat, body_bytes=body_bytes, seed=SEED)
    assert len(executor.threads) == 1
    assert prompt.packed == pack_tokens(model.renderer.encode(model.renderer.render(chat.messages)))


async def test_big_bodies_are_parsed_in_a_thread(executor: CountingExecutor) -> None:
    reader = PromptReader(executor)
    small = b'{"model": "m", "messages": [{"role": "user", "content": "x"}]}'
    big = small.replace(b"x", b"x" * OFFLOAD_BODY_BYTES)
    assert await reader.parse(small) == parse_chat_request(small)
    assert executor.threads == []
    assert await reader.parse(big) == parse_chat_request(big)
    assert len(executor.threads) == 1
    with pytest.raises(InvalidRequest):
        await reader.parse(big + b"}")


async def test_the_salt_changes_every_hash(executor: CountingExecutor) -> None:
    model, reader = _model(), PromptReader(executor)
    text = "hello " * 100
    plain, salted = [
        await reader.read(model, _chat(text, cache_salt=salt), body_bytes=1, seed=SEED) for salt in ("", "tenant")
    ]
    other_seed = await reader.read(model, _chat(text), body_bytes=1, seed=SEED + 1)
    assert plain.packed == salted.packed == other_seed.packed
    assert plain.index_hashes
    assert not set(plain.index_hashes) & (set(salted.index_hashes) | set(other_seed.index_hashes))


async def test_a_template_that_refuses_and_one_that_writes_nothing(executor: CountingExecutor) -> None:
    reader = PromptReader(executor)
    with pytest.raises(InvalidRequest, match="roles must alternate"):
        await reader.read(_model("{{ raise_exception('roles must alternate') }}"), _chat("x"), body_bytes=1, seed=SEED)
    with pytest.raises(InvalidRequest, match="empty prompt"):
        await reader.read(_model("{# nothing #}"), _chat("x"), body_bytes=1, seed=SEED)


async def test_matches_are_timed_and_failures_counted(caplog: pytest.LogCaptureFixture) -> None:
    metrics = ProxyMetrics()
    predictor = Predictor(metrics, QuietLog(logging.getLogger("test")))
    index = MemoryIndex()
    registration = await index.register()
    await index.apply(registration.incarnation, 1, [11, 12], [])
    assert await predictor.depths(index, []) == {}
    assert index.faults.num_calls == 2, "nothing to ask for"
    assert await predictor.depths(index, [11, 12, 13]) == {registration.incarnation: 2}
    index.faults.unavailable = True
    for _ in range(5):
        assert await predictor.depths(index, [11]) == {}
    text = exposition(metrics.registry).decode()
    assert "prefixcache_index_lookup_failures_total 5.0" in text
    assert "prefixcache_index_lookup_seconds_count 6.0" in text
    assert len(caplog.records) == 1, "said once, not with every request"


async def test_other_exceptions_of_an_index_are_not_hidden() -> None:
    class BrokenIndex(MemoryIndex):
        async def match(self, hashes: Any) -> Any:
            await asyncio.sleep(0)
            raise RuntimeError("a bug")

    with pytest.raises(RuntimeError):
        await Predictor(ProxyMetrics(), QuietLog(logging.getLogger("test"))).depths(BrokenIndex(), [1])
