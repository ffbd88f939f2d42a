"""One worker put together: engine, server and publisher, started and ended in order."""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from random import Random

from prefixcache import hashing, protocol
from prefixcache.index.base import PrefixIndex
from prefixcache.limits import INDEX_CHECK_S, MAX_STEP_S, REANNOUNCE_JITTER_S
from prefixcache.metrics import WorkerMetrics
from prefixcache.registry import Registry, WorkerRecord
from prefixcache.routing.order import Order
from prefixcache.types import INDEX_STRIDE
from worker.config import Address, advertised
from worker.engine import Engine, StepOutput
from worker.http import ServedTokenizer, application
from worker.publisher import Publisher
from worker.runner import Runner
from worker.self_question import SelfQuestion
from worker.server import Server


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedModel:
    """What a worker says of the model it serves."""

    name: str
    revision: str
    served_names: tuple[str, ...]
    tokenizer: ServedTokenizer
    stop_token_ids: tuple[int, ...]

    def namespace(self, block_size: int) -> str:
        return hashing.namespace(
            model=self.name,
            revision=self.revision,
            tokenizer_fingerprint=self.tokenizer.fingerprint,
            block_size=block_size,
            stride=INDEX_STRIDE,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Worker:
    """A worker that serves."""

    engine: Engine
    server: Server
    publisher: Publisher
    metrics: WorkerMetrics
    listening: Address
    failed: asyncio.Event
    """The engine has ended by itself; `engine.failure` says why."""

    @property
    def record(self) -> WorkerRecord:
        return self.publisher.record

    async def drain(self) -> None:
        """Takes no further request, says so to all who could send one, and returns when the last one has ended."""
        await asyncio.gather(self.server.drain(), self.publisher.drain())


@asynccontextmanager
async def serve(
    runner: Runner,
    *,
    model: ServedModel,
    worker_id: str,
    bound: socket.socket,
    advertise: Address | None,
    metrics: WorkerMetrics,
    open_index: Callable[[str], PrefixIndex],
    registry: Registry,
    random: Random,
    order: Order = "mean",
    step_s: float = MAX_STEP_S,
    worker_token: bytes | None = None,
    checks_integrity: bool = False,
    reannounce_jitter_s: float = REANNOUNCE_JITTER_S,
    index_check_s: float = INDEX_CHECK_S,
) -> AsyncIterator[Worker]:
    """Serves on a bound socket until the block is left; then says so, hands back what runs, withdraws, closes streams.

    Does not wait for the registration: a worker serves those who know its address also while Redis is away.
    """
    loop = asyncio.get_running_loop()
    metrics.identify(worker=worker_id, model=model.served_names[0])
    failed = asyncio.Event()
    started_at = time.time()
    block_size = runner.limits.block_size
    namespace = model.namespace(block_size)

    def take_output(output: StepOutput) -> None:
        server.deliver(output)
        question.deliver(output)
        if output.index_changed:
            publisher.wake()
        if engine.failure is not None:
            failed.set()

    engine = Engine(
        runner,
        metrics=metrics,
        on_output=lambda output: _in_loop(loop, take_output, output),
        order=order,
        step_s=step_s,
        checks_integrity=checks_integrity,
    )
    metrics.serving.set_function(lambda: engine.is_serving)
    server = Server(
        engine=engine,
        namespace=namespace,
        incarnation=lambda: publisher.incarnation,
        started_at=started_at,
        address=lambda: record.address,
        token=worker_token,
    )
    question = SelfQuestion(engine)
    app = application(engine=engine, metrics=metrics, tokenizer=model.tokenizer, question=question)
    async with server.listen(app, bound) as listening:
        record = _record(
            engine, model, worker_id=worker_id, address=advertised(listening, advertise), started_at=started_at
        )
        publisher = Publisher(
            index=open_index(namespace),
            registry=registry,
            changes=engine.index_changes,
            measure=engine.measure,
            record=record,
            metrics=metrics,
            random=random,
            reannounce_jitter_s=reannounce_jitter_s,
            check_s=index_check_s,
        )
        engine.start()
        publishing = asyncio.create_task(publisher.run(), name="publisher")
        try:
            yield Worker(
                engine=engine, server=server, publisher=publisher, metrics=metrics, listening=listening, failed=failed
            )
        finally:
            await _leave(engine, publisher, publishing)


async def _leave(engine: Engine, publisher: Publisher, publishing: asyncio.Task[None]) -> None:
    """Says that it takes nothing more, hands back what runs, and withdraws."""
    publishing.cancel()
    await asyncio.gather(publishing, return_exceptions=True)
    await publisher.drain()
    await asyncio.to_thread(engine.stop)
    await publisher.close()


def _in_loop(loop: asyncio.AbstractEventLoop, take: Callable[[StepOutput], None], output: StepOutput) -> None:
    """Hands an output to the event loop; one that comes after the loop closed has nobody to read it."""
    if not loop.is_closed():
        loop.call_soon_threadsafe(take, output)


def _record(engine: Engine, model: ServedModel, *, worker_id: str, address: Address, started_at: float) -> WorkerRecord:
    limits = engine.limits
    return WorkerRecord(
        worker_id=worker_id,
        address=str(address),
        namespace=model.namespace(limits.block_size),
        incarnation=0,
        protocol=(protocol.MAJOR, protocol.MINOR),
        model=model.name,
        revision=model.revision,
        served_names=model.served_names,
        tokenizer_fingerprint=model.tokenizer.fingerprint,
        vocab_size=limits.vocab_size,
        max_model_len=limits.max_model_len,
        stop_token_ids=tuple(token for token in model.stop_token_ids if token < limits.vocab_size),
        block_size=limits.block_size,
        stride=INDEX_STRIDE,
        num_blocks=limits.num_blocks,
        kv_bytes_per_token=limits.kv_bytes_per_token,
        started_at=started_at,
    )
