"""One generation on one worker: token ids in, text out, and the account of what it cost.

    sent ──first token──> text ──stop string──> abort sent ──end, or END_WAIT_S──┐
      │                    └───────────────────end──────────────────────────────> done (finish_reason)
      └── fail, or the stream is lost ──────────────────────────────────────────> done (error)

`async with` owns it: whatever ends the scope before `done`, a client that left included, aborts it at the worker.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from types import TracebackType

from prefixcache.errors import WorkerFault
from prefixcache.limits import END_WAIT_S
from prefixcache.protocol import End, Generate, StepEntry, TokenLogprobs, Usage
from prefixcache.rendering.detokenizer import Detokenizer
from prefixcache.rendering.stop_strings import StopScanner
from proxy.answer import FinishReason
from proxy.reservation import ReservedChoice
from proxy.scored_tokens import ScoredToken, ScoredTokens
from proxy.worker_stream import WorkerStream


class Generation:
    """The sink of one `generate`. Its futures never carry an exception: `error` does."""

    def __init__(
        self,
        stream: WorkerStream,
        frame: Generate,
        reserved: ReservedChoice,
        *,
        detokenizer: Detokenizer,
        stop_strings: tuple[str, ...],
        scored: ScoredTokens | None = None,
        on_text: Callable[[str, Sequence[ScoredToken]], None],
        on_tokens: Callable[[int], None],
    ) -> None:
        """`on_text` gets final text, `on_tokens` the count of new tokens; both are called from the stream.

        With `scored` the text comes with the log probabilities of the tokens that begin in it.
        """
        self._loop = asyncio.get_running_loop()
        self._stream = stream
        self._frame = frame
        self._reserved = reserved
        self._stop_token_ids = frozenset(frame.stop_token_ids)
        self._detokenizer = detokenizer
        self._scanner = StopScanner(stop_strings) if stop_strings else None
        self._scored = scored
        self._on_text = on_text
        self._on_tokens = on_tokens
        self._num_received = 0
        self._num_chars = 0
        self._ended = False
        self._end_timer: asyncio.TimerHandle | None = None
        self.first: asyncio.Future[None] = self._loop.create_future()
        """Set once a token came or the request is done: from here on an answer is certain."""
        self.done: asyncio.Future[None] = self._loop.create_future()
        self.error: Exception | None = None
        self.finish_reason: FinishReason | None = None
        self.output_tokens = 0
        self.cached_tokens: int | None = None
        self.usage: Usage | None = None
        """The worker's account; None if its last word did not come."""

    @property
    def choice(self) -> int:
        """Its number among the choices of one prompt."""
        return self._frame.choice

    @property
    def stream(self) -> WorkerStream:
        return self._stream

    async def __aenter__(self) -> Generation:
        """Sends the request. Raises Unavailable."""
        self._stream.generate(self._frame, self)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Does not wait, so that no second cancellation can interrupt it."""
        if self._end_timer is not None:
            self._end_timer.cancel()
        self._reserved.gone()
        if not self._ended:
            self._stream.abort(self._frame.id, forget=True)

    def on_started(self, cached_tokens: int) -> None:
        self.cached_tokens = cached_tokens
        self._reserved.started()

    def on_tokens(self, entry: StepEntry) -> None:
        if self.finish_reason is not None:
            return
        index, ids, logprobs = entry.index, entry.ids, entry.logprobs
        if index > self._num_received:
            raise WorkerFault(f"the worker skipped output tokens {self._num_received} to {index - 1}")
        if self._scored is not None and (logprobs is None or len(logprobs) != len(ids)):
            raise WorkerFault("the worker sent tokens without their log probabilities")
        num_known = self._num_received - index
        ids = ids[num_known:]
        if not ids:
            return
        num_before = self._num_received
        if not num_before:
            self._reserved.first_token()
        self._num_received += len(ids)
        self._on_tokens(len(ids))
        if ids[-1] in self._stop_token_ids:
            ids = ids[:-1]
        if self._scanner is None and self._scored is None:
            self._emit(self._detokenizer.feed(ids))
        else:
            self._take_singly(ids, logprobs[num_known:] if logprobs else (), num_before)
        if not self.first.done():
            self.first.set_result(None)

    def on_end(self, end: End) -> None:
        self._ended = True
        self.usage = end.usage
        self.cached_tokens = end.usage.cached_tokens
        if self.finish_reason is None:
            if end.reason == "aborted":
                raise WorkerFault("the worker ended the request before its answer was complete")
            self.output_tokens = end.usage.output_tokens
            self.finish_reason = end.reason
            if self._flush():
                self.finish_reason = "stop"
        self._finish()

    def on_fail(self, error: Exception) -> None:
        self._ended = True
        # A text that a stop string completed is whole, whatever becomes of the worker afterwards.
        if self.finish_reason is None:
            self.error = error
        self._finish()

    def _emit(self, text: str) -> None:
        self._num_chars += len(text)
        tokens = self._scored.released(self._num_chars) if self._scored is not None else ()
        if text or tokens:
            self._on_text(text, tokens)

    def _take_singly(self, ids: tuple[int, ...], logprobs: Sequence[TokenLogprobs], num_before: int) -> None:
        """One token at a time, so that each is known with its text, and the one that completed a stop string."""
        for place, token_id in enumerate(ids):
            text = self._detokenizer.feed((token_id,))
            if self._scored is not None:
                self._scored.take(token_id, logprobs[place], text)
            num_tokens = num_before + place + 1
            # As in vLLM, no stop string is looked for before `min_tokens`.
            if self._scanner is None or num_tokens <= self._frame.sampling.min_tokens:
                self._emit(text)
                continue
            text, matched = self._scanner.feed(text)
            self._emit(text)
            if matched:
                self.output_tokens = num_tokens
                self.finish_reason = "stop"
                self._stream.abort(self._frame.id, forget=False)
                self._end_timer = self._loop.call_later(END_WAIT_S, self._finish)
                return

    def _flush(self) -> bool:
        """Emits what was held back; True if a stop string is complete in it."""
        text = self._detokenizer.flush()
        if self._scored is not None:
            self._scored.end(text)
        matched = False
        if self._scanner is not None:
            text, matched = self._scanner.feed(text)
            if not matched:
                text += self._scanner.flush()
        self._emit(text)
        if self._scored is not None and not matched and (rest := self._scored.rest()):
            self._on_text("", rest)
        return matched

    def _finish(self) -> None:
        if self.done.done():
            return
        self._reserved.gone()
        if not self.first.done():
            self.first.set_result(None)
        self.done.set_result(None)
