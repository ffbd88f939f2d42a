"""The event loop: arrivals, workers whose engines reach something, and what is moved or dies in between.

arrival ──policy──► worker's queue ──► engine ──► first token ──► end ──think time──► the session's next arrival
             ▲            │ idle worker: steal
             └────────────┴──────── worker dies: placed once more
"""

from __future__ import annotations

import heapq
import random
from collections import deque
from collections.abc import Iterator, Sequence

from prefixcache.routing.base import Policy, RoutingRequest, WorkerSnapshot
from prefixcache.routing.rates import prefill_rates
from prefixcache.routing.steal import Waiting, to_steal
from prefixcache.simulation.engine import NEVER
from prefixcache.simulation.job import Job
from prefixcache.simulation.lru import LruCache, UnpinnedCache
from prefixcache.simulation.mechanisms import Mechanisms
from prefixcache.simulation.scenario import Kill, Scenario
from prefixcache.simulation.trace import Trace, TraceRequest
from prefixcache.simulation.worker import SimWorker

Event = TraceRequest | SimWorker | Kill


class Fleet:
    """Workers behind proxies that choose by a policy of their own; `run` once."""

    def __init__(
        self,
        trace: Trace,
        scenario: Scenario,
        mechanisms: Mechanisms,
        policies: Sequence[Policy],
        *,
        seed: int,
        is_pooled: bool = False,
    ) -> None:
        """One policy for each proxy. `is_pooled`: the workers share one cache, as large as all of theirs."""
        self.trace = trace
        self.scenario = scenario
        self.mechanisms = mechanisms
        self.random = random.Random(f"simulation {seed}")
        self._policies = policies
        self._is_pooled = is_pooled
        self._hashes = {block: self.random.getrandbits(64) for each in trace.requests for block in each.blocks}
        """What the policies are told in place of a trace's names, which are no hashes: others with each seed."""
        self.workers = self._new_workers()
        self.first_tokens: list[Job] = []
        """In the order of their first tokens."""
        self.num_steals = 0
        self.ended_at = 0.0
        self._by_id = {worker.worker_id: worker for worker in self.workers}
        self._events: list[tuple[float, int, Event]] = []
        self._num_events = 0
        self._num_arrivals = 0
        self._due: dict[str, float] = {}
        """When each worker's entry in the heap that counts comes; an engine may have changed its mind since another."""
        self._later: dict[int, deque[TraceRequest]] = {}
        """What is left of each session."""

    def run(self) -> None:
        for request in self.trace.requests:
            if request.session is None:
                self._push(request.arrival_s, request)
            elif request.session in self._later:
                self._later[request.session].append(request)
            else:
                self._later[request.session] = deque()
                self._push(request.arrival_s, request)
        for kill in self.scenario.kills:
            self._push(kill.at_s, kill)
        while self._events:
            now, _, event = heapq.heappop(self._events)
            if isinstance(event, SimWorker):
                if self._due.get(event.worker_id) == now:
                    del self._due[event.worker_id]
                    if not event.is_dead:
                        self._advance(event, now)
            elif isinstance(event, TraceRequest):
                self._arrive(event, now)
            else:
                self._kill(self.workers[event.worker - 1], now)

    # --- events ---------------------------------------------------------------------------------------------

    def _arrive(self, request: TraceRequest, now: float) -> None:
        proxy = self._num_arrivals % self.scenario.num_proxies
        self._num_arrivals += 1
        self._place(Job(request, number=self._num_arrivals, arrived_at=now, proxy=proxy), now)

    def _advance(self, worker: SimWorker, now: float) -> None:
        first, ended = worker.advance(now)
        if first is not None and first.ttft_s is None:
            first.ttft_s = now - first.arrived_at
            self.first_tokens.append(first)
        for job in ended:
            self.ended_at = now
            later = self._later.get(job.request.session) if job.request.session is not None else None
            if later:
                request = later.popleft()
                self._push(now + request.think_s, request)
        self._begin(worker, now)
        if self.mechanisms.steal and worker.is_idle:
            self._steal(worker, now)

    def _begin(self, worker: SimWorker, now: float) -> None:
        """Lets it start what it can, and comes back when its engine has something."""
        worker.begin(now)
        due = worker.engine.next_at
        if due != NEVER and self._due.get(worker.worker_id) != due:
            self._due[worker.worker_id] = due
            self._push(due, worker)

    def _kill(self, worker: SimWorker, now: float) -> None:
        if worker.is_dead:
            return
        lost = [*worker.die(now), *worker.waiting]
        worker.waiting.clear()
        for job in sorted(lost, key=lambda job: job.number):
            self._place(job, now)

    def _push(self, at: float, event: Event) -> None:
        self._num_events += 1
        heapq.heappush(self._events, (at, self._num_events, event))

    # --- where a request goes -------------------------------------------------------------------------------

    def _place(self, job: Job, now: float) -> None:
        alive = [worker for worker in self.workers if not worker.is_dead]
        snapshots = [worker.snapshot_for(job, now) for worker in alive]
        asked = RoutingRequest(
            prompt_tokens=job.prompt_tokens,
            index_hashes=[self._hashes[block] for block in job.request.blocks],
            block_tokens=self.trace.block_tokens,
        )
        decision = self._policies[job.proxy].choose(asked, snapshots)
        self._put(job, self._by_id[decision.worker_id], prefill_rates(snapshots)[decision.worker_id], now)
        if self.mechanisms.steal and not self._by_id[decision.worker_id].is_idle:
            for worker in alive:
                if worker.is_idle and self._steal(worker, now):
                    break

    def _put(self, job: Job, worker: SimWorker, rate: float, now: float) -> None:
        job.placed_hit_tokens = worker.expected_blocks(job, now) * self.trace.block_tokens
        job.placed_prefill_s = (job.prompt_tokens - job.placed_hit_tokens) / rate
        worker.place(job, now)
        self._begin(worker, now)

    def _steal(self, idle: SimWorker, now: float) -> bool:
        """The proxies in turn: the first of them that gains by it moves the request of its own that gains most."""
        having = [worker for worker in self.workers if worker.waiting]
        for proxy in range(self.scenario.num_proxies) if having else ():
            snapshots = [worker.snapshot(proxy, now) for worker in (idle, *having)]
            rate = prefill_rates(snapshots)[idle.worker_id]
            loads = zip(having, snapshots[1:], strict=True)
            chosen = to_steal(
                waiting for worker, load in loads for waiting in self._stealable(idle, worker, proxy, rate, load, now)
            )
            if chosen is not None:
                job, worker = chosen
                worker.take_away(job, now)
                self.num_steals += 1
                self._put(job, idle, rate, now)
                return True
        return False

    def _stealable(
        self, idle: SimWorker, worker: SimWorker, proxy: int, rate: float, load: WorkerSnapshot, now: float
    ) -> Iterator[Waiting[tuple[Job, SimWorker]]]:
        for job in worker.waiting:
            if job.proxy == proxy:
                hit_tokens = idle.expected_blocks(job, now) * self.trace.block_tokens
                yield Waiting(
                    request=(job, worker),
                    ahead_s=load.ahead_s(job.placed_prefill_s) - job.placed_prefill_s,
                    prefill_there_s=job.placed_prefill_s,
                    prefill_here_s=(job.prompt_tokens - hit_tokens) / rate,
                )

    def _new_workers(self) -> list[SimWorker]:
        capacity, num_workers = self.scenario.capacity_blocks, self.scenario.num_workers
        pool = UnpinnedCache(capacity * num_workers) if self._is_pooled else None
        return [
            SimWorker(
                f"worker-{number:04}",
                self.scenario,
                self.mechanisms,
                block_tokens=self.trace.block_tokens,
                cache=pool or LruCache(capacity),
                phase=self.random.random(),
                rate_factor=self.random.lognormvariate(0.0, self.scenario.rate_error),
            )
            for number in range(1, num_workers + 1)
        ]
