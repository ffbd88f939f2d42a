"""One generation on its worker: token ids in, text out, and the account of what it cost.

    sent ──first token──> text ──stop string──> abort sent ──end, or END_WAIT_S──┐
      │                    └───────────────────end──────────────────────────────> done (finish_reason)
      └── fail, or the stream is lost ──────────────────────────────────────────> done (error)

Before its first token it may go elsewhere: where its worker refuses it as one that is overloaded or drains, and where
it is asked back for an idle worker. What crosses decides: once it has started it stays.

`async with` owns it: whatever ends the scope before `done`, a client that left included, aborts it at the worker.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from types import TracebackType
from typing import Literal

from prefixcache.errors import Draining, Overloaded, PrefixCacheError, WorkerFault
from prefixcache.limits import END_WAIT_S
from prefixcache.protocol import End, StepEntry, TokenLogprobs, Usage
from prefixcache.rendering.detokenizer import Detokenizer
from prefixcache.rendering.stop_strings import StopScanner
from proxy.answer import FinishReason
from proxy.scored_tokens import ScoredToken, ScoredTokens
from proxy.whereabouts import Whereabouts
from proxy.worker_link import WorkerLink

MoveOutcome = Literal["moved", "stayed", "left", "failed"]
"""stayed: it has started meanwhile. left: the client has. failed: it could be sent to nobody, or has ended."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Move:
    """Asked for, and not made yet."""

    link: WorkerLink
    on_settled: Callable[[MoveOutcome], None]


class Generation:
    """The sink of one `generate`. Its futures never carry an exception: `error` does."""

    def __init__(
        self,
        whereabouts: Whereabouts,
        *,
        detokenizer: Detokenizer,
        stop_strings: tuple[str, ...],
        scored: ScoredTokens | None = None,
        on_text: Callable[[str, Sequence[ScoredToken]], None],
        on_tokens: Callable[[int], None],
        movable: set[Generation] | None = None,
    ) -> None:
        """`on_text` gets final text, `on_tokens` the count of new tokens; both are called from the stream.

        With `scored` the text comes with the log probabilities of the tokens that begin in it. It is among the
        `movable` while it may be moved.
        """
        self._loop = asyncio.get_running_loop()
        self.whereabouts = whereabouts
        self._movable = movable if movable is not None else set()
        self._move: _Move | None = None
        """To be made once its worker has given it back."""
        self._stop_token_ids: frozenset[int] = frozenset()
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
        return self.whereabouts.number

    async def __aenter__(self) -> Generation:
        """Sends the request. Raises NoWorkerReady."""
        self.whereabouts.send(self)
        self._was_sent()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Does not wait, so that no second cancellation can interrupt it."""
        if self._end_timer is not None:
            self._end_timer.cancel()
        self._settle_move("left")
        self.whereabouts.choice.gone()
        if not self._ended:
            self._abort(forget=True)

    def move_to(self, link: WorkerLink, on_settled: Callable[[MoveOutcome], None]) -> None:
        """Asks its worker for it, to send it to `link`; for one of the `movable`.

        `on_settled` is called once, with what became of it, whatever ends this generation's scope before that.
        """
        self._movable.discard(self)
        self._move = _Move(link=link, on_settled=on_settled)
        stream, frame = self.whereabouts.sent
        stream.abort_if_waiting(frame.id)

    def on_started(self, cached_tokens: int) -> None:
        self._settle_move("stayed")
        self.cached_tokens = cached_tokens
        self.whereabouts.choice.started()

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
            self._settle_move("stayed")
            self.whereabouts.choice.first_token()
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
        if self._move is not None and end.reason == "aborted":
            self._make_move()
            return
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
        if self._move is not None and isinstance(error, Overloaded | Draining | WorkerFault):
            self._make_move()
        elif isinstance(error, Overloaded | Draining) and not self._num_received:
            self._send_again(partial(self.whereabouts.send_elsewhere, self, error))
        else:
            self._fail(error)

    def _was_sent(self) -> None:
        """For the first time, or again after nothing came of it elsewhere."""
        self.cached_tokens = None
        self._stop_token_ids = frozenset(self.whereabouts.sent[1].stop_token_ids)
        if self.whereabouts.is_movable:
            self._movable.add(self)
        else:
            self._movable.discard(self)

    def _send_again(self, send: Callable[[], None]) -> bool:
        try:
            send()
        except PrefixCacheError as error:
            self._fail(error)
            return False
        self._was_sent()
        return True

    def _make_move(self) -> None:
        move, self._move = self._move, None
        assert move is not None, "only a move that was asked for is made"
        was_sent = False
        try:
            was_sent = self._send_again(partial(self.whereabouts.move, self, move.link))
        finally:
            move.on_settled("moved" if was_sent else "failed")

    def _settle_move(self, outcome: MoveOutcome) -> None:
        """It cannot be moved any more, and a move that was asked for has come to this."""
        self._movable.discard(self)
        move, self._move = self._move, None
        if move is not None:
            move.on_settled(outcome)

    def _abort(self, *, forget: bool) -> None:
        stream, frame = self.whereabouts.sent
        stream.abort(frame.id, forget=forget)

    def _fail(self, error: Exception) -> None:
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
            if self._scanner is None or num_tokens <= self.whereabouts.sent[1].sampling.min_tokens:
                self._emit(text)
                continue
            text, matched = self._scanner.feed(text)
            self._emit(text)
            if matched:
                self.output_tokens = num_tokens
                self.finish_reason = "stop"
                self._abort(forget=False)
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
        self._settle_move("failed")
        self.whereabouts.choice.gone()
        if not self.first.done():
            self.first.set_result(None)
        self.done.set_result(None)
