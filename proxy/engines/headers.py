"""Which headers pass between a client and an engine: lists of what may, so that a new one is a decision.

Hop-by-hop headers never pass, nor does one that `Connection` names (RFC 9110, 7.6.1); cookies, forwarding
headers (`X-Forwarded-*`, which engines would take for true) and cross-origin headers (the proxy answers those) do not.

Credentials pass as the client sent them, unless the operator says otherwise: the engines are the operator's own, given
by URL, and `vllm serve --api-key` behind the proxy asks the app for the same key as without it. The operator may give
the key of the engines instead; clients' own then never reach them.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

_TO_ENGINE = frozenset(
    b"accept accept-language content-type user-agent idempotency-key "
    b"x-request-id x-correlation-id x-session-id x-user-id x-data-parallel-rank "
    b"traceparent tracestate baggage b3 x-b3-traceid x-b3-spanid x-b3-parentspanid x-b3-sampled x-b3-flags".split()
)
_TO_ENGINE_PREFIXES = (b"openai-", b"anthropic-", b"x-vllm-", b"x-sglang-", b"x-smg-")
_CREDENTIALS = frozenset((b"authorization", b"x-api-key"))
"""The OpenAI SDKs send the first, Anthropic's the second."""

_TO_CLIENT = frozenset(
    b"content-type content-length content-encoding content-language content-disposition cache-control allow etag "
    b"last-modified vary retry-after retry-after-ms x-should-retry www-authenticate x-request-id request-id "
    b"x-accel-buffering server-timing".split()
)
_TO_CLIENT_PREFIXES = (b"openai-", b"anthropic-", b"x-ratelimit-", b"x-vllm-", b"x-sglang-", b"x-smg-")

_PLAIN_BODY = (b"accept-encoding", b"identity")
"""A compressed answer would come in lumps, and its usage could not be read on the way."""

Header = tuple[bytes, bytes]


@dataclass(frozen=True, slots=True, kw_only=True)
class HeaderRules:
    """What goes to the engines beside the body."""

    forward_authorization: bool = True
    """Whether clients' Authorization and X-Api-Key reach the engines."""
    engine_api_key: str | None = field(default=None, repr=False)
    """Sent as a bearer token in place of clients' own."""

    def to_engine(self, headers: Iterable[Header]) -> list[Header]:
        """Of a client's request, in its order and spelling."""
        given = list(headers)
        named = _named_by_connection(given)
        credentials: frozenset[bytes] = frozenset()
        if self.forward_authorization and self.engine_api_key is None:
            credentials = _CREDENTIALS
        passed = [
            (name, value)
            for name, value in given
            if ((lower := name.lower()) in _TO_ENGINE or lower in credentials or lower.startswith(_TO_ENGINE_PREFIXES))
            and lower not in named
        ]
        passed.append(_PLAIN_BODY)
        return passed + self.own()

    def own(self) -> list[Header]:
        """Those of a request that the proxy makes itself, such as a probe."""
        if self.engine_api_key is None:
            return []
        return [(b"authorization", b"Bearer " + self.engine_api_key.encode())]


def response_headers(headers: Iterable[Header]) -> list[Header]:
    """Of an engine's answer, in its order and spelling: what goes on to the client.

    Content-Length is among them: whoever changes the body on its way leaves it out.
    """
    given = list(headers)
    named = _named_by_connection(given)
    return [
        (name, value)
        for name, value in given
        if ((lower := name.lower()) in _TO_CLIENT or lower.startswith(_TO_CLIENT_PREFIXES)) and lower not in named
    ]


def _named_by_connection(headers: Iterable[Header]) -> frozenset[bytes]:
    names = [value for name, value in headers if name.lower() == b"connection"]
    return frozenset(each.strip().lower() for value in names for each in value.split(b","))
