"""A real worker in this process, over a scripted runner: engine, server and publisher as in the program."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from random import Random
from typing import Protocol

from prefixcache.index.base import PrefixIndex
from prefixcache.limits import INDEX_CHECK_S
from prefixcache.metrics import WorkerMetrics
from prefixcache.registry import Registry, WorkerRecord
from tests.support.memory_store import MemoryStore
from tests.support.scripted_runner import ScriptedRunner
from worker.config import Address
from worker.engine import Engine
from worker.http import ServedTokenizer
from worker.server import bind
from worker.service import ServedModel, Worker, serve


class Store(Protocol):
    """What a worker needs of RedisStore or MemoryStore."""

    def index(self, namespace: str) -> PrefixIndex: ...

    def registry(self) -> Registry: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class PlainTokenizer:
    """Any bytes as tokenizer files, for tests that do not tokenize."""

    files: Mapping[str, bytes] = field(default_factory=lambda: {"tokenizer.json": b"{}"})
    fingerprint: str = "f" * 64


@dataclass(frozen=True, slots=True, kw_only=True)
class RunningWorker:
    """A worker that serves on loopback."""

    worker: Worker
    runner: ScriptedRunner

    @property
    def address(self) -> str:
        """HOST:PORT of protocol v1 and HTTP."""
        return str(self.worker.listening)

    @property
    def record(self) -> WorkerRecord:
        return self.worker.record

    @property
    def engine(self) -> Engine:
        return self.worker.engine


@asynccontextmanager
async def running_worker(
    runner: ScriptedRunner | None = None,
    *,
    store: Store | None = None,
    worker_id: str = "scripted-worker",
    model: str = "scripted",
    revision: str = "0123456789abcdef",
    served_names: tuple[str, ...] | None = None,
    tokenizer: ServedTokenizer | None = None,
    stop_token_ids: tuple[int, ...] = (0,),
    reannounce_jitter_s: float = 0.0,
    index_check_s: float = INDEX_CHECK_S,
    worker_token: bytes | None = None,
) -> AsyncIterator[RunningWorker]:
    """Yields once the worker is registered in `store` (a fresh MemoryStore if none is given).

    The engine checks its integrity after every step; leaving the block fails if it ever did not hold.
    """
    runner = runner or ScriptedRunner()
    store = store or MemoryStore()
    served = ServedModel(
        name=model,
        revision=revision,
        served_names=served_names or (model,),
        tokenizer=tokenizer or PlainTokenizer(),
        stop_token_ids=stop_token_ids,
    )
    async with serve(
        runner,
        model=served,
        worker_id=worker_id,
        bound=bind(Address(host="127.0.0.1", port=0)),
        advertise=None,
        metrics=WorkerMetrics(),
        open_index=store.index,
        registry=store.registry(),
        random=Random(0),
        checks_integrity=True,
        reannounce_jitter_s=reannounce_jitter_s,
        index_check_s=index_check_s,
        worker_token=worker_token,
    ) as worker:
        try:
            await worker.publisher.registered()
            yield RunningWorker(worker=worker, runner=runner)
        finally:
            runner.resume()
    if worker.engine.failure is not None:
        raise worker.engine.failure
