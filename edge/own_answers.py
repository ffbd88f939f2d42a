"""What the edge answers itself, all of it in the shape of OpenAI's errors; nginx's own pages are HTML."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass

from prefixcache.limits import AWAY_RETRY_AFTER_S, MAX_BODY_BYTES, RETRY_AFTER_S

_PLACE = "/.edge"
"""Where they are; unknown to clients."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnAnswer:
    """An error that the edge answers itself."""

    status: int
    message: str
    kind: str = "invalid_request_error"
    code: str | None = None
    headers: tuple[str, ...] = ()

    @property
    def body(self) -> str:
        error = {"message": self.message, "type": self.kind, "param": None, "code": self.code}
        return json.dumps({"error": error})

    @property
    def directives(self) -> str:
        """What answers it, whatever the location: no body is read before."""
        headers = "".join(f"add_header {header} always; " for header in self.headers)
        return f"default_type application/json; {headers}return {self.status} '{self.body}';"


def _come_again(message: str, after_s: int) -> OwnAnswer:
    return OwnAnswer(
        status=503, message=message, kind="server_error", code="unavailable", headers=(f"Retry-After {after_s}",)
    )


NO_PROXY = _come_again("no proxy answers, try again", AWAY_RETRY_AFTER_S)
NO_METRICS = OwnAnswer(
    status=404,
    message="each proxy has metrics of its own: scrape all of them, not the edge",
    code="unknown_url",
)
OF_NGINX: Mapping[int, OwnAnswer] = {
    400: OwnAnswer(status=400, message="the request is no valid HTTP"),
    404: OwnAnswer(status=404, message="Invalid URL", code="unknown_url"),
    405: OwnAnswer(status=405, message="this method is not served", code="method_not_allowed"),
    408: OwnAnswer(status=408, message="the request took too long to arrive", code="request_timeout"),
    413: OwnAnswer(status=413, message=f"the body is larger than {MAX_BODY_BYTES} bytes", code="request_too_large"),
    414: OwnAnswer(status=414, message="the URL is too long", code="url_too_long"),
    429: OwnAnswer(
        status=429,
        message="too many requests are in hand at the edge, try again",
        kind="rate_limit_error",
        code="rate_limit_exceeded",
        headers=(f"Retry-After {RETRY_AFTER_S}",),
    ),
    494: OwnAnswer(status=431, message="the headers are too long", code="headers_too_long"),
    # No room for a body, or no connection to a proxy: what else may go wrong within nginx does not.
    500: _come_again("the edge has no room left for this request, try again", AWAY_RETRY_AFTER_S),
    501: OwnAnswer(status=501, message="of transfer encodings only `chunked` is known", code="not_implemented"),
    502: NO_PROXY,
    504: NO_PROXY,  # one that lets a connection wait, too
    505: OwnAnswer(status=505, message="HTTP/1.1 and HTTP/1.0 are spoken here", code="http_version_not_supported"),
}
"""By the status that nginx means; those that it can come to with this configuration."""
OF_RULES: Mapping[str, OwnAnswer] = {
    "no-key": OwnAnswer(
        status=401,
        message="an API key is needed: Authorization: Bearer KEY, or X-Api-Key: KEY",
        code="invalid_api_key",
        headers=("WWW-Authenticate Bearer",),
    ),
    "only-get": OwnAnswer(
        status=405,
        message="this path takes GET and HEAD",
        code="method_not_allowed",
        headers=("Allow 'GET, HEAD'",),
    ),
    "no-body": OwnAnswer(status=413, message="this path takes no body", code="request_too_large"),
}
"""By a name that the configuration gives."""


def sent_to(name: str) -> str:
    """The directive that answers with one of OF_RULES instead of going on."""
    assert name in OF_RULES
    return f"rewrite ^ {_PLACE}/{name} last;"


def locations() -> str:
    """For a server of nginx: each of them, and nginx's own errors sent there."""
    answers = {**{str(status): answer for status, answer in OF_NGINX.items()}, **OF_RULES}
    lines = [f"        error_page {status} = {_PLACE}/{status};" for status in OF_NGINX]
    lines += [
        f"        location = {_PLACE}/{name} {{ internal; {answer.directives} }}" for name, answer in answers.items()
    ]
    return "\n".join(lines)
