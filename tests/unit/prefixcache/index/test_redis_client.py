"""The pool without a server."""

from __future__ import annotations

import pytest

from prefixcache.errors import IndexUnavailable
from prefixcache.index.redis_client import RedisClient


async def test_server_that_is_not_there_is_unavailable_at_once(tmp_path_factory: pytest.TempPathFactory) -> None:
    path = tmp_path_factory.mktemp("s") / "absent"
    client = RedisClient(f"unix://:secret@{path}")
    try:
        with pytest.raises(IndexUnavailable, match="absent") as caught:
            await client.command("PING", deadline_s=1.0)
        assert "secret" not in str(caught.value)
    finally:
        await client.aclose()
