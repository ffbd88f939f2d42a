"""URLs: what is taken and as what, what is refused, and that no password gets into a message."""

from __future__ import annotations

import ssl
from typing import Any

import pytest
from redis.asyncio import ConnectionPool

from prefixcache.errors import ConfigError
from prefixcache.index.redis_url import RedisUrl, read_redis_url

PLAIN: dict[str, Any] = {
    "host": "",
    "port": 6379,
    "path": None,
    "db": 0,
    "username": "",
    "password": "",
    "tls": None,
}

URLS = {
    "redis://cache.example": {"place": "cache.example:6379", "host": "cache.example"},
    "redis://cache.example/": {"place": "cache.example:6379", "host": "cache.example"},
    "redis://user:secret@cache.example:7000/3": {
        "place": "cache.example:7000",
        "host": "cache.example",
        "port": 7000,
        "db": 3,
        "username": "user",
        "password": "secret",
    },
    "redis://:p%40ss%2F@[::1]:7000?db=4": {
        "place": "::1:7000",
        "host": "::1",
        "port": 7000,
        "db": 4,
        "password": "p@ss/",
    },
    "redis://only@cache.example": {"place": "cache.example:6379", "host": "cache.example", "username": "only"},
    "redis://cache.example?username=u&password=secret": {
        "place": "cache.example:6379",
        "host": "cache.example",
        "username": "u",
        "password": "secret",
    },
    "rediss://:secret@cache.example?ssl_cert_reqs=none": {
        "place": "cache.example:6379",
        "host": "cache.example",
        "password": "secret",
        "tls": {"ssl_cert_reqs": "none"},
    },
    "rediss://cache.example": {"place": "cache.example:6379", "host": "cache.example", "tls": {}},
    "unix:///run/valkey.sock": {"place": "unix:///run/valkey.sock", "path": "/run/valkey.sock"},
    "unix://user:secret@/run/valkey.sock?db=2": {
        "place": "unix:///run/valkey.sock",
        "path": "/run/valkey.sock",
        "db": 2,
        "username": "user",
        "password": "secret",
    },
}


@pytest.mark.parametrize(("url", "fields"), URLS.items())
def test_url_is_understood(url: str, fields: dict[str, Any]) -> None:
    read = read_redis_url(url)
    assert read == RedisUrl(**(PLAIN | fields))
    assert "secret" not in repr(read) and "secret" not in read.place


@pytest.mark.parametrize("url", URLS)
def test_pool_connects_as_redis_py_would_by_the_url_itself(url: str) -> None:
    pools = ConnectionPool(**read_redis_url(url).connection_options()), ConnectionPool.from_url(url)
    ours, theirs = (pool.connection_class(**pool.connection_kwargs) for pool in pools)
    assert type(ours) is type(theirs)
    for name in ("host", "port", "path", "db", "cert_reqs", "ca_certs", "check_hostname"):
        assert getattr(ours, name, None) == getattr(theirs, name, None)
    for name in ("username", "password"):
        assert (getattr(ours, name) or "") == (getattr(theirs, name) or "")


@pytest.mark.parametrize(
    ("url", "credentials"),
    [
        ("redis://h", ()),
        ("redis://:word@h", ("word",)),
        ("redis://user:word@h", ("user", "word")),
        ("redis://user@h", ("user", "")),
    ],
)
def test_credentials_are_what_auth_takes(url: str, credentials: tuple[str, ...]) -> None:
    assert read_redis_url(url).credentials == credentials


def test_certificates_are_checked_unless_the_url_says_otherwise() -> None:
    checked, unchecked = [
        read_redis_url(f"rediss://h{options}").ssl_context() for options in ("", "?ssl_cert_reqs=none")
    ]
    assert checked is not None and unchecked is not None
    assert (checked.verify_mode, checked.check_hostname) == (ssl.CERT_REQUIRED, True)
    assert (unchecked.verify_mode, unchecked.check_hostname) == (ssl.CERT_NONE, False)
    assert read_redis_url("redis://h").ssl_context() is None


@pytest.mark.parametrize(
    "url",
    [
        "",
        "cache.example:6379",
        "http://cache.example",
        "redis://",
        "unix://",
        "redis://:secret@cache.example:port",
        "redis://:secret@cache.example?db=three",
        "redis://:secret@cache.example/three",
        "redis://:secret@cache.example/1/2",
        "redis://:secret@cache.example?socket_timeout=5",
        "redis://:secret@cache.example?max_connections=1",
        "redis://:secret@cache.example?ssl_cert_reqs=none",
        "unix://:secret@/run/valkey.sock?ssl_ca_certs=/none",
        "rediss://:secret@cache.example?ssl_ca_certs=/nowhere/ca.pem",
        "rediss://:secret@cache.example?ssl_certfile=/nowhere/cert.pem",
        "rediss://:secret@cache.example?ssl_cert_reqs=perhaps",
    ],
)
def test_unusable_urls_are_refused_without_showing_the_password(url: str) -> None:
    with pytest.raises(ConfigError) as caught:
        read_redis_url(url)
    assert "secret" not in str(caught.value)
