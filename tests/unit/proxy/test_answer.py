"""The two shapes of an answer are one answer, on both surfaces."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from openai.types import Completion
from openai.types.chat import ChatCompletion, ChatCompletionChunk

from prefixcache.protocol import TokenLogprobs
from prefixcache.rendering.renderer import Renderer
from proxy.answer import Answer, AnswerBody, AnswerHead, FinishReason, TokenSpelling, WholeChoice, completion_usage
from proxy.chat_answer import ChatAnswer
from proxy.completion_answer import CompletionAnswer
from proxy.scored_tokens import ScoredToken
from proxy.sse_stream import event
from tests.support.folding import folded_chat, folded_completion
from tests.support.tiny_tokenizer import TINY_EOS_ID, tiny_tokenizer_files

RENDERER = Renderer(tiny_tokenizer_files())
SPELLING = TokenSpelling(token_bytes=RENDERER.token_bytes, token_name=RENDERER.token_spelling)
USAGE = completion_usage(prompt_tokens=30, completion_tokens=12, cached_tokens=16)


def _head(*, scored: bool, include_usage: bool = True) -> AnswerHead:
    return AnswerHead(
        id="x-1",
        created=7,
        model="m",
        system_fingerprint="fp_1",
        include_usage=include_usage,
        spelling=SPELLING if scored else None,
    )


def _json(value: object) -> Any:
    return json.loads(msgspec.json.encode(value))


logprobs = st.floats(max_value=0, allow_nan=False)
ids = st.integers(0, RENDERER.vocab_size + 5)
tokens = st.builds(
    ScoredToken,
    id=ids,
    offset=st.integers(0, 10**6),
    logprobs=st.builds(TokenLogprobs, logprobs, st.lists(st.tuples(ids, logprobs), max_size=3).map(tuple)),
)
pieces = st.tuples(st.integers(0, 3), st.text(), st.lists(tokens, max_size=3))
reasons: st.SearchStrategy[FinishReason] = st.sampled_from(("stop", "length"))


def _chunks(answer: Answer, given_pieces: list[tuple[int, str, list[ScoredToken]]], ends: list[FinishReason]) -> Any:
    openings = [answer.opening(choice) for choice in range(len(ends))]
    bodies: list[AnswerBody | None] = [
        *openings,
        *(answer.piece(choice, text, scored) for choice, text, scored in given_pieces),
        *(answer.finish(choice, reason) for choice, reason in reversed(list(enumerate(ends)))),
        answer.usage(USAGE),
    ]
    return [_json(body) for body in bodies if body is not None]


def _wholes(given_pieces: list[tuple[int, str, list[ScoredToken]]], ends: list[FinishReason]) -> list[WholeChoice]:
    return [
        WholeChoice(
            text="".join(text for place, text, _ in given_pieces if place == choice),
            tokens=[token for place, _, scored in given_pieces for token in scored if place == choice],
            finish_reason=reason,
        )
        for choice, reason in enumerate(ends)
    ]


@given(st.lists(pieces), st.lists(reasons, min_size=4, max_size=4), st.booleans())
def test_folding_a_chat_stream_gives_the_whole_answer(
    given_pieces: list[tuple[int, str, list[ScoredToken]]], ends: list[FinishReason], scored: bool
) -> None:
    answer = ChatAnswer(_head(scored=scored))
    chunks = _chunks(answer, given_pieces, ends)
    whole = _json(answer.whole(_wholes(given_pieces, ends), USAGE))
    assert folded_chat(chunks) == whole
    for chunk in chunks:
        ChatCompletionChunk.model_validate_json(json.dumps(chunk), strict=True)
    ChatCompletion.model_validate_json(json.dumps(whole), strict=True)


@given(st.lists(pieces), st.lists(reasons, min_size=4, max_size=4), st.booleans(), st.lists(st.text(), max_size=1))
def test_folding_a_completion_stream_gives_the_whole_answer(
    given_pieces: list[tuple[int, str, list[ScoredToken]]], ends: list[FinishReason], scored: bool, echo: list[str]
) -> None:
    answer = CompletionAnswer(_head(scored=scored), echoes=echo * 2, n=2)
    whole = _json(answer.whole(_wholes(given_pieces, ends), USAGE))
    assert folded_completion(_chunks(answer, given_pieces, ends)) == whole
    Completion.model_validate_json(json.dumps(whole), strict=True)
    for choice in whole["choices"]:
        assert choice["text"].startswith("".join(echo))
        assert (choice["logprobs"] is not None) == scored
        if scored:
            assert len({len(values) for values in choice["logprobs"].values()}) == 1


def _scored(id: int, *top: tuple[int, float], logprob: float = -1.5, offset: int = 3) -> ScoredToken:
    return ScoredToken(id=id, offset=offset, logprobs=TokenLogprobs(logprob, top))


(HALF,) = [id for id in range(RENDERER.vocab_size) if RENDERER.token_bytes(id) == b"\xf0"]
(LETTER,) = [id for id in range(RENDERER.vocab_size) if RENDERER.token_bytes(id) == b"a"]


def test_chat_log_probabilities_have_exact_bytes() -> None:
    token = _scored(HALF, (LETTER, -0.5), (HALF, float("-inf")), (TINY_EOS_ID, -2.0), (10**6, -3.0))
    whole = WholeChoice(text="a", tokens=[token], finish_reason="stop")
    (choice,) = _json(ChatAnswer(_head(scored=True)).whole([whole], USAGE))["choices"]
    assert choice["logprobs"] == {
        "content": [
            {
                "token": "bytes:\\xf0",
                "logprob": -1.5,
                "bytes": [0xF0],
                "top_logprobs": [
                    {"token": "a", "logprob": -0.5, "bytes": [97]},
                    {"token": "bytes:\\xf0", "logprob": -9999.0, "bytes": [0xF0]},
                    {"token": "<|im_end|>", "logprob": -2.0, "bytes": None},
                    {"token": "", "logprob": -3.0, "bytes": None},
                ],
            }
        ],
        "refusal": None,
    }


def test_completion_log_probabilities_have_the_drawn_token_among_them() -> None:
    tokens = [_scored(LETTER, (HALF, -0.5)), _scored(LETTER, (LETTER, -1.5), offset=4), _scored(HALF, offset=5)]
    whole = WholeChoice(text="aa", tokens=tokens, finish_reason="stop")
    (choice,) = _json(CompletionAnswer(_head(scored=True)).whole([whole], USAGE))["choices"]
    assert choice["logprobs"] == {
        "tokens": ["a", "a", "bytes:\\xf0"],
        "token_logprobs": [-1.5, -1.5, -1.5],
        "top_logprobs": [{"bytes:\\xf0": -0.5, "a": -1.5}, {"a": -1.5}, {"bytes:\\xf0": -1.5}],
        "text_offset": [3, 4, 5],
    }


@given(st.text())
def test_an_event_is_one_data_line(text: str) -> None:
    data = event(ChatAnswer(_head(scored=False)).piece(0, text, ()))
    assert data.startswith(b"data: ") and data.endswith(b"\n\n")
    assert b"\n" not in data[:-2] and b"\r" not in data
    assert json.loads(data[6:])["choices"][0]["delta"] == {"content": text}


@pytest.mark.parametrize("kind", [ChatAnswer, CompletionAnswer])
def test_without_the_option_no_chunk_has_a_usage_field(kind: type[ChatAnswer] | type[CompletionAnswer]) -> None:
    answer = kind(_head(scored=False, include_usage=False))
    chunks = [answer.piece(0, "x", ()), answer.finish(0, "stop")]
    assert all("usage" not in chunk for chunk in msgspec.to_builtins(chunks))


def test_total_is_prompt_plus_completion() -> None:
    assert msgspec.to_builtins(USAGE) == {
        "prompt_tokens": 30,
        "completion_tokens": 12,
        "total_tokens": 42,
        "prompt_tokens_details": {"cached_tokens": 16},
    }
