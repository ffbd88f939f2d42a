"""Does the engine give tokens? Known from what it gives others, else by a question of its own.

a token of anybody in the last SELF_QUESTION_S ────► yes, nothing is asked
none ──► a prompt of one token, one at a time and at most every SELF_QUESTION_S
           its token comes ────────────────────────► yes
           it fails ───────────────────────────────► no, until a token comes
           neither yet, but steps are made ────────► yes if it ever gave a token: it is busy
           neither, no step for SELF_STUCK_S ──────► no
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass

from prefixcache.errors import PrefixCacheError
from prefixcache.limits import SELF_ANSWER_WAIT_S, SELF_QUESTION_S, SELF_STUCK_S
from prefixcache.protocol import End, Fail, Generate, Sampling, StepEntry
from prefixcache.types import pack_tokens
from worker.engine import Engine, StepOutput

_QUESTION = Generate(
    id="self-question",
    root=0,
    prompt_ids=pack_tokens([0]),
    sampling=Sampling(seed=0, temperature=0),
    max_tokens=1,
)
"""One token fills no block, so nothing is registered under its root and nothing is reused."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    answers: bool
    reason: str


class SelfQuestion:
    """Lives on the event loop, where `deliver` is told every output of the engine."""

    def __init__(
        self, engine: Engine, *, clock: Callable[[], float] = time.monotonic, wait_s: float = SELF_ANSWER_WAIT_S
    ) -> None:
        self._engine = engine
        self._clock = clock
        self._wait_s = wait_s
        self._token_at: float | None = None
        self._asked_at: float | None = None
        self._is_asked = False
        """The question is in the engine's hands."""
        self._step = 0
        self._stuck_since: float | None = None
        """A token is due, and this was the last time that a step was seen; None while nothing is due."""
        self._failure: str | None = None
        self._news = asyncio.Event()

    def deliver(self, output: StepOutput) -> None:
        for owner, event in output.events:
            if isinstance(event, StepEntry):
                self._token_at, self._stuck_since, self._failure = self._clock(), None, None
                self._news.set()
            elif owner is self and isinstance(event, End | Fail):
                self._is_asked = False
                if isinstance(event, Fail):
                    self._failure = f"a question of one token failed: {event.message}"
                    self._news.set()

    async def verdict(self) -> Verdict:
        """Asks if nobody got a token of late, and waits up to SELF_ANSWER_WAIT_S for one that is due."""
        self._ask_if_due()
        if self._is_asked and not self._is_fresh():
            self._news.clear()
            try:
                async with asyncio.timeout(self._wait_s):
                    await self._news.wait()
            except TimeoutError:
                pass
        return self._judged()

    def _is_fresh(self) -> bool:
        return self._token_at is not None and self._clock() - self._token_at < SELF_QUESTION_S

    def _ask_if_due(self) -> None:
        now = self._clock()
        if not self._engine.is_serving or self._is_fresh() or self._is_asked:
            return
        if self._asked_at is not None and now - self._asked_at < SELF_QUESTION_S:
            return
        self._asked_at = now
        if self._stuck_since is None:
            self._stuck_since, self._step = now, self._engine.load.step
        try:
            self._engine.submit(self, _QUESTION)
            self._is_asked = True
        except PrefixCacheError:  # too many wait already: a token of theirs is as good
            pass

    def _judged(self) -> Verdict:
        engine = self._engine
        if not engine.is_serving:
            return Verdict(answers=False, reason=str(engine.failure or "the worker is shutting down"))
        if self._failure is not None:
            return Verdict(answers=False, reason=self._failure)
        if self._stuck_since is None:
            return Verdict(answers=True, reason="a token was given of late")
        now, step = self._clock(), engine.load.step
        if step != self._step:
            self._step, self._stuck_since = step, now
        stuck_s = now - self._stuck_since
        if stuck_s >= SELF_STUCK_S:
            return Verdict(answers=False, reason=f"a token is due, and no step was made for {stuck_s:.0f} s")
        if self._token_at is None:
            return Verdict(answers=False, reason="the first token is not there yet")
        return Verdict(answers=True, reason="busy: a token is due, and steps are made")
