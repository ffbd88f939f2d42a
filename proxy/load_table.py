"""The load of every worker: this proxy's own, and what workers and other proxies say of theirs through the index.

    own ledgers ──every LOAD_REPORT_S──► index ──► records of workers and other proxies ──┐
    a match ──────────────────────────────────► fresher ones of the workers it names ─────┴──► ahead of a new request

Workers take short prefills first, so what waits is kept by classes of length: what is ahead of a request is the rest of
the slice that runs and what waits of the classes up to its own.

Times are counted down with the age of an answer. A record that is older than LOAD_RECORD_S counts for nothing, also
while there is no index to say so. A measured rate is no load: the last one stays.
"""

from __future__ import annotations

import asyncio
import heapq
import logging
import math
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from operator import add

from prefixcache.errors import IndexUnavailable
from prefixcache.limits import LOAD_RECORD_S, LOAD_REPORT_S, MATCH_LOADS
from prefixcache.load import NO_WAITING, IncarnationLoad, ProxyLoad, WorkerLoad
from proxy.destination import Destination, HasLinks
from proxy.store import Store
from proxy.warnings_log import QuietLog

_logger = logging.getLogger(__name__)
RECENT_SHARE = 0.25
"""Of what all caches hold: prompt tokens after which a placement has faded e-fold; by simulation, as the prices are."""
_WORKER = ""
"""Names the worker among the writers of an incarnation's records; a proxy is named by its id."""


class _Elsewhere:
    """The records of one incarnation that others wrote, as sums at the moment of the last answer."""

    __slots__ = (
        "_proxies",
        "_seen",
        "_until",
        "_worker",
        "prefilling_s",
        "recent_tokens",
        "taken_at",
        "waiting_s",
        "worker",
    )

    def __init__(self) -> None:
        self._seen: dict[str, tuple[int, float]] = {}
        """Version of each writer's record and when it was first seen."""
        self._until = float("inf")
        """When the next of them expires."""
        self._worker: WorkerLoad | None = None
        self._proxies: dict[str, ProxyLoad] = {}
        self.taken_at = float("-inf")
        self._add_up(self.taken_at)

    def take(self, load: IncarnationLoad, besides: str, now: float) -> None:
        """What an answer said just now; the record of `besides` does not count."""
        proxies, worker = dict(load.proxies), load.worker
        proxies.pop(besides, None)
        before, seen = self._seen, {}
        for writer, record in (*proxies.items(), *(((_WORKER, worker),) if worker is not None else ())):
            known = before.get(writer)
            if known is None or known[0] < record.version:
                known = (record.version, now)
            elif known[0] > record.version and now < self._until:
                return  # an answer that was overtaken by a fresher one
            seen[writer] = known
        self._seen, self._worker, self._proxies, self.taken_at = seen, worker, proxies, now
        self._add_up(now)

    def at(self, now: float) -> _Elsewhere:
        """Itself, without what has expired by `now`."""
        if now >= self._until:
            self._add_up(now)
        return self

    def _add_up(self, now: float) -> None:
        self._until = float("inf")
        self.prefilling_s, self.waiting_s, self.recent_tokens = 0.0, NO_WAITING, 0.0
        self.worker: WorkerLoad | None = None
        for writer, (_, seen_at) in self._seen.items():
            end = seen_at + LOAD_RECORD_S
            if end <= now:
                continue
            self._until = min(self._until, end)
            if (record := self._proxies.get(writer)) is not None:
                self.prefilling_s += record.prefilling_s
                self.waiting_s = _sums(self.waiting_s, record.waiting_s)
                self.recent_tokens += record.recent_tokens
            else:
                self.worker = self._worker


class LoadTable:
    """One for the process; reads and writes on a timer, and answers at once."""

    def __init__(
        self,
        store: Store,
        fleet: HasLinks,
        proxy_id: str,
        log: QuietLog,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._store = store
        self._fleet = fleet
        self._proxy_id = proxy_id
        self._log = log
        self._clock = clock
        self._elsewhere: dict[int, _Elsewhere] = {}
        self._rates: dict[int, float] = {}

    async def run(self) -> None:
        """Never returns; cancelled by its owner."""
        while True:
            try:
                await self.exchange()
            except IndexUnavailable as error:
                self._log.warning("load", "the load of other proxies is not known: %s", error)
            except Exception:
                _logger.exception("exchanging the load failed")
            await asyncio.sleep(LOAD_REPORT_S)

    async def exchange(self) -> None:
        """Tells and asks once, for each namespace. Raises IndexUnavailable."""
        links = self._fleet.links
        self._keep_only(links)
        by_namespace: dict[str, list[Destination]] = {}
        for link in links:
            by_namespace.setdefault(link.namespace, []).append(link)
        for namespace, members in by_namespace.items():
            own = {link.incarnation: link.ledger.record() for link in members if link.ledger.needs_report()}
            asked = [link.incarnation for link in members]
            loads = await self._store.index(namespace).exchange_loads(self._proxy_id, own, asked)
            self.merge({incarnation: loads.get(incarnation, IncarnationLoad()) for incarnation in asked})

    def merge(self, loads: Mapping[int, IncarnationLoad]) -> None:
        """Takes over what an answer of the index said of these incarnations just now."""
        now = self._clock()
        for incarnation, load in loads.items():
            elsewhere = self._elsewhere.get(incarnation)
            if elsewhere is None:
                elsewhere = self._elsewhere[incarnation] = _Elsewhere()
            elsewhere.take(load, self._proxy_id, now)
            if load.worker is not None and load.worker.prefill_rate > 0:
                self._rates[incarnation] = load.worker.prefill_rate

    def ahead(self, link: Destination) -> tuple[float, tuple[float, ...]]:
        """Seconds until the worker chooses again what goes next, and prefill seconds of what waits there, by class.

        What has started is told by the worker and, fresher, by the proxies that sent it: the larger one counts. What
        waits is told by the proxies alone, each of its own; nothing of ours comes from the index, which is late.
        """
        rest_s, waiting_s = link.ledger.ahead()
        elsewhere = self._elsewhere.get(link.incarnation)
        if elsewhere is None:
            return rest_s, waiting_s
        now = self._clock()
        elsewhere.at(now)
        age_s = now - elsewhere.taken_at
        if elsewhere.prefilling_s > age_s:
            rest_s += elsewhere.prefilling_s - age_s
        if elsewhere.waiting_s is not NO_WAITING:
            waiting_s = _sums(waiting_s, elsewhere.waiting_s)
        if (worker := elsewhere.worker) is not None:
            rest_s = max(rest_s, worker.rest_s - age_s)
            if any(worker.sliced_s):
                waiting_s = _with_sliced(waiting_s, worker.sliced_s)
        return rest_s, waiting_s

    def ahead_s(self, link: Destination) -> float:
        """Seconds of prefill of all that is there."""
        rest_s, waiting_s = self.ahead(link)
        return rest_s + sum(waiting_s)

    def worker(self, link: Destination) -> WorkerLoad | None:
        """What the worker said of itself last; None where that does not stand. For `rest_s`, see `ahead`."""
        elsewhere = self._elsewhere.get(link.incarnation)
        return elsewhere.at(self._clock()).worker if elsewhere is not None else None

    def note_placed(self, link: Destination, tokens: int, *, among: Callable[[], Sequence[Destination]]) -> None:
        """A prompt goes to `link`. What went to any of them before fades by tokens placed, as caches age, not by time.

        Nothing is kept or asked where a capacity is not known, as those of own workers.
        """
        if not link.claimed_capacity_tokens:
            return
        links = among()
        capacities_tokens = [each.claimed_capacity_tokens or 0.0 for each in links]
        if not capacities_tokens or not all(capacities_tokens):
            return
        kept = math.exp(-tokens / (RECENT_SHARE * sum(capacities_tokens)))
        for each in links:
            each.ledger.recent_tokens *= kept
        link.ledger.recent_tokens += tokens

    def note_left(self, link: Destination, tokens: int) -> None:
        """The prompt that was placed there just now goes elsewhere."""
        link.ledger.recent_tokens = max(link.ledger.recent_tokens - tokens, 0.0)

    def recent_tokens(self, link: Destination) -> float:
        """Prompt tokens that all proxies placed there of late."""
        elsewhere = self._elsewhere.get(link.incarnation)
        if elsewhere is None or not elsewhere.recent_tokens:
            return link.ledger.recent_tokens
        return link.ledger.recent_tokens + elsewhere.at(self._clock()).recent_tokens

    def prefill_rate(self, link: Destination) -> float | None:
        """Tokens a second that the worker measured last, or this proxy where it measures; None if neither has."""
        return self._rates.get(link.incarnation) or link.prefill_rate

    def is_draining(self, link: Destination) -> bool:
        worker = self.worker(link)
        return worker is not None and worker.is_draining

    def least_loaded(self, links: Sequence[Destination]) -> Sequence[int]:
        """Incarnations with the least ahead, as many as a match may ask for."""
        return [link.incarnation for link in heapq.nsmallest(MATCH_LOADS, links, key=self.ahead_s)]

    def _keep_only(self, links: Collection[Destination]) -> None:
        known = {link.incarnation for link in links}
        for content in (self._elsewhere, self._rates):
            for incarnation in [incarnation for incarnation in content if incarnation not in known]:
                del content[incarnation]


def _sums(a: tuple[float, ...], b: tuple[float, ...]) -> tuple[float, ...]:
    return tuple(map(add, a, b))


def _with_sliced(waiting_s: tuple[float, ...], sliced_s: tuple[float, ...]) -> tuple[float, ...]:
    """With what a worker says is left of its sliced prefills, unless the proxies have told as much up to each class.

    They tell it of what they have sent themselves, and may count it for a class below by now.
    """
    sums: list[float] = []
    missing_s = 0.0
    for told_s, left_s in zip(waiting_s, sliced_s, strict=True):
        missing_s += left_s - told_s
        sums.append(told_s + missing_s if missing_s > 0.0 else told_s)
        missing_s = min(missing_s, 0.0)
    return tuple(sums)
