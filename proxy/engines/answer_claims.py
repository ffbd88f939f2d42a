"""Claims of prompts with their answers: what an engine has computed is what the next turn of the chat begins with.

    answer over ──offer──► queue ──one at a time, in a thread──► its text ──► chain of the next turn ──► claimed

The prompt alone is claimed at the first byte of the answer; this comes after its last one, and nobody waits for it. It
is work of the second rank: one thread of those that tokenize at most, few answers kept, and none where many wait.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

from prefixcache.limits import MAX_KEPT_ANSWERS, MAX_QUEUED_ANSWERS
from prefixcache.rendering.engine_prompt import EnginePrompt, EnginePrompts
from prefixcache.rendering.tokenizing_threads import TokenizingThreads
from proxy.engines.answer_text import KeptAnswer
from proxy.engines.engine_link import EngineLink
from proxy.engines.prompt_geometry import PromptGeometry

_logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class AnsweredChat:
    """A chat whose answer is over."""

    parsed: Mapping[str, Any]
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
        return self.prompts.answered(self.parsed, self.prompt, text) if text else []

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

    def keeps(self, scope: ExitStack) -> bool:
        """Whether one more answer may be kept while it passes; `scope` ends with it."""
        if self._num_kept >= MAX_KEPT_ANSWERS:
            return False
        self._num_kept += 1
        scope.callback(self._pass)
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

    def _pass(self) -> None:
        self._num_kept -= 1
