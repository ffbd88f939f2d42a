"""A client's request on its way to an engine: its bytes, and what is known of them.

    read ──parsed──► prompt known: what was parsed is forgotten ──► first byte of the answer: the bytes are let go, too

A thousand requests that wait for their engines are thus a thousand bodies as they came, and nothing made of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any

from aiohttp import web

from prefixcache.errors import WebSocketRefused
from prefixcache.limits import MAX_BODY_COMMAS, MAX_PREDICTED_COMMAS, OFFLOAD_BODY_BYTES
from prefixcache.rendering.tokenizing_threads import TokenizingThreads
from proxy.access_log import ACCESS_RECORD, AccessRecord
from proxy.engines.body_edit import BodyEdit
from proxy.engines.headers import HeaderRules
from proxy.engines.http_message import EngineRequest
from proxy.engines.request_fields import BodyFields, read_fields
from proxy.engines.usage_request import asking_for_usage
from proxy.request_body import let_go_of_body, read_body

CHAT_PATH = "/v1/chat/completions"
COMPLETION_PATH = "/v1/completions"
COMPLETION_PATHS = frozenset({CHAT_PATH, COMPLETION_PATH})
"""Where a stream tells its usage only when it is asked to, and ends with [DONE]."""
MESSAGES_PATH = "/v1/messages"
PREDICTED_PATHS = COMPLETION_PATHS | {MESSAGES_PATH, "/v1/responses"}


@dataclass(slots=True, kw_only=True)
class ClientRequest:
    """What cannot be read of a body is None; it goes on as it is."""

    request: web.Request
    record: AccessRecord
    body: bytes
    model: str | None
    """The name asked for."""
    parsed: Mapping[str, Any] | None
    """The body of a request that is predicted, until its prompt is known."""
    is_predicted: bool
    """Whether an answer is made of a prompt that may be predicted."""
    is_stream: bool
    """Whether it is known to ask for one."""
    usage_edit: BodyEdit | None
    """What must be written into the body so that the engine tells the usage of its stream."""

    @property
    def path(self) -> str:
        return self.request.path

    def forget_parsed(self) -> None:
        self.parsed = None

    def let_go(self) -> None:
        """It is not sent again."""
        self.body = b""
        let_go_of_body(self.request)

    def to_engine(self, rules: HeaderRules) -> EngineRequest:
        headers = [(name, value) for name, value in rules.to_engine(self.request.raw_headers) if name.lower() != _ID]
        headers.append((_ID, self.record.request_id.encode()))
        return EngineRequest(
            method=self.request.method,
            target=self.request.raw_path,
            headers=headers,
            body=self.body,
            edit=self.usage_edit,
        )


_ID = b"x-request-id"


async def read_request(request: web.Request, threads: TokenizingThreads, turn: ExitStack) -> ClientRequest:
    """A body is read, and looked into, once; a long one in a thread, a large one in its `turn`.

    Raises WebSocketRefused, and what `read_body` raises.
    """
    if any(value.strip().lower() == "websocket" for value in request.headers.getall("Upgrade", ())):
        # Other offers, such as the h2c of Java's client, may be declined by answering in HTTP/1.1.
        raise WebSocketRefused(
            "WebSockets are not proxied: connect to an engine itself, or use a path that speaks HTTP"
        )
    body = await read_body(request)
    path = request.path
    is_predicted = request.method == "POST" and path in PREDICTED_PATHS
    await threads.take_turn(turn, len(body))
    reading = partial(_read, body, request.headers.get("Content-Type", ""), path if is_predicted else None)
    is_short = len(body) < OFFLOAD_BODY_BYTES
    fields, usage_edit = reading() if is_short else await threads.off_loop(reading, body_bytes=len(body))
    return ClientRequest(
        request=request,
        record=request[ACCESS_RECORD],
        body=body,
        model=fields.model,
        parsed=fields.parsed,
        is_predicted=is_predicted,
        is_stream=fields.parsed is not None and fields.parsed.get("stream") is True,
        usage_edit=usage_edit,
    )


def _read(body: bytes, content_type: str, predicted_path: str | None) -> tuple[BodyFields, BodyEdit | None]:
    most_commas = MAX_BODY_COMMAS if predicted_path == COMPLETION_PATH else MAX_PREDICTED_COMMAS
    fields = read_fields(body, content_type, is_predicted=predicted_path is not None, most_commas=most_commas)
    if fields.parsed is None or predicted_path not in COMPLETION_PATHS:
        return fields, None
    return fields, asking_for_usage(body, fields.parsed)
