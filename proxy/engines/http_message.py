"""What is sent to an engine and what receives its answer."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from prefixcache.errors import InvalidRequest
from proxy.engines.body_edit import BodyEdit
from proxy.engines.engine_url import EngineUrl

Headers = Sequence[tuple[bytes, bytes]]

_WRITTEN_HERE = frozenset(
    b"host content-length transfer-encoding expect connection keep-alive proxy-connection upgrade te trailer".split()
)
"""Headers of one connection and of framing: never taken from a caller."""
_TARGET = re.compile(rb"/[\x21-\x7e]*")
_TOKEN = re.compile(rb"[!#$%&'*+.^_`|~0-9A-Za-z-]+")
_WITH_BODY = frozenset(("POST", "PUT", "PATCH"))
_COPIED_BYTES = 64 * 1024
"""A body up to this length goes in one piece with its head; a copy of an upload of 30 MB would take 10 ms."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineRequest:
    """One request; `target` is path and query as they are sent, below the base path of the engine's URL."""

    method: str
    target: str
    headers: Headers = ()
    """Content-Length, Host and whatever else belongs to framing or one connection are left out and written anew."""
    body: bytes = b""
    edit: BodyEdit | None = None
    """What is sent otherwise than it stands in the body."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FetchedResponse:
    """A small answer as a whole."""

    status: int
    headers: list[tuple[bytes, bytes]]
    body: bytes


class ResponseSink(Protocol):
    """Receives one answer: on_head, on_data any number of times, then on_end; or, at any point, on_fail and no more.

    Called while the connection reads, so none may block. After ResponseHandle.abort() nothing is called. A sink that
    raises gets its exception back in on_fail, and the connection is closed.
    """

    def on_head(self, status: int, reason: bytes, headers: list[tuple[bytes, bytes]]) -> None:
        """Once, with the final status; names as the engine wrote them, trailers and 1xx answers are dropped."""

    def on_data(self, data: bytes) -> None:
        """A piece of the body, freed from chunking, as soon as it came; never empty."""

    def on_end(self) -> None: ...

    def on_fail(self, error: Exception) -> None:
        """EngineUnreachable, EngineFault, EngineTimeout, Unavailable of a pool that closes, or the sink's own."""


def request_parts(request: EngineRequest, url: EngineUrl) -> tuple[bytes | memoryview, ...]:
    """Head and body as they are written. Raises InvalidRequest for what would not be one request."""
    target = request.target.encode("latin-1", "replace")
    method = request.method.encode("latin-1", "replace")
    if not _TARGET.fullmatch(target):
        raise InvalidRequest(
            f"the path {request.target[:100]!r} cannot be sent to an engine: write it in ASCII, with %XX"
        )
    if not _TOKEN.fullmatch(method):
        raise InvalidRequest(f"{request.method[:100]!r} is no HTTP method")
    lines = [b"%b %b%b HTTP/1.1" % (method, url.base_path, target), b"Host: " + url.host_header]
    for name, value in request.headers:
        if name.lower() not in _WRITTEN_HERE:
            if not _TOKEN.fullmatch(name):
                raise InvalidRequest(f"{name[:100]!r} is no name of a header")
            lines.append(b"%b: %b" % (name, value))
    length = len(request.body) if request.edit is None else request.edit.length(request.body)
    if length or request.method in _WITH_BODY:
        lines.append(b"Content-Length: %d" % length)
    head = b"\r\n".join(lines)
    # Every line break is one of ours: a value with one would smuggle a header, or a second request.
    if head.count(b"\n") != len(lines) - 1 or head.count(b"\r") != len(lines) - 1 or b"\0" in head:
        raise InvalidRequest("a header of the request has a line break or a zero byte in it")
    parts = (request.body,) if request.edit is None else request.edit.parts(request.body)
    if length > _COPIED_BYTES:
        return head + b"\r\n\r\n", *parts
    return (b"".join((head, b"\r\n\r\n", *parts)),)
