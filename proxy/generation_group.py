"""All generations of one request: sent together, ended together.

`async with` owns them: whatever ends the scope before `done` aborts every one that has not ended.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import AsyncExitStack
from functools import partial
from types import TracebackType

from proxy.generation import Generation


class GenerationGroup:
    """Its futures never carry an exception: `error` does. The first generation that fails fails them all."""

    def __init__(self, members: Sequence[Generation]) -> None:
        loop = asyncio.get_running_loop()
        self.members = members
        self.first: asyncio.Future[None] = loop.create_future()
        """Set once any of them has a token, or the group is done: from here on an answer is certain."""
        self.done: asyncio.Future[None] = loop.create_future()
        self.error: Exception | None = None
        self._num_left = len(members)
        self._scopes = AsyncExitStack()
        for member in members:
            member.siblings = members if len(members) > 1 else ()
            member.first.add_done_callback(self._one_began)
            member.done.add_done_callback(partial(self._one_ended, member))
        if not members:
            self._finish()

    async def __aenter__(self) -> GenerationGroup:
        """Sends the requests. Raises Unavailable, and then none is left behind."""
        for stream in {member.whereabouts.stream for member in self.members}:
            if stream is not None:
                stream.check_read()  # once: the frames of this very request may be more than one buffer holds
        async with AsyncExitStack() as scopes:
            for member in self.members:
                await scopes.enter_async_context(member)
            self._scopes = scopes.pop_all()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._scopes.aclose()

    def raise_error(self) -> None:
        """Raises what a generation failed with, if one did."""
        if self.error is not None:
            raise self.error

    def _one_began(self, _first: asyncio.Future[None]) -> None:
        if not self.first.done():
            self.first.set_result(None)

    def _one_ended(self, member: Generation, _done: asyncio.Future[None]) -> None:
        self._num_left -= 1
        self.error = self.error or member.error
        if self.error is not None or not self._num_left:
            self._finish()

    def _finish(self) -> None:
        for future in (self.first, self.done):
            if not future.done():
                future.set_result(None)
