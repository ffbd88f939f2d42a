"""Messages of a chat: checked, and in the shape in which a chat template gets them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
from msgspec import UNSET, Raw, UnsetType

from prefixcache.errors import InvalidRequest
from prefixcache.limits import MAX_MESSAGES
from proxy.body_fields import MAX_SHOWN_CHARS, check_count, decoded, refuse_unless_no_op

_arguments_decoder = msgspec.json.Decoder(dict[str, Any])

ROLES = ("system", "developer", "user", "assistant", "tool")


class _Part(msgspec.Struct, forbid_unknown_fields=True):
    type: str
    text: str | None = None
    image_url: Raw | UnsetType = UNSET
    input_audio: Raw | UnsetType = UNSET
    file: Raw | UnsetType = UNSET
    refusal: Raw | UnsetType = UNSET


class _Function(msgspec.Struct, forbid_unknown_fields=True):
    name: str
    arguments: str


class _ToolCall(msgspec.Struct, forbid_unknown_fields=True):
    id: str
    function: _Function
    type: str = "function"
    index: int | None = None


class MessageFields(msgspec.Struct, forbid_unknown_fields=True):
    role: str
    content: str | list[_Part] | None = None
    name: str | None = None
    tool_call_id: str | None = None
    tool_calls: list[_ToolCall] | None = None
    reasoning_content: str | None = None
    annotations: Raw | UnsetType = UNSET
    audio: Raw | UnsetType = UNSET
    function_call: Raw | UnsetType = UNSET
    refusal: Raw | UnsetType = UNSET


def chat_messages(messages: Sequence[MessageFields]) -> tuple[Mapping[str, Any], ...]:
    """Content is text, a list of two and more text parts or, beside tool calls, None; `developer` is `system`.

    Raises InvalidRequest.
    """
    if not messages:
        raise InvalidRequest("messages must not be empty", param="messages")
    check_count("messages", len(messages), MAX_MESSAGES, "items")
    return tuple(_message(message, f"messages[{place}]") for place, message in enumerate(messages))


def _message(message: MessageFields, place: str) -> Mapping[str, Any]:
    role = message.role
    if role not in ROLES:
        raise InvalidRequest(f"{place}.role must be one of {', '.join(ROLES)}", param=f"{place}.role")
    refuse_unless_no_op(f"{place}.annotations", message.annotations, ([],))
    for name in ("audio", "function_call", "refusal"):
        refuse_unless_no_op(f"{place}.{name}", getattr(message, name), ())
    result: dict[str, Any] = {"role": "system" if role == "developer" else role, "content": _content(message, place)}
    if message.name is not None:
        result["name"] = message.name
    if role == "tool":
        if message.tool_call_id is None:
            raise InvalidRequest(f"{place}.tool_call_id is missing", param=f"{place}.tool_call_id")
        result["tool_call_id"] = message.tool_call_id
    elif message.tool_call_id is not None:
        raise InvalidRequest(f"{place}.tool_call_id belongs to tool messages only", param=f"{place}.tool_call_id")
    for name in ("tool_calls", "reasoning_content"):
        value = getattr(message, name)
        if value is None:
            continue
        if role != "assistant":
            raise InvalidRequest(f"{place}.{name} belongs to assistant messages only", param=f"{place}.{name}")
        result[name] = value
    if message.tool_calls is not None:
        result["tool_calls"] = [
            _tool_call(call, f"{place}.tool_calls[{n}]") for n, call in enumerate(message.tool_calls)
        ]
    return result


def _tool_call(call: _ToolCall, place: str) -> Mapping[str, Any]:
    if call.type != "function":
        raise InvalidRequest(f"{place}.type must be function", param=f"{place}.type")
    if call.function.arguments:
        decoded(_arguments_decoder, call.function.arguments.encode(), within=f"{place}.function.arguments")
    function = {"name": call.function.name, "arguments": call.function.arguments}
    return {"id": call.id, "type": call.type, "function": function}


def with_argument_objects(messages: Sequence[Mapping[str, Any]]) -> Sequence[Mapping[str, Any]]:
    """For a chat template that takes the arguments of tool calls as objects, which is what most of them iterate."""
    return [
        {**message, "tool_calls": list(map(_with_argument_object, message["tool_calls"]))}
        if "tool_calls" in message
        else message
        for message in messages
    ]


def _with_argument_object(call: Mapping[str, Any]) -> Mapping[str, Any]:
    function = call["function"]
    arguments = _arguments_decoder.decode(function["arguments"] or "{}")
    return {**call, "function": {**function, "arguments": arguments}}


def with_joined_parts(messages: Sequence[Mapping[str, Any]]) -> Sequence[Mapping[str, Any]]:
    """For a chat template that takes text only: parts joined by a newline, as vLLM does."""
    return [
        {**message, "content": "\n".join(part["text"] for part in content)}
        if isinstance(content := message["content"], list)
        else message
        for message in messages
    ]


def _content(message: MessageFields, place: str) -> str | list[Mapping[str, str]] | None:
    content = message.content
    if content is None:
        if message.role == "assistant" and message.tool_calls:
            return None
        raise InvalidRequest(f"{place}.content is missing", param=f"{place}.content")
    if isinstance(content, str):
        return content
    if not content:
        raise InvalidRequest(f"{place}.content must not be an empty list", param=f"{place}.content")
    texts: list[str] = []
    for number, part in enumerate(content):
        where = f"{place}.content[{number}]"
        if part.type != "text":
            kind = part.type[:MAX_SHOWN_CHARS]
            raise InvalidRequest(f"{where}: content of type {kind} is not supported, only text", param=f"{where}.type")
        for name in ("image_url", "input_audio", "file", "refusal"):
            refuse_unless_no_op(f"{where}.{name}", getattr(part, name), ())
        if part.text is None:
            raise InvalidRequest(f"{where}.text is missing", param=f"{where}.text")
        texts.append(part.text)
    return texts[0] if len(texts) == 1 else [{"type": "text", "text": text} for text in texts]
