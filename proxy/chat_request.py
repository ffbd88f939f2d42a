"""Request validation: the bytes of a chat completion request -> ChatRequest, or an error that names the field.

The body is decoded straight into typed structs. So a wrong type is refused where it stands, unknown fields are refused
by name, numbers are finite, strings are valid Unicode, and nothing is built from a value nobody reads: fields that are
not honoured stay raw bytes. Nesting is bounded by the types themselves.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import msgspec
from msgspec import UNSET, Raw, UnsetType

from prefixcache.errors import InvalidRequest
from prefixcache.limits import MAX_MESSAGES, MAX_METADATA_BYTES, MAX_STOP_STRING_CHARS, MAX_STOP_STRINGS

ROLES = ("system", "developer", "user", "assistant", "tool")
MAX_TEMPERATURE = 2.0

_MAX_NAME_CHARS = 100
"""A caller's own words are cut to this length in an error."""
_MAX_NO_OP_BYTES = 64

NO_OPS: Mapping[str, tuple[Any, ...]] = {
    "add_generation_prompt": (True,),
    "audio": (),
    "best_of": (1,),
    "chat_template": (),
    "chat_template_kwargs": ({},),
    "continue_final_message": (False,),
    "echo": (False,),
    "frequency_penalty": (0,),
    "function_call": ("none", "auto"),
    "functions": ([],),
    "ignore_eos": (False,),
    "length_penalty": (1,),
    "logit_bias": ({},),
    "logprobs": (False,),
    "min_p": (0,),
    "min_tokens": (0,),
    "modalities": (["text"],),
    "n": (1,),
    "parallel_tool_calls": (True, False),
    "prediction": (),
    "presence_penalty": (0,),
    "reasoning_effort": (),
    "repetition_penalty": (1,),
    "response_format": ({"type": "text"},),
    "service_tier": ("auto", "default"),
    "skip_special_tokens": (True,),
    "stop_token_ids": ([],),
    "store": (False,),
    "tool_choice": ("none", "auto"),
    "tools": ([],),
    "top_k": (-1, 0),
    "top_logprobs": (0,),
    "use_beam_search": (False,),
    "verbosity": (),
    "web_search_options": (),
}
"""Fields that are not honoured, each with the values that ask for nothing. Null asks for nothing everywhere."""


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


class _Message(msgspec.Struct, forbid_unknown_fields=True):
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


class _StreamOptions(msgspec.Struct, forbid_unknown_fields=True):
    include_usage: bool | None = None
    include_obfuscation: Raw | UnsetType = UNSET


class _Body(msgspec.Struct, forbid_unknown_fields=True):
    model: str
    messages: list[_Message]
    stream: bool | None = None
    stream_options: _StreamOptions | None = None
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    cache_salt: str | None = None
    user: str | None = None
    safety_identifier: str | None = None
    metadata: Raw | UnsetType = UNSET

    add_generation_prompt: Raw | UnsetType = UNSET
    audio: Raw | UnsetType = UNSET
    best_of: Raw | UnsetType = UNSET
    chat_template: Raw | UnsetType = UNSET
    chat_template_kwargs: Raw | UnsetType = UNSET
    continue_final_message: Raw | UnsetType = UNSET
    echo: Raw | UnsetType = UNSET
    frequency_penalty: Raw | UnsetType = UNSET
    function_call: Raw | UnsetType = UNSET
    functions: Raw | UnsetType = UNSET
    ignore_eos: Raw | UnsetType = UNSET
    length_penalty: Raw | UnsetType = UNSET
    logit_bias: Raw | UnsetType = UNSET
    logprobs: Raw | UnsetType = UNSET
    min_p: Raw | UnsetType = UNSET
    min_tokens: Raw | UnsetType = UNSET
    modalities: Raw | UnsetType = UNSET
    n: Raw | UnsetType = UNSET
    parallel_tool_calls: Raw | UnsetType = UNSET
    prediction: Raw | UnsetType = UNSET
    presence_penalty: Raw | UnsetType = UNSET
    reasoning_effort: Raw | UnsetType = UNSET
    repetition_penalty: Raw | UnsetType = UNSET
    response_format: Raw | UnsetType = UNSET
    service_tier: Raw | UnsetType = UNSET
    skip_special_tokens: Raw | UnsetType = UNSET
    stop_token_ids: Raw | UnsetType = UNSET
    store: Raw | UnsetType = UNSET
    tool_choice: Raw | UnsetType = UNSET
    tools: Raw | UnsetType = UNSET
    top_k: Raw | UnsetType = UNSET
    top_logprobs: Raw | UnsetType = UNSET
    use_beam_search: Raw | UnsetType = UNSET
    verbosity: Raw | UnsetType = UNSET
    web_search_options: Raw | UnsetType = UNSET


_decoder = msgspec.json.Decoder(_Body)
_metadata_decoder = msgspec.json.Decoder(dict[str, str])
_PLACE = re.compile(r"(?P<what>.*?)(?: - at `\$\.?(?P<place>.*)`)?", re.DOTALL)
_FIELD = re.compile(r"Object (?P<fault>contains unknown|missing required) field `(?P<name>.*)`", re.DOTALL)


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatRequest:
    """A chat completion request whose every field is valid. Whether it fits the model is decided later."""

    model: str
    messages: tuple[Mapping[str, Any], ...]
    """As the chat template gets them: content is text or, beside tool calls, None; `developer` is `system`."""
    stream: bool = False
    include_usage: bool = False
    max_tokens: int | None = None
    """None: as many as fit the context."""
    temperature: float = 1.0
    top_p: float = 1.0
    seed: int | None = None
    """0 <= seed < 2**64."""
    stop: tuple[str, ...] = ()
    cache_salt: str = ""


def parse_chat_request(body: bytes) -> ChatRequest:
    """Raises InvalidRequest. Costs one pass over the body."""
    parsed = _decoded(body)
    for name, no_ops in NO_OPS.items():
        _refuse_unless_no_op(name, getattr(parsed, name), no_ops)
    if not parsed.model:
        raise InvalidRequest("model must not be empty", param="model")
    _check_metadata(parsed.metadata)
    stream = bool(parsed.stream)
    return ChatRequest(
        model=parsed.model,
        messages=_messages(parsed.messages),
        stream=stream,
        include_usage=_include_usage(parsed.stream_options, stream),
        max_tokens=_max_tokens(parsed),
        temperature=_temperature(parsed.temperature),
        top_p=_top_p(parsed.top_p),
        seed=_seed(parsed.seed),
        stop=_stop(parsed.stop),
        cache_salt=parsed.cache_salt or "",
    )


def _decoded(body: bytes) -> _Body:
    try:
        return _decoder.decode(body)
    except msgspec.ValidationError as error:
        _raise_named(str(error))
    except RecursionError:
        raise InvalidRequest("the body is nested too deeply") from None
    except ValueError as error:
        raise InvalidRequest(f"the body is not valid JSON: {error}") from None


def _raise_named(message: str) -> NoReturn:
    """Turns msgspec's "<what> - at `$.<place>`" into an error whose `param` is the field."""
    match = _PLACE.fullmatch(message)
    what, place = (match["what"], match["place"] or "") if match else (message, "")
    if field := _FIELD.fullmatch(what):
        param = ".".join(part for part in (place, field["name"][:_MAX_NAME_CHARS]) if part)
        if field["fault"] == "missing required":
            raise InvalidRequest(f"{param} is missing", param=param) from None
        raise InvalidRequest(f"{param} is not a field that this server knows", param=param) from None
    where = place or "the body"
    raise InvalidRequest(f"{where}: {what[0].lower()}{what[1:]}", param=place or None) from None


def _refuse_unless_no_op(name: str, raw: Raw | UnsetType, no_ops: Sequence[Any]) -> None:
    if raw is UNSET:
        return
    given = bytes(raw)
    if given == b"null":
        return
    if len(given) <= _MAX_NO_OP_BYTES:
        value = msgspec.json.decode(given)
        # A bool is not a number here: `n: true` and `logprobs: 0` are mistakes, not no-ops.
        if any(value == no_op and isinstance(value, bool) == isinstance(no_op, bool) for no_op in no_ops):
            return
    raise InvalidRequest(f"{name} is not supported by this server", param=name)


def _check_metadata(raw: Raw | UnsetType) -> None:
    if raw is UNSET or bytes(raw) == b"null":
        return
    if len(raw) > MAX_METADATA_BYTES:
        raise InvalidRequest(f"metadata is longer than {MAX_METADATA_BYTES} bytes", param="metadata")
    try:
        _metadata_decoder.decode(raw)
    except (msgspec.DecodeError, RecursionError):
        raise InvalidRequest("metadata must be an object with string values", param="metadata") from None


def _messages(messages: Sequence[_Message]) -> tuple[Mapping[str, Any], ...]:
    if not messages:
        raise InvalidRequest("messages must not be empty", param="messages")
    if len(messages) > MAX_MESSAGES:
        raise InvalidRequest(
            f"messages has {len(messages)} items, at most {MAX_MESSAGES} are allowed", param="messages"
        )
    return tuple(_message(message, f"messages[{place}]") for place, message in enumerate(messages))


def _message(message: _Message, place: str) -> Mapping[str, Any]:
    role = message.role
    if role not in ROLES:
        raise InvalidRequest(f"{place}.role must be one of {', '.join(ROLES)}", param=f"{place}.role")
    _refuse_unless_no_op(f"{place}.annotations", message.annotations, ([],))
    for name in ("audio", "function_call", "refusal"):
        _refuse_unless_no_op(f"{place}.{name}", getattr(message, name), ())
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
    function = {"name": call.function.name, "arguments": call.function.arguments}
    return {"id": call.id, "type": call.type, "function": function}


def _content(message: _Message, place: str) -> str | None:
    """Text of a message; the texts of several parts are joined by a newline, as vLLM does for text-only templates."""
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
            kind = part.type[:_MAX_NAME_CHARS]
            raise InvalidRequest(f"{where}: content of type {kind} is not supported, only text", param=f"{where}.type")
        for name in ("image_url", "input_audio", "file", "refusal"):
            _refuse_unless_no_op(f"{where}.{name}", getattr(part, name), ())
        if part.text is None:
            raise InvalidRequest(f"{where}.text is missing", param=f"{where}.text")
        texts.append(part.text)
    return "\n".join(texts)


def _include_usage(options: _StreamOptions | None, stream: bool) -> bool:
    if options is None:
        return False
    if not stream:
        raise InvalidRequest("stream_options is only allowed together with stream", param="stream_options")
    _refuse_unless_no_op("stream_options.include_obfuscation", options.include_obfuscation, (False,))
    return bool(options.include_usage)


def _max_tokens(body: _Body) -> int | None:
    chosen: int | None = None
    for name in ("max_tokens", "max_completion_tokens"):
        value: int | None = getattr(body, name)
        if value is None:
            continue
        if value < 1:
            raise InvalidRequest(f"{name} must be at least 1", param=name)
        chosen = value
    return chosen


def _temperature(value: float | None) -> float:
    if value is None:
        return 1.0
    if not 0.0 <= value <= MAX_TEMPERATURE:
        raise InvalidRequest(f"temperature must be between 0 and {MAX_TEMPERATURE:g}", param="temperature")
    return value


def _top_p(value: float | None) -> float:
    if value is None:
        return 1.0
    if not 0.0 < value <= 1.0:
        raise InvalidRequest("top_p must be above 0 and at most 1", param="top_p")
    return value


def _seed(value: int | None) -> int | None:
    if value is None:
        return None
    if not -(2**63) <= value < 2**64:
        raise InvalidRequest("seed must fit 64 bits", param="seed")
    return value % 2**64


def _stop(value: str | list[str] | None) -> tuple[str, ...]:
    if value is None:
        return ()
    stops = [value] if isinstance(value, str) else value
    if len(stops) > MAX_STOP_STRINGS:
        raise InvalidRequest(f"stop has {len(stops)} strings, at most {MAX_STOP_STRINGS} are allowed", param="stop")
    for stop in stops:
        if not stop:
            raise InvalidRequest("a stop string must not be empty", param="stop")
        if len(stop) > MAX_STOP_STRING_CHARS:
            raise InvalidRequest(f"a stop string is longer than {MAX_STOP_STRING_CHARS} characters", param="stop")
    return tuple(stops)
