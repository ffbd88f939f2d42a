"""Where rendering and tokenizing run: on the event loop while that is quick, else in one of a few threads.

    long body ──take_turn──► parsed, rendered, encoded ──turn closed──► the next one
                                 └── caller gone: when the thread is done

How many at a time is a matter of memory: what is made of a body may take four times its bytes, and more. One large one
leaves a thread to everybody else.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import Executor
from contextlib import ExitStack
from typing import Any, TypeVar

from prefixcache.limits import (
    LARGE_BODY_BYTES,
    OFFLOAD_BODY_BYTES,
    OFFLOAD_MESSAGES,
    TOKENIZE_INLINE_CHARS,
    TOKENIZE_THREADS,
)

T = TypeVar("T")
D = TypeVar("D")


class TokenizingThreads:
    """The threads that all prompts of one process share; those behind one object leave room for each other."""

    def __init__(self, executor: Executor) -> None:
        self._executor = executor
        self._turns = asyncio.Semaphore(2 * TOKENIZE_THREADS)
        self._large_turn = asyncio.Semaphore(1)
        self._large_work: asyncio.Future[Any] | None = None
        """What a thread does with a large body."""

    async def take_turn(self, turn: ExitStack, body_bytes: int) -> None:
        """Waits until no other large body is taken apart, or until few are of those that go to a thread.

        Until `turn` is closed; where that is when its prompts are read, or it is refused, the others wait as bytes.
        """
        if body_bytes >= LARGE_BODY_BYTES:
            await self._large_turn.acquire()
            turn.callback(self._end_large_turn)
        elif body_bytes >= OFFLOAD_BODY_BYTES:
            await self._turns.acquire()
            turn.callback(self._turns.release)

    async def inline_or_thread(
        self,
        draft: Callable[[], D],
        encode: Callable[[D], T],
        *,
        uncached_chars: Callable[[D], int],
        body_bytes: int,
        num_messages: int,
    ) -> T:
        """`encode(draft())`; what would hold the event loop for long is done in a thread."""
        if body_bytes < OFFLOAD_BODY_BYTES and num_messages < OFFLOAD_MESSAGES:
            drafted = draft()
            if uncached_chars(drafted) <= TOKENIZE_INLINE_CHARS:
                return encode(drafted)
            return await self.in_thread(encode, drafted)
        return await self.off_loop(lambda: encode(draft()), body_bytes=body_bytes)

    async def off_loop(self, function: Callable[[], T], *, body_bytes: int) -> T:
        """In a thread; of a large body, whose turn it is, to its end: it holds its memory when its caller is gone."""
        work = self.in_thread(function)
        if body_bytes < LARGE_BODY_BYTES:
            return await work
        self._large_work = asyncio.ensure_future(work)
        self._large_work.add_done_callback(self._end_work)
        return await asyncio.shield(self._large_work)

    async def in_thread(self, function: Callable[..., T], *arguments: object) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._executor, function, *arguments)

    def _end_work(self, work: asyncio.Future[Any]) -> None:
        self._large_work = None
        if not work.cancelled():
            work.exception()  # retrieved here: its caller may be gone

    def _end_large_turn(self) -> None:
        if self._large_work is None:
            self._large_turn.release()
        else:
            self._large_work.add_done_callback(lambda _: self._large_turn.release())
