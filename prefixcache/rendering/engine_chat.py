"""A conversation through the chat template, in the shape in which vLLM hands it over.

    content     one text, the parts joined by a newline where the template wants text, else a list of text parts
    tool calls  arguments as objects
    tools       type, then name, description and parameters (null where missing), then whatever else there is
    others      only what templates know: name, tool_call_id, reasoning

SGLang differs in little, such as the wrapping of tools: its prompts are cut a few tokens elsewhere, and the same
prefix still gives the same ids. What an image, a sound or a file becomes only the engine knows: here its digest stands
in its place as text, so that ids before it are those of the engine and equal images still share what follows.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from prefixcache.errors import InvalidRequest
from prefixcache.rendering.chat_form import ChatForm, ChatMessage, Part
from prefixcache.rendering.renderer import RenderedPrompt, Renderer

_DIGEST_CHARS = 32
_FUNCTION_FIELDS = ("name", "description", "parameters")


def render_chat_form(renderer: Renderer, form: ChatForm) -> RenderedPrompt:
    """Raises InvalidRequest for a chat that the template refuses; ValueError for arguments that are no JSON."""
    if form.continue_final_message and form.add_generation_prompt:
        raise InvalidRequest("continue_final_message and add_generation_prompt exclude each other")
    if form.continue_final_message and not form.messages:
        raise InvalidRequest("continue_final_message needs a message", param="messages")
    return renderer.render_unmarked(
        [_template_message(renderer, message) for message in form.messages],
        tools=None if form.tools is None else _template_tools(form.tools),
        documents=form.documents,
        add_generation_prompt=form.add_generation_prompt,
        continue_final_message=form.continue_final_message,
        template_arguments=form.template_arguments,
        add_special_tokens=form.add_special_tokens,
    )


def _template_message(renderer: Renderer, message: ChatMessage) -> dict[str, Any]:
    content = _content(message.parts, takes_parts=renderer.takes_parts)
    shown: dict[str, Any] = {"role": message.role, "content": content}
    if message.tool_calls:
        shown["tool_calls"] = [
            _tool_call(call, as_object=renderer.takes_argument_objects) for call in message.tool_calls
        ]
    if message.name is not None:
        shown["name"] = message.name
    if message.tool_call_id is not None:
        shown["tool_call_id"] = message.tool_call_id
    if message.reasoning is not None:
        shown["reasoning"] = message.reasoning
    return shown


def _content(parts: Sequence[Part], *, takes_parts: bool) -> str | list[dict[str, str]]:
    if len(parts) == 1 and parts[0].kind == "text":
        return parts[0].value
    texts = [value if kind == "text" else f"<{kind} {value[:_DIGEST_CHARS]}>" for kind, value in parts]
    if takes_parts and len(texts) > 1:
        return [{"type": "text", "text": text} for text in texts]
    return "\n".join(texts)


def _tool_call(call: Mapping[str, Any], *, as_object: bool) -> dict[str, Any]:
    function = call.get("function")
    if not isinstance(function, Mapping):
        raise InvalidRequest("a tool call must have a function", param="messages")
    arguments = function.get("arguments") or {}
    if as_object and isinstance(arguments, str):
        arguments = json.loads(arguments)
    elif not as_object and not isinstance(arguments, str):
        arguments = json.dumps(arguments)
    return {**call, "function": {**function, "arguments": arguments}}


def _template_tools(tools: Sequence[Any]) -> list[dict[str, Any]]:
    """Tools that are no functions are left out: the server itself brings them along."""
    functions = [tool["function"] for tool in tools if isinstance(tool, Mapping) and "function" in tool]
    if not all(isinstance(function, Mapping) for function in functions):
        raise InvalidRequest("the function of a tool must be an object", param="tools")
    return [
        {"type": "function", "function": {**{name: function.get(name) for name in _FUNCTION_FIELDS}, **function}}
        for function in functions
    ]
