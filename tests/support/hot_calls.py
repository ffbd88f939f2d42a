"""Calls of a HotClient that know their own answer."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from prefixcache.errors import IndexUnavailable
from prefixcache.index.hot_client import HotClient
from prefixcache.index.scripts import Script
from tests.support.waiting import eventually

PATIENT_S = 5.0


def script(text: str) -> Script:
    sha1 = hashlib.sha1(text.encode(), usedforsecurity=False).hexdigest()
    return Script(name="test", text=text, sha1=sha1)


ECHO = script("return ARGV[1]")
APPEND = script("return redis.call('RPUSH', KEYS[1], ARGV[1])")


@asynccontextmanager
async def hot_client(url: str, *, deadline_s: float = PATIENT_S) -> AsyncIterator[HotClient]:
    """Fails if a task or a socket is left behind."""
    num_before, tasks = num_sockets(), asyncio.all_tasks()
    async with HotClient.open(url, deadline_s=deadline_s) as client:
        yield client
    await eventually(lambda: asyncio.all_tasks() <= tasks)
    await eventually(lambda: num_sockets() <= num_before)


def num_sockets() -> int:
    """Open in this process."""
    num = 0
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):  # The listing's own, closed by now.
            num += os.readlink(f"/proc/self/fd/{name}").startswith("socket:")
    return num


async def echo(client: HotClient, number: int) -> None:
    """Fails if the reply is not one's own."""
    word = b"%08d" % number
    assert await client.run(ECHO, "key", word) == word


async def until_answered(client: HotClient) -> None:
    """Returns once a call is answered: where its deadline is short, a busy machine may miss it."""

    async def is_answered() -> bool:
        try:
            await echo(client, 0)
        except IndexUnavailable:
            return False
        return True

    await eventually(is_answered)


async def echoes(client: HotClient, num_calls: int = 16) -> None:
    await asyncio.gather(*(echo(client, number) for number in range(num_calls)))
