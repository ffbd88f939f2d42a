"""JSON bodies of answers."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec
from aiohttp import web

_encoder = msgspec.json.Encoder()


def json_answer(value: object, *, status: int = 200, headers: Mapping[str, str] | None = None) -> web.Response:
    """`value` is anything msgspec encodes."""
    return web.Response(
        body=_encoder.encode(value), status=status, headers=headers, content_type="application/json", charset="utf-8"
    )
