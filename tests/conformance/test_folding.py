"""Folding a stream gives the whole answer, and both have OpenAI's shape, for any request."""

from __future__ import annotations

from random import Random
from typing import Any

import pytest

from tests.cases.catalogue import WORDS, Call, changed
from tests.cases.outcome import Outcome
from tests.cases.world import MODEL, World
from tests.conformance.schema import chat_chunk, chat_completion, completion, completion_chunk
from tests.support.folding import folded_chat, folded_completion
from tests.support.seeds import seeded
from tests.support.tiny_tokenizer import TINY_SPECIAL_TOKENS

NUM_REQUESTS = 40
CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
async def test_a_folded_stream_is_the_whole_answer(fast_world: World, path: str) -> None:
    random = seeded(path)
    for _ in range(NUM_REQUESTS):
        body = {**(_chat(random) if path == CHAT else _completion(random, fast_world)), **_options(random)}
        chosen: dict[str, Any]
        if path == CHAT:
            chosen = random.choice([{}, {"logprobs": True}, {"logprobs": True, "top_logprobs": random.randrange(4)}])
        else:
            chosen = random.choice([{}, {"logprobs": random.randrange(4)}, {"echo": True}])
        call = changed(Call(method="POST", path=path, content=b"{}"), **body, **chosen)
        whole = await fast_world.send(call)
        streamed = await fast_world.send(changed(call, stream=True, stream_options={"include_usage": True}))
        assert (whole.status, streamed.status) == (200, 200), (call.body, whole.content, streamed.content)
        folded = folded_chat if path == CHAT else folded_completion
        assert _comparable(folded(streamed.chunks)) == _comparable(whole.body), call.body
        _check_shapes(path, whole, streamed)
        for choice in whole.body["choices"]:
            if choice["logprobs"] is not None:
                _check_logprobs(choice)


def _check_shapes(path: str, whole: Outcome, streamed: Outcome) -> None:
    assert streamed.events[-1] == "[DONE]"
    if path == CHAT:
        chat_completion(whole.body)
        for chunk in streamed.chunks:
            chat_chunk(chunk)
    else:
        completion(whole.body)
        for chunk in streamed.chunks:
            completion_chunk(chunk)
    assert len({(chunk["id"], chunk["created"], chunk["model"]) for chunk in streamed.chunks}) == 1


def _check_logprobs(choice: dict[str, Any]) -> None:
    """The tokens are those of the text, in order; the last one may reach beyond a stop string."""
    if "message" in choice:
        tokens = choice["logprobs"]["content"]
        spelled = b"".join(bytes(token["bytes"] or ()) for token in tokens).decode("utf-8", "replace")
        assert spelled.startswith(choice["message"]["content"])
        return
    scores = choice["logprobs"]
    lengths = {len(scores[name]) for name in ("tokens", "token_logprobs", "text_offset", "top_logprobs")}
    assert len(lengths) == 1
    offsets = scores["text_offset"]
    assert offsets == sorted(offsets) and all(offset >= 0 for offset in offsets)
    # A special token has no text: drawn last, where ids that end an answer are ignored, it stands at the text's end.
    past_end = len(choice["text"])
    for token, offset in zip(scores["tokens"], offsets, strict=True):
        assert offset < past_end or (offset == past_end and token in TINY_SPECIAL_TOKENS), (token, offset, past_end)


def _comparable(body: dict[str, Any]) -> dict[str, Any]:
    """Without what differs between two calls: their id and time, and how much of the prompt was cached."""
    usage = {name: count for name, count in body["usage"].items() if name != "prompt_tokens_details"}
    return {**body, "id": None, "created": None, "usage": usage}


def _words(random: Random, most: int) -> str:
    return " ".join(
        random.choice([*WORDS, "né", "🎈", "早安", "1 + 1", "\n"]) for _ in range(random.randrange(1, most))
    )


def _chat(random: Random) -> dict[str, Any]:
    turns = [{"role": role, "content": _words(random, 20)} for role in ("user", "assistant") * random.randrange(2)]
    content = _words(random, 20)
    parts = [{"type": "text", "text": content}] if random.random() < 0.3 else content
    return {"model": MODEL, "messages": [*turns, {"role": "user", "content": parts}]}


def _completion(random: Random, world: World) -> dict[str, Any]:
    def ids() -> list[int]:
        return [random.randrange(3, world.renderer.vocab_size) for _ in range(random.randrange(1, 40))]

    prompts: list[Any] = [_words(random, 20), ids(), [_words(random, 9), _words(random, 9)], [ids(), ids(), ids()]]
    return {"model": MODEL, "prompt": random.choice(prompts)}


def _options(random: Random) -> dict[str, Any]:
    """Any mixture of the options that change an answer; a seed, so that it can be had twice."""
    offered = {
        "max_tokens": random.randrange(1, 60),
        "n": random.randrange(1, 4),
        "stop": random.sample([" ", "e", "the", "é", "\ufffd\ufffd", "and you"], random.randrange(1, 4)),
        "top_p": random.choice([0.3, 1]),
        "top_k": random.choice([1, 20]),
        "min_p": 0.1,
        "presence_penalty": 0.5,
        "frequency_penalty": -0.5,
        "repetition_penalty": 1.2,
        "logit_bias": {"7": 3, "8": -100},
        "min_tokens": 1,
        "ignore_eos": True,
        "stop_token_ids": [9, 10],
    }
    taken = {name: value for name, value in offered.items() if random.random() < 0.35}
    temperature = random.choice([0, 0.7, 1.5])
    return {"max_tokens": 60, **taken, "seed": random.randrange(2**31), "temperature": temperature}
