"""The layout that most prefix indexes in Redis have: one HASH per block, a field for each of its holders.

    flat:<16 hex digits of the block's hash>   HASH   incarnation -> 1

A match asks for the fields of every block of the chain in one pipeline and intersects them in the client.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence

from redis.asyncio import Redis

_LOAD = """\
for at = 2, #ARGV do
  redis.call('HSET', 'flat:' .. ARGV[at], ARGV[1], 1)
end
"""
_LOADED_AT_ONCE = 1_000


class FlatLayout:
    """On one connection, with redis-py."""

    def __init__(self, url: str) -> None:
        self._redis = Redis(unix_socket_path=url.removeprefix("unix://"), single_connection_client=True)
        self._execute: Callable[..., Awaitable[object]] = self._redis.execute_command

    async def aclose(self) -> None:
        await self._redis.aclose()

    async def load(self, holder: int, blocks: Sequence[int]) -> None:
        """Fills it by a script: for what is not timed."""
        for start in range(0, len(blocks), _LOADED_AT_ONCE):
            names = (f"{block:016x}" for block in blocks[start : start + _LOADED_AT_ONCE])
            await self._execute("EVAL", _LOAD, 0, holder, *names)

    async def store(self, holder: int, blocks: Sequence[int]) -> None:
        await self._pipelined([("HSET", f"flat:{block:016x}", holder, 1) for block in blocks])

    async def remove(self, holder: int, blocks: Sequence[int]) -> None:
        await self._pipelined([("HDEL", f"flat:{block:016x}", holder) for block in blocks])

    async def match(self, chain: Sequence[int]) -> dict[int, int]:
        """Depth of each holder's unbroken run from the root."""
        answers = await self._pipelined([("HKEYS", f"flat:{block:016x}") for block in chain])
        depths: dict[int, int] = {}
        holding: set[bytes] | None = None
        for depth, holders in enumerate(answers, start=1):
            holding = set(holders) if holding is None else holding.intersection(holders)
            if not holding:
                break
            depths.update((int(holder), depth) for holder in holding)
        return depths

    async def _pipelined(self, commands: Sequence[tuple[str | int, ...]]) -> list[list[bytes]]:
        async with self._redis.pipeline(transaction=False) as pipeline:
            for command in commands:
                pipeline.execute_command(*command)
            return list(await pipeline.execute())
