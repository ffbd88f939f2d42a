"""What a container's health check runs: does it answer, and is a token given? With the standard library alone.

    python -P -m prefixcache.probe worker HOST:PORT             GET /health/answer
    python -P -m prefixcache.probe proxy HOST:PORT [KEY_FILE]   GET /ready, and a one-token chat at most every 10 s

Exit status 0 is healthy; what was found stands on stdout, where `docker inspect` shows it. Each run is a process of its
own, so the last answer is kept in a file. HTTP/1.0 over a plain socket starts in half the time of http.client.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import time
from typing import Any, NamedTuple

from prefixcache.limits import PROBE_ANSWER_S, PROBE_QUESTION_S, PROBE_TIMEOUT_S

_NO_CHAT = 400
"""A model without a chat template is asked for a completion instead."""
_BUSY = 429
_USAGE = "usage: python -m prefixcache.probe worker|proxy HOST:PORT [KEY_FILE]"


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
    with open(f"{path}.{os.getpid()}", "w", encoding="utf-8") as file:
        json.dump([kept.asked_at, *kept.finding], file)
    os.replace(file.name, path)


def main(arguments: list[str]) -> int:
    try:
        kind, address, *files = arguments
        host, _, port = address.rpartition(":")
        server = Server(host, int(port), _key(*files))
        check = {"worker": check_worker, "proxy": _check_proxy_and_keep}[kind]
    except (ValueError, KeyError, TypeError, OSError) as error:
        print(f"{_USAGE}\n{error!r}")
        return 2
    try:
        finding = check(server)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        finding = Finding(False, f"no answer: {type(error).__name__} {error}")
    print(finding.reason)
    return 0 if finding.healthy else 1


def _key(path: str | None = None) -> str:
    if path is None:
        return ""
    with open(path, encoding="utf-8") as file:
        return file.read().strip()


def _check_proxy_and_keep(server: Server) -> Finding:
    path = os.path.join(os.environ.get("TMPDIR", "/tmp"), f"prefixcache-probe-{server.port}.json")
    before = read_kept(path)
    finding, kept = check_proxy(server, before, time.time())
    if kept is not None and kept is not before:
        write_kept(path, kept)
    return finding


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
