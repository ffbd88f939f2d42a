"""The HTTP server around the application."""

from __future__ import annotations

import errno
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from aiohttp import web

from prefixcache.errors import ConfigError, InvalidRequest
from prefixcache.limits import LISTEN_BACKLOG, MAX_HEADER_LINE_BYTES, SHUTDOWN_CLOSE_S
from proxy.access_log import CLIENT_CLOSED_REQUEST
from proxy.departure import Departure
from proxy.error_answers import error_answer

_logger = logging.getLogger(__name__)


class _Connection(web.RequestHandler):
    """Answers what is no HTTP, and so never reaches the application, in the envelope of all other errors.

    A client that left while its answer was being written is no error.
    """

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        if isinstance(exc, ConnectionError):
            nobody_reads = web.Response(status=CLIENT_CLOSED_REQUEST)
            nobody_reads.force_close()
            return nobody_reads
        if status >= 500 or request.writer.output_size > 0:
            return super().handle_error(request, status, exc, message)
        _logger.info("malformed request from %s: %s", request.remote, type(exc).__name__)
        response = error_answer(InvalidRequest("the request is not valid HTTP"))
        response.force_close()
        return response


class _Server(web.Server):
    def __call__(self) -> _Connection:
        return _Connection(self, loop=self._loop, **self._kwargs)


class _Runner(web.AppRunner):
    """aiohttp has no public way to choose the class of its connections."""

    async def _make_server(self) -> web.Server:
        made: Any = await super()._make_server()
        return _Server(
            made.request_handler,
            request_factory=made.request_factory,
            handler_cancellation=made.handler_cancellation,
            **made._kwargs,
        )


@asynccontextmanager
async def serving(app: web.Application, departure: Departure, *, host: str, port: int) -> AsyncIterator[str]:
    """Serves until exit, then takes leave; yields the URL. Raises ConfigError if the address cannot be listened on.

    handler_cancellation: a client that leaves cancels its handler at whatever it awaits, so that its request is
    aborted at the worker; aiohttp's default is to go on.
    """
    runner = _Runner(
        app,
        handler_cancellation=True,
        access_log=None,
        shutdown_timeout=SHUTDOWN_CLOSE_S,
        max_line_size=MAX_HEADER_LINE_BYTES,
        max_field_size=MAX_HEADER_LINE_BYTES,
    )
    try:
        await runner.setup()  # What it opened before it failed is closed below, too.
        site = web.TCPSite(runner, host, port, backlog=LISTEN_BACKLOG)
        try:
            await site.start()
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                raise ConfigError(f"cannot listen on {host}:{port}: the port is in use, choose another one") from error
            raise ConfigError(f"cannot listen on {host}:{port}: {error.strerror or error}") from error
        bound_host, bound_port = runner.addresses[0][:2]
        yield f"http://{f'[{bound_host}]' if ':' in bound_host else bound_host}:{bound_port}"
        await departure.leave(site.stop)
    finally:
        await runner.cleanup()
