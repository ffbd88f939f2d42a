"""From a request to the token ids, hashes and matches that a policy decides on.

messages ──render──> text ──encode──> ids ──chain from the root──> index hashes ──match──> who has how much
text or token ids ───────────┘    inline when cheap, else in a thread         one call with a deadline, or none
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from prefixcache.errors import ContextLengthExceeded, IndexUnavailable, InvalidRequest
from prefixcache.hashing import block_hashes, index_hashes
from prefixcache.index.base import Match, PrefixIndex
from prefixcache.limits import MAX_ECHO_CHARS, MAX_MATCHES_AT_ONCE, OFFLOAD_BODY_BYTES
from prefixcache.metrics import ProxyMetrics
from prefixcache.rendering.renderer import RenderedPrompt, Renderer
from prefixcache.rendering.tokenizing_threads import TokenizingThreads
from prefixcache.types import pack_tokens
from proxy.chat_request import ChatRequest
from proxy.completion_request import CompletionRequest
from proxy.message_fields import with_argument_objects, with_joined_parts
from proxy.model import Model
from proxy.request_body import has_too_many_parts, too_many_parts
from proxy.warnings_log import QuietLog

T = TypeVar("T")

AnyRequest = ChatRequest | CompletionRequest


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """Token ids of one prompt and the names of its prefixes."""

    packed: bytes
    """u32 little-endian ids."""
    root: int
    index_hashes: list[int]
    field: str
    """Where it stood in the request."""
    echo: str = ""
    """Its text, where that was asked for."""

    @property
    def num_tokens(self) -> int:
        return len(self.packed) // 4


@dataclass(frozen=True, slots=True, kw_only=True)
class _Draft:
    """A prompt that may have to be encoded still."""

    content: RenderedPrompt | Sequence[int]
    field: str


class PromptReader(TokenizingThreads):
    """Parses, renders and encodes; what would hold the event loop for long goes to the executor."""

    async def parse(self, parse: Callable[[bytes], T], body: bytes) -> T:
        """Raises InvalidRequest; RequestTooLarge for a body of too many parts."""
        if has_too_many_parts(body):
            raise too_many_parts()
        if len(body) < OFFLOAD_BODY_BYTES:
            return parse(body)
        return await self.off_loop(partial(parse, body), body_bytes=len(body))

    async def read(
        self, model: Model, asked: AnyRequest, *, body_bytes: int, seed: int, most_tokens: int
    ) -> Sequence[Prompt]:
        """The prompts of a request to `model`.

        Raises InvalidRequest if the chat template refuses the messages, and for token ids that the model has not;
        ContextLengthExceeded, before anything is tokenized, for a text that must become more than `most_tokens`.
        """
        root = model.root_hash(seed=seed, cache_salt=asked.options.cache_salt)
        return await self.inline_or_thread(
            partial(_drafts, model, asked, most_tokens),
            partial(_encode, model, asked, root),
            uncached_chars=lambda drafts: uncached_chars(model.renderer, [draft.content for draft in drafts]),
            body_bytes=body_bytes,
            num_messages=len(asked.messages) if isinstance(asked, ChatRequest) else 0,
        )


def uncached_chars(renderer: Renderer, contents: Sequence[RenderedPrompt | Sequence[int]]) -> int:
    """Characters that would have to be tokenized."""
    return sum(renderer.uncached_chars(content) for content in contents if isinstance(content, RenderedPrompt))


def render_chat(
    renderer: Renderer, messages: Sequence[Mapping[str, Any]], *, add_generation_prompt: bool = True
) -> RenderedPrompt:
    """Messages as `chat_messages` gives them. Raises InvalidRequest if the chat template refuses them."""
    if not renderer.takes_parts:
        messages = with_joined_parts(messages)
    if renderer.takes_argument_objects:
        messages = with_argument_objects(messages)
    return renderer.render(messages, add_generation_prompt=add_generation_prompt)


def _drafts(model: Model, asked: AnyRequest, most_tokens: int) -> Sequence[_Draft]:
    drafts = _rendered(model, asked)
    for draft in drafts:
        least = model.renderer.least_tokens(draft.content) if isinstance(draft.content, RenderedPrompt) else 0
        if least > most_tokens:
            raise ContextLengthExceeded(
                f"This model's maximum context length is {most_tokens} tokens. However, {draft.field} has at least "
                f"{least} tokens. Please reduce its length.",
                param=draft.field,
            )
    return drafts


def _rendered(model: Model, asked: AnyRequest) -> Sequence[_Draft]:
    asked.options.check_vocabulary(model.vocab_size)
    if isinstance(asked, ChatRequest):
        return [_Draft(content=render_chat(model.renderer, asked.messages), field="messages")]
    asked.check_vocabulary(model.vocab_size)
    return [
        _Draft(
            content=model.renderer.raw(prompt, add_special_tokens=asked.add_special_tokens)
            if isinstance(prompt, str)
            else prompt,
            field=asked.name_of(place),
        )
        for place, prompt in enumerate(asked.prompts)
    ]


def _encode(model: Model, asked: AnyRequest, root: int, drafts: Sequence[_Draft]) -> Sequence[Prompt]:
    has_echo = isinstance(asked, CompletionRequest) and asked.echo
    prompts = [_prompt(model, draft, root, has_echo=has_echo) for draft in drafts]
    if sum(len(prompt.echo) for prompt in prompts) * asked.options.n > MAX_ECHO_CHARS:
        raise InvalidRequest(f"echo would repeat more than {MAX_ECHO_CHARS} characters", param="echo")
    return prompts


def _prompt(model: Model, draft: _Draft, root: int, *, has_echo: bool) -> Prompt:
    content = draft.content
    packed = pack_tokens(model.renderer.encode(content) if isinstance(content, RenderedPrompt) else content)
    if not packed:
        raise InvalidRequest(f"{draft.field} gives an empty prompt", param=draft.field)
    hashes = block_hashes(root, packed, model.geometry.block_size)
    return Prompt(
        packed=packed,
        root=root,
        index_hashes=index_hashes(hashes, model.geometry.stride),
        field=draft.field,
        echo=_echo(model.renderer, content) if has_echo else "",
    )


def _echo(renderer: Renderer, content: RenderedPrompt | Sequence[int]) -> str:
    """The text a caller wrote, or the text of the ids as an answer would have it."""
    if isinstance(content, RenderedPrompt):
        return content.text
    detokenizer = renderer.detokenizer()
    return detokenizer.feed(content) + detokenizer.flush()


class Predictor:
    """Asks the index; an index that gives no answer costs the prediction, never the request."""

    def __init__(self, metrics: ProxyMetrics, log: QuietLog) -> None:
        self._metrics = metrics
        self._log = log

    async def all_matches(
        self, index: PrefixIndex, prompts: Sequence[Prompt], candidates: Sequence[int] = ()
    ) -> Sequence[Match | None]:
        """`match` of each prompt, a few at a time: they share the connection with all other requests."""
        if len(prompts) == 1:
            return [await self.match(index, prompts[0].index_hashes, candidates)]
        matches: list[Match | None] = []
        for start in range(0, len(prompts), MAX_MATCHES_AT_ONCE):
            some = prompts[start : start + MAX_MATCHES_AT_ONCE]
            matches += await asyncio.gather(*(self.match(index, prompt.index_hashes, candidates) for prompt in some))
        return matches

    async def match(self, index: PrefixIndex, hashes: Sequence[int], candidates: Sequence[int] = ()) -> Match | None:
        """What the index says of the chain, with the load of `candidates`; None if it does not answer.

        A prompt shorter than an index block is not asked for: nobody can hold any of it.
        """
        if not hashes:
            return Match()
        began = time.perf_counter()
        try:
            return await index.match(hashes, candidates=candidates)
        except IndexUnavailable as error:
            self._metrics.index_lookup_failures.inc()
            self._log.warning("match", "no prediction, the index did not answer: %s", error)
            return None
        finally:
            self._metrics.index_lookup.observe(time.perf_counter() - began)
