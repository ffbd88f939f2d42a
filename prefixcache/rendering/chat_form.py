"""A conversation in one shape, whichever surface it came by: what of it goes into an engine's prompt, in its order."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from prefixcache.errors import InvalidRequest
from prefixcache.rendering.canonical_json import canonical_json

_TEXT_FIELDS = {
    "text": "text",
    "input_text": "text",
    "output_text": "text",
    "summary_text": "text",
    "reasoning_text": "text",
    "refusal": "refusal",
    "thinking": "thinking",
}
"""Types of content parts that are text, and where in the part it stands."""

_KINDS = {
    **dict.fromkeys(("image_url", "input_image"), "image"),
    **dict.fromkeys(("audio_url", "input_audio"), "audio"),
    "video_url": "video",
    **dict.fromkeys(("input_file", "document"), "file"),
}
"""Types of content parts that mean the same on different surfaces."""

_REFERENCE_FIELDS = (
    *("uuid", "image_url", "audio_url", "video_url", "input_audio", "source", "file", "image", "audio", "video"),
    *("url", "data", "file_data", "file_url", "file_id"),
)
"""Where a part says which image, sound or file it is; the first that is there counts."""

IGNORED_FIELDS = frozenset({"cache_control"})
"""Marks that clients move from turn to turn and that never reach a prompt."""


class Part(NamedTuple):
    """A piece of a message's content."""

    kind: str
    """ "text", or what else it is: "image", "audio", "video", "file" or a type that we do not know."""
    value: str
    """The text; else the sha-256 of the reference, a URL or a data URI, so that equal images are equal parts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatMessage:
    """One message. Everything but role, parts and tool calls is as the client sent it."""

    role: str
    parts: tuple[Part, ...] = ()
    name: str | None = None
    tool_call_id: str | None = None
    reasoning: str | None = None
    tool_calls: tuple[Mapping[str, Any], ...] = ()
    """As in OpenAI's chat; the arguments may be JSON text or an object."""
    others: Mapping[str, Any] = field(default_factory=dict)
    """Fields that we do not know."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatForm:
    """What a body says about the prompt; sampling and everything else is left out."""

    messages: Sequence[ChatMessage]
    tools: Sequence[Any] | None = None
    """As in OpenAI's chat."""
    documents: Sequence[Any] | None = None
    template_arguments: Mapping[str, Any] = field(default_factory=dict)
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    add_special_tokens: bool = False


def content_parts(content: object) -> tuple[Part, ...]:
    """Content of any surface: nothing, a text, or a list of parts. Raises InvalidRequest for anything else."""
    if content is None or content == "":
        return ()
    if isinstance(content, str):
        return (Part("text", content),)
    if not isinstance(content, list):
        raise InvalidRequest("the content of a message must be a text or a list of parts", param="messages")
    return tuple(part for item in content if (part := _part(item)) is not None)


def joined_text(content: object, separator: str) -> str:
    """The texts in some content."""
    return separator.join(part.value for part in content_parts(content) if part.kind == "text")


def optional_text(value: object, name: str) -> str | None:
    """Raises InvalidRequest unless it is a text or nothing."""
    if value is None or isinstance(value, str):
        return value
    raise InvalidRequest(f"{name} must be a string", param=name)


def optional_list(value: object, name: str) -> list[Any] | None:
    """Raises InvalidRequest unless it is a list or nothing."""
    if value is None or isinstance(value, list):
        return value
    raise InvalidRequest(f"{name} must be a list", param=name)


def objects(value: object, name: str) -> list[Mapping[str, Any]]:
    """Raises InvalidRequest unless it is a list of objects."""
    if not isinstance(value, list) or not all(isinstance(item, Mapping) for item in value):
        raise InvalidRequest(f"{name} must be a list of objects", param=name)
    return value


def _part(item: object) -> Part | None:
    """None for a part that says nothing."""
    if isinstance(item, str):
        return Part("text", item)
    if not isinstance(item, Mapping):
        raise InvalidRequest("a part of a message's content must be an object", param="messages")
    kind = item.get("type", "text" if "text" in item else next(filter(item.__contains__, _KINDS), "unknown"))
    if not isinstance(kind, str):
        raise InvalidRequest("the type of a part of a message's content must be a string", param="messages")
    if kind in _TEXT_FIELDS:
        text = optional_text(item.get(_TEXT_FIELDS[kind]), "messages")
        return None if text is None else Part("text", text)
    return Part(_KINDS.get(kind, kind), hashlib.sha256(_reference(item)).hexdigest())


def _reference(part: Mapping[str, Any]) -> bytes:
    for name in _REFERENCE_FIELDS:
        value = part.get(name)
        if isinstance(value, str):
            if name == "data" and isinstance(part.get("media_type"), str):
                value = f"data:{part['media_type']};base64,{value}"
            return value.encode(errors="surrogatepass")
        if isinstance(value, Mapping):
            return _reference(value)
    return canonical_json({name: value for name, value in part.items() if name not in IGNORED_FIELDS})
