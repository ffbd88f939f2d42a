"""What requests could leave behind in a proxy, its workers, this process and Redis; equal before and after them."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
from prometheus_client.parser import text_string_to_metric_families

from prefixcache.limits import PENDING_SETTLED_S
from prefixcache.load import ProxyLoad
from prefixcache.metrics import exposition
from proxy.app import BOOKS, DEPARTURE, ENGINES, GENERATION, HELD
from proxy.load_ledger import LoadLedger
from tests.support.engine_pool import num_sockets
from tests.support.pending_claims import pending_ends_s
from tests.support.proxy_harness import RunningProxy
from tests.support.valkey import Server
from tests.support.worker_harness import RunningWorker

_MAY_MOVE = (
    "prefixcache_worker_cached_blocks",
    "prefixcache_worker_prefill_tokens_per_second",
    "prefixcache_redis_memory_bytes",
)
"""What was computed stays cached, and what was measured stays known."""
_OF_THIS_PROCESS = "_process_"
"""Memory and descriptors of all that the tests keep here, proxies, workers and clients."""
MORE_SOCKETS = 2
"""Pools of connections to Redis may grow by so many, whoever asks."""
_CHANGES = ("placed", "settled", "released")


@dataclass(frozen=True, slots=True, kw_only=True)
class Traces:
    """At one moment."""

    gauges: Mapping[tuple[str, ...], float]
    ledgers: Mapping[str, ProxyLoad]
    """Of this proxy, on each worker."""
    engines: Sequence[tuple[int, int, int, int]]
    """Running and waiting requests, those of them that prefill, and blocks in use, of each worker."""
    inside: Mapping[str, int]
    """What the parts of the proxy keep of requests in flight."""
    claims_placed: float
    """By prompts that neither settled nor released them, as the proxy counts."""
    tasks: Mapping[str, int]
    sockets: int
    num_pending: int
    """Claims in Redis, but for those that a first token has settled."""

    def left_since(self, before: Traces) -> Mapping[str, object]:
        """What is more than it was, or other; tasks and sockets may have ended by themselves."""
        left: dict[str, object] = {
            name: (mine, theirs)
            for name in ("ledgers", "engines", "inside", "claims_placed", "num_pending")
            if (mine := getattr(self, name)) != (theirs := getattr(before, name))
        }
        if gauges := set(self.gauges.items()) ^ set(before.gauges.items()):
            left["gauges"] = gauges
        if tasks := Counter(self.tasks) - Counter(before.tasks):
            left["tasks"] = tasks
        if self.sockets > before.sockets + MORE_SOCKETS:
            left["sockets"] = self.sockets - before.sockets
        return left


def traces(proxy: RunningProxy, workers: Sequence[RunningWorker] = (), valkey: Server | None = None) -> Traces:
    """`valkey`: the server that all of them share."""
    app = proxy.app
    changes = {change: proxy.metric("prefixcache_pending_claims_total", change=change) for change in _CHANGES}
    registries = [app[BOOKS].metrics.registry, *(worker.worker.metrics.registry for worker in workers)]
    namespaces = {worker.record.namespace for worker in workers}
    return Traces(
        gauges={
            (str(number), sample.name, *sample.labels.values()): sample.value
            for number, registry in enumerate(registries)
            for family in text_string_to_metric_families(exposition(registry).decode())
            for sample in family.samples
            if family.type == "gauge" and sample.name not in _MAY_MOVE and _OF_THIS_PROCESS not in sample.name
        },
        ledgers={name: _without_version(ledger.record()) for name, ledger in _ledgers(proxy)},
        engines=[
            (worker.engine.load.running, worker.engine.load.waiting, worker.engine.load.prefilling, _blocks(worker))
            for worker in workers
        ],
        inside={
            "in hand": app[DEPARTURE]._num_in_hand,
            "held": app[HELD].num_held,
            "movable": len(app[GENERATION]._rebalancer.movable),
            "own claims": len(app[GENERATION]._placer._own_claims),
            "bound for idle workers": len(app[GENERATION]._rebalancer._bound_for),
        },
        claims_placed=changes["placed"] - changes["settled"] - changes["released"],
        tasks=Counter(_name(task) for task in asyncio.all_tasks()),
        sockets=num_sockets(),
        num_pending=0 if valkey is None else sum(_num_pending(valkey, each) for each in namespaces),
    )


def _num_pending(valkey: Server, namespace: str) -> int:
    latest = time.time() + PENDING_SETTLED_S
    return sum(end_s > latest for end_s in pending_ends_s(valkey.url, namespace))


def _ledgers(proxy: RunningProxy) -> Iterator[tuple[str, LoadLedger]]:
    for link in proxy.fleet.links:
        yield link.worker_id, link.ledger
    for engine in proxy.app[ENGINES].links:
        yield engine.engine_id, engine.ledger


def _blocks(worker: RunningWorker) -> int:
    return worker.engine._pool.num_in_use


def _without_version(load: ProxyLoad) -> ProxyLoad:
    return msgspec.structs.replace(load, version=0)


def _name(task: asyncio.Task[Any]) -> str:
    return getattr(task.get_coro(), "__qualname__", "?")
