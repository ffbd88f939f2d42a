"""POST /v1/chat/completions and /v1/completions: parse, predict, place, hand over to the exchange with the workers."""

from __future__ import annotations

import itertools
import time
import uuid
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import get_args

from aiohttp import web

from prefixcache.errors import NoWorkerReady
from proxy.access_log import ACCESS_RECORD, AccessRecord
from proxy.answer import Answer, AnswerHead, TokenSpelling
from proxy.chat_answer import ChatAnswer
from proxy.chat_request import ChatRequest, parse_chat_request
from proxy.completion_answer import CompletionAnswer
from proxy.completion_request import parse_completion_request
from proxy.exchange import Books, Exchange, PlacedPrompt
from proxy.fleet import Fleet
from proxy.generation import Continuation
from proxy.held_requests import HeldRequests
from proxy.model import Model
from proxy.placement import check_context
from proxy.placer import Placer
from proxy.prediction import AnyRequest, Prompt, PromptReader
from proxy.prompt_frames import PromptFrames
from proxy.rebalancer import Rebalancer
from proxy.request_body import let_go_of_body, read_body
from proxy.sampling_fields import GenerationOptions
from proxy.secret import DeploymentSecret
from proxy.whereabouts import Ways, Whereabouts


class GenerationHandler:
    """One for the process; holds nothing of any request."""

    def __init__(
        self,
        *,
        fleet: Fleet,
        secret: DeploymentSecret,
        reader: PromptReader,
        placer: Placer,
        rebalancer: Rebalancer,
        held: HeldRequests,
        books: Books,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._fleet = fleet
        self._secret = secret
        self._reader = reader
        self._placer = placer
        self._ways = Ways(placer=placer, held=held, metrics=books.metrics)
        self._rebalancer = rebalancer
        self._held = held
        self._books = books
        self._clock = clock
        self._request_numbers = itertools.count(1)
        for outcome in get_args(Continuation):
            books.metrics.continuations.labels(outcome)

    async def chat(self, request: web.Request) -> web.StreamResponse:
        return await self._answer(request, parse_chat_request)

    async def completion(self, request: web.Request) -> web.StreamResponse:
        return await self._answer(request, parse_completion_request)

    async def _answer(self, request: web.Request, parse: Callable[[bytes], AnyRequest]) -> web.StreamResponse:
        record = request[ACCESS_RECORD]
        record.counted = True
        body = await read_body(request)
        body_bytes = len(body)
        patience = self._held.patience()
        with ExitStack() as turn:
            await self._reader.take_turn(turn, body_bytes)
            asked = await self._reader.parse(parse, body)
            del body
            while True:
                try:
                    return await self._answer_now(request, record, asked, body_bytes=body_bytes, turn=turn)
                except NoWorkerReady as error:
                    # Nothing of an answer has been sent, and others may be looked into meanwhile.
                    turn.close()
                    await patience.wait(asked.options.model, error)
                    await self._reader.take_turn(turn, body_bytes)

    async def _answer_now(
        self, request: web.Request, record: AccessRecord, asked: AnyRequest, *, body_bytes: int, turn: ExitStack
    ) -> web.StreamResponse:
        """Raises NoWorkerReady where nobody can take it. Closes `turn`, and frees the body's room, once it is read."""
        model = self._fleet.model(asked.options.model)
        record.model = model.name
        prompts = await self._reader.read(
            model,
            asked,
            body_bytes=body_bytes,
            seed=self._secret.seed,
            most_tokens=self._fleet.max_model_len(model.namespace),
        )
        turn.close()
        let_go_of_body(request)
        record.prompt_tokens = sum(prompt.num_tokens for prompt in prompts)
        with ExitStack() as reservations:
            exchange = Exchange(
                request,
                record,
                model=model,
                prompts=await self._place_all(model, asked.options, prompts, record, reservations),
                num_choices=len(prompts) * asked.options.n,
                stop_strings=asked.options.stop,
                answer=self._answer_object(model, asked, prompts),
                movable=self._rebalancer.movable,
                books=self._books,
            )
            return await (exchange.answer_stream() if asked.options.stream else exchange.answer_whole())

    async def _place_all(
        self,
        model: Model,
        options: GenerationOptions,
        prompts: Sequence[Prompt],
        record: AccessRecord,
        reservations: ExitStack,
    ) -> Sequence[PlacedPrompt]:
        """Nothing is placed where nothing is to be computed."""
        links = self._fleet.ready_links(model.namespace)
        for prompt in prompts:
            # Too long a prompt is refused before the index is asked.
            check_context(links, prompt.num_tokens, options.max_tokens, field=prompt.field)
        if options.max_tokens == 0:
            return []
        reserved = await self._placer.place(model, prompts, options, reservations)
        placed: list[PlacedPrompt] = []
        for prompt, each in zip(prompts, reserved, strict=True):
            frames = PromptFrames(
                prompt,
                options,
                request_numbers=self._request_numbers,
                received_at=record.received_at,
                request_id=record.request_id,
            )
            is_alone = len(prompts) == options.n == 1
            placed.append(
                tuple(
                    Whereabouts(self._ways, each, frames, choice, reservations, is_alone=is_alone)
                    for choice in range(options.n)
                )
            )
        return placed

    def _answer_object(self, model: Model, asked: AnyRequest, prompts: Sequence[Prompt]) -> Answer:
        options, renderer = asked.options, model.renderer
        is_chat = isinstance(asked, ChatRequest)
        is_scored = options.sampling.top_logprobs is not None
        head = AnswerHead(
            id=f"{'chatcmpl' if is_chat else 'cmpl'}-{uuid.uuid4().hex}",
            created=int(self._clock()),
            model=options.model,
            system_fingerprint=f"fp_{model.namespace}",
            include_usage=options.include_usage,
            spelling=TokenSpelling(token_bytes=renderer.token_bytes, token_name=renderer.token_spelling)
            if is_scored
            else None,
        )
        if isinstance(asked, ChatRequest):
            return ChatAnswer(head)
        echoes = [prompt.echo for prompt in prompts] if asked.echo else ()
        return CompletionAnswer(head, echoes=echoes, n=options.n)
