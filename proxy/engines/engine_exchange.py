"""One attempt to have a request answered by one engine, and what is learnt from it.

turn in the held queue ──► sent ──first byte of the answer──► prefilled: the prompt's chain is claimed, what it was
                             │                                expected to store is settled, the next one may go
                             └──end──► usage: the prediction is compared, rates are learnt, the books are kept
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from http import HTTPStatus

import msgspec
from aiohttp import web

from prefixcache.errors import EngineUnreachable
from prefixcache.rendering.engine_prompt import EnginePrompt, EnginePrompts
from proxy.engines.answer_claims import AnswerClaims, AnsweredChat
from proxy.engines.answer_text import KeptAnswer
from proxy.engines.engine_link import EngineLink
from proxy.engines.engine_request import CHAT_PATH, MESSAGES_PATH, ClientRequest
from proxy.engines.headers import HeaderRules
from proxy.engines.held_queue import Turn
from proxy.engines.http_pool import ResponseHandle
from proxy.engines.prompt_geometry import PromptGeometry
from proxy.engines.relay import Head, Relay, RelayOptions
from proxy.engines.stream_end import StreamEnd
from proxy.engines.usage import Usage
from proxy.engines.usage_reader import AnswerReader, StreamUsage, WholeUsage
from proxy.engines.usage_request import UsageFilter
from proxy.error_answers import described
from proxy.exchange import Books
from proxy.placer import ReservedPrompt


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacedPrompt:
    """A predicted prompt with its place."""

    prompt: EnginePrompt
    prompts: EnginePrompts
    """What read it."""
    geometry: PromptGeometry
    num_tokens: int
    """As far as it was known, or estimated, before the engine counted them."""
    reserved: ReservedPrompt[EngineLink]


class EngineExchange:
    """Of one request, with one engine; `run` once."""

    def __init__(
        self,
        asked: ClientRequest,
        link: EngineLink,
        *,
        placed: PlacedPrompt | None,
        model: str,
        books: Books,
        answers: AnswerClaims,
        rules: HeaderRules,
        may_refuse: bool,
        is_first: bool,
    ) -> None:
        """Without `placed` nothing was predicted. `may_refuse`: another engine is asked in place of a 5xx's body."""
        self._asked = asked
        self._record = asked.record
        self._link = link
        self._placed = placed
        self._model = model
        self._books = books
        self._answers = answers
        self._rules = rules
        self._may_refuse = may_refuse
        self._is_first = is_first
        self._turn: Turn | None = None
        self._handle: ResponseHandle | None = None
        self._kept_body: bytes | None = None
        """Where prompt and answer are to be claimed together."""
        self._kept: KeptAnswer | None = None
        self._claimed_of = 0
        """Incarnation of the engine when the prompt was claimed."""
        self._was_alone = False
        self._sent_at = 0.0
        self._prefill_s: float | None = None
        """From the moment at which it was sent to the first byte of its stream."""
        self._count_gap: Callable[[float], None] | None = None
        """There once a stream has begun."""
        self._piece_at = 0.0

    async def run(self) -> web.StreamResponse:
        """Raises EngineUnreachable and EngineFault as long as nothing went to the client; Overloaded."""
        with ExitStack() as scope:
            await self._take_turn(scope)
            is_chat = self._placed is not None and self._asked.path == CHAT_PATH
            if is_chat and self._answers.keeps(self._asked.body, scope):
                self._kept_body = self._asked.body
            request = self._asked.to_engine(self._rules)
            relay = Relay(self._asked.request, self._record, self._options())
            self._sent_at = time.perf_counter()
            try:
                self._handle = handle = await self._link.pool.send(request, relay)
            except EngineUnreachable as error:
                self._link.note_failure(error)
                raise
            del request  # It would hold the body while the answer is passed on.
            response = await relay.run(handle)
        self._account(relay)
        return response

    async def _take_turn(self, scope: ExitStack) -> None:
        if self._placed is None:
            entry = self._link.ledger.place(0.0)
            scope.callback(entry.gone)
            entry.first_token()
            return
        placement = self._placed.reserved.placement
        self._turn = scope.enter_context(self._link.held.join(placement.prefill_s, is_stream=self._asked.is_stream))
        await self._turn.come()
        self._was_alone = self._link.held.num_in_hand == 1
        self._placed.reserved.reservation.choices[0].started()

    def _options(self) -> RelayOptions:
        path = self._asked.path
        return RelayOptions(
            engine_id=self._link.engine_id,
            reader_for=self._reader_for,
            on_first_byte=self._on_first_byte,
            on_piece=self._on_piece,
            to_client=partial(self._rules.to_client, url=self._link.pool.place),
            own_headers=self._own_headers(),
            stream_end=StreamEnd(path) if self._asked.is_predicted else None,
            error_event=message_error_event if path == MESSAGES_PATH else error_event,
            refuses_faults=self._may_refuse,
        )

    def _own_headers(self) -> Mapping[str, str]:
        headers = {"x-request-id": self._record.request_id, "x-prefixcache-worker": self._link.engine_id}
        if self._placed is not None:
            decision = self._placed.reserved.placement.decision
            headers["x-prefixcache-hit-tokens"] = str(decision.hit_tokens)
            headers["x-prefixcache-reason"] = decision.reason
        return headers

    def _reader_for(self, head: Head) -> AnswerReader | None:
        if not self._asked.is_predicted or head.status != HTTPStatus.OK:
            return None
        reader: AnswerReader = WholeUsage()
        if head.is_stream:
            reader = UsageFilter() if self._asked.usage_edit is not None else StreamUsage()
        if self._kept_body is not None:
            reader = self._kept = KeptAnswer(reader, is_stream=head.is_stream)
        return reader

    def _on_piece(self) -> None:
        """Called for each one. The gap between two pieces of a stream is that between its tokens, as far as is seen."""
        self._link.note_progress()
        if self._count_gap is not None:
            now = time.perf_counter()
            self._count_gap(now - self._piece_at)
            self._piece_at = now

    def _on_first_byte(self, head: Head) -> None:
        if not (self._may_refuse and head.status >= HTTPStatus.INTERNAL_SERVER_ERROR):
            self._let_go()
        if self._turn is not None:
            self._turn.prefilled()
        if self._asked.is_predicted and head.is_stream and head.status == HTTPStatus.OK:
            self._count_gap = self._books.metrics.inter_token_latency.labels(self._model).observe
            self._piece_at = time.perf_counter()
        placed = self._placed
        if placed is None or head.status != HTTPStatus.OK:
            return
        if head.is_stream:
            now = time.perf_counter()
            self._prefill_s = now - self._sent_at
            self._record.ttft_s = now - self._record.received_at
            self._books.metrics.time_to_first_token.labels(self._model).observe(self._record.ttft_s)
        placed.reserved.reservation.choices[0].first_token()
        self._claimed_of = self._link.incarnation
        for prompt in (placed.prompt, *placed.prompt.others):
            self._link.claims.claim(
                prompt.chain,
                capacity_blocks=self._link.capacity_blocks,
                engine_blocks_per_index_block=placed.geometry.engine_blocks_per_index_block,
            )

    def _let_go(self) -> None:
        """Nobody else is asked any more."""
        assert self._handle is not None
        self._handle.forget_request()
        self._asked.let_go()

    def _account(self, relay: Relay) -> None:
        """Of an answer that is over: of a complete one all books are kept, of any other one nothing is learnt."""
        head, record = relay.head, self._record
        if head is None or relay.error is not None:
            return
        if head.status >= HTTPStatus.BAD_REQUEST:
            record.error_code = f"engine_status_{head.status}"
            return
        if not self._asked.is_predicted or relay.reader is None:
            return
        usage = relay.reader.usage
        placed = self._placed
        self._book(usage)
        if placed is None:
            return
        self._offer_answer(placed)
        estimate, prompt = self._link.estimate, placed.prompt
        if usage.prompt_tokens is not None and prompt.unit == "byte":
            num_bytes = sum(each.num_units for each in (prompt, *prompt.others))
            estimate.observe_prompt(prompt_tokens=usage.prompt_tokens, prompt_bytes=num_bytes)
        if self._prefill_s is not None and self._was_alone:
            hit_tokens = placed.reserved.placement.decision.hit_tokens
            cached_tokens = usage.cached_tokens if usage.cached_tokens is not None else hit_tokens
            uncached_tokens = (usage.prompt_tokens or placed.num_tokens) - cached_tokens
            estimate.observe_prefill(uncached_tokens=uncached_tokens, seconds=self._prefill_s)
        expectation = placed.reserved.placement.expectation
        if self._is_first and not prompt.others and expectation.source == "claims":
            self._link.claims.observe(
                predicted_tokens=round(
                    placed.reserved.placement.decision.hit_tokens
                    * (usage.prompt_tokens or placed.num_tokens)
                    / placed.num_tokens
                ),
                cached_tokens=usage.cached_tokens,
                index_block_tokens=placed.geometry.index_block_tokens,
            )

    def _offer_answer(self, placed: PlacedPrompt) -> None:
        body, kept = self._kept_body, self._kept
        if body is not None and kept is not None:
            self._answers.offer(
                AnsweredChat(
                    body=body,
                    prompts=placed.prompts,
                    prompt=placed.prompt,
                    answer=kept,
                    link=self._link,
                    incarnation=self._claimed_of,
                    geometry=placed.geometry,
                )
            )

    def _book(self, usage: Usage) -> None:
        record, model, metrics = self._record, self._model, self._books.metrics
        estimated = self._placed.num_tokens if self._placed is not None else 0
        record.prompt_tokens = usage.prompt_tokens if usage.prompt_tokens is not None else estimated
        record.cached_tokens = usage.cached_tokens or 0
        record.completion_tokens = usage.completion_tokens or 0
        metrics.prompt_tokens.labels(model).inc(record.prompt_tokens)
        metrics.cached_tokens.labels(model).inc(record.cached_tokens)
        if self._placed is not None:
            placement = self._placed.reserved.placement
            metrics.predicted_hit_tokens.labels(model).inc(placement.index_hit_tokens)
            if usage.cached_tokens is not None:
                metrics.count_misses(
                    model,
                    prompt_tokens=record.prompt_tokens,
                    cached_tokens=usage.cached_tokens,
                    hit_tokens=placement.decision.hit_tokens,
                    best_hit_tokens=placement.best_hit_tokens,
                )
        metrics.generation_tokens.labels(model).inc(record.completion_tokens)
        if record.ttft_s is not None and usage.cached_tokens is not None:
            metrics.observe_reuse(
                model, record.ttft_s, prompt_tokens=record.prompt_tokens, cached_tokens=record.cached_tokens
            )
        metrics.e2e_request_latency.labels(model).observe(time.perf_counter() - record.received_at)
        self._books.stats.record(model, prompt_tokens=record.prompt_tokens, cached_tokens=record.cached_tokens)


def error_event(error: Exception) -> bytes:
    """As OpenAI-compatible servers tell of an error inside a stream."""
    return b"data: %b\n\n" % msgspec.json.encode(described(error)[1])


def message_error_event(error: Exception) -> bytes:
    """As Anthropic's API does."""
    body = {"type": "error", "error": {"type": "api_error", "message": described(error)[1].error.message}}
    return b"event: error\ndata: %b\n\n" % msgspec.json.encode(body)
