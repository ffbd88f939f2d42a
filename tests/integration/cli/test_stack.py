"""A stack of real processes on the test's own clock: who dies is started again, and who is no use ends it."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from prefixcache.cli.restarts import FIRST_PAUSE_S, LASTING_S, MOST_FAILED_STARTS
from prefixcache.cli.stack import ChildEnded, Stack
from prefixcache.cli.valkey import EmbeddedValkey
from tests.support.manual_clock import ManualClock
from tests.support.valkey import Server

TIMEOUT_S = 20.0
SLEEPER = "import time; print('up', flush=True); time.sleep(600)"


def python(program: str) -> list[str]:
    return [sys.executable, "-c", program]


class World:
    """A stack whose time the test turns on, and what it has printed."""

    def __init__(self, capture: pytest.CaptureFixture[str]) -> None:
        self.clock = ManualClock()
        self.stack = Stack(clock=self.clock)
        self._capture = capture
        self._said = ""

    @property
    def said(self) -> str:
        self._said += self._capture.readouterr().err
        return self._said

    def tend_until(self, condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + TIMEOUT_S
        while not condition():
            assert time.monotonic() < deadline, self.said
            self.stack.tend()
            time.sleep(0.005)

    def died(self, times: int) -> None:
        self.tend_until(lambda: self.said.count("it is started again in") == times)


@contextmanager
def stack(capture: pytest.CaptureFixture[str]) -> Iterator[World]:
    world = World(capture)
    with world.stack:
        yield world


def test_what_dies_is_started_again_after_a_pause_and_says_so(
    capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    lives = tmp_path / "lives"
    program = f"""
import pathlib, time
lives = pathlib.Path({str(lives)!r})
with lives.open("a") as file:
    file.write("x")
print("life", len(lives.read_text()), flush=True)
if len(lives.read_text()) < 3:
    raise SystemExit(3)
time.sleep(600)
"""
    with stack(capfd) as world:
        world.stack.start("steady", python(SLEEPER), os.environ)
        world.stack.start("broken", python(program), os.environ)
        world.died(1)
        assert "broken ended with exit code 3; it is started again in 0.5 s" in world.said
        world.clock.now += FIRST_PAUSE_S - 0.01
        for _ in range(20):
            world.stack.tend()
        assert lives.read_text() == "x", "not before its time"
        world.clock.now += 0.01
        world.died(2)
        assert "it is started again in 1 s" in world.said
        world.clock.now += 1.0
        world.tend_until(lambda: "life 3" in world.said)
        assert world.said.count("broken is started again") == 2
        assert "   broken | life 3" in world.said and "steady ended" not in world.said


def test_one_that_was_killed_after_a_long_life_is_there_again_soon(capfd: pytest.CaptureFixture[str]) -> None:
    with stack(capfd) as world:
        world.stack.start("w", python("import os; print('pid', os.getpid(), flush=True); " + SLEEPER), os.environ)
        world.stack.note_ready("w")
        for life in range(1, 7):
            while world.said.count("w | pid") < life:
                world.stack.tend()
                time.sleep(0.005)
            world.clock.now += LASTING_S
            os.kill(int(world.said.rpartition("pid ")[2].split()[0]), 9)
            world.died(life)
            assert world.said.count("w ended by signal SIGKILL; it is started again in 0.5 s") == life
            world.clock.now += FIRST_PAUSE_S


def test_one_that_never_got_ready_ends_the_stack_in_the_end(capfd: pytest.CaptureFixture[str]) -> None:
    with stack(capfd) as world:
        world.stack.start("broken", python("print('last words'); raise SystemExit(3)"), os.environ)
        for death in range(1, MOST_FAILED_STARTS):
            world.died(death)
            world.clock.now += 10.0
        with pytest.raises(ChildEnded, match=r"broken ended with exit code 3, for the 5th time .*; its last lines"):
            world.tend_until(lambda: False)
        assert world.said.count("broken | last words") == MOST_FAILED_STARTS


def test_a_wrong_setting_ends_it_at_once(capfd: pytest.CaptureFixture[str]) -> None:
    with stack(capfd) as world:
        world.stack.start("broken", python("print('--x is wrong'); raise SystemExit(2)"), os.environ)
        with pytest.raises(ChildEnded, match="broken ended with exit code 2, for a setting is wrong"):
            world.tend_until(lambda: False)
        assert "broken | --x is wrong" in world.said


def test_one_whose_port_was_taken_while_it_was_dead_is_tried_again(
    capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    taken = tmp_path / "taken"
    program = f"import pathlib\nif pathlib.Path({str(taken)!r}).exists(): raise SystemExit(2)\n{SLEEPER}"
    with stack(capfd) as world:
        world.stack.start("w", python("import os; print('pid', os.getpid(), flush=True)\n" + program), os.environ)
        world.stack.note_ready("w")
        world.tend_until(lambda: "w | up" in world.said)
        taken.touch()
        os.kill(int(world.said.rpartition("pid ")[2].split()[0]), 9)
        world.died(1)
        world.clock.now += FIRST_PAUSE_S
        world.died(2)
        assert "w ended with exit code 2; it is started again in 1 s" in world.said
        taken.unlink()
        world.clock.now += 1.0
        world.tend_until(lambda: world.said.count("w | up") == 2)


def test_those_that_end_first_have_ended_before_the_others_are_asked(
    capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    told = tmp_path / "told"
    program = f"""
import pathlib, signal, sys, time
def leave(*_):
    time.sleep(0.2 if sys.argv[1] == "first" else 0.0)
    with pathlib.Path({str(told)!r}).open("a") as file:
        file.write(sys.argv[1] + " ")
    raise SystemExit(0)
signal.signal(signal.SIGTERM, leave)
print("up", flush=True)
time.sleep(600)
"""
    with stack(capfd) as world:
        world.stack.start("one", [*python(program), "other"], os.environ)
        world.stack.start("two", [*python(program), "other"], os.environ)
        world.stack.start("three", [*python(program), "first"], os.environ, ends_first=True)
        world.tend_until(lambda: world.said.count("| up") == 3)
    assert told.read_text() == "first other other "


def test_one_that_is_dead_when_the_stack_ends_is_left_so(capfd: pytest.CaptureFixture[str]) -> None:
    with stack(capfd) as world:
        world.stack.start("broken", python("raise SystemExit(3)"), os.environ)
        world.died(1)
    assert "is started again\n" not in world.said


def test_a_program_that_is_gone_counts_as_a_death(capfd: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    program = tmp_path / "program"
    program.write_text("#!/bin/sh\nexit 3\n")
    program.chmod(0o755)
    with stack(capfd) as world:
        world.stack.start("w", [str(program)], os.environ)
        world.died(1)
        program.unlink()
        world.clock.now += FIRST_PAUSE_S
        world.died(2)
        assert "w could not be started: [Errno 2]" in world.said


@pytest.mark.parametrize("which", ["process", "thread"])
def test_no_process_or_thread_to_be_had_counts_as_a_death(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, which: str
) -> None:
    def fails(*_: object, **__: object) -> None:
        raise BlockingIOError(11, "Resource temporarily unavailable") if which == "process" else RuntimeError("no more")

    with EmbeddedValkey() as embedded, stack(capfd) as world:
        world.stack.tend_to("valkey", embedded.process, embedded.start)
        world.stack.start("w", python("import os; print('pid', os.getpid(), flush=True)\n" + SLEEPER), os.environ)
        world.stack.note_ready("w")
        world.tend_until(lambda: "w | up" in world.said)
        os.kill(int(world.said.rpartition("pid ")[2].split()[0]), 9)
        os.kill(embedded.pid, 9)
        world.died(2)
        with monkeypatch.context() as patch:
            if which == "process":
                patch.setattr(subprocess, "Popen", fails)
            else:
                patch.setattr(threading.Thread, "start", fails)
            world.clock.now += FIRST_PAUSE_S
            world.tend_until(lambda: "w could not be started: [Errno 11]" in world.said)
            assert ("valkey could not be started: [Errno 11]" in world.said) == (which == "process")
        world.clock.now += 1.0
        world.tend_until(lambda: world.said.count("w | up") >= 2)
        world.tend_until(embedded._answers)


def test_an_embedded_valkey_comes_back_empty_in_the_same_place(capfd: pytest.CaptureFixture[str]) -> None:
    with EmbeddedValkey() as embedded, stack(capfd) as world:
        world.stack.tend_to("valkey", embedded.process, embedded.start)
        first = Server(name="embedded", url=embedded.url, pid=embedded.pid)
        first.command("SET", "a", "b")
        os.kill(first.pid, 9)
        world.died(1)
        world.clock.now += FIRST_PAUSE_S
        world.tend_until(embedded._answers)
        assert embedded.pid != first.pid and embedded.url == first.url
        again = Server(name="embedded", url=embedded.url, pid=embedded.pid)
        assert again.command("EXISTS", "a") == b":0\r\n"
        assert b"100" in again.command("CONFIG", "GET", "busy-reply-threshold").split(b"\r\n"), "with its settings"
        folder = Path(embedded.url.removeprefix("unix://")).parent
    assert not folder.exists()
