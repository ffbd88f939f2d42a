"""POST /v1/chat/completions: parse, predict, place, and hand over to the exchange with the worker."""

from __future__ import annotations

import itertools
import secrets
import time
import uuid
from collections.abc import Callable

from aiohttp import web

from prefixcache.errors import Unavailable
from prefixcache.limits import MAX_BODY_BYTES
from prefixcache.protocol import Generate, Sampling
from prefixcache.routing.base import Policy
from proxy.access_log import ACCESS_RECORD
from proxy.chat_answer import ChatAnswer
from proxy.chat_exchange import Books, ChatExchange
from proxy.chat_request import ChatRequest
from proxy.error_answers import body_too_large
from proxy.fleet import Fleet
from proxy.model import Model
from proxy.placement import Placement, check_context, place
from proxy.prediction import Predictor, Prompt, PromptReader
from proxy.secret import DeploymentSecret


class ChatHandler:
    """One for the process; holds nothing of any request."""

    def __init__(
        self,
        *,
        fleet: Fleet,
        secret: DeploymentSecret,
        reader: PromptReader,
        predictor: Predictor,
        policy: Policy,
        books: Books,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._fleet = fleet
        self._secret = secret
        self._reader = reader
        self._predictor = predictor
        self._policy = policy
        self._books = books
        self._clock = clock
        self._request_numbers = itertools.count(1)

    async def __call__(self, request: web.Request) -> web.StreamResponse:
        record = request[ACCESS_RECORD]
        record.counted = True
        if request.content_length is not None and request.content_length > MAX_BODY_BYTES:
            raise body_too_large()
        body = await request.read()
        chat = await self._reader.parse(body)
        model = self._fleet.model(chat.model)
        record.model = model.name
        prompt = await self._reader.read(model, chat, body_bytes=len(body), seed=self._secret.seed)
        del body
        record.prompt_tokens = prompt.num_tokens
        placement = await self._place(model, chat, prompt)
        stream = placement.link.stream
        if stream is None:
            raise Unavailable("the worker was lost as it was chosen, try again")
        record.worker = placement.decision.worker_id
        record.hit_tokens = placement.decision.hit_tokens
        exchange = ChatExchange(
            request,
            record,
            model=model,
            placement=placement,
            stream=stream,
            frame=self._generate(chat, prompt, placement),
            stop_strings=chat.stop,
            answer=ChatAnswer(
                id=f"chatcmpl-{uuid.uuid4().hex}",
                created=int(self._clock()),
                model=chat.model,
                system_fingerprint=f"fp_{model.namespace}",
                include_usage=chat.include_usage,
            ),
            books=self._books,
        )
        return await (exchange.answer_stream() if chat.stream else exchange.answer_whole())

    async def _place(self, model: Model, chat: ChatRequest, prompt: Prompt) -> Placement:
        # Too long a prompt is refused before the index is asked; the workers are looked up anew after that wait.
        check_context(self._fleet.ready_links(model.namespace), prompt.num_tokens, chat.max_tokens)
        depths = await self._predictor.depths(model.index, prompt.index_hashes)
        placement = place(
            self._policy,
            self._fleet.ready_links(model.namespace),
            depths,
            geometry=model.geometry,
            prompt_tokens=prompt.num_tokens,
            max_tokens=chat.max_tokens,
        )
        self._books.metrics.routing_decisions.labels(self._policy.name, placement.decision.reason).inc()
        return placement

    def _generate(self, chat: ChatRequest, prompt: Prompt, placement: Placement) -> Generate:
        return Generate(
            id=f"{next(self._request_numbers):x}",
            root=prompt.root,
            prompt_ids=prompt.packed,
            sampling=Sampling(
                seed=chat.seed if chat.seed is not None else secrets.randbits(64),
                temperature=chat.temperature,
                top_p=chat.top_p,
            ),
            stop_token_ids=placement.link.record.stop_token_ids,
            max_tokens=placement.max_tokens,
        )
