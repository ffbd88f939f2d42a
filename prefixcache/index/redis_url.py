"""Where a Redis is and how it lets one in, read from its URL; both clients of a process connect by the same object."""

from __future__ import annotations

import ssl
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import parse_qs, urlsplit

from redis.asyncio.connection import Connection, SSLConnection, UnixDomainSocketConnection, parse_url
from redis.exceptions import RedisError

from prefixcache.errors import ConfigError

_DEFAULT_PORT = 6379
_TLS_OPTIONS = {"ssl_ca_certs", "ssl_certfile", "ssl_keyfile", "ssl_cert_reqs"}
_OPTIONS = {"db", "username", "password"} | _TLS_OPTIONS
_FORMS = "redis://[USER:PASSWORD@]HOST[:PORT][/DB], rediss://... or unix:///PATH"


@dataclass(frozen=True, slots=True, kw_only=True)
class RedisUrl:
    """A URL that was understood. Nothing that is shown of it holds the password."""

    place: str
    """To be named in messages."""
    host: str
    port: int
    path: str | None
    """Of the unix socket; None with TCP."""
    db: int
    username: str
    password: str = field(repr=False)
    tls: Mapping[str, Any] | None
    """redis-py's options for TLS; None without."""

    @property
    def credentials(self) -> tuple[str, ...]:
        """What AUTH takes; empty if nothing was given."""
        if self.username:
            return self.username, self.password
        return (self.password,) if self.password else ()

    def connection_options(self) -> dict[str, Any]:
        """For a pool of redis-py."""
        options: dict[str, Any] = {"db": self.db, "username": self.username, "password": self.password}
        if self.path is not None:
            return options | {"connection_class": UnixDomainSocketConnection, "path": self.path}
        options |= {"host": self.host, "port": self.port}
        if self.tls is None:
            return options | {"connection_class": Connection}
        return options | {"connection_class": SSLConnection, **self.tls}

    def ssl_context(self) -> ssl.SSLContext | None:
        """As redis-py makes it of the same options; None without TLS. Reads files. Raises OSError and RedisError."""
        return None if self.tls is None else SSLConnection(**self.tls).ssl_context.get()


def read_redis_url(url: str) -> RedisUrl:
    """Raises ConfigError, which names the mistake and never the password."""
    try:
        parts = urlsplit(url)
        place = f"unix://{parts.path}" if parts.scheme == "unix" else f"{parts.hostname}:{parts.port or _DEFAULT_PORT}"
    except ValueError as error:
        raise ConfigError(f"the Redis URL is malformed ({error}); use {_FORMS}") from error
    if parts.scheme not in ("redis", "rediss", "unix") or not (
        parts.path if parts.scheme == "unix" else parts.hostname
    ):
        raise ConfigError(f"the Redis URL has scheme {parts.scheme!r} or names no server; use {_FORMS}")
    given = set(parse_qs(parts.query, keep_blank_values=True))
    for option in sorted(given - _OPTIONS):
        raise ConfigError(f"the Redis URL of {place} has the unknown option {option!r}")
    for option in sorted(given & _TLS_OPTIONS if parts.scheme != "rediss" else ()):
        raise ConfigError(f"the Redis URL of {place} has the option {option!r}, which needs rediss://")
    if parts.scheme != "unix" and not (parts.path.removeprefix("/").isdecimal() or parts.path in ("", "/")):
        raise ConfigError(f"the Redis URL of {place} has the database {parts.path[1:]!r}, which is no number")
    try:
        options: dict[str, Any] = dict(parse_url(url))
    except ValueError as error:
        raise ConfigError(f"the Redis URL of {place} is malformed: {error}") from error
    read = RedisUrl(
        place=place,
        host=options.get("host", ""),
        port=options.get("port", _DEFAULT_PORT),
        path=options.get("path"),
        db=options.get("db", 0),
        username=options.get("username", ""),
        password=options.get("password", ""),
        tls={name: options[name] for name in sorted(_TLS_OPTIONS & set(options))} if parts.scheme == "rediss" else None,
    )
    try:
        read.ssl_context()
    except (OSError, ValueError, RedisError) as error:
        raise ConfigError(f"the Redis URL of {place} has unusable TLS options: {error}") from error
    return read
