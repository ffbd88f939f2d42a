"""The URL of an engine, taken apart for connecting and for the head of a request."""

from __future__ import annotations

from dataclasses import dataclass
from urllib.parse import urlsplit

from prefixcache.errors import ConfigError

_DEFAULT_PORTS = {"http": 80, "https": 443}


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineUrl:
    """What connecting and the first lines of a request need of it."""

    text: str
    """Scheme and host in lower case, without a slash at its end: what is shown, and what tells engines apart."""
    host: str
    """A name or an address, an IPv6 one without its brackets."""
    port: int
    is_tls: bool
    base_path: bytes
    """What stands before every path, without a slash at its end: b"" for most."""
    host_header: bytes

    @classmethod
    def parse(cls, url: str) -> EngineUrl:
        """Raises ConfigError for anything but http[s]://HOST[:PORT][/BASE]."""
        try:
            parts = urlsplit(url)
            port = parts.port
        except ValueError as error:
            raise _wrong(url, str(error)) from error
        place = parts.netloc.lower()
        if "@" in place:
            raise ConfigError(
                f"the engine URL {parts.scheme}://...@{place.rpartition('@')[2]} carries a user or a password, which "
                "would stand in logs: leave it out. Clients' own Authorization reaches the engines, or a key that is "
                "set for them does"
            )
        if parts.scheme not in _DEFAULT_PORTS:
            raise _wrong(url, "it does not begin with http:// or https://")
        if not parts.hostname:
            raise _wrong(url, "it names no host")
        if port == 0:
            raise _wrong(url, "nothing listens on port 0")
        if "?" in url or "#" in url:
            raise _wrong(url, "it has a query or a fragment")
        if not url.isascii() or any(char <= " " or char == "\x7f" for char in url):
            raise _wrong(url, "it has blanks or others than ASCII characters in it: write them as %XX")
        base = parts.path.rstrip("/")
        return cls(
            text=f"{parts.scheme}://{place}{base}",
            host=parts.hostname,
            port=port or _DEFAULT_PORTS[parts.scheme],
            is_tls=parts.scheme == "https",
            base_path=base.encode(),
            host_header=place.encode(),
        )


def _wrong(url: str, why: str) -> ConfigError:
    return ConfigError(f"{url!r} is no URL of an engine: {why}; write http://HOST:PORT or https://HOST[:PORT][/BASE]")
