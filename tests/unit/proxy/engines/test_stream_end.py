"""Streams that say that they are over, and those that only look so."""

from __future__ import annotations

import json

import pytest

from proxy.engines.stream_end import StreamEnd

CHAT, MESSAGES, RESPONSES = "/v1/chat/completions", "/v1/messages", "/v1/responses"

ENDS = [
    (CHAT, b"data: [DONE]\n\n"),
    (CHAT, b'data: {"choices":[]}\n\ndata: [DONE]\n\n'),
    (CHAT, b"data: {}\r\n\r\ndata:[DONE]\r\n\r\n"),
    (CHAT, b"data: {}\r\rdata: [DONE]\r\r"),
    (CHAT, b'data: {}\n\ndata: {"error": {"message": "oom"}}\n\n'),
    ("/v1/completions", b"data: {}\n\ndata: [DONE]"),
    (MESSAGES, b'event: message_stop\ndata: {"type":"message_stop"}\n\n'),
    (MESSAGES, b'event: message_stop\ndata: {"type": "message_stop"}\n\ndata: [DONE]\n\n'),
    (MESSAGES, b'event: error\ndata: {"type":"error","error":{"type":"overloaded_error"}}\n\n'),
    (RESPONSES, b'event: response.completed\ndata: {"type":"response.completed","response":{}}\n\n'),
    (RESPONSES, b'data: {"response":{"output":[]},"type": "response.incomplete"}\n\n'),
    (RESPONSES, b'data: {"type":"response.failed"}\n\n'),
]


@pytest.mark.parametrize(("path", "stream"), ENDS)
def test_an_end_in_every_cut(path: str, stream: bytes) -> None:
    stream = b'data: {"x":"' + b"y" * 200 + b'"}\n\n' + stream
    for size in (1, 2, 7, len(stream)):
        end = StreamEnd(path)
        for begin in range(0, len(stream), size):
            assert not end.is_told or begin > 200
            end.feed(stream[begin : begin + size])
        assert end.is_told, size


@pytest.mark.parametrize(("path", "stream"), ENDS)
def test_no_beginning_of_it_is_one(path: str, stream: bytes) -> None:
    told = [length for length in range(len(stream)) if _is_end(path, stream[:length])]
    assert all(not stream[length:].strip(b"\r\n") or b"[DONE]" in stream[length:] for length in told)


@pytest.mark.parametrize("path", [CHAT, "/v1/completions", MESSAGES, RESPONSES])
@pytest.mark.parametrize(
    "text", ["\ndata: [DONE]\n\n", "[DONE]", '"type":"message_stop"', '{"type": "response.completed"}', '{"error":1}']
)
def test_an_answer_that_speaks_of_ends_is_none(path: str, text: str) -> None:
    for ensure_ascii in (True, False):
        content = json.dumps({"choices": [{"delta": {"content": text}}], "type": "x"}, ensure_ascii=ensure_ascii)
        assert not _is_end(path, b"data: " + content.encode() + b"\n\n")


def _is_end(path: str, stream: bytes) -> bool:
    end = StreamEnd(path)
    end.feed(stream)
    return end.is_told
