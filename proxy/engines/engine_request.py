"""A client's request on its way to an engine: its bytes, and what is known of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from aiohttp import web

from prefixcache.errors import WebSocketRefused
from prefixcache.limits import OFFLOAD_BODY_BYTES
from prefixcache.rendering.tokenizing_threads import TokenizingThreads
from proxy.access_log import ACCESS_RECORD, AccessRecord
from proxy.engines.headers import HeaderRules
from proxy.engines.http_message import EngineRequest
from proxy.engines.request_fields import read_fields
from proxy.engines.usage_request import asking_for_usage
from proxy.request_body import read_body

CHAT_PATH = "/v1/chat/completions"
COMPLETION_PATHS = frozenset({CHAT_PATH, "/v1/completions"})
"""Where a stream tells its usage only when it is asked to, and ends with [DONE]."""
MESSAGES_PATH = "/v1/messages"
PREDICTED_PATHS = COMPLETION_PATHS | {MESSAGES_PATH, "/v1/responses"}


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientRequest:
    """What cannot be read of a body is None; it goes on as it is."""

    request: web.Request
    record: AccessRecord
    body: bytes
    model: str | None
    """The name asked for."""
    parsed: Mapping[str, Any] | None
    """The body of a request that is predicted."""
    is_predicted: bool
    """Whether an answer is made of a prompt that may be predicted."""

    @property
    def path(self) -> str:
        return self.request.path

    @property
    def is_stream(self) -> bool:
        return self.parsed is not None and self.parsed.get("stream") is True

    def to_engine(self, rules: HeaderRules) -> tuple[EngineRequest, bool]:
        """What an engine gets, and whether its stream has usage in it that the client did not ask for."""
        body = None
        if self.path in COMPLETION_PATHS and self.is_predicted and self.parsed is not None:
            body = asking_for_usage(self.body, self.parsed)
        headers = [(name, value) for name, value in rules.to_engine(self.request.raw_headers) if name.lower() != _ID]
        headers.append((_ID, self.record.request_id.encode()))
        return (
            EngineRequest(
                method=self.request.method,
                target=self.request.raw_path,
                headers=headers,
                body=self.body if body is None else body,
            ),
            body is not None,
        )


_ID = b"x-request-id"


async def read_request(request: web.Request, threads: TokenizingThreads) -> ClientRequest:
    """Raises RequestTooLarge, WebSocketRefused. A body is read, and looked into, once; a long one in a thread."""
    if any(value.strip().lower() == "websocket" for value in request.headers.getall("Upgrade", ())):
        # Other offers, such as the h2c of Java's client, may be declined by answering in HTTP/1.1.
        raise WebSocketRefused(
            "WebSockets are not proxied: connect to an engine itself, or use a path that speaks HTTP"
        )
    body = await read_body(request)
    is_predicted = request.method == "POST" and request.path in PREDICTED_PATHS
    reading = partial(read_fields, body, request.headers.get("Content-Type", ""), is_predicted=is_predicted)
    fields = reading() if len(body) < OFFLOAD_BODY_BYTES else await threads.in_thread(reading)
    return ClientRequest(
        request=request,
        record=request[ACCESS_RECORD],
        body=body,
        model=fields.model,
        parsed=fields.parsed,
        is_predicted=is_predicted,
    )
