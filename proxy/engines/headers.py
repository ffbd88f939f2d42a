"""Which headers pass between a client and an engine: lists of what may, so that a new one is a decision.

Hop-by-hop headers never pass, nor does one that `Connection` names (RFC 9110, 7.6.1); cookies, forwarding
headers (`X-Forwarded-*`, which engines would take for true) and cross-origin headers (the proxy answers those) do not.
The operator may name others that pass, in both directions. A place that an answer names is told as seen from outside.

Credentials pass as the client sent them, unless the operator says otherwise: the engines are the operator's own, given
by URL, and `vllm serve --api-key` behind the proxy asks the app for the same key as without it. The operator may give
the key of the engines instead; clients' own then never reach them.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field

from prefixcache.errors import ConfigError
from proxy.engines.engine_url import EngineUrl
from proxy.engines.location import seen_from_outside

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
    b"x-correlation-id x-session-id x-accel-buffering server-timing deprecation sunset".split()
)
_PLACES = frozenset((b"location", b"content-location"))
_TO_CLIENT_PREFIXES = (b"openai-", b"anthropic-", b"x-ratelimit-", b"x-vllm-", b"x-sglang-", b"x-smg-")

_PLAIN_BODY = (b"accept-encoding", b"identity")
"""A compressed answer would come in lumps, and its usage could not be read on the way."""

_OF_THE_PROXY = frozenset(
    b"accept-encoding connection content-length expect host keep-alive proxy-authenticate proxy-authorization "
    b"proxy-connection te trailer transfer-encoding upgrade".split()
)
"""Those of one connection and of framing, which no setting lets pass."""
_OF_THE_PROXY_PREFIXES = (b"x-prefixcache-", b"access-control-")
_NAME = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+")

Header = tuple[bytes, bytes]


def read_header_names(names: Iterable[str]) -> frozenset[bytes]:
    """Names that the operator lets pass, in lower case. Raises ConfigError for one that never may."""
    read = set()
    for name in names:
        if not _NAME.fullmatch(name):
            raise ConfigError(f"{name!r} is no name of a header: write it without a colon or a value, as X-Tenant")
        lower = name.lower().encode()
        if lower in _OF_THE_PROXY or lower.startswith(_OF_THE_PROXY_PREFIXES):
            raise ConfigError(f"the header {name} cannot be passed on: it belongs to each connection, or to the proxy")
        read.add(lower)
    return frozenset(read)


@dataclass(frozen=True, slots=True, kw_only=True)
class HeaderRules:
    """What goes to the engines beside the body."""

    forward_authorization: bool = True
    """Whether clients' Authorization and X-Api-Key reach the engines."""
    engine_api_key: str | None = field(default=None, repr=False)
    """Sent as a bearer token in place of clients' own."""
    passed: frozenset[bytes] = frozenset()
    """Further names in lower case, of requests and answers."""

    def to_engine(self, headers: Iterable[Header]) -> list[Header]:
        """Of a client's request, in its order and spelling."""
        given = list(headers)
        named = _named_by_connection(given)
        known = _TO_ENGINE | self.passed
        if self.engine_api_key is not None:
            known -= _CREDENTIALS
        elif self.forward_authorization:
            known |= _CREDENTIALS
        passed = [
            (name, value)
            for name, value in given
            if ((lower := name.lower()) in known or lower.startswith(_TO_ENGINE_PREFIXES)) and lower not in named
        ]
        passed.append(_PLAIN_BODY)
        return passed + self.own()

    def own(self) -> list[Header]:
        """Those of a request that the proxy makes itself, such as a probe."""
        if self.engine_api_key is None:
            return []
        return [(b"authorization", b"Bearer " + self.engine_api_key.encode())]

    def to_client(self, headers: Iterable[Header], url: EngineUrl) -> list[Header]:
        """Of an answer of the engine at `url`, in its order and spelling.

        Content-Length is among them: whoever changes the body on its way leaves it out.
        """
        given = list(headers)
        named = _named_by_connection(given)
        passed = []
        for name, value in given:
            lower = name.lower()
            if lower in named:
                continue
            if lower in _PLACES:
                passed.append((name, seen_from_outside(value, url)))
            elif lower in _TO_CLIENT or lower in self.passed or lower.startswith(_TO_CLIENT_PREFIXES):
                passed.append((name, value))
        return passed


def _named_by_connection(headers: Iterable[Header]) -> frozenset[bytes]:
    names = [value for name, value in headers if name.lower() == b"connection"]
    return frozenset(each.strip().lower() for value in names for each in value.split(b","))
