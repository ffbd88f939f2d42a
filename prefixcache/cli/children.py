"""Child processes that cannot outlive their parent."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

_PR_SET_PDEATHSIG = 1
_libc = ctypes.CDLL(None, use_errno=True)


def die_with_parent(death_signal: signal.Signals) -> None:
    """Asks the kernel to send `death_signal` to this process when the thread that forked it ends (Linux)."""
    _libc.prctl(_PR_SET_PDEATHSIG, death_signal)


def _prepare(parent: int, niceness: int) -> Callable[[], None]:
    """Runs in the child between fork and exec."""

    def prepare() -> None:
        die_with_parent(signal.SIGKILL)
        os.nice(niceness)
        if os.getppid() != parent:
            os._exit(1)

    return prepare


def spawn(
    arguments: Sequence[str], *, environment: Mapping[str, str] | None = None, niceness: int = 0, **options: Any
) -> subprocess.Popen[bytes]:
    """Starts a child in a process group of its own: Ctrl-C reaches the parent alone, which ends its children in order.

    `niceness` is added to the parent's: a higher one leaves the cores to others first.
    Call it from the main thread: the death signal is tied to the thread that forks.
    """
    if threading.current_thread() is not threading.main_thread():
        raise RuntimeError("children are spawned from the main thread: they die with the thread that forked them")
    return subprocess.Popen(
        list(arguments),
        env=dict(environment) if environment is not None else None,
        preexec_fn=_prepare(os.getpid(), niceness),
        process_group=0,
        **options,
    )


def end(child: subprocess.Popen[bytes], *, patience_s: float) -> None:
    """SIGTERM, then SIGKILL after `patience_s`; returns when the child is reaped."""
    end_all([child], patience_s=patience_s)


def end_all(children: Sequence[subprocess.Popen[bytes]], *, patience_s: float) -> None:
    """The same for several at once, which share the patience."""
    deadline = time.monotonic() + patience_s
    alive = [child for child in children if child.poll() is None]
    for child in alive:
        child.terminate()
    for child in alive:
        try:
            child.wait(max(deadline - time.monotonic(), 0.0))
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait()
