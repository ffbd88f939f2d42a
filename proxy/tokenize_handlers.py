"""POST /tokenize and /detokenize: text to token ids and back, by the very code that makes prompts."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial

import msgspec
from aiohttp import web

from prefixcache.errors import InvalidRequest
from prefixcache.limits import MAX_TOKENIZE_CHARS, OFFLOAD_BODY_BYTES
from prefixcache.rendering.renderer import RenderedPrompt, Renderer
from proxy.fleet import Fleet
from proxy.json_answers import json_answer
from proxy.prediction import PromptReader, render_chat
from proxy.request_body import read_body
from proxy.tokenize_request import (
    DetokenizeRequest,
    TokenizeChat,
    TokenizeText,
    parse_detokenize_request,
    parse_tokenize_request,
)


class Tokenized(msgspec.Struct, frozen=True, kw_only=True):
    tokens: Sequence[int]
    count: int
    max_model_len: int


class Detokenized(msgspec.Struct, frozen=True, kw_only=True):
    prompt: str


class TokenizeHandlers:
    """Special tokens are spelled out on the way back, so that the one undoes the other."""

    def __init__(self, fleet: Fleet, reader: PromptReader) -> None:
        self._fleet = fleet
        self._reader = reader

    async def tokenize(self, request: web.Request) -> web.Response:
        body = await read_body(request)
        with ExitStack() as turn:
            await self._reader.take_turn(turn, len(body))
            asked = await self._reader.parse(parse_tokenize_request, body)
            model = self._fleet.model(asked.model)
            max_model_len = self._fleet.max_model_len(model.namespace)
            renderer = model.renderer

            def answer(draft: RenderedPrompt) -> web.Response:
                tokens = list(renderer.encode(draft))
                return json_answer(Tokenized(tokens=tokens, count=len(tokens), max_model_len=max_model_len))

            return await self._reader.inline_or_thread(
                partial(_draft, renderer, asked),
                answer,
                uncached_chars=renderer.uncached_chars,
                body_bytes=len(body),
                num_messages=len(asked.messages) if isinstance(asked, TokenizeChat) else 0,
            )

    async def detokenize(self, request: web.Request) -> web.Response:
        body = await read_body(request)
        with ExitStack() as turn:
            await self._reader.take_turn(turn, len(body))
            asked = await self._reader.parse(parse_detokenize_request, body)
            model = self._fleet.model(asked.model)
            read = partial(_text, model.renderer, asked, model.vocab_size)
            is_short = len(body) < OFFLOAD_BODY_BYTES
            prompt = read() if is_short else await self._reader.off_loop(read, body_bytes=len(body))
        return json_answer(Detokenized(prompt=prompt))


def _draft(renderer: Renderer, asked: TokenizeText | TokenizeChat) -> RenderedPrompt:
    """Raises InvalidRequest for a text that is longer than this endpoint takes."""
    if isinstance(asked, TokenizeChat):
        draft = render_chat(renderer, asked.messages, add_generation_prompt=asked.add_generation_prompt)
    else:
        draft = renderer.raw(asked.prompt, add_special_tokens=asked.add_special_tokens)
    if len(draft.text) > MAX_TOKENIZE_CHARS:
        field = "messages" if isinstance(asked, TokenizeChat) else "prompt"
        raise InvalidRequest(
            f"{field} has {len(draft.text)} characters; /tokenize takes at most {MAX_TOKENIZE_CHARS}", param=field
        )
    return draft


def _text(renderer: Renderer, asked: DetokenizeRequest, vocab_size: int) -> str:
    asked.check_vocabulary(vocab_size)
    return renderer.decode(asked.tokens)
