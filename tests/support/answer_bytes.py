"""Answers of an OpenAI-compatible engine as bytes: heads, framing, chat streams."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from typing import Any

Header = tuple[str, str]

CHAT_ID = "chatcmpl-scripted"
CREATED = 1_760_000_000


def head(status: int = 200, *headers: Header, reason: str = "OK", version: str = "1.1") -> bytes:
    lines = [f"HTTP/{version} {status} {reason}", *(f"{name}: {value}" for name, value in headers)]
    return "\r\n".join(lines).encode() + b"\r\n\r\n"


def whole(body: bytes, *headers: Header, status: int = 200, reason: str = "OK") -> bytes:
    """Head and body, framed by Content-Length."""
    return head(status, *headers, ("content-length", str(len(body))), reason=reason) + body


def json_answer(content: object, *headers: Header, status: int = 200) -> bytes:
    return whole(json.dumps(content).encode(), ("content-type", "application/json"), *headers, status=status)


def chunk(data: bytes, *, extension: bytes = b"") -> bytes:
    """One chunk of the chunked coding; without data the last one, and with it the end of an answer without trailers."""
    return b"%x%b\r\n%b\r\n" % (len(data), extension, data)


LAST_CHUNK = chunk(b"")


def chunked(pieces: Iterable[bytes], *, extension: bytes = b"", trailers: bytes = b"") -> bytes:
    """A whole body; `trailers` are lines that end in CRLF."""
    chunks = b"".join(chunk(piece, extension=extension) for piece in pieces if piece)
    return chunks + b"0" + extension + b"\r\n" + trailers + b"\r\n"


def stream_head(*headers: Header, status: int = 200) -> bytes:
    """As uvicorn writes that of a stream."""
    stream = (("content-type", "text/event-stream; charset=utf-8"), ("transfer-encoding", "chunked"))
    return head(status, ("server", "uvicorn"), *stream, *headers)


def usage(prompt: int, completion: int, cached: int | None = None) -> dict[str, Any]:
    """As vLLM reports it; without --enable-prompt-tokens-details `cached` is None and the details are null."""
    details = None if cached is None else {"cached_tokens": cached}
    counts = {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}
    return {**counts, "prompt_tokens_details": details}


def chat_chunk(
    delta: dict[str, Any] | None, *, model: str = "demo", finish_reason: str | None = None, **more: Any
) -> dict[str, Any]:
    """One event's object; without a delta it has no choices, as the one that carries usage."""
    choices = [] if delta is None else [{"index": 0, "delta": delta, "finish_reason": finish_reason}]
    named = {"id": CHAT_ID, "object": "chat.completion.chunk", "created": CREATED, "model": model}
    return {**named, "choices": choices, **more}


def event(content: object, *, line_end: bytes = b"\n") -> bytes:
    """One SSE event; a str is taken as it is, such as "[DONE]"."""
    text = content if isinstance(content, str) else json.dumps(content, ensure_ascii=False)
    return b"data: " + text.encode() + 2 * line_end


def chat_events(
    texts: Sequence[str],
    *,
    model: str = "demo",
    usage: dict[str, Any] | None = None,
    finish_reason: str | None = "stop",
    is_done: bool = True,
    line_end: bytes = b"\n",
) -> list[bytes]:
    """The events of a chat stream: role, texts, finish, usage if given, [DONE]; cut short where one is absent."""
    chunks = [chat_chunk({"role": "assistant", "content": ""}, model=model)]
    chunks += [chat_chunk({"content": text}, model=model) for text in texts]
    if finish_reason is not None:
        chunks.append(chat_chunk({}, model=model, finish_reason=finish_reason))
    if usage is not None:
        chunks.append(chat_chunk(None, model=model, usage=usage))
    events = [event(each, line_end=line_end) for each in chunks]
    return [*events, event("[DONE]", line_end=line_end)] if is_done else events


def error_event(message: str, *, code: int = 500, line_end: bytes = b"\n") -> bytes:
    """What vLLM writes into a stream that fails after its first tokens."""
    return event({"error": {"message": message, "type": "InternalServerError", "code": code}}, line_end=line_end)


def chat_stream(texts: Sequence[str], **how: Any) -> bytes:
    """A whole streamed answer, one chunk an event; `how` as for chat_events()."""
    return stream_head() + chunked(chat_events(texts, **how))


def chat_answer(text: str, *, model: str = "demo", usage: dict[str, Any] | None = None) -> bytes:
    """A whole answer that is not streamed."""
    choice = {"index": 0, "message": {"role": "assistant", "content": text}, "finish_reason": "stop"}
    named = {"id": CHAT_ID, "object": "chat.completion", "created": CREATED, "model": model}
    return json_answer({**named, "choices": [choice], "usage": usage})


def models_answer(*names: str, max_model_len: int | None = 8192) -> bytes:
    """What GET /v1/models of vLLM says."""
    cards = [{"id": name, "object": "model", "root": name, "parent": None} for name in names]
    return json_answer({"object": "list", "data": [{**card, "max_model_len": max_model_len} for card in cards]})
