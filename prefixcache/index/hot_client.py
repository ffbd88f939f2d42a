"""Calls to Redis on the path of a request: coalesced on one connection, each over by its deadline, none in vain.

The connection is kept by a task of the client: connected again whenever it is lost, with every script loaded, so that a
call costs one round trip. Without a connection, or while the breaker (breaker.py) is not closed, calls fail at once.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from hiredis import ReplyError

from prefixcache.errors import IndexUnavailable
from prefixcache.index import redis_errors, scripts
from prefixcache.index.breaker import Breaker
from prefixcache.index.hot_connection import HotConnection
from prefixcache.index.redis_client import Argument
from prefixcache.index.redis_url import RedisUrl, read_redis_url
from prefixcache.index.scripts import Script
from prefixcache.limits import (
    INDEX_CONNECT_TIMEOUT_S,
    INDEX_DEADLINE_S,
    RECONNECT_FIRST_S,
    RECONNECT_MOST_S,
)

logger = logging.getLogger(__name__)

_CLIENT_NAME = "prefixcache"
_SERVES_NOBODY = {"LOADING", "BUSY", "READONLY", "MASTERDOWN", "NOPERM"}
"""Codes of error replies that say nothing about the call and much about the server, or about who we are to it.

NOPERM: the user may run no script, or touch none of our keys; what is forbidden inside a script has another code.
"""
_NO_PRIMARY = {"READONLY", "MASTERDOWN"}
"""Those after which the name may lead to another server by now."""
_TRIAL = ("EVAL", "#!lua flags=allow-oom\nreturn 1")
"""A script that might write: refused by whoever would refuse ours, but for lack of memory, which fails single calls."""


class HotClient:
    """One connection; the server may be down, slow, frozen or restarted at any time."""

    def __init__(self, url: RedisUrl, deadline_s: float) -> None:
        self.place = url.place
        self._url = url
        self._deadline_s = deadline_s
        self._loop = asyncio.get_running_loop()
        self._breaker = Breaker()
        self._connection: HotConnection | None = None
        self._tried = asyncio.Event()
        """The first attempt to connect has ended."""
        self._reason = IndexUnavailable(f"Redis at {self.place} is not connected yet")
        self._logged: str | None = None
        """Why nothing is sent, as last logged; None while calls are."""
        self._trial_timer: asyncio.TimerHandle | None = None
        self._refusal: str | None = None
        """The first one of a server that serves nobody since then; None if it is merely late."""
        self._refused_key: str | None = None
        """Of the call that it refused: the trial names it, too."""

    @classmethod
    @asynccontextmanager
    async def open(cls, url: str, *, deadline_s: float = INDEX_DEADLINE_S) -> AsyncIterator[HotClient]:
        """Begins once the first attempt to connect has ended, well or not. Raises ConfigError for an unusable URL."""
        client = cls(read_redis_url(url), deadline_s)
        keeping = asyncio.create_task(client._keep_connected())
        try:
            await client._tried.wait()
            yield client
        finally:
            await client._close(keeping)

    @classmethod
    @asynccontextmanager
    async def closed(cls, url: str) -> AsyncIterator[HotClient]:
        """One that never connects, for a program that looks no prompt up. Raises ConfigError for an unusable URL."""
        yield cls(read_redis_url(url), INDEX_DEADLINE_S)

    @property
    def is_available(self) -> bool:
        """Whether a call would be sent."""
        return self._connection is not None and self._connection.is_open and self._breaker.state == "closed"

    async def run(self, script: Script, key: str, *arguments: Argument) -> Any:
        """The script's reply. Raises IndexUnavailable: not sent, not answered in time, or refused."""
        reply = await self._call("EVALSHA", script.sha1, 1, key, *arguments)
        if isinstance(reply, ReplyError) and _code(reply) == "NOSCRIPT":  # SCRIPT FLUSH on a living server.
            reply = await self._call("EVAL", script.text, 1, key, *arguments)
        if isinstance(reply, ReplyError):
            self.take_refusal(reply, key)
            raise redis_errors.refused(self.place, str(reply))
        return reply

    def post(self, script: Script, key: str, *arguments: Argument) -> None:
        """`run` without waiting, on the same connection, in order; one that cannot be sent or fails is forgotten."""
        self.forward(_Post(self, script, key, arguments), "EVALSHA", script.sha1, 1, key, *arguments)

    def forward(self, post: _Post, *words: Argument) -> None:
        """Sent also while an overdue reply is owed, since nobody waits for it: a short stall loses none."""
        if self._connection is not None and self._breaker.state in ("closed", "owing"):
            with contextlib.suppress(IndexUnavailable):
                self._connection.send(post, *words)

    def send(self, future: asyncio.Future[Any], *words: Argument) -> None:
        """Raises IndexUnavailable at once if it makes no sense to send."""
        if self._connection is None:
            raise IndexUnavailable(str(self._reason))
        if self._breaker.state != "closed":
            raise IndexUnavailable(f"Redis at {self.place} is late or unable; nothing is sent until it is back in time")
        self._connection.send(future, *words)

    def take_refusal(self, reply: ReplyError, key: str | None = None) -> None:
        """Draws the conclusions of an error reply to a call on `key`."""
        if _code(reply) in _SERVES_NOBODY:
            self._reason = redis_errors.refused(self.place, str(reply))
            if self._refusal is None:
                self._refusal, self._refused_key = str(self._reason), key
            self._breaker.refused()
            self._breaker_moved()
            if _code(reply) in _NO_PRIMARY and self._connection is not None:
                self._connection.abort(self._reason)

    async def _call(self, *words: Argument) -> Any:
        future: asyncio.Future[Any] = self._loop.create_future()
        self.send(future, *words)
        return await future

    # --- the connection

    async def _keep_connected(self) -> None:
        """Never returns; cancelled by its owner."""
        pause_s = RECONNECT_FIRST_S
        while True:
            begun_at = time.monotonic()
            try:
                self._connection = await self._connect()
            except TimeoutError:
                self._reason = redis_errors.no_answer(self.place, INDEX_CONNECT_TIMEOUT_S)
            except IndexUnavailable as error:
                self._reason = error
            except OSError as error:
                self._reason = redis_errors.failed(self.place, error)
            except Exception as error:
                logger.exception("connecting to Redis at %s failed", self.place)
                self._reason = redis_errors.failed(self.place, error)
            else:
                self._tried.set()
                self._breaker_moved()
                self._reason = await asyncio.shield(self._connection.lost)
                self._connection = None
            self._tried.set()
            self._report()
            lasted_s = time.monotonic() - begun_at
            if lasted_s > RECONNECT_MOST_S:
                pause_s = RECONNECT_FIRST_S
            # Counted from the begin of the attempt: a server that stands still has taken its time already. Full jitter
            # over the upper half: restarted proxies must not knock in step.
            jitter = random.uniform(0.5, 1.0)
            await asyncio.sleep(max(RECONNECT_FIRST_S * jitter, pause_s * jitter - lasted_s))
            pause_s = min(2 * pause_s, RECONNECT_MOST_S)

    async def _connect(self) -> HotConnection:
        """A connection past its handshake; all of it within INDEX_CONNECT_TIMEOUT_S."""
        connection = HotConnection(self.place, changed=self._breaker_moved)
        url = self._url
        try:
            async with asyncio.timeout(INDEX_CONNECT_TIMEOUT_S):
                if url.path is not None:
                    await self._loop.create_unix_connection(lambda: connection, url.path)
                else:
                    context = url.ssl_context()
                    await self._loop.create_connection(lambda: connection, url.host, url.port, ssl=context)
                await self._shake_hands(connection)
        except BaseException:
            connection.abort(redis_errors.closed(self.place))
            raise
        connection.serve(self._breaker, self._deadline_s)
        return connection

    async def _shake_hands(self, connection: HotConnection) -> None:
        """One write. Raises IndexUnavailable; what a server may lack or forbid (names, loading ahead) is no reason."""
        needed: list[tuple[Argument, ...]] = []
        if self._url.credentials:
            needed.append(("AUTH", *self._url.credentials))
        if self._url.db:
            needed.append(("SELECT", self._url.db))
        useful: list[tuple[Argument, ...]] = [("CLIENT", "SETNAME", _CLIENT_NAME)]
        useful += [("SCRIPT", "LOAD", script.text) for script in scripts.ALL]
        futures: list[asyncio.Future[Any]] = []
        for words in needed + useful:
            futures.append(self._loop.create_future())
            connection.send(futures[-1], *words)
        replies = await asyncio.gather(*futures, return_exceptions=True)
        last_words: ReplyError | None = None
        for at, reply in enumerate(replies):
            if isinstance(reply, IndexUnavailable):
                raise reply if last_words is None else redis_errors.refused(self.place, str(last_words))
            if isinstance(reply, ReplyError):
                last_words = reply
                if at < len(needed) or _code(reply) not in ("ERR", "NOPERM"):
                    raise redis_errors.refused(self.place, str(reply))

    async def _close(self, keeping: asyncio.Task[None]) -> None:
        """What was sent gets the usual time; nothing is left behind."""
        if self.is_available:
            last: asyncio.Future[Any] = self._loop.create_future()
            with contextlib.suppress(IndexUnavailable):
                self.send(last, "PING")
            await asyncio.wait([last], timeout=INDEX_DEADLINE_S)
            if not last.cancel():
                last.exception()  # Retrieved: that it came too late is nobody's concern.
        connection, self._connection = self._connection, None
        self._reason = redis_errors.closed(self.place)
        if self._trial_timer is not None:
            self._trial_timer.cancel()
        keeping.cancel()
        await asyncio.gather(keeping, return_exceptions=True)
        if connection is not None:
            connection.abort(self._reason)
            await connection.lost

    # --- the breaker

    def _breaker_moved(self) -> None:
        """Has a trial made as soon as one makes sense."""
        self._report()
        at = self._breaker.trial_at
        if at is not None and self._connection is not None and self._trial_timer is None:
            self._trial_timer = self._loop.call_later(max(0.0, at - time.monotonic()), self._try)

    def _try(self) -> None:
        self._trial_timer = None
        at, connection = self._breaker.trial_at, self._connection
        if at is None or connection is None or not connection.is_open:
            return
        if time.monotonic() < at:
            self._breaker_moved()
        else:
            self._breaker.begin_trial()
            try:
                keys = () if self._refused_key is None else (self._refused_key,)
                connection.send(_Trial(self), *_TRIAL, len(keys), *keys)
            except IndexUnavailable:
                self._breaker.refused()
                self._breaker_moved()

    def trial_ended(self, reply: Any) -> None:
        """`reply` is None if none came in time; the breaker knows that already."""
        if isinstance(reply, ReplyError) and _code(reply) in _SERVES_NOBODY:
            self.take_refusal(reply)
        elif reply is not None:
            self._breaker.passed()
            self._refusal = self._refused_key = None
        self._breaker_moved()

    def _report(self) -> None:
        """Logs whether calls are sent when that, or the reason why not, has changed. One late reply is no news."""
        if self._connection is None:
            why: str | None = str(self._reason)
        elif self._breaker.state in ("closed", "owing"):
            why = None
        else:
            why = self._refusal or self._logged or f"Redis at {self.place} answers late or not at all"
        if why == self._logged:
            return
        self._logged = why
        if why is None:
            logger.info("Redis at %s answers: prompts are looked up again", self.place)
        else:
            logger.warning("%s: prompts are not looked up", why)


class _Post:
    """Receives the reply to a post."""

    __slots__ = ("_arguments", "_client", "_key", "_script")

    def __init__(self, client: HotClient, script: Script, key: str, arguments: tuple[Argument, ...]) -> None:
        self._client = client
        self._script: Script | None = script
        self._key = key
        self._arguments = arguments

    def done(self) -> bool:
        return False

    def set_result(self, reply: Any, /) -> None:
        if not isinstance(reply, ReplyError):
            return
        if _code(reply) == "NOSCRIPT" and self._script is not None:
            script, self._script = self._script, None
            self._client.forward(self, "EVAL", script.text, 1, self._key, *self._arguments)
        else:
            self._client.take_refusal(reply, self._key)

    def set_exception(self, error: IndexUnavailable, /) -> None:
        """Forgotten."""


class _Trial:
    """Receives the reply to the breaker's trial."""

    __slots__ = ("_client",)

    def __init__(self, client: HotClient) -> None:
        self._client = client

    def done(self) -> bool:
        return False

    def set_result(self, reply: Any, /) -> None:
        self._client.trial_ended(reply)

    def set_exception(self, error: IndexUnavailable, /) -> None:
        self._client.trial_ended(None)


def _code(reply: ReplyError) -> str:
    return str(reply).partition(" ")[0]
