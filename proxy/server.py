"""The HTTP server around the application."""

from __future__ import annotations

import errno
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from aiohttp import web

from prefixcache.errors import ConfigError
from prefixcache.limits import SHUTDOWN_GRACE_S


@asynccontextmanager
async def serving(app: web.Application, *, host: str, port: int) -> AsyncIterator[str]:
    """Serves until exit and yields the URL. Raises ConfigError if the address cannot be listened on.

    handler_cancellation: a client that leaves cancels its handler at whatever it awaits, so that its request is
    aborted at the worker; aiohttp's default is to go on.
    """
    runner = web.AppRunner(app, handler_cancellation=True, access_log=None, shutdown_timeout=SHUTDOWN_GRACE_S)
    await runner.setup()
    try:
        site = web.TCPSite(runner, host, port)
        try:
            await site.start()
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                raise ConfigError(f"cannot listen on {host}:{port}: the port is in use, choose another one") from error
            raise ConfigError(f"cannot listen on {host}:{port}: {error.strerror or error}") from error
        bound_host, bound_port = runner.addresses[0][:2]
        yield f"http://{f'[{bound_host}]' if ':' in bound_host else bound_host}:{bound_port}"
    finally:
        await runner.cleanup()
