"""Request validation: the bytes of a chat completion request -> ChatRequest, or an error that names the field."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import msgspec
from msgspec import UNSET, Raw, UnsetType

from prefixcache.errors import InvalidRequest
from proxy.body_fields import decoded, refuse_unless_no_ops
from proxy.message_fields import MessageFields, chat_messages
from proxy.sampling_fields import (
    SHARED_NO_OPS,
    GenerationOptions,
    SamplingFields,
    check_max_tokens,
    check_top_logprobs,
    generation_options,
)

NO_OPS: Mapping[str, tuple[Any, ...]] = {
    **SHARED_NO_OPS,
    "add_generation_prompt": (True,),
    "audio": (),
    "chat_template": (),
    "chat_template_kwargs": ({},),
    "continue_final_message": (False,),
    "echo": (False,),
    "function_call": ("none", "auto"),
    "functions": ([],),
    "modalities": (["text"],),
    "parallel_tool_calls": (True, False),
    "prediction": (),
    "reasoning_effort": (),
    "response_format": ({"type": "text"},),
    "service_tier": ("auto", "default"),
    "store": (False,),
    "tool_choice": ("none", "auto"),
    "tools": ([],),
    "verbosity": (),
    "web_search_options": (),
}
"""Fields that are not honoured, each with the values that ask for nothing."""


class ChatFields(SamplingFields, kw_only=True, forbid_unknown_fields=True):
    messages: list[MessageFields]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None

    add_generation_prompt: Raw | UnsetType = UNSET
    audio: Raw | UnsetType = UNSET
    chat_template: Raw | UnsetType = UNSET
    chat_template_kwargs: Raw | UnsetType = UNSET
    continue_final_message: Raw | UnsetType = UNSET
    echo: Raw | UnsetType = UNSET
    function_call: Raw | UnsetType = UNSET
    functions: Raw | UnsetType = UNSET
    modalities: Raw | UnsetType = UNSET
    parallel_tool_calls: Raw | UnsetType = UNSET
    prediction: Raw | UnsetType = UNSET
    reasoning_effort: Raw | UnsetType = UNSET
    response_format: Raw | UnsetType = UNSET
    service_tier: Raw | UnsetType = UNSET
    store: Raw | UnsetType = UNSET
    tool_choice: Raw | UnsetType = UNSET
    tools: Raw | UnsetType = UNSET
    verbosity: Raw | UnsetType = UNSET
    web_search_options: Raw | UnsetType = UNSET


_decoder = msgspec.json.Decoder(ChatFields)


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatRequest:
    """A chat completion request whose every field is valid. Whether it fits the model is decided later."""

    options: GenerationOptions
    messages: tuple[Mapping[str, Any], ...]
    """As a chat template gets them; see `message_fields.chat_messages`."""


def parse_chat_request(body: bytes) -> ChatRequest:
    """Raises InvalidRequest. Costs one pass over the body."""
    fields = decoded(_decoder, body)
    refuse_unless_no_ops(fields, NO_OPS)
    options = generation_options(fields, max_tokens=_max_tokens(fields), top_logprobs=_top_logprobs(fields))
    return ChatRequest(options=options, messages=chat_messages(fields.messages))


def _max_tokens(fields: ChatFields) -> int | None:
    """The newer of the two names wins."""
    chosen: int | None = None
    for name in ("max_tokens", "max_completion_tokens"):
        value: int | None = getattr(fields, name)
        if value is not None:
            chosen = check_max_tokens(name, value)
    return chosen


def _top_logprobs(fields: ChatFields) -> int | None:
    if fields.logprobs:
        return check_top_logprobs("top_logprobs", fields.top_logprobs or 0)
    if fields.top_logprobs:
        raise InvalidRequest("top_logprobs is only allowed together with logprobs", param="top_logprobs")
    return None
