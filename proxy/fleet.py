"""The workers this proxy knows and the models they serve.

registry, every REGISTRY_READ_S ──> a link for each worker ──ready──> model of its namespace
A worker leaves when its record is gone and its stream is lost: an emptied store takes nobody down. Where another
one has registered at its address, it gets nothing new and leaves with its last request: its stream is one to that.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections import Counter
from collections.abc import Callable, Sequence

from prefixcache import hashing
from prefixcache.errors import IndexUnavailable, ModelNotFound, NoWorkerReady, Unavailable
from prefixcache.limits import RECORD_DEAD_AFTER_S, REGISTRY_READ_S
from prefixcache.metrics import ProxyMetrics
from prefixcache.registry import WorkerRecord
from proxy.model import Model, main_name
from proxy.served_name import ServedName
from proxy.store import Store
from proxy.tokenizer_fetch import Tokenizers
from proxy.warnings_log import QuietLog
from proxy.worker_link import WorkerLink, same_place

_logger = logging.getLogger(__name__)


class Fleet:
    """Reads the registry and owns one link a worker."""

    def __init__(
        self,
        store: Store,
        tokenizers: Tokenizers,
        metrics: ProxyMetrics,
        log: QuietLog,
        worker_token: bytes | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._store = store
        self._tokenizers = tokenizers
        self._metrics = metrics
        self._log = log
        self._worker_token = worker_token
        self._links: dict[str, WorkerLink] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._models: dict[str, Model] = {}
        self._namespace_told: dict[str, str] = {}
        self._counted_models: set[str] = set()
        self._clock = clock
        self._served_at: dict[str, float] = {}
        """When a registered worker was last seen to serve each name."""
        self.on_idle: Callable[[WorkerLink], None] = lambda _: None
        """Called with each beat of a worker that owes nobody a first token."""
        self.measured_rate: Callable[[WorkerLink], float | None] = lambda _: None
        """Tokens a second that a worker prefills, None while nobody knows."""
        self.registry_read_at: float | None = None
        """Monotonic time of the last answer of the registry."""
        self.registry_reachable = False

    @property
    def links(self) -> Sequence[WorkerLink]:
        return list(self._links.values())

    @property
    def num_ready(self) -> int:
        return sum(link.ready for link in self._links.values())

    def served_names(self) -> Sequence[ServedName]:
        """Names that at least one ready worker serves."""
        by_name: dict[str, list[WorkerRecord]] = {}
        for link in self._links.values():
            if link.ready:
                for name in _names(link.record):
                    by_name.setdefault(name, []).append(link.record)
        return [
            ServedName(
                name=name,
                created=int(min(record.started_at for record in records)),
                max_model_len=max(record.max_model_len for record in records),
                root=self.model(name).model,
            )
            for name, records in sorted(by_name.items())
        ]

    def knows(self, name: str) -> bool:
        """Whether a worker serves it, ready or not, or has done so lately: it may come back."""
        if any(name in _names(link.record) for link in self._links.values()):
            return True
        return self._clock() - self._served_at.get(name, -math.inf) < RECORD_DEAD_AFTER_S

    def model(self, name: str) -> Model:
        """The model behind a served name: the namespace with most ready workers, then the newest.

        Raises NoWorkerReady where it is known and none is ready, ModelNotFound where it is not known, or Unavailable
        while no worker at all is there.
        """
        ready = [link for link in self._links.values() if link.ready and name in _names(link.record)]
        if not ready:
            if self.knows(name):
                raise NoWorkerReady("no worker is ready to serve this model yet, try again in a moment")
            if not self._links:
                raise Unavailable("no worker is there yet, try again in a moment")
            raise ModelNotFound(f"The model `{name[:100]}` does not exist", param="model")
        namespaces = Counter(link.record.namespace for link in ready)
        newest = {link.record.namespace: link.record.started_at for link in sorted(ready, key=_started_at)}
        namespace = max(namespaces, key=lambda candidate: (namespaces[candidate], newest[candidate], candidate))
        if len(namespaces) > 1 and self._namespace_told.get(name) != namespace:
            self._namespace_told[name] = namespace
            _logger.warning("workers of %d namespaces serve %s: using %s", len(namespaces), name[:100], namespace)
        return self._model_of(next(link for link in ready if link.record.namespace == namespace))

    def ready_links(
        self, namespace: str, *, besides: Callable[[WorkerLink], bool] = lambda _: False
    ) -> Sequence[WorkerLink]:
        """Those to choose from, none of those `besides`.

        Without those that failed lately, unless all have, and without the silent ones, unless all are silent (then it
        may be us who is late).
        """
        ready = [
            link
            for link in self._links.values()
            if link.ready and link.record.namespace == namespace and not besides(link)
        ]
        awake = [link for link in ready if not link.is_silent]
        return [link for link in awake if not link.is_set_aside] or awake or ready

    def max_model_len(self, namespace: str) -> int:
        """The longest context among the ready workers of a namespace."""
        return max((link.record.max_model_len for link in self.ready_links(namespace)), default=0)

    async def run(self) -> None:
        """Never returns; when its owner cancels it, every link is ended before it returns."""
        registry = self._store.registry()
        try:
            while True:
                try:
                    records = await registry.live_workers()
                    self.registry_reachable = True
                    self.registry_read_at = time.monotonic()
                    await self._apply(records)
                except IndexUnavailable as error:
                    self.registry_reachable = False
                    self._log.warning("registry", "registry could not be read, keeping the known workers: %s", error)
                except Exception:
                    self.registry_reachable = False
                    _logger.exception("reading the registry failed")
                await asyncio.sleep(REGISTRY_READ_S)
        finally:
            tasks = list(self._tasks.values())
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    def fail_all(self, error: Unavailable) -> None:
        """Ends every request on every worker with `error`."""
        for link in self.links:
            if link.stream is not None:
                link.stream.fail_all(error)

    def _hashes_alike(self, record: WorkerRecord) -> bool:
        """Whether the worker names its namespace as this proxy does; of another one no prefix would ever be found."""
        expected = namespace_of(record)
        if record.namespace != expected:
            self._log.warning(
                f"namespace {record.worker_id}",
                "worker %s is left out: its namespace is %s, by the hash scheme %d of this proxy it is %s; "
                "run proxies and workers of one version",
                record.worker_id,
                record.namespace,
                hashing.SCHEME_VERSION,
                expected,
            )
        return record.namespace == expected

    async def _apply(self, found: Sequence[WorkerRecord]) -> None:
        records = [record for record in _newest_of_each_place(found) if self._hashes_alike(record)]
        for record in records:
            link = self._links.get(record.worker_id)
            if link is not None and same_place(link.record, record):
                link.update(record)
                continue
            if link is not None:
                await self._drop(link)
            self._add(record)
        registered = {record.worker_id for record in records}
        places = {record.address for record in records}
        for link in self.links:
            if link.worker_id not in registered:
                link.is_succeeded = link.record.address in places
                if link.stream is None or (link.is_succeeded and link.ledger.is_idle):
                    await self._drop(link)
        self._note_names()
        self._tokenizers.keep_only({link.record.tokenizer_fingerprint for link in self.links})
        namespaces = {link.record.namespace for link in self.links}
        for namespace in [known for known in self._models if known not in namespaces]:
            del self._models[namespace]

    def _note_names(self) -> None:
        now = self._clock()
        for link in self._links.values():
            self._served_at.update(dict.fromkeys(_names(link.record), now))
        for name, served_at in list(self._served_at.items()):
            if now - served_at >= RECORD_DEAD_AFTER_S:
                del self._served_at[name]
                if name in self._counted_models:
                    self._counted_models.discard(name)
                    self._metrics.workers_ready.remove(name)

    def _add(self, record: WorkerRecord) -> None:
        worker_id = record.worker_id
        link = WorkerLink(
            record,
            self._tokenizers,
            self._log,
            self._worker_token,
            on_idle=lambda link: self.on_idle(link),
            on_lost=self._metrics.workers_lost.inc,
            measured_rate=lambda link: self.measured_rate(link),
        )
        self._links[worker_id] = link
        self._tasks[worker_id] = asyncio.create_task(link.run(), name=f"link {worker_id}")
        self._metrics.num_requests_waiting.labels(worker_id).set_function(lambda: link.own_waiting)
        self._metrics.num_requests_running.labels(worker_id).set_function(lambda: link.own_running)
        self._metrics.worker_breaker_open.labels(worker_id).set_function(lambda: link.breaker.is_open)
        model = main_name(record)
        if model not in self._counted_models:
            self._counted_models.add(model)
            self._metrics.workers_ready.labels(model).set_function(lambda: self._num_ready_of(model))
        _logger.info("worker %s registered at %s", worker_id, record.address)

    async def _drop(self, link: WorkerLink) -> None:
        worker_id = link.worker_id
        del self._links[worker_id]
        task = self._tasks.pop(worker_id)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        self._metrics.num_requests_waiting.remove(worker_id)
        self._metrics.num_requests_running.remove(worker_id)
        self._metrics.worker_breaker_open.remove(worker_id)
        _logger.info("worker %s left", worker_id)

    def _num_ready_of(self, model: str) -> int:
        return sum(link.ready and main_name(link.record) == model for link in self._links.values())

    def _model_of(self, link: WorkerLink) -> Model:
        namespace = link.record.namespace
        model = self._models.get(namespace)
        if model is None:
            assert link.renderer is not None, "a ready link has a renderer"
            model = Model.of(link.record, link.renderer, self._store.index(namespace))
            self._models[namespace] = model
        return model


def namespace_of(record: WorkerRecord) -> str:
    """By the hash scheme of this process, which must be the worker's."""
    return hashing.namespace(
        model=record.model,
        revision=record.revision,
        tokenizer_fingerprint=record.tokenizer_fingerprint,
        block_size=record.block_size,
        stride=record.stride,
    )


def _newest_of_each_place(records: Sequence[WorkerRecord]) -> Sequence[WorkerRecord]:
    """A process that restarted under a new id: its old record stands until the lease ends, its address is the same."""
    newest = {record.address: record for record in sorted(records, key=lambda record: record.started_at)}
    return [record for record in records if newest[record.address] is record]


def _names(record: WorkerRecord) -> tuple[str, ...]:
    return record.served_names or (record.model,)


def _started_at(link: WorkerLink) -> float:
    return link.record.started_at
