"""One generation on its worker: token ids in, text out, and the account of what it cost.

    sent ──first token──> text ──stop string──> abort sent ──end, or END_WAIT_S──┐
    ▲ │                    │ └─────────────────end──────────────────────────────> done (finish_reason)
    │ └── refused, failed, lost with its worker ──nobody takes it in time───────> done (error)
    └───────── elsewhere ──┘ at once, or after a wait

What its worker refuses as one that is overloaded or drains, and what a worker fails or is lost with, goes on elsewhere,
with all ids that came: text, stop strings and log probabilities go on in the same objects, and nobody sees a seam. What
is asked back for an idle worker goes there, and there what crosses decides: once it has started it stays.

`async with` owns it: whatever ends the scope before `done`, a client that left included, aborts it at the worker.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Literal

from prefixcache.errors import Draining, InvalidRequest, NoWorkerReady, Overloaded, PrefixCacheError, WorkerFault
from prefixcache.limits import END_WAIT_S, MAX_MOVES
from prefixcache.protocol import End, StepEntry, TokenLogprobs, Usage
from prefixcache.rendering.detokenizer import Detokenizer
from prefixcache.rendering.stop_strings import StopScanner
from proxy.answer import FinishReason
from proxy.output_check import checked_cached_tokens, new_tokens
from proxy.scored_tokens import ScoredToken, ScoredTokens
from proxy.whereabouts import Whereabouts
from proxy.worker_link import WorkerLink

MoveOutcome = Literal["moved", "stayed", "left", "failed"]
"""stayed: it has started meanwhile. left: the client has. failed: it could be sent to nobody, or has ended."""

Continuation = Literal["moved", "waited", "whole", "left", "failed"]
"""What became of a generation whose worker failed it: waited for another one, or had all its tokens already."""


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
        self._held: asyncio.Future[None] | None = None
        """While it waits for a worker."""
        self._awaits_token = True
        """From where it is."""
        self._stop_token_ids: frozenset[int] = frozenset()
        self._detokenizer = detokenizer
        self._scanner = StopScanner(stop_strings) if stop_strings else None
        self._scored = scored
        self._on_text = on_text
        self._on_tokens = on_tokens
        self._num_chars = 0
        self._ended = False
        self._end_timer: asyncio.TimerHandle | None = None
        self.first: asyncio.Future[None] = self._loop.create_future()
        """Set once a token came or the request is done: from here on an answer is certain."""
        self.siblings: Sequence[Generation] = ()
        """All that answer the same request, if there are others."""
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
        self.siblings = ()
        held, self._held = self._held, None
        if held is not None:
            held.cancel()
            self.whereabouts.count("left")
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
        if not self.whereabouts.output:
            self.cached_tokens = checked_cached_tokens(cached_tokens, self.whereabouts.num_prompt_tokens)
        self.whereabouts.started()

    def on_tokens(self, entry: StepEntry) -> None:
        if self.finish_reason is not None:
            return
        output = self.whereabouts.output
        new = new_tokens(
            entry,
            output,
            max_tokens=self.whereabouts.sent[1].max_tokens,
            stop_token_ids=self._stop_token_ids,
            vocab_size=self.whereabouts.vocab_size,
            is_scored=self._scored is not None,
        )
        if new.ids:
            self._take_new(new.ids, new.logprobs)
        if new.goes_on and self.finish_reason is None:
            # The answer is whole, and nobody else is asked for it; but whose request this is does not end by itself.
            raise WorkerFault("the worker went on after the end of the answer")

    def _take_new(self, ids: tuple[int, ...], logprobs: Sequence[TokenLogprobs]) -> None:
        output = self.whereabouts.output
        num_before = len(output)
        if self._awaits_token:
            self._awaits_token = False
            self._settle_move("stayed")
            self.whereabouts.first_token()
        output.extend(ids)
        self._on_tokens(len(ids))
        if ids[-1] in self._stop_token_ids:
            ids = ids[:-1]
        if self._scanner is None and self._scored is None:
            self._emit(self._detokenizer.feed(ids))
        else:
            self._take_singly(ids, logprobs, num_before)
        if not self.first.done():
            self.first.set_result(None)

    def on_end(self, end: End) -> None:
        if self._move is not None and end.reason == "aborted":
            self._make_move()
            return
        if self.finish_reason is None and end.reason == "aborted":
            raise WorkerFault("the worker ended the request before its answer was complete")
        num_output, most = len(self.whereabouts.output), self.whereabouts.sent[1].max_tokens
        if self.finish_reason is None and end.reason == "length" and num_output < most:
            raise WorkerFault(f"the worker ended the answer for its length at {num_output} of {most} tokens")
        if not self.whereabouts.num_brought_tokens:
            # Of one that was continued, no worker can account for the whole.
            self.usage = end.usage
            self.cached_tokens = checked_cached_tokens(end.usage.cached_tokens, self.whereabouts.num_prompt_tokens)
        if self.finish_reason is not None or end.reason == "aborted":
            self._ended = True
            self._finish()
        else:
            self._complete(end.reason)

    def on_fail(self, error: Exception) -> None:
        """Whatever its worker did wrong, or not at all, another one may do; a text that is whole needs nobody."""
        if isinstance(error, InvalidRequest) and self.whereabouts.was_begun:
            # A worker has taken what the client sent: the others differ from it, or what it has drawn is wrong.
            error = WorkerFault(f"a worker refused to go on with the request: {error}")
        if self.finish_reason is not None or not isinstance(error, Overloaded | Draining | WorkerFault):
            self._fail(error)
            return
        reason = self._reached_end()
        self.whereabouts.failed(error)
        if reason is not None:
            self._tell("whole", "nothing is left to be generated")
            self._complete(reason)
        elif self._move is not None:
            if self._make_move():
                self._tell_where("moved")
        elif self.whereabouts.num_suspect_faults > MAX_MOVES:
            self._tell("failed", f"given up, as {self.whereabouts.num_faults} workers failed it")
            self._fail(error)
        else:
            self._go_elsewhere("moved")

    def _was_sent(self) -> None:
        """For the first time, or again."""
        if not self.whereabouts.output:
            self.cached_tokens = None
        self._awaits_token = True
        self._stop_token_ids = frozenset(self.whereabouts.sent[1].stop_token_ids)
        if self.whereabouts.is_movable:
            self._movable.add(self)
        else:
            self._movable.discard(self)

    def _go_elsewhere(self, outcome: Literal["moved", "waited"]) -> None:
        try:
            self.whereabouts.send_elsewhere(self)
        except PrefixCacheError as error:
            self._wait_or_fail(error)
            return
        self._was_sent()
        self._tell_where(outcome)

    def _wait_or_fail(self, error: PrefixCacheError) -> None:
        """Nobody takes it now. What has cost nothing yet is refused, for its client may come again."""
        try:
            if not self._is_worth_waiting(error):
                raise error
            held = self.whereabouts.wait()
        except PrefixCacheError as final:
            self._tell("failed", f"given up: {final}")
            self._fail(final)
            return
        self._movable.discard(self)
        self._held = held
        held.add_done_callback(self._waited)

    def _is_worth_waiting(self, error: PrefixCacheError) -> bool:
        has_begun = self.first.done() or any(sibling.first.done() for sibling in self.siblings)
        if isinstance(error, Overloaded):
            return has_begun
        return isinstance(error, NoWorkerReady) and (has_begun or self.whereabouts.num_faults > 0)

    def _waited(self, held: asyncio.Future[None]) -> None:
        if held is not self._held:
            return  # it was left, perhaps in the very moment in which a worker came
        self._held = None
        error = held.exception()
        if error is not None:
            assert isinstance(error, Exception), "a wait fails with an error of ours"
            self._tell("failed", f"given up: {error}")
            self._fail(error)
            return
        try:
            self._go_elsewhere("waited")
        except Exception as fault:
            # No stream stands around this call: a fault of our own must not leave the client without an answer.
            self._fail(fault)

    def _tell(self, outcome: Continuation, what: str) -> None:
        """Of one that has begun, or that a worker failed: a mere refusal is none of it."""
        if self.whereabouts.num_faults or self.whereabouts.output:
            self.whereabouts.count(outcome)
            self.whereabouts.tell(what)

    def _tell_where(self, outcome: Literal["moved", "waited"]) -> None:
        self._tell(outcome, f"goes on at worker {self.whereabouts.placement.link.worker_id}")

    def _make_move(self) -> bool:
        """Whether it was sent to anybody."""
        move, self._move = self._move, None
        assert move is not None, "only a move that was asked for is made"
        was_sent = False
        try:
            self.whereabouts.move(self, move.link)
            was_sent = True
        except PrefixCacheError as error:
            self._wait_or_fail(error)
        finally:
            move.on_settled("moved" if was_sent else "failed")
        if was_sent:
            self._was_sent()
        return was_sent

    def _settle_move(self, outcome: MoveOutcome) -> None:
        """It cannot be moved any more, and a move that was asked for has come to this."""
        self._movable.discard(self)
        move, self._move = self._move, None
        if move is not None:
            move.on_settled(outcome)

    def _abort(self, *, forget: bool) -> None:
        stream, frame = self.whereabouts.sent
        stream.abort(frame.id, forget=forget)

    def _reached_end(self) -> FinishReason | None:
        """Why nothing is to be generated any more, where the worker's last word on it did not come."""
        output = self.whereabouts.output
        if output and output[-1] in self._stop_token_ids:
            return "stop"
        return "length" if len(output) >= self.whereabouts.sent[1].max_tokens else None

    def _complete(self, reason: FinishReason) -> None:
        """With the tokens that came, whatever its worker has counted."""
        self._ended = True
        self.output_tokens = len(self.whereabouts.output)
        self.finish_reason = reason
        if self._flush():
            self.finish_reason = "stop"
        self._finish()

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
