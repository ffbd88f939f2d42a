"""The body of a chat completion, as far as it becomes the prompt."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from prefixcache.errors import InvalidRequest
from prefixcache.rendering.chat_form import (
    IGNORED_FIELDS,
    ChatForm,
    ChatMessage,
    content_parts,
    objects,
    optional_list,
    optional_text,
)

_REASONING_FIELDS = ("reasoning_content", "thinking", "reasoning")
_PLAIN_FIELDS = frozenset({"role", "content"})
_KNOWN_FIELDS = frozenset({*_PLAIN_FIELDS, "name", "tool_call_id", "tool_calls", *_REASONING_FIELDS})


def chat_form(body: Mapping[str, Any]) -> ChatForm:
    """Raises InvalidRequest for a body that no engine takes.

    Tools count whatever `tool_choice` says: vLLM leaves them in the prompt even with "none", unless it is started with
    --exclude-tools-when-tool-choice-none. A template of the client's own is refused by engines unless told otherwise.
    """
    if body.get("chat_template") is not None:
        raise InvalidRequest("a chat template of the client's own is not looked into", param="chat_template")
    arguments = body.get("chat_template_kwargs")
    if arguments is None:
        arguments = {}
    if not isinstance(arguments, Mapping):
        raise InvalidRequest("chat_template_kwargs must be an object", param="chat_template_kwargs")
    arguments = dict(arguments)
    effort = body.get("reasoning_effort")
    if effort is not None:
        arguments["reasoning_effort"] = effort
    # A field of the body wins over an argument of the same name.
    flags = {**_popped(arguments, ("add_generation_prompt", "continue_final_message", "documents")), **body}
    return ChatForm(
        messages=[_message(message) for message in objects(body.get("messages"), "messages")],
        tools=optional_list(body.get("tools"), "tools"),
        documents=optional_list(flags.get("documents"), "documents"),
        template_arguments=arguments,
        add_generation_prompt=flags.get("add_generation_prompt") is not False,
        continue_final_message=flags.get("continue_final_message") is True,
        add_special_tokens=body.get("add_special_tokens") is True,
    )


def _popped(arguments: dict[str, Any], names: tuple[str, ...]) -> dict[str, Any]:
    return {name: arguments.pop(name) for name in names if name in arguments}


def _message(message: Mapping[str, Any]) -> ChatMessage:
    role = message.get("role")
    if not isinstance(role, str):
        raise InvalidRequest("a message must have a role", param="messages")
    parts = content_parts(message.get("content"))
    if message.keys() <= _PLAIN_FIELDS:
        return ChatMessage(role=role, parts=parts)
    calls = message.get("tool_calls")
    return ChatMessage(
        role=role,
        parts=parts,
        name=optional_text(message.get("name"), "messages"),
        tool_call_id=optional_text(message.get("tool_call_id"), "messages"),
        reasoning=next((value for name in _REASONING_FIELDS if isinstance(value := message.get(name), str)), None),
        tool_calls=tuple(objects(calls, "messages")) if calls else (),
        others=_others(message),
    )


def _others(message: Mapping[str, Any]) -> Mapping[str, Any]:
    """Fields that we do not know; SDKs send many of them empty."""
    return {
        name: value
        for name, value in message.items()
        if name not in _KNOWN_FIELDS and name not in IGNORED_FIELDS and value not in (None, "", [], {})
    }
