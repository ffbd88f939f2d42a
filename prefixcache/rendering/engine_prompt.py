"""From the body of a request to a plain engine to the names of its prompt's prefixes.

                                  ┌─ with its tokenizer ──> template ──> the engine's own token ids ─┐
body ──> chat, or whole prompts ──┤                                                                  ├─> index hashes
                                  └─ without ─────────────> canonical bytes in prompt order ─────────┘   from the root
"""

from __future__ import annotations

import json
from array import array
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeAlias

from prefixcache.errors import InvalidRequest
from prefixcache.hashing import chain, engine_root
from prefixcache.limits import MAX_CACHE_KEY_CHARS, MAX_MATCH_BLOCKS, MAX_MESSAGES, MAX_PREDICTED_TEXT_BYTES
from prefixcache.rendering.canonical import canonical_chat, canonical_completion
from prefixcache.rendering.chat_body import chat_form
from prefixcache.rendering.chat_form import ChatForm, ChatMessage, content_parts
from prefixcache.rendering.completions_body import CompletionForm, completion_form
from prefixcache.rendering.engine_chat import render_chat_form
from prefixcache.rendering.messages_body import messages_form
from prefixcache.rendering.renderer import RenderedPrompt, Renderer
from prefixcache.rendering.responses_body import responses_form
from prefixcache.rendering.tokenizing_threads import TokenizingThreads
from prefixcache.types import KV_BLOCK_SIZE, TOKEN_BYTES, EngineGeometry, Unit, num_common_tokens, pack_tokens

READERS: Mapping[str, Callable[[Mapping[str, Any]], ChatForm | CompletionForm]] = {
    "/v1/chat/completions": chat_form,
    "/v1/completions": completion_form,
    "/v1/messages": messages_form,
    "/v1/responses": responses_form,
}
"""The paths whose prompts are predicted; those of every other one pass unseen."""

CACHE_KEY_FIELDS = ("cache_salt", "prompt_cache_key", "extra_key", "lora_path", "previous_response_id", "conversation")
"""Fields by which a client keeps prompts apart that look alike: two prompts share only if all of them are equal."""

UNKNOWN_TOKENIZER = "bytes"

_MESSAGES_OF_ONE_RENDERED = 10
"""Messages that take as long to be written down in canonical bytes as one takes in a chat template."""

_KEY_ENCODER = json.JSONEncoder(sort_keys=True)
_LONG_KEY = f"a key that keeps prompts apart has more than {MAX_CACHE_KEY_CHARS} characters"

_NEXT = ChatMessage(role="user", parts=content_parts("and then?"))
"""What the user may say next: templates write the last answer of a chat otherwise than those before."""

_Draft: TypeAlias = "RenderedPrompt | array[int] | str | bytes"
"""Text to be tokenized; token ids; without a tokenizer also a caller's text, and a chat as canonical bytes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EnginePrompt:
    """One prompt and the names of its prefixes."""

    geometry: EngineGeometry
    """By which it was cut into index blocks."""
    root: int
    """Before the first of its hashes."""
    num_units: int
    chain: list[int]
    """Hashes of its full index blocks, at most limits.MAX_MATCH_BLOCKS: nothing deeper is looked up."""
    tail: bytes
    """What follows those blocks, less than one: with the chain all that is kept of the prompt, however long."""
    prompt_tokens_estimate: int | None
    """Known where token ids are; an image counts there as the few tokens of its digest."""
    others: tuple[EnginePrompt, ...] = ()
    """Further prompts of a completion: the first one decides the route, and they go with it."""

    @property
    def unit(self) -> Unit:
        return self.geometry.unit

    def begins(self, units: bytes) -> bool:
        """Whether units of the same root begin with it, as far as it was cut into blocks."""
        width = self.geometry.index_block_bytes
        end = len(self.chain) * width
        return units.startswith(self.tail, end) and chain(self.root, units[:end], width) == self.chain


class EnginePrompts:
    """Reads the prompts of requests to engines with one block size; without a `renderer` the tokenizer is not known."""

    def __init__(
        self, *, renderer: Renderer | None, threads: TokenizingThreads, block_size: int = KV_BLOCK_SIZE
    ) -> None:
        self._renderer = renderer
        self._threads = threads
        self.geometry = EngineGeometry(unit="byte" if renderer is None else "token", block_size=block_size)

    async def of(self, path: str, parsed: object, *, body_bytes: int, seed: int, model: str) -> EnginePrompt | None:
        """The prompt of a body that is plain JSON data; `path` begins with /v1, `model` is the name that was asked for.

        None where there is no telling: another path, a body that no engine takes, a chat that the template refuses.
        The engine answers those for itself. Costs one pass over the body and the tokenizing of what is new in it.
        """
        read = READERS.get(path)
        if read is None or not isinstance(parsed, Mapping):
            return None
        num_messages = _num_messages(parsed)
        if num_messages > MAX_MESSAGES:
            return None
        try:
            return await self._threads.inline_or_thread(
                partial(self._drafts, read, parsed),
                lambda drafts: self._prompt(self._root(parsed, seed=seed, model=model), drafts),
                uncached_chars=self._uncached_chars,
                body_bytes=body_bytes,
                num_messages=num_messages // (_MESSAGES_OF_ONE_RENDERED if self._renderer is None else 1),
            )
        except (InvalidRequest, RecursionError, ValueError, OverflowError):
            # Nested too deeply, not Unicode, no JSON in the arguments of a call, a number beyond all bounds.
            return None

    def answered(self, parsed: Mapping[str, Any], prompt: EnginePrompt, text: str) -> list[int]:
        """The chain of a chat's prompt with its answer behind it, as far as the next turn begins with both; blocking.

        That is the prompt's own chain where a template writes an answer that is history another way.
        """
        try:
            units = self._answered_units(chat_form(parsed), prompt, text)
        except (InvalidRequest, RecursionError, ValueError, OverflowError):
            return prompt.chain
        width = self.geometry.index_block_bytes
        held = len(prompt.chain)
        before = prompt.chain[-1] if prompt.chain else prompt.root
        return prompt.chain + chain(before, units[held * width : MAX_MATCH_BLOCKS * width], width)

    def _answered_units(self, form: ChatForm, prompt: EnginePrompt, text: str) -> bytes:
        """Nothing where the next turn does not begin with the prompt.

        Without the last token, which an engine has given out and not computed.
        """
        if form.continue_final_message or not form.add_generation_prompt:
            return b""
        messages = [*form.messages, ChatMessage(role="assistant", parts=content_parts(text))]
        renderer = self._renderer
        if renderer is None:
            return canonical_chat(replace(form, messages=messages))
        said = replace(form, messages=messages, add_generation_prompt=False, continue_final_message=True)
        asked = replace(form, messages=[*messages, _NEXT], add_generation_prompt=False)
        now, then = (pack_tokens(renderer.encode(render_chat_form(renderer, each))) for each in (said, asked))
        end = TOKEN_BYTES * prompt.num_units
        if not prompt.begins(now) or then[:end] != now[:end]:
            return b""
        end += TOKEN_BYTES * num_common_tokens(now[end:], then[end:])
        return now[: end - TOKEN_BYTES]

    def _root(self, body: Mapping[str, Any], *, seed: int, model: str) -> int:
        keys = {name: _key_text(body[name]) for name in CACHE_KEY_FIELDS if body.get(name) is not None}
        return engine_root(
            seed=seed,
            model=model,
            unit=self.geometry.unit,
            tokenizer=UNKNOWN_TOKENIZER if self._renderer is None else self._renderer.fingerprint,
            index_block_units=self.geometry.index_block_units,
            cache_keys=keys,
        )

    def _drafts(
        self, read: Callable[[Mapping[str, Any]], ChatForm | CompletionForm], body: Mapping[str, Any]
    ) -> list[_Draft]:
        form = read(body)
        renderer = self._renderer
        if isinstance(form, ChatForm):
            if renderer is None:
                return [canonical_chat(form)]
            _check_length(part.value for message in form.messages for part in message.parts)
            draft = render_chat_form(renderer, form)
            _check_length([draft.text])
            return [draft]
        if renderer is None:
            return [*form.prompts]
        _check_length(prompt for prompt in form.prompts if isinstance(prompt, str))
        return [
            renderer.raw(_unicode(prompt), add_special_tokens=form.add_special_tokens)
            if isinstance(prompt, str)
            else prompt
            for prompt in form.prompts
        ]

    def _uncached_chars(self, drafts: list[_Draft]) -> int:
        if self._renderer is None:
            return 0
        return sum(self._renderer.uncached_chars(draft) for draft in drafts if isinstance(draft, RenderedPrompt))

    def _prompt(self, root: int, drafts: list[_Draft]) -> EnginePrompt:
        first, *others = [self._one(root, draft) for draft in drafts]
        return replace(first, others=tuple(others)) if others else first

    def _one(self, root: int, draft: _Draft) -> EnginePrompt:
        ids = draft if isinstance(draft, array) else None
        if isinstance(draft, RenderedPrompt):
            assert self._renderer is not None
            ids = self._renderer.encode(draft)
        units = _canonical(draft) if self._renderer is None else pack_tokens(ids or ())
        width = self.geometry.index_block_bytes
        hashed = units[: MAX_MATCH_BLOCKS * width]
        hashes = chain(root, hashed, width)
        return EnginePrompt(
            root=root,
            geometry=self.geometry,
            num_units=len(units) if self._renderer is None else len(units) // TOKEN_BYTES,
            chain=hashes,
            tail=hashed[len(hashes) * width :],
            prompt_tokens_estimate=None if ids is None else len(ids),
        )


def _key_text(value: object) -> str:
    """Its JSON. Raises InvalidRequest where that is too long, as soon as it is."""
    if isinstance(value, str):
        if len(value) <= MAX_CACHE_KEY_CHARS:
            return json.dumps(value)
        raise InvalidRequest(_LONG_KEY)
    parts: list[str] = []
    num_chars = 0
    for part in _KEY_ENCODER.iterencode(value):
        parts.append(part)
        num_chars += len(part)
        if num_chars > MAX_CACHE_KEY_CHARS:
            raise InvalidRequest(_LONG_KEY)
    return "".join(parts)


def _num_messages(body: Mapping[str, Any]) -> int:
    """Of a chat, or items of a response's input."""
    lists = [value for name in ("messages", "input") if isinstance(value := body.get(name), list)]
    return max(map(len, lists), default=0)


def _check_length(texts: Iterable[str]) -> None:
    """Raises InvalidRequest for what would take too much memory to be rendered, or tokenized."""
    if sum(map(_num_bytes, texts)) > MAX_PREDICTED_TEXT_BYTES:
        raise InvalidRequest(f"a prompt of more than {MAX_PREDICTED_TEXT_BYTES} bytes is not tokenized")


def _num_bytes(text: str) -> int:
    """As UTF-8, of which a long text is not made to be counted."""
    return len(text) if text.isascii() or len(text) > MAX_PREDICTED_TEXT_BYTES else len(text.encode())


def _canonical(draft: _Draft) -> bytes:
    if isinstance(draft, bytes):
        return draft
    assert not isinstance(draft, RenderedPrompt)
    return canonical_completion(draft)


def _unicode(text: str) -> str:
    """Raises UnicodeEncodeError, a ValueError, for a text with an unpaired surrogate, which has no tokens."""
    if not text.isascii():
        text.encode()
    return text
