"""The bytes of a request."""

from __future__ import annotations

from aiohttp import web

from prefixcache.errors import RequestTooLarge
from prefixcache.limits import MAX_BODY_BYTES


def body_too_large() -> RequestTooLarge:
    return RequestTooLarge(f"the body is longer than {MAX_BODY_BYTES} bytes")


async def read_body(request: web.Request) -> bytes:
    """Raises RequestTooLarge, as soon as a length over the limit is announced."""
    if request.content_length is not None and request.content_length > MAX_BODY_BYTES:
        raise body_too_large()
    return await request.read()
