"""Proxy, Valkey and real workers (engine, server, publisher) over a scripted runner."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest

from prefixcache.hashing import block_hashes, index_hashes
from prefixcache.protocol import Sampling
from prefixcache.rendering.renderer import Renderer
from prefixcache.store import RedisStore
from prefixcache.types import pack_tokens
from proxy.app import SECRET
from tests.support.folding import folded_chat
from tests.support.proxy_harness import RunningProxy, body, running_proxy, text_of
from tests.support.raw_http import post, raw_connection
from tests.support.scripted_runner import ScriptedRunner, expected_output, made_up_logprobs
from tests.support.seeds import seeded
from tests.support.tiny_tokenizer import TINY_EOS_ID, TINY_SPECIAL_TOKENS, tiny_tokenizer_files
from tests.support.valkey import Server
from tests.support.waiting import eventually
from tests.support.worker_harness import RunningWorker, running_worker

FILES = tiny_tokenizer_files()
RENDERER = Renderer(FILES)
RESERVED = len(TINY_SPECIAL_TOKENS)
SYSTEM = "the answer is in the question and " * 40


@dataclass(frozen=True, slots=True, kw_only=True)
class Stack:
    """What a test talks to."""

    proxy: RunningProxy
    store: RedisStore
    workers: list[RunningWorker]


@asynccontextmanager
async def _stack(valkey: Server, *, num_workers: int = 2, step_delay_s: float = 0.0) -> AsyncIterator[Stack]:
    async with RedisStore.open(valkey.url) as store, AsyncExitStack() as stack:
        workers = [
            await stack.enter_async_context(
                running_worker(
                    ScriptedRunner(
                        vocab_size=RENDERER.vocab_size,
                        reserved=RESERVED,
                        max_model_len=2048,
                        step_delay_s=step_delay_s,
                    ),
                    store=store,
                    worker_id=f"w{number}",
                    model="tiny",
                    tokenizer=FILES,
                    stop_token_ids=(TINY_EOS_ID,),
                )
            )
            for number in range(num_workers)
        ]
        async with running_proxy(store) as proxy:
            await proxy.ready(num_workers)
            yield Stack(proxy=proxy, store=store, workers=workers)
        await stack.aclose()  # it reads the index in many steps, so nobody may write meanwhile
        await store.index(workers[0].record.namespace).check_integrity()


def _messages(question: str) -> list[dict[str, str]]:
    return [{"role": "system", "content": SYSTEM}, {"role": "user", "content": question}]


def _expected(messages: list[dict[str, str]], num_tokens: int, *, seed: int | None = None) -> str:
    """What a correct engine says: greedy, or drawn with `seed`."""
    ids = RENDERER.encode(RENDERER.render(messages))
    sampling = Sampling(seed=0, temperature=0) if seed is None else Sampling(seed=seed)
    output = expected_output(ids, num_tokens, vocab_size=RENDERER.vocab_size, sampling=sampling, reserved=RESERVED)
    return _decoded(output)


def _decoded(output: Sequence[int]) -> str:
    detokenizer = RENDERER.detokenizer()
    return detokenizer.feed(output) + detokenizer.flush()


def _content(answer: dict[str, Any]) -> str:
    content: str = answer["choices"][0]["message"]["content"]
    return content


async def test_the_second_prompt_goes_to_the_worker_that_holds_its_prefix(valkey: Server) -> None:
    async with _stack(valkey) as stack:
        first = await stack.proxy.chat(messages=_messages("hello"), temperature=0, max_tokens=12)
        assert _content(first.json()) == _expected(_messages("hello"), 12)
        assert first.json()["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
        holder = first.headers["x-prefixcache-worker"]
        for question in ("world", "question", "and you"):
            await eventually(partial(_predicted, stack, question))
            second = await stack.proxy.chat(messages=_messages(question), temperature=0, max_tokens=12)
            assert second.headers["x-prefixcache-worker"] == holder
            assert second.headers["x-prefixcache-reason"] == "longest_prefix"
            usage = second.json()["usage"]
            cached = usage["prompt_tokens_details"]["cached_tokens"]
            assert cached >= 0.9 * usage["prompt_tokens"]
            assert 0 <= cached - int(second.headers["x-prefixcache-hit-tokens"]) < 64
            assert _content(second.json()) == _expected(_messages(question), 12)


async def _predicted(stack: Stack, question: str) -> bool:
    """Whether the index knows the prefix of a prompt that may never have been asked."""
    model = stack.proxy.fleet.model("tiny")
    root = model.root_hash(seed=stack.proxy.app[SECRET].seed, cache_salt="")
    packed = pack_tokens(RENDERER.encode(RENDERER.render(_messages(question))))
    return bool((await model.index.match(index_hashes(block_hashes(root, packed, 16), 4))).depths)


async def test_whole_streamed_sampled_and_many_at_once(valkey: Server) -> None:
    async with _stack(valkey) as stack:
        questions = [f"question {number}" for number in range(24)]

        async def ask(question: str) -> None:
            messages = _messages(question)
            events = await stack.proxy.events(
                messages=messages, seed=7, max_tokens=20, stream_options={"include_usage": True}
            )
            whole = (await stack.proxy.chat(messages=messages, seed=7, max_tokens=20)).json()
            assert text_of(events) == _content(whole) == _expected(messages, 20, seed=7)
            assert events[-3]["choices"][0]["finish_reason"] == "length"
            assert events[-2]["usage"]["completion_tokens"] == 20

        await asyncio.gather(*map(ask, questions))
        statistics = (await stack.proxy.client.get("/cache/stats")).json()["total"]["since_start"]
        assert statistics["prompt_tokens"] == stack.proxy.metric("prefixcache_prompt_tokens_total")
        assert statistics["cached_tokens"] == stack.proxy.metric("prefixcache_cached_tokens_total") > 0


async def test_several_choices_with_log_probabilities(valkey: Server) -> None:
    async with _stack(valkey) as stack:
        messages = _messages("hello")
        fields: dict[str, Any] = {"seed": 7, "max_tokens": 20, "logprobs": True, "top_logprobs": 2}
        whole = (await stack.proxy.chat(messages=messages, n=3, **fields)).json()
        again = (await stack.proxy.chat(messages=messages, n=3, **fields)).json()
        events = await stack.proxy.events(messages=messages, n=3, stream_options={"include_usage": True}, **fields)
        ids = RENDERER.encode(RENDERER.render(messages))
        for number, choice in enumerate(whole["choices"]):
            output = expected_output(
                ids, 20, vocab_size=RENDERER.vocab_size, sampling=Sampling(seed=7), reserved=RESERVED, choice=number
            )
            assert choice["message"]["content"] == _decoded(output)
            told = choice["logprobs"]["content"]
            assert [bytes(token["bytes"]) for token in told] == [RENDERER.token_bytes(id) for id in output]
            expected = [made_up_logprobs(id, 2, vocab_size=RENDERER.vocab_size) for id in output]
            assert [token["logprob"] for token in told] == [scores.logprob for scores in expected]
            assert [[top["logprob"] for top in token["top_logprobs"]] for token in told] == [
                [logprob for _, logprob in scores.top] for scores in expected
            ]
        assert whole["usage"]["prompt_tokens"] == len(ids)
        assert whole["usage"]["completion_tokens"] == 60
        assert whole["usage"]["prompt_tokens_details"]["cached_tokens"] == 0, "what its own choices share is no hit"
        assert again["usage"]["prompt_tokens_details"]["cached_tokens"] >= 0.9 * len(ids)
        assert again["choices"] == whole["choices"] == folded_chat(events[:-1])["choices"]


@pytest.mark.parametrize("seed", [None, 7])
@pytest.mark.parametrize("stream", [False, True])
async def test_a_stream_that_is_cut_at_any_token_goes_on_on_the_other_worker(
    valkey: Server, stream: bool, seed: int | None
) -> None:
    """Again and again: the answers are those of an undisturbed run, token for token, with their log probabilities."""
    async with _stack(valkey, step_delay_s=0.002) as stack:
        messages = _messages("hello")
        fields: dict[str, Any] = {"messages": messages, "max_tokens": 120, "logprobs": True, "top_logprobs": 2, "n": 2}
        fields |= {"temperature": 0} if seed is None else {"seed": seed, "frequency_penalty": 0.5}
        undisturbed = (await stack.proxy.chat(**fields)).json()
        links = stack.proxy.fleet.links
        random = seeded("streams cut")

        async def ask() -> dict[str, Any]:
            if not stream:
                whole: dict[str, Any] = (await stack.proxy.chat(**fields)).json()
                return whole
            return folded_chat((await stack.proxy.events(stream_options={"include_usage": True}, **fields))[:-1])

        for _ in range(4):
            tokens = stack.proxy.metric("prefixcache_inter_token_latency_seconds_count")
            asking = asyncio.create_task(ask())
            for cut in sorted(random.sample(range(1, 200), 2)):
                await eventually(partial(_num_gaps, stack, tokens + cut))
                for link in links:
                    if link.own_running and link.stream is not None:
                        link.stream.cut()
                        break
            answer = await asking
            assert answer["choices"] == undisturbed["choices"]
            assert answer["usage"]["completion_tokens"] == undisturbed["usage"]["completion_tokens"]
        assert stack.proxy.metric("prefixcache_continuations_total", outcome="failed") == 0
        assert stack.proxy.metric("prefixcache_continuations_total") > 0
        await eventually(lambda: all(worker.worker.engine.load.running == 0 for worker in stack.workers))


def _num_gaps(stack: Stack, least: float) -> bool:
    return stack.proxy.metric("prefixcache_inter_token_latency_seconds_count") >= least


async def test_completions_of_texts_and_token_ids(valkey: Server) -> None:
    async with _stack(valkey) as stack:
        texts = [SYSTEM + "one", SYSTEM + "two"]
        prompts = [list(RENDERER.encode(RENDERER.raw(text))) for text in texts]
        answers = []
        for prompt in (texts, prompts):
            body = {"model": "tiny", "prompt": prompt, "n": 2, "temperature": 0, "logprobs": 1}
            answer = await stack.proxy.client.post("/v1/completions", json=body)
            assert answer.status_code == 200, answer.text
            answers.append(answer.json())
        outputs = [
            expected_output(prompt, 16, vocab_size=RENDERER.vocab_size, reserved=RESERVED)
            for prompt in prompts
            for _ in range(2)
        ]
        for answer in answers:
            assert [choice["text"] for choice in answer["choices"]] == [_decoded(output) for output in outputs]
            assert answer["usage"]["prompt_tokens"] == sum(map(len, prompts))
            assert answer["usage"]["completion_tokens"] == 64


async def test_a_worker_takes_every_sampling_field(valkey: Server) -> None:
    async with _stack(valkey, num_workers=1) as stack:
        fields: dict[str, Any] = {
            "temperature": 0.5,
            "top_p": 0.9,
            "top_k": 7,
            "min_p": 0.05,
            "presence_penalty": -2,
            "frequency_penalty": 2,
            "repetition_penalty": 1.05,
            "logit_bias": {"5": -100, str(RENDERER.vocab_size - 1): 100},
            "min_tokens": 4000,
            "stop_token_ids": [5],
            "ignore_eos": True,
            "n": 4,
        }
        answer = await stack.proxy.chat(**fields)
        assert answer.status_code == 200, answer.text
        too_high = await stack.proxy.chat(logit_bias={str(RENDERER.vocab_size): 1})
        assert (too_high.status_code, too_high.json()["error"]["param"]) == (400, "logit_bias")


async def test_another_salt_shares_nothing(valkey: Server) -> None:
    async with _stack(valkey, num_workers=1) as stack:
        cached = []
        for salt in ("a", "a", "b", "b"):
            answer = await stack.proxy.chat(messages=_messages("hello"), max_tokens=1, cache_salt=salt)
            cached.append(answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"])
        assert cached[0] == cached[2] == 0
        assert cached[1] == cached[3] > 0


async def test_a_stop_string_ends_the_work_at_the_worker(valkey: Server) -> None:
    async with _stack(valkey, num_workers=1, step_delay_s=0.002) as stack:
        text = _expected(_messages("hello"), 400)
        stop = text[10:13]
        answer = await stack.proxy.chat(messages=_messages("hello"), temperature=0, max_tokens=400, stop=stop)
        assert _content(answer.json()) == text[: text.index(stop)]
        assert answer.json()["choices"][0]["finish_reason"] == "stop"
        assert answer.json()["usage"]["completion_tokens"] < 400
        await eventually(lambda: stack.workers[0].worker.engine.load.running == 0)
        assert stack.workers[0].runner.num_steps < 100


@pytest.mark.parametrize("stream", [True, False])
async def test_a_client_that_leaves_frees_the_worker(valkey: Server, stream: bool) -> None:
    async with _stack(valkey, num_workers=1, step_delay_s=0.002) as stack:
        (worker,) = stack.workers
        async with raw_connection(stack.proxy.port) as connection:
            connection.send(post("/v1/chat/completions", body(stream=stream, max_tokens=1900)))
            await eventually(lambda: worker.runner.num_steps > 3)
        await eventually(lambda: worker.engine.load.running == 0)
        steps = worker.runner.num_steps
        assert steps < 1000
        assert (await stack.proxy.chat(max_tokens=1)).status_code == 200


async def test_a_prompt_too_long_for_the_worker(valkey: Server) -> None:
    async with _stack(valkey, num_workers=1) as stack:
        answer = await stack.proxy.chat(messages=[{"role": "user", "content": "hello " * 3000}])
        assert answer.status_code == 400
        assert answer.json()["error"]["code"] == "context_length_exceeded"


async def test_a_paused_valkey_costs_predictions_only(valkey: Server) -> None:
    async with _stack(valkey) as stack:
        expected = _expected(_messages("hello"), 4)
        await stack.proxy.chat(messages=_messages("hello"), temperature=0, max_tokens=4)
        with valkey.paused():
            for _ in range(5):
                answer = await stack.proxy.chat(messages=_messages("hello"), temperature=0, max_tokens=4)
                assert (answer.status_code, _content(answer.json())) == (200, expected)
            await eventually(lambda: not stack.proxy.fleet.registry_reachable)
            assert stack.proxy.metric("prefixcache_index_lookup_failures_total") >= 5
            assert (await stack.proxy.client.get("/health")).json()["redis"]["reachable"] is False
        await eventually(lambda: stack.proxy.fleet.registry_reachable)
        await eventually(lambda: _is_hit(stack))


async def test_an_emptied_valkey_is_filled_again(valkey: Server) -> None:
    async with _stack(valkey) as stack:
        await stack.proxy.chat(messages=_messages("hello"), max_tokens=1)
        await eventually(lambda: _is_hit(stack))
        valkey.flush()
        assert (await stack.proxy.chat(messages=_messages("hello"), max_tokens=1)).status_code == 200
        await eventually(lambda: _is_hit(stack), timeout_s=15)


async def _is_hit(stack: Stack) -> bool:
    answer = await stack.proxy.chat(messages=_messages("hello"), max_tokens=1)
    return answer.headers["x-prefixcache-hit-tokens"] != "0"


async def test_the_log_tells_what_the_worker_says_each_request_has_cost(
    valkey: Server, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "proxy.access_log")
    async with _stack(valkey, num_workers=1) as stack:
        for question in ("why", "when"):
            assert (await stack.proxy.chat(messages=_messages(question), max_tokens=6)).status_code == 200
    lines = [record.getMessage() for record in caplog.records if record.name == "proxy.access_log"]
    told = [dict(part.split("=") for part in line.split() if "=" in part) for line in lines if "completions" in line]
    parts = [sum(int(each[name]) for name in ("cached", "copied", "computed")) for each in told]
    assert parts == [int(each["prompt"]) for each in told]
    assert 0 < int(told[1]["copied"]) < 16, "the questions begin alike"
    assert (told[0]["cached"], told[1]["completion"]) == ("0", "6")
    assert int(told[1]["cached"]) > 0
    for each in told:
        assert each["preempted"] == "0"
        parts_ms = [float(each[f"{name}_ms"]) for name in ("queue", "prefill", "decode")]
        assert min(parts_ms) >= 0
        assert sum(parts_ms) <= float(each["total_ms"])
