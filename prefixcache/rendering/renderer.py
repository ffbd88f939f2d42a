"""Chat messages to prompt to token ids, as the model's own files say: the one path for every program."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from prefixcache.errors import InvalidRequest
from prefixcache.rendering.control_tokens import ControlTokens, UnmarkedText, unmark
from prefixcache.rendering.detokenizer import Detokenizer
from prefixcache.rendering.detokenizers import detokenizer_factory
from prefixcache.rendering.encoder import Encoder
from prefixcache.rendering.length_bound import most_chars_per_token
from prefixcache.rendering.pieces import Piece
from prefixcache.rendering.special_affixes import special_affixes
from prefixcache.rendering.template import ChatTemplate
from prefixcache.rendering.tokenizer_config import DEFAULT_TEMPLATE, TOOL_USE_TEMPLATE, TokenizerConfig
from prefixcache.rendering.tokenizer_files import TokenizerFiles
from prefixcache.rendering.vocabulary import Vocabulary

ROLES = frozenset({"system", "developer", "user", "assistant", "tool", "function"})
"""Roles a message may have. Templates build control tokens from a role ("<|" + role + "|>"), so it is never free."""

_REASONING_KEYS = ("reasoning_content", "thinking", "reasoning")
"""Names under which clients send a message's reasoning; templates read the first or the second."""

_PROMPT_NAMES = frozenset({"messages", "tools", "documents", "add_generation_prompt", "chat_template"})

_END_TAG = "CONTINUE_FINAL_MESSAGE_TAG"
"""Put behind a message that is to be continued, and found again in the prompt; the text is transformers'."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RenderedPrompt:
    """What a chat template made of a request, or a text that a caller wrote as a whole, before it is tokenized."""

    text: str
    pieces: tuple[Piece, ...]
    """The same text, cut where it is encoded apart; made for the renderer that rendered it."""
    special_tokens: bool = False
    """Whether the tokenizer's own first and last tokens (BOS, where its post-processor adds one) come on top."""


class Renderer:
    """One model's chat templates and tokenizer. The constructor blocks for 0.1 to 1 s; methods are thread-safe.

    Raises ConfigError for files it cannot use. A model without any template can still detokenize.
    """

    def __init__(self, files: TokenizerFiles, *, clock: Callable[[], datetime] = datetime.now) -> None:
        config = TokenizerConfig.from_files(files)
        self.fingerprint = files.fingerprint
        self._clock = clock
        self._special_tokens = config.special_tokens
        self._templates = {name: ChatTemplate(source) for name, source in config.chat_templates.items()}
        self.takes_parts = all(item.takes_parts(self._special_tokens) for item in self._templates.values())
        """Whether a message's content may be a list of text parts, instead of one text."""
        self.takes_argument_objects = all(
            item.takes_argument_objects(self._special_tokens) for item in self._templates.values()
        )
        """Whether the arguments of a tool call may be an object, instead of its JSON text."""
        literals = frozenset[str]().union(*(template.literals for template in self._templates.values()))
        vocabulary = Vocabulary.load(files, config, literals)
        self.vocab_size = vocabulary.vocab_size
        self._control = ControlTokens(vocabulary.control)
        self._encoder = Encoder(vocabulary)
        self._tokenizer = vocabulary.tokenizer
        self._affixes = special_affixes(vocabulary.tokenizer)
        self._new_detokenizer = detokenizer_factory(vocabulary.tokenizer)
        self._most_chars_per_token = most_chars_per_token(vocabulary.tokenizer)

    @property
    def prints_date(self) -> bool:
        """Whether a template writes today's date: its prompts share nothing with yesterday's."""
        return any(template.prints_date for template in self._templates.values())

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        template_arguments: Mapping[str, Any] | None = None,
    ) -> RenderedPrompt:
        """The prompt for a chat: plain JSON data in, text out. Work is bounded by the size of both.

        The caller's strings never become control tokens. Raises InvalidRequest for messages the template refuses, an
        unknown role, an argument under a name the template's environment uses, and text that is not Unicode.
        """
        template = self._template(with_tools=tools is not None)
        try:
            variables = {
                **self._special_tokens,
                **self._arguments(template, template_arguments or {}),
                "messages": self._messages(messages),
                "tools": self._control.mark(tools),
                "documents": None,
                "add_generation_prompt": add_generation_prompt,
            }
        except RecursionError as error:
            raise InvalidRequest("the messages or tools are nested too deeply", param="messages") from error
        prompt = unmark(template.render(variables, self._clock()))
        if not _is_unicode(prompt.text):
            raise InvalidRequest("a message holds an unpaired surrogate, which is not Unicode text", param="messages")
        return RenderedPrompt(text=prompt.text, pieces=self._encoder.cut(prompt))

    def render_unmarked(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        documents: Sequence[Any] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        template_arguments: Mapping[str, Any] | None = None,
        add_special_tokens: bool = False,
    ) -> RenderedPrompt:
        """The prompt as transformers renders it and engines with it: for a prediction, never for a worker of our own.

        A role may be anything, and a control spelling of the caller's is a control token. Raises InvalidRequest as
        `render`, and for a final message that cannot be continued.
        """
        template = self._template(with_tools=tools is not None)
        for name in template_arguments or {}:
            if name in _PROMPT_NAMES | template.reserved_names:
                raise InvalidRequest(f"chat_template_kwargs may not set {name!r}", param="chat_template_kwargs")
        present = [_with_reasoning_names(message) for message in messages]
        variables = {
            **self._special_tokens,
            **(template_arguments or {}),
            "messages": [*present[:-1], _tagged(present[-1])] if continue_final_message else present,
            "tools": tools,
            "documents": documents,
            "add_generation_prompt": add_generation_prompt,
        }
        text = template.render(variables, self._clock())
        if continue_final_message:
            text = _until_tag(text)
        if not _is_unicode(text):
            raise InvalidRequest("a message holds an unpaired surrogate, which is not Unicode text", param="messages")
        return self.raw(text, add_special_tokens=add_special_tokens)

    def raw(self, text: str, *, add_special_tokens: bool = True) -> RenderedPrompt:
        """The prompt that a caller wrote as a whole, without a template: control spellings in it are control tokens.

        `add_special_tokens` as in the tokenizer's own `encode`: BOS and EOS where its post-processor adds them.
        """
        plain = UnmarkedText(text=text, starts=(), joints=())
        return RenderedPrompt(text=text, pieces=self._encoder.cut(plain), special_tokens=add_special_tokens)

    def encode(self, prompt: RenderedPrompt) -> array[int]:
        """Token ids of a prompt; blocking. A template writes its own first token: none is added to what it wrote."""
        ids = self._encoder.encode(prompt.pieces)
        if not prompt.special_tokens:
            return ids
        first, last = self._affixes
        return first + ids + last

    def decode(self, ids: Sequence[int]) -> str:
        """Text of ids, special tokens spelled out; blocking."""
        text: str = self._tokenizer.decode(ids, skip_special_tokens=False)
        return text

    def token_bytes(self, id: int) -> bytes | None:
        """What a token adds to a text, be it half a character; None for one that adds nothing (special, unknown)."""
        return self._new_detokenizer.token_bytes(id)

    def token_spelling(self, id: int) -> str | None:
        """The name of a token in the vocabulary; None for an unknown one."""
        spelling: str | None = self._tokenizer.id_to_token(id)
        return spelling

    def least_tokens(self, prompt: RenderedPrompt) -> int:
        """The fewest tokens that `encode` can give, without tokenizing; 0 where no bound is known."""
        return len(prompt.text) // self._most_chars_per_token if self._most_chars_per_token else 0

    def uncached_chars(self, prompt: RenderedPrompt) -> int:
        """Characters that `encode` would have to tokenize now; the others it remembers."""
        return self._encoder.uncached_chars(prompt.pieces)

    def detokenizer(self) -> Detokenizer:
        """A new one, for one stream of output ids."""
        return self._new_detokenizer()

    def _template(self, *, with_tools: bool) -> ChatTemplate:
        if with_tools and TOOL_USE_TEMPLATE in self._templates:
            return self._templates[TOOL_USE_TEMPLATE]
        if DEFAULT_TEMPLATE not in self._templates:
            raise InvalidRequest("this model has no chat template, so it cannot answer messages", param="messages")
        return self._templates[DEFAULT_TEMPLATE]

    def _messages(self, messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        if not messages:
            raise InvalidRequest("messages must not be empty", param="messages")
        return [self._message(index, message) for index, message in enumerate(messages)]

    def _message(self, index: int, message: Mapping[str, Any]) -> dict[str, Any]:
        role = message.get("role") if isinstance(message, Mapping) else None
        if not isinstance(role, str) or role not in ROLES:
            raise InvalidRequest(
                f"messages[{index}] must have a role among {', '.join(sorted(ROLES))}", param="messages"
            )
        marked: dict[str, Any] = self._control.mark(_with_reasoning_names(message))
        marked["role"] = role
        return marked

    def _arguments(self, template: ChatTemplate, arguments: Mapping[str, Any]) -> dict[str, Any]:
        taken = _PROMPT_NAMES | template.reserved_names | self._special_tokens.keys()
        for name in arguments:
            if name in taken:
                raise InvalidRequest(f"chat_template_kwargs may not set {name!r}", param="chat_template_kwargs")
        return {name: self._control.mark(value) for name, value in arguments.items()}


def _with_reasoning_names(message: Mapping[str, Any]) -> dict[str, Any]:
    # Clients send `"content": null`; templates know a missing key better than None.
    present = {key: value for key, value in message.items() if value is not None}
    if present.keys().isdisjoint(_REASONING_KEYS):
        return present
    reasoning = next(present[key] for key in _REASONING_KEYS if key in present)
    return {"thinking": reasoning, **present, "reasoning_content": reasoning}


def _tagged(message: Mapping[str, Any]) -> dict[str, Any]:
    """The message with a tag behind its last text."""
    content = message.get("content")
    if isinstance(content, str):
        return {**message, "content": f"{content}{_END_TAG} "}
    if isinstance(content, list) and content:
        return {**message, "content": [*content[:-1], {**content[-1], "text": f"{content[-1]['text']}{_END_TAG} "}]}
    raise InvalidRequest("continue_final_message needs a final message with text in it", param="messages")


def _until_tag(text: str) -> str:
    """The prompt up to the tag; a template that trims the message has taken the blank behind the tag."""
    place = text.rfind(_END_TAG)
    if place < 0:
        raise InvalidRequest("the chat template leaves out the final message, so it cannot be continued")
    return text[:place] if text.startswith(" ", place + len(_END_TAG)) else text[:place].rstrip()


def _is_unicode(text: str) -> bool:
    try:
        return text.isascii() or bool(text.encode())
    except UnicodeEncodeError:
        return False
