"""A set of child processes that stand and fall together: embedded server, workers, proxy."""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from subprocess import PIPE, STDOUT, Popen
from types import TracebackType

from prefixcache.cli.children import end, spawn
from prefixcache.errors import PrefixCacheError

_PATIENCE_S = 5.0


class ChildEnded(PrefixCacheError):
    """A child ended although nobody asked it to."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Child:
    name: str
    process: Popen[bytes]
    printer: threading.Thread


class Stack:
    """Starts children, prints their lines under their names, and ends them in reverse order on exit."""

    def __init__(self) -> None:
        self._children: list[_Child] = []

    def __enter__(self) -> Stack:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for child in reversed(self._children):
            end(child.process, patience_s=_PATIENCE_S)
            child.printer.join(_PATIENCE_S)

    def start(self, name: str, command: Sequence[str], environment: Mapping[str, str], *, niceness: int = 0) -> None:
        """Starts one child; its output appears on stderr with `name` before each line."""
        process = spawn(command, environment=environment, niceness=niceness, stdout=PIPE, stderr=STDOUT)
        printer = threading.Thread(target=_print_lines, args=(name, process), name=f"lines of {name}", daemon=True)
        printer.start()
        self._children.append(_Child(name=name, process=process, printer=printer))

    def check(self) -> None:
        """Raises ChildEnded if a child is gone."""
        for child in self._children:
            code = child.process.poll()
            if code is not None:
                how = f"by signal {signal.Signals(-code).name}" if code < 0 else f"with exit code {code}"
                raise ChildEnded(f"{child.name} ended {how}; its last lines stand above")


def _print_lines(name: str, process: Popen[bytes]) -> None:
    assert process.stdout is not None
    with process.stdout as lines:
        for line in lines:
            sys.stderr.write(f"{name:>9} | {line.decode('utf-8', 'replace')}")
            sys.stderr.flush()


class StopSignals:
    """SIGINT and SIGTERM as a condition to wait for instead of an exception at any line."""

    def __init__(self) -> None:
        self._event = threading.Event()
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self._set)

    def _set(self, _number: int, _frame: object) -> None:
        self._event.set()

    def wait(self, timeout_s: float) -> bool:
        """True once a signal came."""
        return self._event.wait(timeout_s)
