"""Where a request goes: to own workers, or to a plain engine.

A model that engines serve goes to them, any other one to own workers; what no worker of our own knows how to answer
goes to an engine as it is. Without engines everything is as if there were no such thing.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from contextlib import ExitStack

from aiohttp import web

from prefixcache.rendering.tokenizing_threads import TokenizingThreads
from proxy.engines.engine_handler import EngineHandler
from proxy.engines.engine_request import read_request
from proxy.generation_handler import GenerationHandler
from proxy.served_models import ServedModels
from proxy.tokenize_handlers import TokenizeHandlers

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class Dispatch:
    """Holds nothing of any request. `engines` is None if none is configured."""

    def __init__(
        self,
        *,
        served: ServedModels,
        generation: GenerationHandler,
        tokenize: TokenizeHandlers,
        engines: EngineHandler | None,
        threads: TokenizingThreads,
    ) -> None:
        self._served = served
        self._generation = generation
        self._tokenize = tokenize
        self._engines = engines
        self._threads = threads

    async def chat(self, request: web.Request) -> web.StreamResponse:
        return await self._by_model(request, self._generation.chat)

    async def completion(self, request: web.Request) -> web.StreamResponse:
        return await self._by_model(request, self._generation.completion)

    async def tokenize(self, request: web.Request) -> web.StreamResponse:
        return await self._by_model(request, self._tokenize.tokenize)

    async def detokenize(self, request: web.Request) -> web.StreamResponse:
        return await self._by_model(request, self._tokenize.detokenize)

    async def anything_else(self, request: web.Request) -> web.StreamResponse:
        """Only routed here where there are engines."""
        assert self._engines is not None
        with ExitStack() as turn:
            return await self._engines.answer(await read_request(request, self._threads, turn), turn)

    async def _by_model(self, request: web.Request, own: Handler) -> web.StreamResponse:
        """A body that names no model is for an engine to complain about, or to answer with its only one."""
        if self._engines is None:
            return await own(request)
        with ExitStack() as turn:
            asked = await read_request(request, self._threads, turn)
            if asked.model is None or self._served.is_of_engines(asked.model):
                return await self._engines.answer(asked, turn)
            del asked
        # The bytes are still there, and all else of it is made anew.
        return await own(request)
