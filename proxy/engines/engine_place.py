"""What an engine is called: HOST:PORT of its URL."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from urllib.parse import urlsplit

from prefixcache.errors import ConfigError

_DEFAULT_PORTS = {"http": 80, "https": 443}
_MOST_CHARS = 128


@dataclass(frozen=True, slots=True, kw_only=True)
class EnginePlace:
    url: str
    """What paths are appended to: without a slash at the end, without /v1."""
    engine_id: str
    """HOST:PORT and the base path, fit for a header and a metric label; the same on every proxy that has this URL."""


def read_engine_places(texts: Sequence[str]) -> Sequence[EnginePlace]:
    """In their order. Raises ConfigError, also for one engine that is given twice."""
    places = [read_engine_place(text) for text in texts]
    for number, place in enumerate(places):
        if place in places[:number]:
            raise ConfigError(f"engine {place.url} is given twice: name each of them once")
    return places


def read_engine_place(text: str) -> EnginePlace:
    """Raises ConfigError. The /v1 of an OpenAI base URL is part of the paths asked for, and dropped here."""
    mend = "an engine is http://HOST:PORT or https://HOST[:PORT][/BASE]"
    try:
        parts = urlsplit(text.strip())
        host, port = parts.hostname, parts.port
    except ValueError as error:
        raise ConfigError(f"engine {text!r} is no URL ({error}): {mend}") from None
    if parts.scheme not in _DEFAULT_PORTS or not host:
        raise ConfigError(f"engine {text!r} is no URL of an HTTP server: {mend}")
    if parts.username is not None or parts.query or parts.fragment:
        raise ConfigError(f"engine {text!r} has more in its URL than a place: {mend}")
    path = parts.path.rstrip("/").removesuffix("/v1").rstrip("/")
    place = f"[{host}]" if ":" in host else host
    engine_id = f"{place}:{port or _DEFAULT_PORTS[parts.scheme]}{path}"
    if len(engine_id) > _MOST_CHARS or not all("!" <= char <= "~" for char in engine_id):
        raise ConfigError(f"engine {text!r} has blanks, more than {_MOST_CHARS} characters, or others than ASCII")
    return EnginePlace(url=f"{parts.scheme}://{engine_id}", engine_id=engine_id)
