"""One request on its chosen workers: from `generate` to the last byte of the answer.

prompt 0 ── placement ──> choice 0, choice 1 ┐
prompt 1 ── placement ──> choice 2, choice 3 ┴──> one answer: chunks in the order in which they come, or the whole
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial

from aiohttp import web

from prefixcache.metrics import ProxyMetrics
from proxy.access_log import AccessRecord
from proxy.answer import Answer, CompletionUsage, FinishReason, WholeChoice, completion_usage
from proxy.cache_stats import CacheStats
from proxy.error_answers import described, error_code
from proxy.generation import Generation
from proxy.generation_group import GenerationGroup
from proxy.json_answers import json_answer
from proxy.model import Model
from proxy.scored_tokens import ScoredToken, ScoredTokens
from proxy.sse_stream import DONE, SseStream, event
from proxy.whereabouts import Whereabouts


@dataclass(frozen=True, slots=True, kw_only=True)
class Books:
    """Where completed requests are accounted."""

    metrics: ProxyMetrics
    stats: CacheStats


PlacedPrompt = Sequence[Whereabouts]
"""One prompt of a request: where each of its choices is."""


class Exchange:
    """Answers one request, whole or as a stream, and accounts it."""

    def __init__(
        self,
        request: web.Request,
        record: AccessRecord,
        *,
        model: Model,
        prompts: Sequence[PlacedPrompt],
        num_choices: int,
        stop_strings: tuple[str, ...],
        answer: Answer,
        movable: set[Generation],
        books: Books,
    ) -> None:
        """Without `prompts` nothing is generated: the answer is what the answer object says of its own accord.

        `movable`: those of the whole process that an idle worker may have.
        """
        self._request = request
        self._record = record
        self._model = model
        self._prompts = prompts
        self._num_choices = num_choices
        self._stop_strings = stop_strings
        self._answer = answer
        self._movable = movable
        self._books = books

    async def answer_whole(self) -> web.StreamResponse:
        """Raises what a generation failed with."""
        texts: list[list[str]] = [[] for _ in range(self._num_choices)]
        tokens: list[list[ScoredToken]] = [[] for _ in range(self._num_choices)]

        def on_text(choice: int, text: str, scored: Sequence[ScoredToken]) -> None:
            self._mark_first_text()
            texts[choice].append(text)
            tokens[choice].extend(scored)

        async with self._group(on_text) as group:
            await group.done
        group.raise_error()
        usage = self._account(group)
        choices = [
            WholeChoice(text="".join(texts[choice]), tokens=tokens[choice], finish_reason=reason)
            for choice, reason in enumerate(self._finish_reasons(group))
        ]
        return json_answer(self._answer.whole(choices, usage), headers=self._headers())

    async def answer_stream(self) -> web.StreamResponse:
        """Raises what a generation failed with before the first token; a later error is told inside the stream."""
        sse = SseStream(self._request)
        for choice in range(self._num_choices):
            if (opening := self._answer.opening(choice)) is not None:
                sse.send(event(opening))
        has_text = False

        def on_text(choice: int, text: str, scored: Sequence[ScoredToken]) -> None:
            nonlocal has_text
            has_text = True
            sse.send(event(self._answer.piece(choice, text, scored)))
            if sse.begun:
                self._mark_first_text()

        closing = b""

        def on_done(choice: int, member: Generation, _done: asyncio.Future[None]) -> None:
            nonlocal closing
            if member.finish_reason is None:
                return
            finish = event(self._answer.finish(choice, member.finish_reason))
            # The last one leaves in the same write as what ends the stream.
            if group.done.done():
                closing += finish
            else:
                sse.send(finish)

        async with self._group(on_text) as group:
            for choice, member in enumerate(group.members):
                member.done.add_done_callback(partial(on_done, choice, member))
            await group.first
            group.raise_error()
            await sse.begin(self._headers())
            if has_text:
                self._mark_first_text()
            await group.done
        try:
            group.raise_error()
            last = self._last_events(group)
        except Exception as error:
            self._record.error_code = error_code(error)
            self._record.status, envelope = described(error)
            last = event(envelope)
        sse.send(closing + last)
        return await sse.end()

    @asynccontextmanager
    async def _group(
        self, on_text: Callable[[int, str, Sequence[ScoredToken]], None]
    ) -> AsyncIterator[GenerationGroup]:
        """Sends the request. Raises NoWorkerReady, Unavailable."""
        try:
            async with self._generations(on_text) as group:
                yield group
        finally:
            self._note_places()

    def _generations(self, on_text: Callable[[int, str, Sequence[ScoredToken]], None]) -> GenerationGroup:
        renderer = self._model.renderer
        members: list[Generation] = []
        gaps = self._books.metrics.inter_token_latency.labels(self._model.name)
        for whereabouts in self._all_whereabouts():
            members.append(
                Generation(
                    whereabouts,
                    detokenizer=renderer.detokenizer(),
                    stop_strings=self._stop_strings,
                    scored=ScoredTokens(renderer.token_bytes) if self._answer.is_scored else None,
                    on_text=partial(on_text, len(members)),
                    on_tokens=TokenGaps(gaps.observe),
                    movable=self._movable,
                )
            )
        return GenerationGroup(members)

    def _finish_reasons(self, group: GenerationGroup) -> Sequence[FinishReason]:
        reasons = [member.finish_reason for member in group.members if member.finish_reason is not None]
        assert len(reasons) == len(group.members), "a generation that is done without an error has a finish reason"
        return reasons or ["length"] * self._num_choices

    def _headers(self) -> Mapping[str, str]:
        """Of the workers that answer, as far as a token or the end has come: until then a request may be moved."""
        headers = {"x-request-id": self._record.request_id}
        if self._prompts:
            self._note_places()
            headers["x-prefixcache-worker"] = self._record.worker
            headers["x-prefixcache-hit-tokens"] = str(self._record.hit_tokens)
            headers["x-prefixcache-reason"] = joined_names(
                choices[0].begun.decision.reason for choices in self._prompts
            )
        return headers

    def _note_places(self) -> None:
        """Where its generations began, or are by now; of the choices of a prompt, the first speaks for its hits."""
        self._record.worker = joined_names(each.begun.link.worker_id for each in self._all_whereabouts())
        self._record.hit_tokens = sum(choices[0].begun.decision.hit_tokens for choices in self._prompts)

    def _all_whereabouts(self) -> Sequence[Whereabouts]:
        return [whereabouts for choices in self._prompts for whereabouts in choices]

    def _last_events(self, group: GenerationGroup) -> bytes:
        usage = self._account(group)
        last = b""
        if not group.members:
            reasons = self._finish_reasons(group)
            last = b"".join(event(self._answer.finish(choice, reason)) for choice, reason in enumerate(reasons))
        if self._answer.include_usage:
            last += event(self._answer.usage(usage))
        return last + DONE

    def _mark_first_text(self) -> None:
        if self._record.ttft_s is None:
            self._record.ttft_s = time.perf_counter() - self._record.received_at
            self._books.metrics.time_to_first_token.labels(self._model.name).observe(self._record.ttft_s)

    def _account(self, group: GenerationGroup) -> CompletionUsage:
        """Books one completed request: metrics, statistics, log and usage get the same numbers.

        A prompt counts once, however many choices it has, and so do its cached tokens: those of its first choice, for
        the others reuse what that one computed.
        """
        record, model, metrics = self._record, self._model.name, self._books.metrics
        firsts = [member for member in group.members if member.choice == 0]
        record.cached_tokens = cached_tokens = sum(first.cached_tokens or 0 for first in firsts)
        record.completion_tokens = output_tokens = sum(member.output_tokens for member in group.members)
        metrics.prompt_tokens.labels(model).inc(record.prompt_tokens)
        metrics.cached_tokens.labels(model).inc(cached_tokens)
        predicted = sum(choices[0].begun.index_hit_tokens for choices in self._prompts)
        metrics.predicted_hit_tokens.labels(model).inc(predicted)
        metrics.count_misses(
            model,
            prompt_tokens=record.prompt_tokens,
            cached_tokens=cached_tokens,
            hit_tokens=record.hit_tokens,
            best_hit_tokens=sum(choices[0].begun.best_hit_tokens for choices in self._prompts),
        )
        metrics.generation_tokens.labels(model).inc(output_tokens)
        usages = [member.usage for member in group.members if member.usage is not None]
        for usage in usages:
            metrics.request_queue_time.labels(model).observe(usage.queue_s)
            metrics.request_prefill_time.labels(model).observe(usage.prefill_s)
            metrics.request_decode_time.labels(model).observe(usage.decode_s)
        if len(usages) == len(group.members):
            record.copied_tokens = sum(usage.copied_tokens for usage in usages)
            record.computed_tokens = sum(usage.computed_tokens for usage in usages)
            record.preemptions = sum(usage.preemptions for usage in usages)
        if record.ttft_s is not None:
            metrics.observe_reuse(model, record.ttft_s, prompt_tokens=record.prompt_tokens, cached_tokens=cached_tokens)
        record.queue_s = max((usage.queue_s for usage in usages), default=None)
        record.prefill_s = max((usage.prefill_s for usage in usages), default=None)
        record.decode_s = max((usage.decode_s for usage in usages), default=None)
        metrics.e2e_request_latency.labels(model).observe(time.perf_counter() - record.received_at)
        self._books.stats.record(model, prompt_tokens=record.prompt_tokens, cached_tokens=cached_tokens)
        return completion_usage(
            prompt_tokens=record.prompt_tokens, completion_tokens=output_tokens, cached_tokens=cached_tokens
        )


class TokenGaps:
    """Observes the gaps between the tokens of one generation."""

    __slots__ = ("_last_at", "_observe")

    def __init__(self, observe: Callable[[float], None]) -> None:
        self._observe = observe
        self._last_at: float | None = None

    def __call__(self, count: int) -> None:
        """`count` new tokens came at once."""
        now = time.perf_counter()
        last, self._last_at = self._last_at, now
        if last is not None:
            for _ in range(count):
                self._observe((now - last) / count)


def joined_names(names: Iterable[str]) -> str:
    """Each name once, in order."""
    return ", ".join(dict.fromkeys(names))
