"""What a container's health check runs: does it answer, and is a token given? With the standard library alone.

    python -P -m prefixcache.probe worker HOST:PORT                    GET /health/answer
    python -P -m prefixcache.probe proxy HOST:PORT FOLDER [KEY_FILE]   GET /ready, a one-token chat at most every 10 s

Exit status 0 is healthy; what was found stands on stdout, where `docker inspect` shows it. Each run is a process of its
own, so the last answer is kept in a file in FOLDER, which nothing else should be able to fill; where it cannot be kept,
each run asks. HTTP/1.0 over a plain socket starts in half the time of http.client.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import time
from collections.abc import Callable
from typing import Any, NamedTuple

from prefixcache.limits import PROBE_ANSWER_S, PROBE_QUESTION_S, PROBE_TIMEOUT_S

_NO_CHAT = 400
"""A model without a chat template is asked for a completion instead."""
_BUSY = 429
_USAGE = "usage: python -m prefixcache.probe worker HOST:PORT | proxy HOST:PORT FOLDER [KEY_FILE]"


class Finding(NamedTuple):
    healthy: bool
    reason: str


class Kept(NamedTuple):
    """The last question and what came of it."""

    asked_at: float
    """time.time()."""
    finding: Finding

    def is_due(self, now: float) -> bool:
        """Whether to ask again; also if the clock was set back."""
        return not 0 <= now - self.asked_at < PROBE_QUESTION_S


class Server(NamedTuple):
    """Where to ask. Every question raises OSError or ValueError if no answer came."""

    host: str
    port: int
    key: str = ""

    def ask(self, path: str, body: Any = None, *, timeout_s: float = PROBE_TIMEOUT_S) -> tuple[int, Any]:
        """Status, and the body as JSON. The time limit is for the whole answer."""
        content = b"" if body is None else json.dumps(body).encode()
        head = [
            f"{'GET' if body is None else 'POST'} {path} HTTP/1.0",
            f"Host: {self.host}:{self.port}",
            "User-Agent: prefixcache-probe",
            *([f"Authorization: Bearer {self.key}"] if self.key else []),
            *(["Content-Type: application/json", f"Content-Length: {len(content)}"] if content else []),
        ]
        return parsed(self._exchange("\r\n".join([*head, "", ""]).encode() + content, time.monotonic() + timeout_s))

    def _exchange(self, request: bytes, deadline: float) -> bytes:
        received = bytearray()
        with socket.create_connection((self.host, self.port), timeout=deadline - time.monotonic()) as connection:
            connection.sendall(request)
            while True:
                if (left_s := deadline - time.monotonic()) <= 0:
                    raise TimeoutError
                connection.settimeout(left_s)
                if not (piece := connection.recv(65_536)):
                    return bytes(received)
                received += piece


def parsed(answer: bytes) -> tuple[int, Any]:
    """Status and JSON body of a whole HTTP answer. Raises ValueError."""
    head, separator, body = answer.partition(b"\r\n\r\n")
    words = head.split(None, 2)
    if not separator or len(words) < 2 or not words[0].startswith(b"HTTP/"):
        raise ValueError(f"{answer[:80]!r} is no HTTP answer")
    return int(words[1]), json.loads(body) if body.strip() else None


def check_worker(server: Server) -> Finding:
    status, body = server.ask("/health/answer")
    return Finding(status == 200, _said(body, status))


def check_proxy(server: Server, kept: Kept | None, now: float) -> tuple[Finding, Kept | None]:
    """What was found, and what to keep of it."""
    status, body = server.ask("/ready")
    if status != 200:
        return Finding(False, f"not ready: {_said(body, status)}"), kept
    if kept is None or kept.is_due(now):
        kept = Kept(now, _question(server))
    return kept.finding, kept


def _question(server: Server) -> Finding:
    """Whether one token is given to somebody who asks now."""
    status, body = server.ask("/v1/models")
    models = body.get("data") if status == 200 and isinstance(body, dict) else None
    if not models:
        return Finding(False, f"no model is listed: {_said(body, status)}")
    asked = {"model": models[0]["id"], "max_tokens": 1, "temperature": 0}
    chat = {**asked, "messages": [{"role": "user", "content": "Hi"}]}
    try:
        status, body = server.ask("/v1/chat/completions", chat, timeout_s=PROBE_ANSWER_S)
        if status == _NO_CHAT:
            status, body = server.ask("/v1/completions", {**asked, "prompt": "Hi"}, timeout_s=PROBE_ANSWER_S)
    except TimeoutError:
        return Finding(_has_a_queue(server), f"no answer within {PROBE_ANSWER_S:.0f} s")
    if status == 200:
        return Finding(True, f"{asked['model']} answers")
    return Finding(status == _BUSY, f"{asked['model']}: {_said(body, status)}")


def _has_a_queue(server: Server) -> bool:
    """Whether others wait for their tokens, too. A worker that hangs meanwhile is cut by the proxy."""
    status, body = server.ask("/health")
    if status != 200:
        return False
    places = [*body.get("workers", ()), *body.get("engines", ())]
    return any(place["waiting"] + place["running"] > 1 for place in places)


def _said(body: Any, status: int) -> str:
    """The reason in an answer of ours, else its status."""
    if isinstance(body, dict):
        error = body.get("error")
        reason = error.get("message") if isinstance(error, dict) else body.get("reason")
        if reason:
            return f"{status}, {reason}"
    return f"status {status}"


# --- what is kept between two runs ------------------------------------------------------------------------------


def read_kept(path: str) -> Kept | None:
    """None if nothing readable is there."""
    try:
        with open(path, encoding="utf-8") as file:
            asked_at, healthy, reason = json.load(file)
        return Kept(float(asked_at), Finding(bool(healthy), str(reason)))
    except (OSError, ValueError, TypeError):
        return None


def write_kept(path: str, kept: Kept) -> None:
    """Over what is there: that takes no more room, and leaves nothing beside it. Half of it is not readable: None."""
    content = json.dumps([kept.asked_at, *kept.finding]).encode()
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        os.pwrite(descriptor, content, 0)
        os.ftruncate(descriptor, len(content))
    finally:
        os.close(descriptor)


def main(arguments: list[str]) -> int:
    try:
        kind, address, *paths = arguments
        host, _, port = address.rpartition(":")
        check = _CHECKS[kind](Server(host, int(port)), *paths)
    except (ValueError, KeyError, TypeError, OSError) as error:
        print(f"{_USAGE}\n{error!r}")
        return 2
    try:
        finding = check()
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        finding = Finding(False, f"no answer: {type(error).__name__} {error}")
    print(finding.reason)
    return 0 if finding.healthy else 1


def _worker_check(server: Server) -> Callable[[], Finding]:
    return lambda: check_worker(server)


def _proxy_check(server: Server, folder: str, key_file: str | None = None) -> Callable[[], Finding]:
    path = os.path.join(folder, f"prefixcache-probe-{server.port}.json")
    if key_file is not None:
        with open(key_file, encoding="utf-8") as file:
            server = server._replace(key=file.read().strip())
    return lambda: _check_and_keep(server, path)


def _check_and_keep(server: Server, path: str) -> Finding:
    before = read_kept(path)
    finding, kept = check_proxy(server, before, time.time())
    if kept is None or kept is before:
        return finding
    try:
        write_kept(path, kept)
    except OSError as error:
        return finding._replace(reason=f"{finding.reason}; this is not kept: {error}")
    return finding


_CHECKS: dict[str, Callable[..., Callable[[], Finding]]] = {"worker": _worker_check, "proxy": _proxy_check}


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
