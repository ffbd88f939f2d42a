"""The body of Anthropic's Messages API, as far as it becomes the prompt: the chat that vLLM makes of it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from prefixcache.errors import InvalidRequest
from prefixcache.rendering.chat_form import (
    IGNORED_FIELDS,
    ChatForm,
    ChatMessage,
    content_parts,
    joined_text,
    objects,
    optional_list,
    optional_text,
)

_BILLING_PREFIX = "x-anthropic-billing-header"
"""Begins a system block of Claude Code that differs with every request; vLLM leaves it out, too."""

_UNSEEN_BLOCKS = frozenset({"redacted_thinking", "tool_reference"})
"""Blocks that no prompt shows."""


def messages_form(body: Mapping[str, Any]) -> ChatForm:
    """Raises InvalidRequest for a body that no engine takes."""
    given = objects(body.get("messages"), "messages")
    system = [*_system_texts(body.get("system"))]
    messages: list[ChatMessage] = []
    for message in given:
        if message.get("role") == "system":
            system += _system_texts(message.get("content"))
        else:
            messages += _messages(message)
    if system:
        messages.insert(0, ChatMessage(role="system", parts=content_parts("".join(system))))
    tools = optional_list(body.get("tools"), "tools")
    arguments = body.get("chat_template_kwargs")
    return ChatForm(
        messages=messages,
        tools=None if tools is None else [_tool(tool) for tool in objects(tools, "tools")],
        template_arguments=dict(arguments) if isinstance(arguments, Mapping) else {},
    )


def _system_texts(content: object) -> list[str]:
    texts = [part.value for part in content_parts(content) if part.kind == "text"]
    return [text for text in texts if not text.startswith(_BILLING_PREFIX)]


def _messages(message: Mapping[str, Any]) -> list[ChatMessage]:
    """Results of tools are messages of their own, before what the user says beside them."""
    role = message.get("role")
    if not isinstance(role, str):
        raise InvalidRequest("a message must have a role", param="messages")
    content = message.get("content")
    if not isinstance(content, list):
        return [ChatMessage(role=role, parts=content_parts(content))]
    results: list[ChatMessage] = []
    calls: list[Mapping[str, Any]] = []
    thoughts: list[str] = []
    rest: list[object] = []
    for block in content:
        kind = block.get("type") if isinstance(block, Mapping) else None
        if kind == "tool_result" and role == "user":
            results += _tool_result(block)
        elif kind == "tool_use":
            calls.append(_tool_call(block))
        elif kind == "thinking":
            thoughts.append(optional_text(block.get("thinking"), "messages") or "")
        elif kind not in _UNSEEN_BLOCKS:
            rest.append(block)
    parts = content_parts(rest)
    if role == "user" and not parts and results:
        return results
    said = ChatMessage(
        role=role, parts=parts, reasoning="".join(thoughts) if thoughts else None, tool_calls=tuple(calls)
    )
    return [*results, said]


def _tool_result(block: Mapping[str, Any]) -> list[ChatMessage]:
    content = block.get("content")
    result = ChatMessage(
        role="tool",
        parts=content_parts(joined_text(content, "\n")),
        tool_call_id=optional_text(block.get("tool_use_id"), "messages"),
    )
    shown = tuple(part for part in content_parts(content) if part.kind != "text")
    return [result, ChatMessage(role="user", parts=shown)] if shown else [result]


def _tool_call(block: Mapping[str, Any]) -> Mapping[str, Any]:
    function = {"name": block.get("name"), "arguments": block.get("input") or {}}
    return {"id": block.get("id"), "type": "function", "function": function}


def _tool(tool: Mapping[str, Any]) -> Mapping[str, Any]:
    """As a chat has it; tools that the server brings along have no schema and stay as they are."""
    if "input_schema" not in tool:
        return {name: value for name, value in tool.items() if name not in IGNORED_FIELDS}
    function = {
        "name": tool.get("name"),
        "description": tool.get("description"),
        "parameters": tool["input_schema"],
    }
    return {"type": "function", "function": function}
