"""What one proxy has placed on one simulated worker: the ledger of the proxy, as far as decisions go by it."""

from __future__ import annotations

from dataclasses import dataclass

from prefixcache.load import NUM_WAITING_CLASSES, waiting_class
from prefixcache.simulation.job import Job

_MICRO = 1_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Placed:
    """A ledger at one moment, as others see it."""

    waiting_us: tuple[int, ...] = (0,) * NUM_WAITING_CLASSES
    num_waiting: int = 0
    num_running: int = 0
    running_tokens: int = 0
    waiting_tokens: int = 0


class Ledger:
    """Seconds are whole microseconds: what was added is taken away exactly."""

    __slots__ = ("num_running", "num_waiting", "running_tokens", "waiting_tokens", "waiting_us")

    def __init__(self) -> None:
        self.waiting_us = [0] * NUM_WAITING_CLASSES
        """Prefills that were not started, by class."""
        self.waiting_tokens = 0
        """What they will store."""
        self.num_waiting = 0
        self.num_running = 0
        """Started and not ended."""
        self.running_tokens = 0
        """What all of them, waiting ones too, come to fill of the cache."""

    def place(self, job: Job) -> None:
        self.num_waiting += 1
        self.waiting_us[waiting_class(job.placed_prefill_s)] += round(job.placed_prefill_s * _MICRO)
        self.waiting_tokens += job.prompt_tokens - job.placed_hit_tokens
        self.running_tokens += job.prompt_tokens

    def start(self, job: Job) -> None:
        self._leave_waiting(job)
        self.num_running += 1

    def end(self, job: Job) -> None:
        """Whatever ends a started one."""
        self.num_running -= 1
        self.running_tokens -= job.prompt_tokens

    def take_away(self, job: Job) -> None:
        """One that has not started."""
        self._leave_waiting(job)
        self.running_tokens -= job.prompt_tokens

    def placed(self) -> Placed:
        return Placed(
            waiting_us=tuple(self.waiting_us),
            num_waiting=self.num_waiting,
            num_running=self.num_running,
            running_tokens=self.running_tokens,
            waiting_tokens=self.waiting_tokens,
        )

    def _leave_waiting(self, job: Job) -> None:
        self.num_waiting -= 1
        self.waiting_us[waiting_class(job.placed_prefill_s)] -= round(job.placed_prefill_s * _MICRO)
        self.waiting_tokens -= job.prompt_tokens - job.placed_hit_tokens
