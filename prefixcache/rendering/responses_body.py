"""The body of OpenAI's Responses API, as far as it becomes the prompt: the chat that vLLM makes of it.

What an earlier response holds is known to its engine alone: with `previous_response_id` only this body's part of the
prompt is seen. The id enters the root (`engine_prompt.py`), so that it is not taken for the beginning of a prompt.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from prefixcache.errors import InvalidRequest
from prefixcache.rendering.chat_form import (
    ChatForm,
    ChatMessage,
    content_parts,
    joined_text,
    objects,
    optional_list,
    optional_text,
)

_UNSEEN_FIELDS = frozenset({"id", "status", "type"})
"""Fields of an item that no prompt shows."""


def responses_form(body: Mapping[str, Any]) -> ChatForm:
    """Raises InvalidRequest for a body that no engine takes."""
    messages: list[ChatMessage] = []
    instructions = optional_text(body.get("instructions"), "instructions")
    if instructions:
        messages.append(ChatMessage(role="system", parts=content_parts(instructions)))
    asked = body.get("input")
    if isinstance(asked, str):
        messages.append(ChatMessage(role="user", parts=content_parts(asked)))
    else:
        for item in objects(asked, "input"):
            _add(messages, item)
    tools = optional_list(body.get("tools"), "tools")
    reasoning = body.get("reasoning")
    effort = reasoning.get("effort") if isinstance(reasoning, Mapping) else None
    return ChatForm(
        messages=messages,
        tools=None if not tools else [_tool(tool) for tool in objects(tools, "tools")],
        template_arguments={} if effort is None else {"reasoning_effort": effort},
    )


def _add(messages: list[ChatMessage], item: Mapping[str, Any]) -> None:
    """One item more; reasoning, text and calls of the assistant in a row are one message of a chat."""
    kind = item.get("type", "message")
    last = messages[-1] if messages and messages[-1].role == "assistant" else None
    if kind in ("function_call", "custom_tool_call"):
        call = _tool_call(item)
        if last is None:
            messages.append(ChatMessage(role="assistant", tool_calls=(call,)))
        else:
            messages[-1] = replace(last, tool_calls=(*last.tool_calls, call))
    elif kind == "reasoning":
        reasoning = joined_text(item.get("content") or item.get("summary"), "")
        if last is None or last.reasoning is not None:
            messages.append(ChatMessage(role="assistant", reasoning=reasoning))
        else:
            messages[-1] = replace(last, reasoning=reasoning)
    elif kind in ("function_call_output", "custom_tool_call_output"):
        call_id = optional_text(item.get("call_id"), "input")
        messages.append(ChatMessage(role="tool", parts=content_parts(item.get("output")), tool_call_id=call_id))
    elif kind == "message" and isinstance(role := item.get("role"), str):
        parts = content_parts(item.get("content"))
        if role == "assistant" and last is not None and not last.parts:
            messages[-1] = replace(last, parts=parts)
        else:
            messages.append(ChatMessage(role=role, parts=parts))
    elif isinstance(kind, str) and kind != "message":
        others = {name: value for name, value in item.items() if name not in _UNSEEN_FIELDS}
        messages.append(ChatMessage(role=kind, others=others))
    else:
        raise InvalidRequest("an item of input must have a type or a role", param="input")


def _tool_call(item: Mapping[str, Any]) -> Mapping[str, Any]:
    arguments = item.get("arguments") if item.get("type") == "function_call" else {"input": item.get("input")}
    function = {"name": item.get("name"), "arguments": arguments}
    return {"id": item.get("call_id"), "type": "function", "function": function}


def _tool(tool: Mapping[str, Any]) -> Mapping[str, Any]:
    """As a chat has it; tools that the server brings along stay as they are."""
    if tool.get("type") != "function":
        return tool
    return {"type": "function", "function": {name: value for name, value in tool.items() if name != "type"}}
