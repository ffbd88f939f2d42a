"""The health check: what it asks, what it takes for healthy, and that it asks for a token seldom."""

from __future__ import annotations

import json
import socket
import socketserver
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from prefixcache import probe
from prefixcache.limits import PROBE_QUESTION_S
from prefixcache.probe import Finding, Kept, Server, check_proxy, check_worker, main, parsed, read_kept, write_kept
from tests.support.ports import free_port

READY, CHAT, COMPLETION = "/ready", "/v1/chat/completions", "/v1/completions"
MODELS = (200, {"data": [{"id": "m"}, {"id": "other"}]})
Answers = dict[str, tuple[int, Any]]
WELL: Answers = {READY: (200, {}), "/v1/models": MODELS, CHAT: (200, {"choices": []})}


class Asked(list[tuple[str, Any]]):
    """Path and body of every question."""

    @property
    def paths(self) -> list[str]:
        return [path for path, _ in self]


@contextmanager
def server(answers: Answers) -> Iterator[tuple[Server, Asked]]:
    """A path without an answer is accepted and left alone."""
    asked = Asked()
    done = threading.Event()

    class Handler(socketserver.StreamRequestHandler):
        def handle(self) -> None:
            line = self.rfile.readline().decode()
            headers = dict(iter(lambda: self.rfile.readline().decode().strip().partition(": ")[::2], ("", "")))
            body = self.rfile.read(int(headers.get("Content-Length", 0)))
            path = line.split()[1]
            asked.append((path, json.loads(body) if body else None))
            if path not in answers:
                done.wait(30)
                return
            status, content = answers[path]
            self.wfile.write(f"HTTP/1.1 {status} X\r\n\r\n{json.dumps(content)}".encode())

    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), Handler) as listening:
        thread = threading.Thread(target=listening.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield Server("127.0.0.1", listening.server_address[1]), asked
        finally:
            done.set()
            listening.shutdown()
            thread.join()


def found(answers: Answers, kept: Kept | None = None, now: float = 1_000.0) -> tuple[Finding, Asked]:
    with server(answers) as (asked_server, asked):
        finding, _ = check_proxy(asked_server, kept, now)
    return finding, asked


def test_a_proxy_is_well_when_it_is_ready_and_gives_a_token() -> None:
    finding, asked = found(WELL)
    assert finding == Finding(True, "m answers")
    assert asked.paths == [READY, "/v1/models", CHAT]
    question = asked[-1][1]
    assert (question["model"], question["max_tokens"]) == ("m", 1)


def test_one_that_is_not_ready_is_not_asked_for_more() -> None:
    finding, asked = found({**WELL, READY: (503, {"error": {"message": "no worker is ready"}})})
    assert finding == Finding(False, "not ready: 503, no worker is ready")
    assert asked.paths == [READY]


@pytest.mark.parametrize("was_well", [True, False])
def test_the_last_answer_counts_for_ten_seconds(was_well: bool) -> None:
    kept = Kept(1_000.0, Finding(was_well, "then"))
    finding, asked = found(WELL, kept, 1_000.0 + PROBE_QUESTION_S - 0.1)
    assert (finding, asked.paths) == (Finding(was_well, "then"), [READY])
    for now in (1_000.0 + PROBE_QUESTION_S, 999.0):
        finding, asked = found(WELL, kept, now)
        assert (finding.healthy, len(asked)) == (True, 3), "it is due, or the clock was set back"


@pytest.mark.parametrize(
    ("answer", "healthy", "reason"),
    [
        ((429, {"error": {"message": "too many wait"}}), True, "m: 429, too many wait"),
        ((502, {"error": {"message": "worker fault"}}), False, "m: 502, worker fault"),
        ((503, None), False, "m: status 503"),
    ],
)
def test_what_a_chat_may_come_to(answer: tuple[int, Any], healthy: bool, reason: str) -> None:
    finding, _ = found({**WELL, CHAT: answer})
    assert finding == Finding(healthy, reason)


def test_a_model_without_a_chat_template_is_asked_for_a_completion() -> None:
    finding, asked = found({**WELL, CHAT: (400, {}), COMPLETION: (200, {})})
    assert (finding.healthy, asked.paths[-1]) == (True, COMPLETION)
    assert asked[-1][1]["prompt"] and "messages" not in asked[-1][1]


def test_without_a_model_it_is_not_well() -> None:
    finding, _ = found({**WELL, "/v1/models": (200, {"data": []})})
    assert not finding.healthy and "no model is listed" in finding.reason


@pytest.mark.parametrize(("places", "healthy"), [([], False), ([(0, 1)], False), ([(1, 1)], True), ([(5, 0)], True)])
def test_a_late_answer_is_forgiven_where_others_wait(
    places: list[tuple[int, int]], healthy: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(probe, "PROBE_ANSWER_S", 0.05)
    workers = [{"waiting": waiting, "running": running} for waiting, running in places]
    answers = {**WELL, "/health": (200, {"workers": workers, "engines": []})}
    del answers[CHAT]
    finding, asked = found(answers)
    assert finding.healthy is healthy
    assert asked.paths[-1] == "/health"


@pytest.mark.parametrize("status", [200, 503])
def test_a_workers_own_word_counts(status: int) -> None:
    with server({"/health/answer": (status, {"reason": "why"})}) as (worker, asked):
        assert check_worker(worker) == Finding(status == 200, f"{status}, why")
    assert asked.paths == ["/health/answer"]


@pytest.mark.parametrize(
    "answer", [b"", b"HTTP/1.1 200", b"SSH-2.0\r\n\r\n", b"HTTP/1.1 x\r\n\r\n", b"HTTP/1.1 200\r\n\r\n<"]
)
def test_what_is_no_answer_raises(answer: bytes) -> None:
    with pytest.raises(ValueError):
        parsed(answer)


def test_a_server_that_trickles_is_given_up_in_time() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        with pytest.raises(TimeoutError):
            Server("127.0.0.1", listening.getsockname()[1]).ask(READY, timeout_s=0.05)


def test_what_is_kept_survives_the_process(tmp_path: Path) -> None:
    path = str(tmp_path / "kept.json")
    assert read_kept(path) is None
    for reason in ("a long reason, over which a short one is written", "why"):
        kept = Kept(12.5, Finding(False, reason))
        write_kept(path, kept)
        assert read_kept(path) == kept
    assert [each.name for each in tmp_path.iterdir()] == ["kept.json"]
    Path(path).write_text("[1]")
    assert read_kept(path) is None


# --- the program ----------------------------------------------------------------------------------------------------


def test_exit_status_and_words(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    key = tmp_path / "key"
    key.write_text("secret\n")
    with server(WELL) as (proxy, asked):
        for _ in range(3):
            assert main(["proxy", f"127.0.0.1:{proxy.port}", str(tmp_path), str(key)]) == 0
        assert asked.paths == [READY, "/v1/models", CHAT, READY, READY]
    assert capsys.readouterr().out == "m answers\n" * 3
    assert main(["proxy", f"127.0.0.1:{free_port()}", str(tmp_path)]) == 1
    assert "no answer: ConnectionRefusedError" in capsys.readouterr().out


def test_who_serves_is_well_also_where_nothing_can_be_kept(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with server(WELL) as (proxy, asked):
        for _ in range(2):
            assert main(["proxy", f"127.0.0.1:{proxy.port}", str(tmp_path / "absent")]) == 0
    assert asked.paths == 2 * [READY, "/v1/models", CHAT], "each run asks"
    assert capsys.readouterr().out.count("m answers; this is not kept: [Errno 2]") == 2


WRONG: list[Callable[[Path], list[str]]] = [
    lambda _: [],
    lambda _: ["redis", "127.0.0.1:1"],
    lambda _: ["proxy", "127.0.0.1"],
    lambda folder: ["proxy", "127.0.0.1:1"],
    lambda folder: ["worker", "127.0.0.1:1", str(folder)],
    lambda folder: ["proxy", "127.0.0.1:1", str(folder), str(folder / "absent")],
    lambda folder: ["proxy", "127.0.0.1:1", str(folder), "a", "b"],
]


@pytest.mark.parametrize("arguments", WRONG)
def test_a_wrong_call_says_how_it_is_called(
    arguments: Callable[[Path], list[str]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments(tmp_path)) == 2
    assert "usage" in capsys.readouterr().out
