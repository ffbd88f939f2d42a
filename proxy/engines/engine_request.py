"""A client's request on its way to an engine: its bytes, and what is known of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import msgspec
from aiohttp import web

from prefixcache.limits import OFFLOAD_BODY_BYTES
from prefixcache.rendering.tokenizing_threads import TokenizingThreads
from proxy.access_log import ACCESS_RECORD, AccessRecord
from proxy.engines.headers import HeaderRules
from proxy.engines.http_message import EngineRequest
from proxy.engines.usage_request import asking_for_usage
from proxy.request_body import read_body

COMPLETION_PATHS = frozenset({"/v1/chat/completions", "/v1/completions"})
"""Where a stream tells its usage only when it is asked to, and ends with [DONE]."""
MESSAGES_PATH = "/v1/messages"
PREDICTED_PATHS = COMPLETION_PATHS | {MESSAGES_PATH, "/v1/responses"}


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientRequest:
    """`parsed` is None for a body that is no JSON object; it goes on as it is."""

    request: web.Request
    record: AccessRecord
    body: bytes
    parsed: Mapping[str, Any] | None

    @property
    def path(self) -> str:
        return self.request.path

    @property
    def is_predicted(self) -> bool:
        """Whether an answer is made of a prompt that may be predicted."""
        return self.request.method == "POST" and self.path in PREDICTED_PATHS

    @property
    def model(self) -> str | None:
        """The name asked for."""
        name = self.parsed.get("model") if self.parsed is not None else None
        return name if isinstance(name, str) and name else None

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
_LOOKED_AT_BYTES = 1_024


async def read_request(request: web.Request, threads: TokenizingThreads) -> ClientRequest:
    """Raises RequestTooLarge. A body is read, and decoded, once; a long one in a thread."""
    body = await read_body(request)
    parsed: object = None
    if body[:_LOOKED_AT_BYTES].lstrip().startswith(b"{"):
        # Whatever its type is said to be: curl -d says that JSON is a form.
        if len(body) < OFFLOAD_BODY_BYTES:
            parsed = _decoded(body)
        else:
            parsed = await threads.in_thread(_decoded, body)
    return ClientRequest(
        request=request,
        record=request[ACCESS_RECORD],
        body=body,
        parsed=parsed if isinstance(parsed, dict) else None,
    )


def _decoded(body: bytes) -> object:
    try:
        return msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None
