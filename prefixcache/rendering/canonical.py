"""A prompt as bytes, for an engine whose tokenizer is not known: the same prefix, the same bytes.

    F8 c | F9 tool | F9 tool | FA document | FB system | FE text | FB user | FE text | FF image C0 digest | FB ...
           keys sorted                       FB role   [FC name C0 value ...]  [FE text ...]  [FD call ...]

Every item begins with a byte that UTF-8 never has and ends where the next one begins, so two different conversations
never give the same bytes, a longer one only adds to those of a shorter one, and two texts share their bytes as far as
they are equal: with a length before each text they would differ from its first byte on.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping

from prefixcache.rendering.canonical_json import canonical_json
from prefixcache.rendering.chat_form import IGNORED_FIELDS, ChatForm, ChatMessage

_BEGIN = b"\xf8"
_TOOL = b"\xf9"
_DOCUMENT = b"\xfa"
_MESSAGE = b"\xfb"
_FIELD = b"\xfc"
_CALL = b"\xfd"
_TEXT = b"\xfe"
_OTHER_PART = b"\xff"
_VALUE = b"\xc0"


def canonical_chat(form: ChatForm) -> bytes:
    """Tools, documents, then the messages in order; template arguments are left out, most act on its very end."""
    items = [_BEGIN + b"c"]
    items += [_TOOL + canonical_json(_without_marks(tool)) for tool in form.tools or ()]
    items += [_DOCUMENT + canonical_json(document) for document in form.documents or ()]
    for message in form.messages:
        _append_message(items, message)
    return b"".join(items)


def canonical_completion(prompt: str | array[int]) -> bytes:
    """A prompt that the caller wrote as a whole."""
    if isinstance(prompt, str):
        return _BEGIN + b"t" + _utf8(prompt)
    return _BEGIN + b"i" + prompt.tobytes()


def _append_message(items: list[bytes], message: ChatMessage) -> None:
    items += (_MESSAGE, _utf8(message.role))
    if message.name is not None:
        items += (_FIELD, b"name", _VALUE, _utf8(message.name))
    if message.tool_call_id is not None:
        items += (_FIELD, b"tool_call_id", _VALUE, _utf8(message.tool_call_id))
    if message.reasoning is not None:
        items += (_FIELD, b"reasoning", _VALUE, _utf8(message.reasoning))
    for kind, value in message.parts:
        items += (_TEXT, _utf8(value)) if kind == "text" else (_OTHER_PART, _utf8(kind), _VALUE, value.encode())
    items += [_CALL + canonical_json(call) for call in message.tool_calls]
    for name in sorted(message.others):
        items += (_FIELD, _utf8(name), _VALUE, canonical_json(message.others[name]))


def _without_marks(tool: object) -> object:
    if not isinstance(tool, Mapping):
        return tool
    return {name: value for name, value in tool.items() if name not in IGNORED_FIELDS}


def _utf8(text: str) -> bytes:
    return text.encode(errors="surrogatepass")
