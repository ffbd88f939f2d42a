"""URLs: what is taken, what is refused, and that no password gets into a message."""

from __future__ import annotations

import pytest

from prefixcache.errors import ConfigError, IndexUnavailable
from prefixcache.index.redis_client import RedisClient


@pytest.mark.parametrize(
    ("url", "place"),
    [
        ("redis://cache.example", "cache.example:6379"),
        ("redis://user:secret@cache.example:7000/3", "cache.example:7000"),
        ("rediss://:secret@cache.example", "cache.example:6379"),
        ("redis://[::1]:7000", "::1:7000"),
        ("unix:///run/valkey.sock", "unix:///run/valkey.sock"),
        ("unix://user:secret@/run/valkey.sock?db=2", "unix:///run/valkey.sock"),
    ],
)
def test_place_names_the_server_without_the_password(url: str, place: str) -> None:
    assert RedisClient(url).place == place


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
        "redis://:secret@cache.example?socket_timeout=5",
        "redis://:secret@cache.example?max_connections=1",
    ],
)
def test_unusable_urls_are_refused_without_showing_the_password(url: str) -> None:
    with pytest.raises(ConfigError) as caught:
        RedisClient(url)
    assert "secret" not in str(caught.value)


async def test_server_that_is_not_there_is_unavailable_at_once(tmp_path_factory: pytest.TempPathFactory) -> None:
    path = tmp_path_factory.mktemp("s") / "absent"
    client = RedisClient(f"unix://:secret@{path}")
    try:
        with pytest.raises(IndexUnavailable, match="absent") as caught:
            await client.command("PING", deadline_s=1.0)
        assert "secret" not in str(caught.value)
    finally:
        await client.aclose()
