"""Where rendering and tokenizing run: on the event loop while that is quick, else in one of a few threads."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import Executor
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
        self._large = asyncio.Semaphore(TOKENIZE_THREADS - 1)

    async def inline_or_thread(
        self,
        draft: Callable[[], D],
        encode: Callable[[D], T],
        *,
        uncached_chars: Callable[[D], int],
        body_bytes: int,
        num_messages: int,
    ) -> T:
        """`encode(draft())`; what would hold the event loop for long is done in a thread.

        Work on a long text leaves one thread to everybody else, and goes on holding its own when its caller is gone.
        """
        if body_bytes < OFFLOAD_BODY_BYTES and num_messages < OFFLOAD_MESSAGES:
            drafted = draft()
            if uncached_chars(drafted) <= TOKENIZE_INLINE_CHARS:
                return encode(drafted)
            return await self.in_thread(encode, drafted)
        if body_bytes < LARGE_BODY_BYTES:
            return await self.in_thread(lambda: encode(draft()))
        await self._large.acquire()
        work = asyncio.ensure_future(self.in_thread(lambda: encode(draft())))
        work.add_done_callback(self._end_large)
        return await asyncio.shield(work)

    async def in_thread(self, function: Callable[..., T], *arguments: object) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._executor, function, *arguments)

    def _end_large(self, work: asyncio.Future[Any]) -> None:
        self._large.release()
        if not work.cancelled():
            work.exception()  # retrieved here: its caller may be gone
