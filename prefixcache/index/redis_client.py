"""Calls to Redis that no request waits for: each over by its deadline, with its own reply or with IndexUnavailable.

    caller ──────── deadline ────────► IndexUnavailable          the caller is gone, the call is not:
    call   ── send ───────────────────────────── reply ─► pool   a late reply is read by the call that sent it,
           ── send ───────────────────────────────────────x      or, after 1 s, its connection is closed

A caller that stops waiting or is cancelled never interrupts redis-py between send and reply: each call is a task of the
client, so that no connection goes back to the pool with a reply unread (redis-py closes such a connection, yet a second
cancellation while it gives it back would lose the slot for good). A caller that gets no free connection before its
deadline has sent nothing.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, TypeVar

from redis.asyncio import ConnectionPool, Redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import (
    AuthenticationError,
    MasterDownError,
    NoPermissionError,
    NoScriptError,
    OutOfMemoryError,
    ReadOnlyError,
    RedisError,
)

from prefixcache.errors import IndexUnavailable
from prefixcache.index import redis_errors
from prefixcache.index.redis_url import read_redis_url
from prefixcache.index.scripts import Script
from prefixcache.limits import (
    INDEX_CONNECT_TIMEOUT_S,
    INDEX_CONNECTIONS,
    INDEX_WRITE_TIMEOUT_S,
)

T = TypeVar("T")
Argument = bytes | str | int

_LATE_LOOP_TURNS = 2
"""Turns of the loop from bytes in the socket to a finished call."""


class RedisClient:
    """A pool of connections that open when they are needed; the server may be down, slow or restarted at any time."""

    def __init__(self, url: str) -> None:
        address = read_redis_url(url)
        self.place = address.place
        self._pool = ConnectionPool(
            **address.connection_options(),
            max_connections=INDEX_CONNECTIONS,
            socket_connect_timeout=INDEX_CONNECT_TIMEOUT_S,
            # The client's own deadline bounds reads and writes: redis-py's costs a task and a timer a call, and the
            # wait_for of Python 3.11 behind it can swallow a cancellation.
            socket_timeout=None,
            retry=Retry(NoBackoff(), 0),
            protocol=2,
            driver_info=None,
        )
        self._redis = Redis(connection_pool=self._pool)
        self._free = asyncio.Semaphore(INDEX_CONNECTIONS)
        self._closed = False
        self._calls: set[asyncio.Task[Any]] = set()

    async def command(self, *arguments: Argument, deadline_s: float) -> Any:
        """One command."""
        return await self._within(deadline_s, lambda: self._execute(*arguments))

    async def commands(self, commands: Sequence[Sequence[Argument]], *, deadline_s: float) -> list[Any]:
        """Several commands in one round trip, without a transaction."""
        return await self._within(deadline_s, lambda: self._pipelined(commands))

    async def run(self, script: Script, key: str, *arguments: Argument, deadline_s: float) -> Any:
        """One script; one that the server does not know yet, or forgot, is sent as text."""
        return await self._within(deadline_s, lambda: self._run(script, key, *arguments))

    async def aclose(self) -> None:
        """Ends the calls in flight, refuses further ones and closes every connection."""
        self._closed = True
        for call in self._calls:
            call.cancel()
        await asyncio.gather(*self._calls, return_exceptions=True)
        await self._redis.aclose()
        with contextlib.suppress(RedisError, OSError):  # A connection that does not close in time is dropped.
            await self._pool.aclose()

    async def _execute(self, *arguments: Argument) -> Any:
        return await self._redis.execute_command(*arguments)  # type: ignore[no-untyped-call]  # redis-py has no types

    async def _run(self, script: Script, key: str, *arguments: Argument) -> Any:
        try:
            return await self._execute("EVALSHA", script.sha1, 1, key, *arguments)
        except NoScriptError:
            return await self._execute("EVAL", script.text, 1, key, *arguments)

    async def _pipelined(self, commands: Sequence[Sequence[Argument]]) -> list[Any]:
        async with self._redis.pipeline(transaction=False) as pipeline:
            for command in commands:
                pipeline.execute_command(*command)
            replies = list(await pipeline.execute(raise_on_error=False))
        for reply in replies:
            if isinstance(reply, RedisError):
                raise reply  # As it came: redis-py's own raise quotes the command, and one of them holds the secret.
        return replies

    async def _within(self, deadline_s: float, call: Callable[[], Awaitable[T]]) -> T:
        task: asyncio.Task[T] | None = None
        try:
            async with asyncio.timeout(deadline_s):
                await self._free.acquire()
                task = self._start(call)
                return await asyncio.shield(task)
        except TimeoutError:
            if task is None:
                raise IndexUnavailable(
                    f"all {INDEX_CONNECTIONS} connections to Redis at {self.place} are busy"
                ) from None
            return await self._overdue(task, deadline_s)
        except asyncio.CancelledError:
            current = asyncio.current_task()
            if task is not None and task.cancelled() and current is not None and not current.cancelling():
                raise redis_errors.closed(self.place) from None
            raise

    def _start(self, call: Callable[[], Awaitable[T]]) -> asyncio.Task[T]:
        """Takes over one of the free connections until the call has ended."""
        if self._closed:
            self._free.release()
            raise redis_errors.closed(self.place)
        task = asyncio.get_running_loop().create_task(self._translated(call))
        self._calls.add(task)
        task.add_done_callback(self._ended)
        return task

    async def _overdue(self, task: asyncio.Task[T], deadline_s: float) -> T:
        """The loop may have been late, not Redis: a reply that waits in the socket by now is taken."""
        for _ in range(_LATE_LOOP_TURNS):
            await asyncio.sleep(0)
            if task.done():
                return task.result()
        raise redis_errors.no_answer(self.place, deadline_s)

    async def _translated(self, call: Callable[[], Awaitable[T]]) -> T:
        try:
            async with asyncio.timeout(INDEX_WRITE_TIMEOUT_S):
                return await call()
        except TimeoutError:
            raise redis_errors.no_answer(self.place, INDEX_WRITE_TIMEOUT_S) from None
        except AuthenticationError as error:
            raise redis_errors.wrong_password(self.place, error) from error
        except NoPermissionError as error:
            raise redis_errors.no_permission(self.place, error) from error
        except OutOfMemoryError as error:
            raise redis_errors.full(self.place) from error
        except (ReadOnlyError, MasterDownError) as error:
            # The name may lead to another server by now; a connection that stays would never find out.
            with contextlib.suppress(RedisError, OSError):
                await self._pool.disconnect(inuse_connections=False)
            raise redis_errors.failed(self.place, error) from error
        except (RedisError, OSError) as error:
            raise redis_errors.failed(self.place, error) from error

    def _ended(self, task: asyncio.Task[Any]) -> None:
        self._calls.discard(task)
        self._free.release()
        if not task.cancelled():
            task.exception()  # Retrieved here: its caller may have stopped waiting.
