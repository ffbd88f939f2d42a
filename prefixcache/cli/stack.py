"""The child processes of one stack: each is started again when it dies, and all end with it."""

from __future__ import annotations

import errno
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from subprocess import PIPE, STDOUT, Popen
from types import TracebackType

import click

from prefixcache.cli.children import end_all, spawn
from prefixcache.cli.restarts import GivenUp, Restarts, how
from prefixcache.errors import PrefixCacheError

_PATIENCE_S = 5.0


class ChildEnded(PrefixCacheError):
    """A child ended although nobody asked it to, and to start it again is no use."""


@dataclass(slots=True, kw_only=True)
class _Child:
    name: str
    start: Callable[[], Popen[bytes]]
    restarts: Restarts
    process: Popen[bytes]
    starts_at: float | None = None
    """While it is dead: when it is started again."""
    printers: list[threading.Thread] = field(default_factory=list)


class Stack:
    """Starts children, prints their lines under their names, starts them again, and ends them on exit.

    Everything from the main thread: a child dies with the thread that started it.
    """

    def __init__(self, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._first: list[_Child] = []
        self._then: list[_Child] = []
        self._others: list[_Child] = []

    def __enter__(self) -> Stack:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for children in (self._first, self._then):
            end_all([child.process for child in children], patience_s=_PATIENCE_S)
            for child in children:
                for printer in child.printers:
                    printer.join(_PATIENCE_S)

    def start(
        self,
        name: str,
        command: Sequence[str],
        environment: Mapping[str, str],
        *,
        niceness: int = 0,
        ends_first: bool = False,
    ) -> None:
        """Starts a child; its output appears on stderr with `name` before each line.

        `ends_first`: the others are asked to end when it has ended.
        """

        def start() -> Popen[bytes]:
            return spawn(command, environment=environment, niceness=niceness, stdout=PIPE, stderr=STDOUT)

        child = _Child(name=name, start=start, restarts=Restarts(), process=start())
        self._has_started(child)
        (self._first if ends_first else self._then).append(child)

    def tend_to(self, name: str, process: Popen[bytes], start_again: Callable[[], Popen[bytes]]) -> None:
        """Starts a child of somebody else again, who also ends it."""
        child = _Child(name=name, start=start_again, restarts=Restarts(was_ready=True), process=process)
        self._has_started(child)
        self._others.append(child)

    def note_ready(self, name: str) -> None:
        """That child does what it is there for."""
        for child in self._children:
            if child.name == name:
                child.restarts.ready()

    def tend(self) -> None:
        """Sees who has died and starts again whose time has come. Raises ChildEnded for one that is given up."""
        for child in self._children:
            if child.starts_at is None:
                if (code := child.process.poll()) is not None:
                    self._has_ended(child, code, f"ended {how(code)}")
            elif self._clock() >= child.starts_at:
                self._start_again(child)

    def _start_again(self, child: _Child) -> None:
        try:
            child.process = child.start()
            self._has_started(child)
        except OSError as error:
            self._has_ended(child, 1, f"could not be started: {error}")
            return
        child.starts_at = None
        click.echo(f"{child.name} is started again", err=True)

    @property
    def _children(self) -> Sequence[_Child]:
        return [*self._others, *self._then, *self._first]

    def _has_started(self, child: _Child) -> None:
        child.restarts.started(self._clock())
        if child.process.stdout is not None:
            child.printers = [printer for printer in child.printers if printer.is_alive()]
            child.printers.append(_print_lines_of(child.name, child.process))

    def _has_ended(self, child: _Child, code: int, how_it_ended: str) -> None:
        now = self._clock()
        try:
            pause_s = child.restarts.ended(code, now)
        except GivenUp as why:
            for printer in child.printers:
                printer.join(_PATIENCE_S)
            raise ChildEnded(f"{child.name} {how_it_ended}, {why}; its last lines stand above") from None
        child.starts_at = now + pause_s
        click.echo(f"{child.name} {how_it_ended}; it is started again in {pause_s:g} s", err=True)


def _print_lines_of(name: str, process: Popen[bytes]) -> threading.Thread:
    """Raises OSError where no thread is to be had; the child is ended then."""

    def run() -> None:
        assert process.stdout is not None
        with process.stdout as lines:
            for line in lines:
                sys.stderr.write(f"{name:>9} | {line.decode('utf-8', 'replace')}")
                sys.stderr.flush()

    printer = threading.Thread(target=run, name=f"lines of {name}", daemon=True)
    try:
        printer.start()
    except RuntimeError as error:
        process.kill()
        process.wait()
        if process.stdout is not None:
            process.stdout.close()
        raise OSError(errno.EAGAIN, f"no thread for its lines ({error})") from error
    return printer
