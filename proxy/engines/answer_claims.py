"""Claims of prompts with their answers: what an engine has computed is what the next turn of the chat begins with.

    answer over ──offer──► queue ──one at a time, in a thread──► its text ──► chain of the next turn ──► claimed

The prompt alone is claimed at the first byte of the answer; this comes after its last one, and nobody waits for it. It
is work of the second rank: one thread of those that tokenize at most, few answers kept, and none where many wait.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from contextlib import ExitStack
from dataclasses import dataclass

import msgspec

from prefixcache.limits import LARGE_BODY_BYTES, MAX_KEPT_ANSWERS, MAX_KEPT_PROMPT_BYTES, MAX_QUEUED_ANSWERS
from prefixcache.rendering.engine_prompt import EnginePrompt, EnginePrompts
from prefixcache.rendering.tokenizing_threads import TokenizingThreads
from proxy.engines.answer_text import KeptAnswer
from proxy.engines.engine_link import EngineLink
from proxy.engines.prompt_geometry import PromptGeometry

_logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class AnsweredChat:
    """A chat whose answer is over."""

    body: bytes
    prompts: EnginePrompts
    prompt: EnginePrompt
    answer: KeptAnswer
    link: EngineLink
    incarnation: int
    """Of the engine when the prompt was claimed: an engine that has lost its cache since holds nothing of it."""
    geometry: PromptGeometry

    def chain(self) -> list[int]:
        """Blocking."""
        text = self.answer.text()
        return self.prompts.answered(msgspec.json.decode(self.body), self.prompt, text) if text else []

    @property
    def may_add_a_block(self) -> bool:
        """Whether prompt and answer together have a further full block, as far as the engine told their tokens."""
        num_answered = self.answer.usage.completion_tokens
        if num_answered is None or self.prompt.unit == "byte":
            return True
        width = self.prompt.geometry.index_block_units
        return (self.prompt.num_units + num_answered - 1) // width > len(self.prompt.chain)


class AnswerClaims:
    """One for the process."""

    def __init__(self, threads: TokenizingThreads) -> None:
        self._threads = threads
        self._queue: deque[AnsweredChat] = deque()
        self._wake = asyncio.Event()
        self._num_kept = 0
        self._num_body_bytes = 0
        """Of the requests whose answers are kept."""

    def keeps(self, body: bytes, scope: ExitStack) -> bool:
        """Whether one more answer may be kept while it passes, and its body with it; `scope` ends with both."""
        num_bytes = len(body)
        if (
            num_bytes >= LARGE_BODY_BYTES
            or self._num_kept >= MAX_KEPT_ANSWERS
            or self._num_body_bytes + num_bytes > MAX_KEPT_PROMPT_BYTES
        ):
            return False
        self._num_kept += 1
        self._num_body_bytes += num_bytes
        scope.callback(self._pass, num_bytes)
        return True

    def offer(self, chat: AnsweredChat) -> None:
        """Its answer is over and whole. Where many wait already it is let go."""
        if len(self._queue) < MAX_QUEUED_ANSWERS and chat.may_add_a_block:
            self._queue.append(chat)
            self._wake.set()

    async def run(self) -> None:
        """Claims what is offered; never returns."""
        while True:
            while self._queue:
                try:
                    await self._claim(self._queue.popleft())
                except Exception:
                    _logger.exception("claiming an answer failed")
            self._wake.clear()
            await self._wake.wait()

    async def _claim(self, chat: AnsweredChat) -> None:
        chain = await self._threads.in_thread(chat.chain)
        if len(chain) > len(chat.prompt.chain) and chat.link.incarnation == chat.incarnation:
            # The whole chain: an engine lets go of a sequence as one, and a block must not outlive its parent.
            chat.link.claims.claim(
                chain,
                capacity_blocks=chat.link.capacity_blocks,
                engine_blocks_per_index_block=chat.geometry.engine_blocks_per_index_block,
            )

    def _pass(self, num_bytes: int) -> None:
        self._num_kept -= 1
        self._num_body_bytes -= num_bytes
