"""All engines of this proxy, and which of them a model may go to."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager

from prefixcache.errors import ModelNotFound, Unavailable
from prefixcache.metrics import ProxyMetrics
from prefixcache.types import KV_BLOCK_SIZE
from proxy.engines.engine_link import Claims, EngineLink
from proxy.engines.engine_model import EngineModel
from proxy.engines.engine_place import read_engine_places
from proxy.engines.engine_settings import EngineSettings
from proxy.engines.http_pool import HttpPool
from proxy.engines.probe import Prober
from proxy.served_name import ServedName
from proxy.warnings_log import QuietLog

MOST_NAME_CHARS = 100
"""Of a name that nobody serves, in the message that says so."""


class EngineFleet:
    """Owns the tasks that keep asking the engines; none of them is ever added or dropped."""

    def __init__(self, links: Sequence[EngineLink], metrics: ProxyMetrics) -> None:
        self._links = tuple(links)
        self._changed = asyncio.Event()
        for link in self._links:
            link.on_change = self._wake_waiting
            _export(link, metrics)

    @classmethod
    @asynccontextmanager
    async def open(
        cls,
        settings: EngineSettings,
        *,
        namespace: str,
        make_claims: Callable[[str], Claims],
        metrics: ProxyMetrics,
        log: QuietLog,
    ) -> AsyncIterator[EngineFleet]:
        """Links to all engines, each with its connections; `make_claims` by the engine's id. Raises ConfigError."""
        headers = [(b"Authorization", b"Bearer " + settings.api_key.encode())] if settings.api_key else []
        async with AsyncExitStack() as stack:
            links = []
            for place in read_engine_places(settings.urls):
                pool = HttpPool(place.url, timeouts=settings.timeouts)
                stack.push_async_callback(pool.aclose)
                links.append(
                    EngineLink(
                        engine_id=place.engine_id,
                        url=place.url,
                        pool=pool,
                        prober=Prober(pool, place.url, headers=headers),
                        claims=make_claims(place.engine_id),
                        namespace=namespace,
                        capacity_blocks=settings.capacity_blocks,
                        metrics=metrics,
                        log=log,
                    )
                )
            yield cls(links, metrics)

    @property
    def links(self) -> Sequence[EngineLink]:
        return self._links

    @property
    def num_up(self) -> int:
        return sum(link.is_up for link in self._links)

    def answering(self) -> Sequence[str]:
        """Ids of those that are up."""
        return [link.engine_id for link in self._links if link.is_up]

    @property
    def all_answered(self) -> bool:
        """Whether each engine has told its models once; before that nobody knows what is served."""
        return all(link.was_ever_up for link in self._links)

    def knows(self, name: str) -> bool:
        """Whether an engine serves it, or did when it was last up."""
        return any(link.knows(name) for link in self._links)

    def block_size(self, name: str) -> int:
        """Tokens of a KV block of the engines that serve it, the largest where they differ: no prediction is finer."""
        return max((link.block_size for link in self._links if link.knows(name)), default=KV_BLOCK_SIZE)

    def ready_links(self, name: str) -> Sequence[EngineLink]:
        """Engines that are up and serve it; the slow ones only if all are slow, for then it may be us who is late."""
        ready = [link for link in self._links if link.is_up and link.knows(name)]
        return [link for link in ready if not link.is_slow] or ready

    async def ready_within(self, name: str, timeout_s: float) -> Sequence[EngineLink]:
        """As `ready_links`, waiting for an engine if none is up. Raises what `check` raises, ModelNotFound at once.

        An engine that comes up may turn out not to serve it: then the wait goes on.
        """
        try:
            async with asyncio.timeout(timeout_s):
                while not (ready := self.ready_links(name)):
                    if not self.knows(name) and self.all_answered:
                        break
                    await self._changed.wait()
                else:
                    return ready
        except TimeoutError:
            pass
        self.check(name)
        return self.ready_links(name)

    async def any_up_within(self, timeout_s: float) -> None:
        """Returns once an engine is up. Raises Unavailable if none is by then."""
        try:
            async with asyncio.timeout(timeout_s):
                while not self.num_up:
                    await self._changed.wait()
        except TimeoutError as error:
            raise Unavailable("no engine is up, try again in a moment") from error

    def check(self, name: str) -> None:
        """Raises Unavailable while its engines are down or some never answered, ModelNotFound if nobody has it."""
        if self.ready_links(name):
            return
        if self.knows(name):
            raise Unavailable("no engine that serves this model is up, try again in a moment")
        if not self.all_answered:
            raise Unavailable("not all engines have told yet what they serve, try again in a moment")
        raise ModelNotFound(f"The model `{name[:MOST_NAME_CHARS]}` does not exist", param="model")

    def served_names(self) -> Sequence[ServedName]:
        """Names that at least one engine serves that is up."""
        by_name: dict[str, list[EngineModel]] = {}
        for link in self._links:
            if link.is_up:
                for model in link.models:
                    by_name.setdefault(model.name, []).append(model)
        return [_merged(name, models) for name, models in sorted(by_name.items())]

    def _wake_waiting(self) -> None:
        self._changed.set()
        self._changed.clear()

    async def fail_all(self) -> None:
        """Ends every request on every engine; none takes a further one."""
        await asyncio.gather(*(link.pool.aclose() for link in self._links))

    async def run(self) -> None:
        """Never returns; when its owner cancels it, no engine is asked any more once it returns."""
        tasks = [asyncio.create_task(link.run(), name=f"engine {link.engine_id}") for link in self._links]
        try:
            await asyncio.Event().wait()
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)


def _merged(name: str, models: Sequence[EngineModel]) -> ServedName:
    """One name as several engines serve it. Engines make up `created` anew for each answer; the oldest counts."""
    lengths = [model.max_model_len for model in models]
    known = [length for length in lengths if length is not None]
    return ServedName(
        name=name,
        created=min((model.created for model in models if model.created is not None), default=0),
        max_model_len=max(known) if len(known) == len(lengths) else None,
        root=next((model.root for model in models if model.root is not None), name),
        parent=next((model.parent for model in models if model.parent is not None), None),
        owned_by=next((model.owned_by for model in models if model.owned_by is not None), "engine"),
    )


def _export(link: EngineLink, metrics: ProxyMetrics) -> None:
    name = link.engine_id
    metrics.engine_up.labels(name).set_function(lambda: link.is_up)
    metrics.engine_answered.labels(name).set_function(lambda: link.answered_at)
    metrics.engine_slow.labels(name).set_function(lambda: link.is_slow)
    metrics.engine_probe_failures.labels(name)
    metrics.num_requests_waiting.labels(name).set_function(lambda: link.ledger.num_waiting)
    metrics.num_requests_running.labels(name).set_function(lambda: link.ledger.num_running)
