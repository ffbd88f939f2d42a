"""One chat request on its chosen worker: from `generate` to the last byte of the answer."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from aiohttp import web

from prefixcache.metrics import ProxyMetrics
from prefixcache.protocol import Generate
from proxy.access_log import AccessRecord
from proxy.cache_stats import CacheStats
from proxy.chat_answer import ChatAnswer, CompletionUsage, FinishReason, completion_usage
from proxy.error_answers import described
from proxy.generation import Generation
from proxy.json_answers import json_answer
from proxy.model import Model
from proxy.placement import Placement
from proxy.sse_stream import DONE, SseStream, event
from proxy.worker_stream import WorkerStream


@dataclass(frozen=True, slots=True, kw_only=True)
class Books:
    """Where completed requests are accounted."""

    metrics: ProxyMetrics
    stats: CacheStats


class ChatExchange:
    """Answers one request, whole or as a stream, and accounts it."""

    def __init__(
        self,
        request: web.Request,
        record: AccessRecord,
        *,
        model: Model,
        placement: Placement,
        stream: WorkerStream,
        frame: Generate,
        stop_strings: tuple[str, ...],
        answer: ChatAnswer,
        books: Books,
    ) -> None:
        self._request = request
        self._record = record
        self._model = model
        self._placement = placement
        self._stream = stream
        self._frame = frame
        self._stop_strings = stop_strings
        self._answer = answer
        self._books = books
        self._inter_token_latency = books.metrics.inter_token_latency.labels(model.name)
        self._last_tokens_at: float | None = None

    async def answer_whole(self) -> web.StreamResponse:
        """Raises what the generation failed with."""
        texts: list[str] = []

        def on_text(text: str) -> None:
            self._mark_first_text()
            texts.append(text)

        async with self._generation(on_text) as generation:
            await generation.done
        if generation.error is not None:
            raise generation.error
        reason, usage = self._account(generation)
        return json_answer(self._answer.completion("".join(texts), reason, usage), headers=self._headers())

    async def answer_stream(self) -> web.StreamResponse:
        """Raises what the generation failed with before its first token; a later error is told inside the stream."""
        sse = SseStream(self._request, self._headers())
        sse.send(event(self._answer.first_chunk()))
        has_text = False

        def on_text(text: str) -> None:
            nonlocal has_text
            has_text = True
            sse.send(event(self._answer.text_chunk(text)))
            if sse.begun:
                self._mark_first_text()

        async with self._generation(on_text) as generation:
            await generation.first
            if generation.error is not None:
                raise generation.error
            await sse.begin()
            if has_text:
                self._mark_first_text()
            await generation.done
        try:
            if generation.error is not None:
                raise generation.error
            last = self._last_events(generation)
        except Exception as error:
            self._record.status, envelope = described(error)
            last = event(envelope)
        sse.send(last)
        return await sse.end()

    def _generation(self, on_text: Callable[[str], None]) -> Generation:
        return Generation(
            self._stream,
            self._frame,
            detokenizer=self._model.renderer.detokenizer(),
            stop_strings=self._stop_strings,
            on_text=on_text,
            on_tokens=self._on_tokens,
        )

    def _headers(self) -> Mapping[str, str]:
        decision = self._placement.decision
        return {
            "x-request-id": self._record.request_id,
            "x-prefixcache-worker": decision.worker_id,
            "x-prefixcache-hit-tokens": str(decision.hit_tokens),
            "x-prefixcache-reason": decision.reason,
        }

    def _last_events(self, generation: Generation) -> bytes:
        reason, usage = self._account(generation)
        last = event(self._answer.finish_chunk(reason))
        if self._answer.include_usage:
            last += event(self._answer.usage_chunk(usage))
        return last + DONE

    def _mark_first_text(self) -> None:
        if self._record.ttft_s is None:
            self._record.ttft_s = time.perf_counter() - self._record.received_at
            self._books.metrics.time_to_first_token.labels(self._model.name).observe(self._record.ttft_s)

    def _on_tokens(self, count: int) -> None:
        now = time.perf_counter()
        last, self._last_tokens_at = self._last_tokens_at, now
        if last is not None:
            for _ in range(count):
                self._inter_token_latency.observe((now - last) / count)

    def _account(self, generation: Generation) -> tuple[FinishReason, CompletionUsage]:
        """Books one completed request: metrics, statistics, log and usage get the same numbers."""
        assert generation.finish_reason is not None, "a generation that is done without an error has a finish reason"
        record, model = self._record, self._model.name
        cached_tokens = generation.cached_tokens or 0
        record.cached_tokens = cached_tokens
        record.completion_tokens = generation.output_tokens
        metrics = self._books.metrics
        metrics.prompt_tokens.labels(model).inc(record.prompt_tokens)
        metrics.cached_tokens.labels(model).inc(cached_tokens)
        metrics.predicted_hit_tokens.labels(model).inc(record.hit_tokens)
        metrics.generation_tokens.labels(model).inc(generation.output_tokens)
        metrics.e2e_request_latency.labels(model).observe(time.perf_counter() - record.received_at)
        self._books.stats.record(model, prompt_tokens=record.prompt_tokens, cached_tokens=cached_tokens)
        usage = completion_usage(
            prompt_tokens=record.prompt_tokens,
            completion_tokens=generation.output_tokens,
            cached_tokens=cached_tokens,
        )
        return generation.finish_reason, usage
