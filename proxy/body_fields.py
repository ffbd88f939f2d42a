"""JSON bodies decoded straight into typed structs, and refusals that name the field.

So a wrong type is refused where it stands, unknown fields are refused by name, numbers are finite, strings are valid
Unicode, nesting is bounded by the types themselves, and nothing is built from a value nobody reads: fields that are not
honoured stay raw bytes.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn, TypeVar

import msgspec
from msgspec import UNSET, Raw, UnsetType

from prefixcache.errors import InvalidRequest
from prefixcache.limits import MAX_METADATA_BYTES

T = TypeVar("T")

MAX_SHOWN_CHARS = 100
"""A caller's own words are cut to this length in an error."""

_MAX_NO_OP_BYTES = 64
_PLACE = re.compile(r"(?P<what>.*?)(?: - at `\$\.?(?P<place>.*)`)?", re.DOTALL)
_FIELD = re.compile(r"Object (?P<fault>contains unknown|missing required) field `(?P<name>.*)`", re.DOTALL)
_metadata_decoder = msgspec.json.Decoder(dict[str, str])


def decoded(decoder: msgspec.json.Decoder[T], body: bytes | Raw, *, within: str = "") -> T:
    """Raises InvalidRequest; `within` is the field whose value `body` is, if it is not all of it."""
    try:
        return decoder.decode(body)
    except msgspec.ValidationError as error:
        _raise_named(str(error), within)
    except RecursionError:
        raise InvalidRequest(f"{within or 'the body'} is nested too deeply", param=within or None) from None
    except ValueError as error:
        raise InvalidRequest(f"{within or 'the body'} is not valid JSON: {error}", param=within or None) from None


def _raise_named(message: str, within: str) -> NoReturn:
    """Turns msgspec's "<what> - at `$.<place>`" into an error whose `param` is the field."""
    match = _PLACE.fullmatch(message)
    what, place = (match["what"], match["place"] or "") if match else (message, "")
    if within:
        place = within + place if not place or place.startswith("[") else f"{within}.{place}"
    if field := _FIELD.fullmatch(what):
        param = ".".join(part for part in (place, field["name"][:MAX_SHOWN_CHARS]) if part)
        if field["fault"] == "missing required":
            raise InvalidRequest(f"{param} is missing", param=param) from None
        raise InvalidRequest(f"{param} is not a field that this server knows", param=param) from None
    where = place or "the body"
    raise InvalidRequest(f"{where}: {what[0].lower()}{what[1:]}", param=place or None) from None


def refuse_unless_no_op(name: str, raw: Raw | UnsetType, no_ops: Sequence[Any]) -> None:
    """Raises InvalidRequest for a field that is not honoured, unless its value asks for nothing. Null never does."""
    if raw is UNSET:
        return
    given = bytes(raw)
    if given == b"null":
        return
    if len(given) <= _MAX_NO_OP_BYTES:
        try:
            value = msgspec.json.decode(given)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise InvalidRequest(f"{name} is not valid JSON: {error}", param=name) from None
        # A bool is not a number here: `n: true` and `logprobs: 0` are mistakes, not no-ops.
        if any(value == no_op and isinstance(value, bool) == isinstance(no_op, bool) for no_op in no_ops):
            return
    raise InvalidRequest(f"{name} is not supported by this endpoint", param=name)


def refuse_unless_no_ops(fields: msgspec.Struct, table: Mapping[str, Sequence[Any]]) -> None:
    """As `refuse_unless_no_op`, for each field of a table."""
    for name, no_ops in table.items():
        refuse_unless_no_op(name, getattr(fields, name), no_ops)


def check_metadata(raw: Raw | UnsetType) -> None:
    """Metadata is the caller's own and only looked at for its shape."""
    if raw is UNSET or bytes(raw) == b"null":
        return
    if len(raw) > MAX_METADATA_BYTES:
        raise InvalidRequest(f"metadata is longer than {MAX_METADATA_BYTES} bytes", param="metadata")
    try:
        _metadata_decoder.decode(raw)
    except (msgspec.DecodeError, RecursionError):
        raise InvalidRequest("metadata must be an object with string values", param="metadata") from None


def check_range(name: str, value: float, least: float, most: float) -> None:
    if not least <= value <= most:
        raise InvalidRequest(f"{name} must be between {least:g} and {most:g}", param=name)


def check_count(name: str, count: int, most: int, things: str) -> None:
    if count > most:
        raise InvalidRequest(f"{name} has {count} {things}, at most {most} are allowed", param=name)


def check_ids(name: str, ids: Sequence[int], vocab_size: int) -> None:
    """Raises InvalidRequest that names the first id outside the vocabulary."""
    if not ids or (min(ids) >= 0 and max(ids) < vocab_size):
        return
    place, id = next((place, id) for place, id in enumerate(ids) if not 0 <= id < vocab_size)
    raise InvalidRequest(
        f"{name}[{place}] is {str(id)[:MAX_SHOWN_CHARS]}, the vocabulary has the ids 0 to {vocab_size - 1}",
        param=f"{name}[{place}]",
    )
