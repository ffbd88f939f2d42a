"""What is done to a running stack: each fault begins, lasts, is taken back, and says what clients may see of it."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

from tests.compose.account import DOOR, NO_DOOR, NOTHING, STREAMS, Allowance
from tests.support.compose import ComposeStack
from tests.support.containers import Container

LASTS_S = 10.0
"""Of a pause, and of a cut from the network."""

SHORT_ID_CHARS = 12
"""Of a container's id, as its host name has them."""
_RESTARTED_WITHIN_S = 30.0
_LOOK_EVERY_S = 0.1
_FRONT = ("proxy", "edge")


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """Both calls block."""

    name: str
    begin: Callable[[ComposeStack, str], Callable[[], None]]
    """Given the name of the busiest worker; returns what takes it back."""
    lasts_s: float = 0.0
    allowance: Allowance


def killed(service: str) -> Fault:
    """kill -9; the restart policy brings it back."""

    def begin(stack: ComposeStack, worker: str) -> Callable[[], None]:
        victim = _victim(stack, service, worker)
        victim.kill()
        return partial(_await_restart, stack, victim)

    allowance = NO_DOOR if service == "edge" else _allowance(service)
    return Fault(name=f"kill -9 {service}", begin=begin, allowance=allowance)


def alone(fault: Fault, allowance: Allowance | None = None) -> Fault:
    """The same, where its part is the only one of its kind; `allowance`: in place of its own."""
    return replace(fault, name=f"{fault.name}, the only one", allowance=allowance or fault.allowance)


def paused(service: str) -> Fault:
    """It stands still, its sockets open."""
    return _lasting(f"pause {service} 10 s", service, lambda each: each.pause(), lambda each: each.unpause())


def cut_off(service: str) -> Fault:
    """Its packets go nowhere, and nobody is told."""
    return _lasting(
        f"network away from {service} 10 s", service, lambda each: each.disconnect(), lambda each: each.connect()
    )


def restarted(service: str) -> Fault:
    """As an operator does it; whoever asks the edge meanwhile finds it shut."""

    def begin(stack: ComposeStack, worker: str) -> Callable[[], None]:
        _victim(stack, service, worker).restart()
        return _nothing

    return Fault(name=f"restart {service}", begin=begin, allowance=DOOR if service == "edge" else NOTHING)


def flushed() -> Fault:
    """Everything in Redis is gone from one moment to the next."""

    def begin(stack: ComposeStack, worker: str) -> Callable[[], None]:
        _victim(stack, "redis", worker).execute("redis-cli", "FLUSHALL")
        return _nothing

    return Fault(name="FLUSHALL", begin=begin, allowance=NOTHING)


def scaled(service: str, to: int) -> Fault:
    """No fault at all: an operator wants more or fewer of them."""

    def begin(stack: ComposeStack, worker: str) -> Callable[[], None]:
        stack.up(**{service: to})
        return _nothing

    return Fault(name=f"scale {service} to {to}", begin=begin, allowance=NOTHING)


def _lasting(name: str, service: str, do: Callable[[Container], None], take_back: Callable[[Container], None]) -> Fault:
    def begin(stack: ComposeStack, worker: str) -> Callable[[], None]:
        container = _victim(stack, service, worker)
        do(container)
        return partial(take_back, container)

    return Fault(name=name, begin=begin, lasts_s=LASTS_S, allowance=_allowance(service))


def _allowance(service: str) -> Allowance:
    return STREAMS if service in _FRONT else NOTHING


def _victim(stack: ComposeStack, service: str, worker: str) -> Container:
    """Of workers the busiest one, whose name begins with its container's; of others, which bear alike, the first."""
    running = [each for each in stack.containers(service) if each.is_running]
    return next((each for each in running if each.id[:SHORT_ID_CHARS] == worker[:SHORT_ID_CHARS]), running[0])


def _await_restart(stack: ComposeStack, victim: Container) -> None:
    """By the engine, of a container that was killed."""
    deadline = time.monotonic() + _RESTARTED_WITHIN_S
    while True:
        now = next(each for each in stack.containers(victim.service) if each.id == victim.id)
        if now.is_running and now.started_at != victim.started_at:
            return
        assert time.monotonic() < deadline, f"{victim.name} is not restarted"
        time.sleep(_LOOK_EVERY_S)


def _nothing() -> None:
    return
