"""Children die with their parent, however it dies, and are ended in order."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import threading
from contextlib import ExitStack

import pytest

from prefixcache.cli.children import end, end_all, spawn

_SLEEPER = [sys.executable, "-c", "import time; print('up', flush=True); time.sleep(600)"]
_STUBBORN = [
    sys.executable,
    "-c",
    "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('up', flush=True); time.sleep(600)",
]
_PARENT = """
import subprocess, sys, time
from prefixcache.cli.children import spawn
child = spawn([sys.executable, "-c", "import time; time.sleep(600)"])
print(child.pid, flush=True)
time.sleep(600)
"""


def _wait_for_end(pid: int) -> None:
    """Blocks until the process is gone (it is nobody's child here, so there is nothing to reap)."""
    descriptor = os.pidfd_open(pid)
    try:
        assert select.select([descriptor], [], [], 10.0)[0], f"process {pid} still runs"
    finally:
        os.close(descriptor)


def test_a_child_dies_when_its_parent_is_killed_outright() -> None:
    parent = subprocess.Popen([sys.executable, "-c", _PARENT], stdout=subprocess.PIPE)
    assert parent.stdout is not None
    with parent.stdout as output:
        grandchild = int(output.readline())
        parent.kill()
        _wait_for_end(grandchild)
    parent.wait()


@pytest.mark.parametrize(
    ("command", "patience_s", "code"), [(_SLEEPER, 10.0, -signal.SIGTERM), (_STUBBORN, 0.1, -signal.SIGKILL)]
)
def test_end_asks_first_and_then_insists(command: list[str], patience_s: float, code: int) -> None:
    child = spawn(command, stdout=subprocess.PIPE)
    assert child.stdout is not None
    with child.stdout as output:
        output.readline()
        end(child, patience_s=patience_s)
    assert child.returncode == code
    end(child, patience_s=patience_s)


def test_a_child_can_be_nicer_than_its_parent() -> None:
    child = spawn([sys.executable, "-c", "import os; print(os.nice(0))"], niceness=3, stdout=subprocess.PIPE)
    output, _ = child.communicate()
    assert int(output) == os.nice(0) + 3


def test_children_are_spawned_from_the_main_thread_only() -> None:
    caught: list[BaseException] = []

    def attempt() -> None:
        try:
            spawn(_SLEEPER)
        except RuntimeError as error:
            caught.append(error)

    thread = threading.Thread(target=attempt)
    thread.start()
    thread.join()
    assert "main thread" in str(caught[0])


def test_several_are_asked_at_once_and_share_the_patience() -> None:
    children = [spawn(command, stdout=subprocess.PIPE) for command in (_STUBBORN, _SLEEPER, _STUBBORN)]
    with ExitStack() as outputs:
        for child in children:
            assert child.stdout is not None
            outputs.enter_context(child.stdout).readline()
        end_all(children, patience_s=0.2)
    assert [child.returncode for child in children] == [-signal.SIGKILL, -signal.SIGTERM, -signal.SIGKILL]
