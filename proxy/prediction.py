"""From a request to the token ids, hashes and matches that a policy decides on.

ChatRequest ──render──> text ──encode──> ids ──chain from the root──> index hashes ──match──> depth by incarnation
             inline when cheap, else in a thread                      one call with a deadline, or no prediction
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from concurrent.futures import Executor
from dataclasses import dataclass

from prefixcache.errors import IndexUnavailable, InvalidRequest
from prefixcache.hashing import block_hashes, index_hashes
from prefixcache.index.base import PrefixIndex
from prefixcache.limits import OFFLOAD_BODY_BYTES, TOKENIZE_INLINE_CHARS
from prefixcache.metrics import ProxyMetrics
from prefixcache.rendering.renderer import RenderedPrompt
from prefixcache.types import pack_tokens
from proxy.chat_request import ChatRequest, parse_chat_request
from proxy.model import Model
from proxy.warnings_log import QuietLog


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """Token ids of one request and the names of its prefixes."""

    packed: bytes
    """u32 little-endian ids."""
    root: int
    index_hashes: list[int]

    @property
    def num_tokens(self) -> int:
        return len(self.packed) // 4


class PromptReader:
    """Parses, renders and encodes; what would hold the event loop for long goes to the executor."""

    def __init__(self, executor: Executor) -> None:
        self._executor = executor

    async def parse(self, body: bytes) -> ChatRequest:
        """Raises InvalidRequest."""
        if len(body) < OFFLOAD_BODY_BYTES:
            return parse_chat_request(body)
        return await asyncio.get_running_loop().run_in_executor(self._executor, parse_chat_request, body)

    async def read(self, model: Model, chat: ChatRequest, *, body_bytes: int, seed: int) -> Prompt:
        """The prompt of a request to `model`. Raises InvalidRequest if the chat template refuses the messages."""
        root = model.root_hash(seed=seed, cache_salt=chat.cache_salt)
        loop = asyncio.get_running_loop()
        if body_bytes < OFFLOAD_BODY_BYTES:
            rendered = model.renderer.render(chat.messages)
            if model.renderer.uncached_chars(rendered) <= TOKENIZE_INLINE_CHARS:
                return _encode(model, rendered, root)
            return await loop.run_in_executor(self._executor, _encode, model, rendered, root)
        return await loop.run_in_executor(self._executor, _render_and_encode, model, chat, root)


def _render_and_encode(model: Model, chat: ChatRequest, root: int) -> Prompt:
    return _encode(model, model.renderer.render(chat.messages), root)


def _encode(model: Model, rendered: RenderedPrompt, root: int) -> Prompt:
    packed = pack_tokens(model.renderer.encode(rendered))
    if not packed:
        raise InvalidRequest("the messages give an empty prompt", param="messages")
    hashes = block_hashes(root, packed, model.geometry.block_size)
    return Prompt(packed=packed, root=root, index_hashes=index_hashes(hashes, model.geometry.stride))


class Predictor:
    """Asks the index; an index that gives no answer costs the prediction, never the request."""

    def __init__(self, metrics: ProxyMetrics, log: QuietLog) -> None:
        self._metrics = metrics
        self._log = log

    async def depths(self, index: PrefixIndex, hashes: list[int]) -> Mapping[int, int]:
        """Matched index blocks by incarnation, empty without a prediction."""
        if not hashes:
            return {}
        began = time.perf_counter()
        try:
            return await index.match(hashes)
        except IndexUnavailable as error:
            self._metrics.index_lookup_failures.inc()
            self._log.warning("match", "no prediction, the index did not answer: %s", error)
            return {}
        finally:
            self._metrics.index_lookup.observe(time.perf_counter() - began)
