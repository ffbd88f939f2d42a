"""Request validation of POST /tokenize and /detokenize, whose shapes are vLLM's."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
from msgspec import UNSET, Raw, UnsetType

from prefixcache.errors import InvalidRequest
from prefixcache.limits import MAX_TOKENIZE_CHARS
from proxy.body_fields import check_count, check_ids, decoded, refuse_unless_no_ops
from proxy.message_fields import MessageFields, chat_messages

NO_OPS: Mapping[str, tuple[Any, ...]] = {
    "chat_template": (),
    "chat_template_kwargs": ({},),
    "continue_final_message": (False,),
    "return_token_strs": (False,),
    "tools": ([],),
}
"""Fields that are not honoured, each with the values that ask for nothing."""


class TokenizeFields(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    model: str
    prompt: str | None = None
    messages: list[MessageFields] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None

    chat_template: Raw | UnsetType = UNSET
    chat_template_kwargs: Raw | UnsetType = UNSET
    continue_final_message: Raw | UnsetType = UNSET
    return_token_strs: Raw | UnsetType = UNSET
    tools: Raw | UnsetType = UNSET


class DetokenizeFields(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    model: str
    tokens: list[int]


_tokenize_decoder = msgspec.json.Decoder(TokenizeFields)
_detokenize_decoder = msgspec.json.Decoder(DetokenizeFields)


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenizeText:
    """A text as it is."""

    model: str
    prompt: str
    add_special_tokens: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenizeChat:
    """Messages, with what the chat template makes of them."""

    model: str
    messages: Sequence[Mapping[str, Any]]
    add_generation_prompt: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class DetokenizeRequest:
    """Token ids; whether the model has them is decided later."""

    model: str
    tokens: Sequence[int]

    def check_vocabulary(self, vocab_size: int) -> None:
        """Raises InvalidRequest for a token id that the model has not."""
        check_count("tokens", len(self.tokens), MAX_TOKENIZE_CHARS, "ids")
        check_ids("tokens", self.tokens, vocab_size)


def parse_tokenize_request(body: bytes) -> TokenizeText | TokenizeChat:
    """Raises InvalidRequest."""
    fields = decoded(_tokenize_decoder, body)
    refuse_unless_no_ops(fields, NO_OPS)
    if fields.messages is not None:
        if fields.prompt is not None:
            raise InvalidRequest("give prompt or messages, not both", param="prompt")
        if fields.add_special_tokens:
            raise InvalidRequest(
                "a chat template writes its own special tokens: none are added to messages", param="add_special_tokens"
            )
        return TokenizeChat(
            model=fields.model,
            messages=chat_messages(fields.messages),
            add_generation_prompt=fields.add_generation_prompt is not False,
        )
    if fields.prompt is None:
        raise InvalidRequest("prompt or messages is missing", param="prompt")
    if fields.add_generation_prompt is not None:
        raise InvalidRequest("add_generation_prompt belongs to messages only", param="add_generation_prompt")
    return TokenizeText(
        model=fields.model, prompt=fields.prompt, add_special_tokens=fields.add_special_tokens is not False
    )


def parse_detokenize_request(body: bytes) -> DetokenizeRequest:
    """Raises InvalidRequest."""
    fields = decoded(_detokenize_decoder, body)
    return DetokenizeRequest(model=fields.model, tokens=fields.tokens)
