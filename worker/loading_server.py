"""What a worker answers while its model loads: that it is there, its metrics, and that it takes nothing yet.

A large model loads for minutes, and whoever asks meanwhile can tell a worker that starts from one that is gone. Proxies
find no worker before it has registered; one that knows its address from an earlier life is turned away at the first
byte.
"""

from __future__ import annotations

import json
import socket
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from prefixcache.errors import ConfigError
from prefixcache.limits import HELLO_TIMEOUT_S, LISTEN_BACKLOG, LOADING_POLL_S
from prefixcache.metrics import CONTENT_TYPE, WorkerMetrics, exposition
from worker.config import Address

_REASON = "the model is loading"
_BODIES = {
    "/health": {"serving": False, "reason": _REASON},
    "/health/answer": {"answers": False, "reason": _REASON},
}


@contextmanager
def answering_while_loading(bound: socket.socket, metrics: WorkerMetrics) -> Iterator[None]:
    """Answers on a bound socket, in threads, until the block is left; the socket listens from then on.

    Raises ConfigError where another process listens there.
    """
    try:
        server = _LoadingServer(bound, metrics)
    except OSError as error:
        host, port = bound.getsockname()[:2]
        raise ConfigError(f"cannot listen on {Address(host=host, port=port)}: {error}") from error
    metrics.loading.set(1)
    with server:
        thread = threading.Thread(target=server.serve_forever, args=(LOADING_POLL_S,), name="loading", daemon=True)
        thread.start()
        try:
            yield
        finally:
            server.shutdown()
            thread.join()
            metrics.loading.set(0)


class _LoadingServer(ThreadingHTTPServer):
    """Each connection has a thread for its one question; none of them is waited for."""

    daemon_threads = True

    def __init__(self, bound: socket.socket, metrics: WorkerMetrics) -> None:
        super().__init__(bound.getsockname()[:2], _Question, bind_and_activate=False)
        self.metrics = metrics
        self.socket.close()
        self.socket = bound.dup()  # of the same socket: what has not been accepted here is accepted by who comes next
        try:
            self.socket.setblocking(False)
            self.socket.listen(LISTEN_BACKLOG)
        except OSError:
            self.socket.close()
            raise

    def handle_error(self, request: object, client_address: object) -> None:
        """A client that is gone or slow is nobody's fault."""
        if not isinstance(sys.exception(), OSError):
            super().handle_error(request, client_address)  # type: ignore[arg-type]  # typeshed's own union


class _Question(BaseHTTPRequestHandler):
    """HTTP/1.0: the answer ends with the connection."""

    server: _LoadingServer
    timeout = HELLO_TIMEOUT_S
    server_version, sys_version = "prefixcache-worker", ""

    def handle(self) -> None:
        if self.rfile.peek(1)[:1].isalpha():  # type: ignore[attr-defined]  # a BufferedReader, by its documentation
            super().handle()

    def do_GET(self) -> None:
        if self.path == "/metrics":
            self._answer(HTTPStatus.OK, CONTENT_TYPE, exposition(self.server.metrics.registry))
        else:
            body = _BODIES.get(self.path, {"error": _REASON})
            self._answer(HTTPStatus.SERVICE_UNAVAILABLE, "application/json", json.dumps(body).encode())

    def _answer(self, status: HTTPStatus, content_type: str, body: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Type", content_type)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """The log is the model's."""
