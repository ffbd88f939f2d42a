"""Cross-origin requests of browsers, for the origins that the operator named."""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, Collection, Mapping

from aiohttp import hdrs, web
from aiohttp.typedefs import Handler, Middleware

from prefixcache.errors import ConfigError
from prefixcache.limits import CORS_MAX_AGE_S

ANY_ORIGIN = "*"
EXPOSED_HEADERS = ("x-request-id", "x-prefixcache-worker", "x-prefixcache-hit-tokens", "x-prefixcache-reason")

_ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://[^/\s,]+")
_HEADER_NAMES = re.compile(r"[A-Za-z0-9!#$%&'*+.^_`|~, -]{0,2048}")


def check_origins(origins: Collection[str]) -> None:
    """Raises ConfigError for one that no browser would ever send."""
    for origin in origins:
        if origin != ANY_ORIGIN and not _ORIGIN.fullmatch(origin):
            raise ConfigError(f"cors-origin {origin!r} is no origin: give SCHEME://HOST[:PORT] without a path, or *")


def cors_middleware(origins: Collection[str]) -> Middleware:
    """Answers preflight requests of the origins; the requests themselves go on."""

    @web.middleware
    async def middleware(request: web.Request, handler: Handler) -> web.StreamResponse:
        asks_first = request.method == hdrs.METH_OPTIONS and hdrs.ACCESS_CONTROL_REQUEST_METHOD in request.headers
        if not asks_first or not _is_allowed(request, origins):
            return await handler(request)
        return web.Response(status=204, headers=_preflight_headers(request))

    return middleware


def cors_signal(origins: Collection[str]) -> Callable[[web.Request, web.StreamResponse], Awaitable[None]]:
    """Puts the headers on every answer, streams and errors among them; for `on_response_prepare`."""

    async def add_headers(request: web.Request, response: web.StreamResponse) -> None:
        if ANY_ORIGIN not in origins:
            # A cache must not give one origin the answer, or the lack of one, that was another's.
            response.headers.add(hdrs.VARY, hdrs.ORIGIN)
        if _is_allowed(request, origins):
            response.headers[hdrs.ACCESS_CONTROL_ALLOW_ORIGIN] = (
                ANY_ORIGIN if ANY_ORIGIN in origins else request.headers[hdrs.ORIGIN]
            )
            response.headers[hdrs.ACCESS_CONTROL_EXPOSE_HEADERS] = ", ".join(EXPOSED_HEADERS)

    return add_headers


def _is_allowed(request: web.Request, origins: Collection[str]) -> bool:
    origin = request.headers.get(hdrs.ORIGIN)
    return origin is not None and (ANY_ORIGIN in origins or origin in origins)


def _preflight_headers(request: web.Request) -> Mapping[str, str]:
    """Headers are allowed by the names that the client gave, for it invents some and * leaves out Authorization."""
    headers: dict[str, str] = {
        hdrs.ACCESS_CONTROL_ALLOW_METHODS: "GET, POST, OPTIONS",
        hdrs.ACCESS_CONTROL_MAX_AGE: str(CORS_MAX_AGE_S),
    }
    names = request.headers.get(hdrs.ACCESS_CONTROL_REQUEST_HEADERS, "")
    if names and _HEADER_NAMES.fullmatch(names):
        headers[hdrs.ACCESS_CONTROL_ALLOW_HEADERS] = names
    return headers
