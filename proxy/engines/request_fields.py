"""What is read out of a client's body: all of it where a prompt is to be predicted, else its model alone.

    {"model": "m", ...}              JSON, whatever its type is said to be: curl -d says that JSON is a form
    name="model"\r\n\r\nm\r\n--..    a form with a file, as transcriptions are sent

Where nothing is to be predicted no object is made of what stands beside the model. All of it is given up, too, for a
body of so many parts that to make objects of them would hold up every other request.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from prefixcache.limits import MAX_BODY_COMMAS
from proxy.request_body import has_too_many_parts

_LOOKED_AT_BYTES = 1_024
_MOST_NAME_BYTES = 4_096
_FORM_FIELD = b'name="model"'
_MOST_HEADER_BYTES = 1_024
"""Of one part of a form."""
_MOST_FIELDS = 8
"""So many times may the bytes of a file look like the field before it is given up."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BodyFields:
    """None for what is not there, or no such thing."""

    model: str | None = None
    parsed: Mapping[str, Any] | None = None
    """The whole object."""


class _Named(msgspec.Struct):
    model: msgspec.Raw = msgspec.Raw()


_named = msgspec.json.Decoder(_Named)
_name = msgspec.json.Decoder(str)


def read_fields(
    body: bytes, content_type: str, *, is_predicted: bool, most_commas: int = MAX_BODY_COMMAS
) -> BodyFields:
    """Takes a millisecond a MB for text."""
    if body[:_LOOKED_AT_BYTES].lstrip().startswith(b"{"):
        if is_predicted and not has_too_many_parts(body, most_commas=most_commas):
            return _whole(body)
        return BodyFields(model=_model_of_json(body))
    if content_type.lower().startswith("multipart/form-data"):
        return BodyFields(model=_model_of_form(body))
    return BodyFields()


def _whole(body: bytes) -> BodyFields:
    try:
        parsed = msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return BodyFields()
    name = parsed.get("model")
    return BodyFields(model=name if isinstance(name, str) and name else None, parsed=parsed)


def _model_of_json(body: bytes) -> str | None:
    try:
        name = bytes(_named.decode(body).model)
        return _name.decode(name) or None if 0 < len(name) <= _MOST_NAME_BYTES else None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None


def _model_of_form(body: bytes) -> str | None:
    at = -1
    for _ in range(_MOST_FIELDS):
        at = body.find(_FORM_FIELD, at + 1)
        if at < 0:
            return None
        begin = body.rfind(b"\n", max(at - _MOST_HEADER_BYTES, 0), at) + 1
        end = body.find(b"\r\n\r\n", at, at + _MOST_HEADER_BYTES)
        if end < 0 or not body[begin:at].lower().startswith(b"content-disposition:"):
            continue
        value_end = body.find(b"\r\n", end + 4, end + 4 + _MOST_NAME_BYTES)
        if value_end > end + 4:
            return body[end + 4 : value_end].decode(errors="replace")
    return None
