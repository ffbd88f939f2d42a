"""The bytes of a request."""

from __future__ import annotations

from aiohttp import web

from prefixcache.errors import RequestTooLarge
from prefixcache.limits import MAX_BODY_BYTES, MAX_BODY_COMMAS, MAX_BODY_LISTS

_COUNTED_BYTES = 256 * 1024


def body_too_large() -> RequestTooLarge:
    return RequestTooLarge(f"the body is longer than {MAX_BODY_BYTES} bytes")


async def read_body(request: web.Request) -> bytes:
    """Raises RequestTooLarge, as soon as a length over the limit is announced.

    Where own workers and engines are behind one proxy it is asked for twice; the request keeps it.
    """
    if request.content_length is not None and request.content_length > MAX_BODY_BYTES:
        raise body_too_large()
    return await request.read()


def too_many_parts() -> RequestTooLarge:
    return RequestTooLarge(
        f"the body has more than {MAX_BODY_LISTS} lists and objects, or {MAX_BODY_COMMAS} commas, text included"
    )


def has_too_many_parts(body: bytes) -> bool:
    """Whether objects made of it would take many times its bytes; looks no further than it must."""
    if len(body) <= MAX_BODY_LISTS:
        return False
    num_lists = num_commas = 0
    for start in range(0, len(body), _COUNTED_BYTES):
        end = start + _COUNTED_BYTES
        num_lists += body.count(b"[", start, end) + body.count(b"{", start, end)
        num_commas += body.count(b",", start, end)
        if num_lists > MAX_BODY_LISTS or num_commas > MAX_BODY_COMMAS:
            return True
    return False
