"""From bodies to chains: what shares, what does not, where it is computed, and that no body ever raises."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from prefixcache import hashing
from prefixcache.limits import (
    MAX_CACHE_KEY_CHARS,
    MAX_MATCH_BLOCKS,
    MAX_MESSAGES,
    MAX_PREDICTED_PROMPTS,
    OFFLOAD_BODY_BYTES,
    OFFLOAD_MESSAGES,
    TOKENIZE_INLINE_CHARS,
)
from prefixcache.rendering import engine_prompt
from prefixcache.rendering.canonical import canonical_chat
from prefixcache.rendering.chat_body import chat_form
from prefixcache.rendering.chat_form import ChatForm
from prefixcache.rendering.engine_prompt import CACHE_KEY_FIELDS, READERS, EnginePrompt, EnginePrompts
from prefixcache.rendering.renderer import Renderer
from prefixcache.rendering.tokenizing_threads import TokenizingThreads
from prefixcache.types import unpack_tokens
from tests.support.tiny_tokenizer import tiny_llama_files, tiny_tokenizer_files

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
LONG = "the answer to the question of a user is hello world and " * 40
RENDERER = Renderer(tiny_tokenizer_files())


@pytest.fixture
def threads() -> Iterator[TokenizingThreads]:
    with ThreadPoolExecutor(1) as executor:
        yield TokenizingThreads(executor)


@pytest.fixture(params=[None, RENDERER], ids=["bytes", "tokens"])
def prompts(request: pytest.FixtureRequest, threads: TokenizingThreads) -> EnginePrompts:
    return EnginePrompts(renderer=request.param, threads=threads)


async def prompt_of(
    prompts: EnginePrompts, body: Any, path: str = CHAT, *, body_bytes: int = 1, seed: int = 1, model: str = "m"
) -> EnginePrompt | None:
    return await prompts.of(path, body, body_bytes=body_bytes, seed=seed, model=model)


async def chain_of(prompts: EnginePrompts, body: Any, path: str = CHAT, **named: Any) -> list[int]:
    prompt = await prompt_of(prompts, body, path, **named)
    assert prompt is not None
    assert len(prompt.chain) == prompt.num_units // prompts.geometry.index_block_units
    return prompt.chain


def chat(*texts: str, **body: Any) -> dict[str, Any]:
    roles = ("user", "assistant")
    messages = [{"role": roles[place % 2], "content": text} for place, text in enumerate(texts)]
    return {"model": "m", "messages": messages, **body}


def num_shared(first: list[int], second: list[int]) -> int:
    return next(
        (place for place, pair in enumerate(zip(first, second, strict=False)) if pair[0] != pair[1]), len(first)
    )


# --- what the chain is ------------------------------------------------------------------------------------


async def test_units_and_chain_with_a_tokenizer(threads: TokenizingThreads) -> None:
    prompt = await prompt_of(EnginePrompts(renderer=RENDERER, threads=threads), chat(LONG))
    assert prompt is not None
    ids = RENDERER.encode(RENDERER.render(chat(LONG)["messages"]))
    assert prompt.begins(ids.tobytes()) and prompt.tail == ids.tobytes()[len(prompt.chain) * 256 :]
    assert (prompt.unit, prompt.num_units, prompt.prompt_tokens_estimate) == ("token", len(ids), len(ids))
    root = hashing.engine_root(
        seed=1, model="m", unit="token", tokenizer=RENDERER.fingerprint, index_block_units=64, cache_keys={}
    )
    assert prompt.chain == hashing.chain(root, ids.tobytes(), 256) == hashing.block_hashes(root, ids.tobytes(), 64)
    assert len(prompt.chain) == len(ids) // 64 > 3


async def test_units_and_chain_without_one(threads: TokenizingThreads) -> None:
    prompt = await prompt_of(EnginePrompts(renderer=None, threads=threads), chat(LONG))
    assert prompt is not None
    units = canonical_chat(chat_form(chat(LONG)))
    assert (prompt.unit, prompt.num_units, prompt.tail) == ("byte", len(units), units[len(units) // 256 * 256 :])
    assert prompt.begins(units) and prompt.begins(units + b"more")
    for place in (0, 255, 256, len(units) - 1):
        assert not prompt.begins(units[:place] + b"\0" + units[place + 1 :]) and not prompt.begins(units[:place])
    assert prompt.prompt_tokens_estimate is None
    root = hashing.engine_root(seed=1, model="m", unit="byte", tokenizer="bytes", index_block_units=256, cache_keys={})
    assert prompt.chain == hashing.chain(root, units, 256)
    assert len(prompt.chain) == len(units) // 256 > 3


async def test_an_engine_with_large_blocks_has_large_index_blocks(threads: TokenizingThreads) -> None:
    large = EnginePrompts(renderer=RENDERER, threads=threads, block_size=128)
    usual = EnginePrompts(renderer=RENDERER, threads=threads, block_size=16)
    assert (large.geometry.index_block_units, usual.geometry.index_block_units) == (128, 64)
    assert num_shared(await chain_of(large, chat(LONG)), await chain_of(usual, chat(LONG))) == 0


async def test_the_chain_ends_where_nothing_is_looked_up(
    prompts: EnginePrompts, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = await chain_of(prompts, chat(LONG))
    monkeypatch.setattr(engine_prompt, "MAX_MATCH_BLOCKS", 2)
    prompt = await prompt_of(prompts, chat(LONG))
    assert prompt is not None
    assert prompt.chain == whole[:2] and prompt.tail == b""
    assert MAX_MATCH_BLOCKS > 2


async def test_a_next_turn_goes_on_where_the_last_one_ended(prompts: EnginePrompts) -> None:
    first = await chain_of(prompts, chat(LONG))
    second = await chain_of(prompts, chat(LONG, "hello " * 100, "and?"))
    assert num_shared(first, second) >= len(first) - 1 > 2  # the generation prompt ends the first one
    assert len(second) > len(first)


# --- the root ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", CACHE_KEY_FIELDS)
async def test_each_cache_key_keeps_prompts_apart(prompts: EnginePrompts, name: str) -> None:
    chains = [await chain_of(prompts, chat(LONG, **{name: value})) for value in (None, "", "a", "b", "1", 1, {"id": 1})]
    assert len({chain[0] for chain in chains}) == len(chains)
    assert await chain_of(prompts, chat(LONG)) == chains[0]
    assert await chain_of(prompts, chat(LONG, **{name: "a"})) == chains[2]


async def test_keys_do_not_stand_for_each_other(prompts: EnginePrompts) -> None:
    chains = [await chain_of(prompts, chat(LONG, **{name: "a"})) for name in CACHE_KEY_FIELDS]
    assert len({chain[0] for chain in chains}) == len(CACHE_KEY_FIELDS)


async def test_model_and_secret_keep_prompts_apart(prompts: EnginePrompts) -> None:
    named: list[dict[str, Any]] = [{}, {"model": "adapter"}, {"seed": 2}]
    assert len({(await chain_of(prompts, chat(LONG), **each))[0] for each in named}) == 3


async def test_tokenizers_keep_prompts_apart(threads: TokenizingThreads) -> None:
    other = Renderer(tiny_tokenizer_files(config={"model_max_length": 1}))
    all_prompts = [EnginePrompts(renderer=each, threads=threads) for each in (None, RENDERER, other)]
    assert len({(await chain_of(each, chat(LONG)))[0] for each in all_prompts}) == 3


async def test_fields_of_sampling_and_the_order_of_keys_share_everything(prompts: EnginePrompts) -> None:
    tool = {"type": "function", "function": {"name": "f", "description": "d", "parameters": {"type": "object"}}}
    plain = chat(LONG, tools=[tool])
    busy = {"temperature": 1, "stream": True, **dict(reversed(plain.items())), "seed": 4, "n": 2, "unheard_of": [1]}
    assert await chain_of(prompts, busy) == await chain_of(prompts, plain)
    assert num_shared(await chain_of(prompts, chat(LONG)), await chain_of(prompts, plain)) == 0


# --- surfaces ---------------------------------------------------------------------------------------------


async def test_one_chat_by_three_surfaces_is_one_prompt(prompts: EnginePrompts) -> None:
    messages = chat(LONG, "hello", "more")["messages"]
    by_chat = await chain_of(prompts, {"messages": [{"role": "system", "content": LONG}, *messages]})
    by_messages = await chain_of(prompts, {"system": LONG, "messages": messages}, "/v1/messages")
    by_responses = await chain_of(prompts, {"instructions": LONG, "input": messages}, "/v1/responses")
    assert by_chat == by_messages == by_responses


async def test_an_earlier_response_is_no_empty_beginning(prompts: EnginePrompts) -> None:
    alone = await chain_of(prompts, {"input": LONG}, "/v1/responses")
    continued = await chain_of(prompts, {"input": LONG, "previous_response_id": "resp_1"}, "/v1/responses")
    assert num_shared(alone, continued) == 0


async def test_completions_by_text_and_by_ids(threads: TokenizingThreads) -> None:
    renderer = Renderer(tiny_llama_files("always"))
    prompts = EnginePrompts(renderer=renderer, threads=threads)
    ids = renderer.encode(renderer.raw(LONG)).tolist()
    assert await chain_of(prompts, {"prompt": LONG}, COMPLETIONS) == await chain_of(
        prompts, {"prompt": ids}, COMPLETIONS
    )
    prompt = await prompt_of(prompts, {"prompt": [1, 2, 3]}, COMPLETIONS)
    assert prompt is not None
    assert (unpack_tokens(prompt.tail).tolist(), prompt.num_units) == ([1, 2, 3], 3)


async def test_token_ids_are_counted_without_a_tokenizer(threads: TokenizingThreads) -> None:
    prompts = EnginePrompts(renderer=None, threads=threads)
    prompt = await prompt_of(prompts, {"prompt": list(range(200))}, COMPLETIONS)
    assert prompt is not None
    assert (prompt.unit, prompt.num_units, prompt.prompt_tokens_estimate) == ("byte", 802, 200)


async def test_each_prompt_of_a_completion_has_its_chain(prompts: EnginePrompts) -> None:
    prompt = await prompt_of(prompts, {"prompt": [LONG, LONG + "x", "y" + LONG]}, COMPLETIONS)
    assert prompt is not None
    assert len(prompt.others) == 2
    for text, each in zip((LONG, LONG + "x", "y" + LONG), (prompt, *prompt.others), strict=True):
        assert each.chain == await chain_of(prompts, {"prompt": text}, COMPLETIONS)
        assert each is prompt or not each.others


async def test_equal_images_share_what_follows_and_others_do_not(prompts: EnginePrompts) -> None:
    async def chain(url: str) -> list[int]:
        image = {"type": "image_url", "image_url": {"url": url}}
        parts = [{"type": "text", "text": LONG}, image, {"type": "text", "text": LONG}]
        return await chain_of(prompts, {"messages": [{"role": "user", "content": parts}]})

    before = await chain_of(prompts, chat(LONG))
    one, again, other = await chain("data:,A"), await chain("data:,A"), await chain("data:,B")
    assert one == again
    assert len(before) - 1 <= num_shared(one, other) <= len(before)
    assert len(one) > len(before) + 3


@pytest.mark.parametrize("last", ["x", "é", "🙂"])
async def test_a_text_of_too_many_bytes_is_told_without_a_tokenizer_alone(
    last: str, threads: TokenizingThreads, monkeypatch: pytest.MonkeyPatch
) -> None:
    by_tokens, by_bytes = (EnginePrompts(renderer=each, threads=threads) for each in (RENDERER, None))
    long = LONG + last
    text = RENDERER.render(chat(long)["messages"]).text
    num_bytes = len(text.encode())
    for most_bytes, is_told in ((num_bytes, True), (num_bytes - 1, False)):
        monkeypatch.setattr(engine_prompt, "MAX_PREDICTED_TEXT_BYTES", most_bytes)
        assert (await prompt_of(by_tokens, chat(long)) is not None) == is_told
        assert (await prompt_of(by_tokens, {"prompt": text}, COMPLETIONS) is not None) == is_told
        assert await prompt_of(by_bytes, chat(long)) is not None


# --- where it runs ----------------------------------------------------------------------------------------


@pytest.fixture
def encoded_in(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the threads in which prompts were encoded."""
    names: list[str] = []
    encode = Renderer.encode

    def recording(self: Renderer, *arguments: Any) -> Any:
        names.append(threading.current_thread().name)
        return encode(self, *arguments)

    monkeypatch.setattr(Renderer, "encode", recording)
    return names


async def test_new_text_goes_to_a_thread_and_remembered_text_does_not(
    threads: TokenizingThreads, encoded_in: list[str]
) -> None:
    prompts = EnginePrompts(renderer=Renderer(tiny_tokenizer_files()), threads=threads)
    text = "hello world " * (TOKENIZE_INLINE_CHARS // 10)
    await prompt_of(prompts, chat(text))
    await prompt_of(prompts, chat(text, "hello", "more"))
    assert [name == threading.current_thread().name for name in encoded_in] == [False, True]


async def test_a_large_body_goes_to_a_thread_as_a_whole(threads: TokenizingThreads, encoded_in: list[str]) -> None:
    await prompt_of(EnginePrompts(renderer=RENDERER, threads=threads), chat("Hi"), body_bytes=OFFLOAD_BODY_BYTES)
    assert encoded_in != [threading.current_thread().name]


@pytest.mark.parametrize(("num_messages", "is_inline"), [(OFFLOAD_MESSAGES, True), (10 * OFFLOAD_MESSAGES, False)])
async def test_canonical_bytes_of_many_messages_are_made_in_a_thread(
    threads: TokenizingThreads, monkeypatch: pytest.MonkeyPatch, num_messages: int, is_inline: bool
) -> None:
    names: list[str] = []

    def recording(form: ChatForm) -> bytes:
        names.append(threading.current_thread().name)
        return canonical_chat(form)

    monkeypatch.setattr(engine_prompt, "canonical_chat", recording)
    await prompt_of(EnginePrompts(renderer=None, threads=threads), chat(*["Hi"] * num_messages))
    assert (names == [threading.current_thread().name]) == is_inline


async def test_a_new_turn_of_a_long_chat_tokenizes_nothing_else(threads: TokenizingThreads) -> None:
    renderer = Renderer(tiny_tokenizer_files())
    texts = [f"{place} {LONG[:600]}" for place in range(99)]
    await prompt_of(EnginePrompts(renderer=renderer, threads=threads), chat(*texts[:97]))
    drafts = EnginePrompts(renderer=renderer, threads=threads)
    new_chars = drafts._uncached_chars(drafts._drafts(chat_form, chat(*texts)))
    assert len(texts[97]) + len(texts[98]) <= new_chars <= len(texts[97]) + len(texts[98]) + 100


# --- whatever comes ---------------------------------------------------------------------------------------


def nested(depth: int) -> Any:
    value: Any = "x"
    for _ in range(depth):
        value = [value]
    return value


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/embeddings", {"input": "Hi"}),
        ("/v1/chat/completions/", chat("Hi")),
        (CHAT, None),
        (CHAT, []),
        (CHAT, {}),
        (CHAT, {"messages": [{"role": "user", "content": 5}]}),
        (CHAT, {"messages": [{"role": "user", "content": "a"}] * (MAX_MESSAGES + 1)}),
        (CHAT, chat("Hi", tools=[{"function": {"parameters": nested(100_000)}}])),
        (CHAT, chat("Hi", cache_salt=10**6000)),
        (CHAT, chat("Hi", tools=[{"function": {"parameters": 10**6000}}])),
        (CHAT, chat("Hi", cache_salt=nested(100_000))),
        (COMPLETIONS, {"prompt": None}),
        (COMPLETIONS, {"prompt": [-1]}),
        (COMPLETIONS, {"prompt": [2**40]}),
        (COMPLETIONS, {"prompt": ["a"] * (MAX_PREDICTED_PROMPTS + 1)}),
        (CHAT, chat("Hi", cache_salt="s" * (MAX_CACHE_KEY_CHARS + 1))),
        (CHAT, chat("Hi", extra_key=[0.5] * MAX_CACHE_KEY_CHARS)),
        ("/v1/messages", {"messages": 5}),
        ("/v1/responses", {"input": None}),
    ],
)
async def test_no_prediction(prompts: EnginePrompts, path: str, body: Any) -> None:
    assert await prompt_of(prompts, body, path) is None


async def test_what_has_no_tokens_has_no_prediction(threads: TokenizingThreads) -> None:
    prompts = EnginePrompts(renderer=RENDERER, threads=threads)
    call = {"function": {"name": "f", "arguments": "{not json"}}
    for path, body in (
        (CHAT, chat("\ud800")),
        (CHAT, {"messages": [{"role": "assistant", "tool_calls": [call]}]}),
        (COMPLETIONS, {"prompt": "\ud800"}),
    ):
        assert await prompt_of(prompts, body, path) is None


odd = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(st.characters(exclude_categories=()), max_size=8),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(
                [
                    *("role", "content", "type", "text", "image_url", "url", "tool_calls", "function", "arguments"),
                    *("name", "input", "source", "data", "thinking", "tool_use_id", "summary", "output", "unheard_of"),
                ]
            ),
            inner | st.sampled_from(["user", "assistant", "text", "tool_use", "tool_result", "function_call"]),
            max_size=5,
        )
    ),
    max_leaves=12,
)
bodies = st.dictionaries(
    st.sampled_from(
        [
            *("messages", "prompt", "input", "system", "instructions", "tools", "documents", "chat_template_kwargs"),
            *("continue_final_message", "add_generation_prompt", "reasoning", "reasoning_effort", *CACHE_KEY_FIELDS),
        ]
    ),
    odd | st.lists(odd, max_size=3),
    max_size=5,
)


@settings(max_examples=300)
@given(st.sampled_from(sorted(READERS)), bodies)
async def test_no_body_raises(path: str, body: dict[str, Any]) -> None:
    with ThreadPoolExecutor(1) as executor:
        for renderer in (None, RENDERER):
            prompts = EnginePrompts(renderer=renderer, threads=TokenizingThreads(executor))
            prompt = await prompt_of(prompts, body, path)
            if prompt is not None and prompt.unit == "byte":
                assert json.dumps(prompt.chain)
