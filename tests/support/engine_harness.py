"""An engine without a server: its events collected by request, its integrity checked after every step."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from threading import Condition

from prefixcache.limits import MAX_STEP_S
from prefixcache.metrics import WorkerMetrics
from prefixcache.protocol import End, Fail, Generate, Started, StepEntry
from prefixcache.routing.order import Order
from tests.support.scripted_runner import ScriptedRunner
from worker.engine import Engine, Event, StepOutput
from worker.runner import Runner

OWNER = "owner"


class RunningEngine:
    """Submits requests and waits for what becomes of them."""

    def __init__(
        self,
        runner: Runner,
        *,
        order: Order = "mean",
        step_s: float = MAX_STEP_S,
        max_waiting: int = 1_000,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._runner = runner
        self.metrics = WorkerMetrics()
        self.events: defaultdict[str, list[Event]] = defaultdict(list)
        self.outputs: list[StepOutput] = []
        self._changed = Condition()
        self.engine = Engine(
            runner,
            metrics=self.metrics,
            on_output=self._take,
            order=order,
            step_s=step_s,
            max_waiting=max_waiting,
            checks_integrity=True,
            clock=clock,
        )

    @property
    def runner(self) -> ScriptedRunner:
        """The scripted one, to be told what to do."""
        assert isinstance(self._runner, ScriptedRunner)
        return self._runner

    def resume(self) -> None:
        """Lets a runner that may be held go on."""
        if isinstance(self._runner, ScriptedRunner):
            self._runner.resume()

    def _take(self, output: StepOutput) -> None:
        with self._changed:
            self.outputs.append(output)
            for _owner, event in output.events:
                self.events[event.id].append(event)
            self._changed.notify_all()

    def submit(self, request: Generate) -> int:
        return self.engine.submit(OWNER, request)

    def wait_for(self, condition: Callable[[], object], timeout_s: float = 10.0) -> None:
        """Until it holds; it is asked whenever the engine has put something out."""
        with self._changed:
            assert self._changed.wait_for(condition, timeout_s), f"not within {timeout_s} s: {dict(self.events)}"

    def wait_ended(self, *request_ids: str) -> None:
        self.wait_for(lambda: all(self.ending(request_id) is not None for request_id in request_ids))

    def ending(self, request_id: str) -> End | Fail | None:
        """The last word on a request."""
        return next((event for event in self.events[request_id] if isinstance(event, End | Fail)), None)

    def end(self, request_id: str) -> End:
        self.wait_ended(request_id)
        ending = self.ending(request_id)
        assert isinstance(ending, End), ending
        return ending

    def failure(self, request_id: str) -> Fail:
        self.wait_ended(request_id)
        ending = self.ending(request_id)
        assert isinstance(ending, Fail), ending
        return ending

    def tokens(self, request_id: str) -> list[int]:
        """The output so far; checks that the indexes have no hole."""
        entries = [event for event in self.events[request_id] if isinstance(event, StepEntry)]
        for before, entry in pairwise(entries):
            assert entry.index == before.index + len(before.ids)
        return [token for entry in entries for token in entry.ids]

    def started(self, request_id: str) -> list[Started]:
        return [event for event in self.events[request_id] if isinstance(event, Started)]

    def assert_nothing_is_held(self) -> None:
        """No request, no block in use: what must be true when everything has ended."""
        self.wait_for(lambda: self.outputs[-1].load.running == self.outputs[-1].load.waiting == 0)
        assert self.metrics.kv_cache_usage._value.get() == 0


@contextmanager
def running_engine(
    runner: Runner | None = None,
    *,
    requests: Sequence[Generate] = (),
    order: Order = "mean",
    step_s: float = MAX_STEP_S,
    max_waiting: int = 1_000,
    clock: Callable[[], float] = time.monotonic,
) -> Iterator[RunningEngine]:
    """An engine that is stopped on exit; fails if its bookkeeping ever broke. `requests` are there when it starts."""
    running = RunningEngine(
        runner or ScriptedRunner(), order=order, step_s=step_s, max_waiting=max_waiting, clock=clock
    )
    for request in requests:
        running.submit(request)
    running.engine.start()
    try:
        yield running
    finally:
        running.resume()
        running.engine.stop()
    if running.engine.failure is not None:
        raise running.engine.failure
