"""Calls to one Redis: every one ends within its deadline, with its own reply or with IndexUnavailable.

    caller ──── deadline (30 ms) ────► IndexUnavailable          the caller is gone, the call is not:
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
from urllib.parse import parse_qs, urlsplit

from redis.asyncio import ConnectionPool, Redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import AuthenticationError, NoPermissionError, NoScriptError, RedisError

from prefixcache.errors import ConfigError, IndexUnavailable
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
_URL_OPTIONS = {"db", "username", "password", "ssl_ca_certs", "ssl_certfile", "ssl_keyfile", "ssl_cert_reqs"}
_URL_FORMS = "redis://[USER:PASSWORD@]HOST[:PORT][/DB], rediss://... or unix:///PATH"


def _pool_of(url: str) -> tuple[ConnectionPool, str]:
    """The pool behind a URL and the place to name in messages. Raises ConfigError."""
    try:
        parts = urlsplit(url)
        place = f"unix://{parts.path}" if parts.scheme == "unix" else f"{parts.hostname}:{parts.port or 6379}"
    except ValueError as error:
        raise ConfigError(f"the Redis URL is malformed ({error}); use {_URL_FORMS}") from error
    if parts.scheme not in ("redis", "rediss", "unix") or not (
        parts.path if parts.scheme == "unix" else parts.hostname
    ):
        raise ConfigError(f"the Redis URL has scheme {parts.scheme!r} or names no server; use {_URL_FORMS}")
    unknown = sorted(set(parse_qs(parts.query, keep_blank_values=True)) - _URL_OPTIONS)
    if unknown:
        raise ConfigError(f"the Redis URL of {place} has the unknown option {unknown[0]!r}")
    try:
        pool = ConnectionPool.from_url(
            url,
            max_connections=INDEX_CONNECTIONS,
            socket_connect_timeout=INDEX_CONNECT_TIMEOUT_S,
            # The client's own deadline bounds reads and writes: redis-py's costs a task and a timer a call, and the
            # wait_for of Python 3.11 behind it can swallow a cancellation.
            socket_timeout=None,
            retry=Retry(NoBackoff(), 0),
            protocol=2,
            driver_info=None,
        )
    except ValueError as error:
        raise ConfigError(f"the Redis URL of {place} is malformed: {error}") from error
    return pool, place


class RedisClient:
    """A pool of connections that open when they are needed; the server may be down, slow or restarted at any time."""

    def __init__(self, url: str) -> None:
        self._pool, self.place = _pool_of(url)
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
            return list(await pipeline.execute())

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
                raise IndexUnavailable(f"the connection to Redis at {self.place} is closed") from None
            raise

    def _start(self, call: Callable[[], Awaitable[T]]) -> asyncio.Task[T]:
        """Takes over one of the free connections until the call has ended."""
        if self._closed:
            self._free.release()
            raise IndexUnavailable(f"the connection to Redis at {self.place} is closed")
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
        raise IndexUnavailable(self._no_answer(deadline_s))

    async def _translated(self, call: Callable[[], Awaitable[T]]) -> T:
        try:
            async with asyncio.timeout(INDEX_WRITE_TIMEOUT_S):
                return await call()
        except TimeoutError:
            raise IndexUnavailable(self._no_answer(INDEX_WRITE_TIMEOUT_S)) from None
        except AuthenticationError as error:
            raise IndexUnavailable(
                f"Redis at {self.place} asks for a password, or for another one: "
                f"give it in the URL, redis://:PASSWORD@HOST:PORT ({error})"
            ) from error
        except NoPermissionError as error:
            raise IndexUnavailable(f"the Redis user at {self.place} lacks a permission: {error}") from error
        except (RedisError, OSError) as error:
            raise IndexUnavailable(f"Redis at {self.place} failed: {error}") from error

    def _no_answer(self, waited_s: float) -> str:
        return f"Redis at {self.place} gave no answer within {waited_s * 1e3:.0f} ms"

    def _ended(self, task: asyncio.Task[Any]) -> None:
        self._calls.discard(task)
        self._free.release()
        if not task.cancelled():
            task.exception()  # Retrieved here: its caller may have stopped waiting.
