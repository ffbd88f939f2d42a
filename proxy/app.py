"""The proxy as an aiohttp application: its resources, who owns them, and its routes."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Coroutine
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

from aiohttp import web

from prefixcache.errors import NoWorkerReady, PrefixCacheError
from prefixcache.hashing import engine_namespace
from prefixcache.keeper import Keeper
from prefixcache.limits import DRAIN_TIMEOUT_S, HELD_DOWN_S, MAX_BODY_BYTES, TOKENIZE_THREADS
from prefixcache.load import new_proxy_id
from prefixcache.metrics import ProxyMetrics
from prefixcache.rendering.engine_prompt import EnginePrompts
from prefixcache.rendering.renderer import Renderer
from prefixcache.rendering.tokenizer_files import TokenizerFiles
from prefixcache.rendering.tokenizing_threads import TokenizingThreads
from prefixcache.routing.base import Policy
from proxy.access_log import access_middleware
from proxy.cache_stats import CacheStats
from proxy.cors import cors_middleware, cors_signal
from proxy.departure import Departure, shutting_down
from proxy.destination import Destinations
from proxy.dispatch import Dispatch
from proxy.engines.answer_claims import AnswerClaims
from proxy.engines.engine_families import EngineFamilies
from proxy.engines.engine_fleet import EngineFleet
from proxy.engines.engine_handler import EngineHandler
from proxy.engines.engine_settings import EngineSettings
from proxy.engines.headers import HeaderRules
from proxy.error_answers import error_middleware
from proxy.exchange import Books
from proxy.fleet import Fleet
from proxy.generation_handler import GenerationHandler
from proxy.health import HealthHandlers
from proxy.held_requests import HeldRequests
from proxy.load_table import LoadTable
from proxy.placer import Placer
from proxy.prediction import Predictor, PromptReader
from proxy.rebalancer import Rebalancer
from proxy.recent_placements import RecentPlacements
from proxy.redis_memory import RedisMemoryWatch
from proxy.reports import ReportHandlers
from proxy.request_body import Bodies
from proxy.secret import DeploymentSecret
from proxy.served_models import ServedModels
from proxy.store import Store
from proxy.tokenize_handlers import TokenizeHandlers
from proxy.tokenizer_fetch import Tokenizers
from proxy.warnings_log import QuietLog

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class AppParts:
    """What the application is made of and does not make itself."""

    open_store: Callable[[], AbstractAsyncContextManager[Store]]
    policy: Policy
    secret: bytes | None = None
    """The configured deployment secret."""
    worker_token: bytes | None = field(default=None, repr=False)
    """What workers and this proxy prove to each other; None connects to workers without one alone."""
    engines: EngineSettings = field(default_factory=EngineSettings)
    has_redis: bool = True
    """Whether the store is one that proxies share."""
    held_s: float = HELD_DOWN_S
    """Patience of a request for a known model while none of its own workers is ready."""
    drain_delay_s: float = 0.0
    drain_s: float = DRAIN_TIMEOUT_S
    """Of its departure: between the turn of /ready and the first refusal, and for what is in hand from then on."""
    cors_origins: Collection[str] = ()
    """Origins whose pages may call this proxy; none is told anything if there are none."""


PARTS = web.AppKey("parts", AppParts)
DEPARTURE = web.AppKey("departure", Departure)
BOOKS = web.AppKey("books", Books)
BODIES = web.AppKey("bodies", Bodies)
LOG = web.AppKey("log", QuietLog)
PROXY_ID = web.AppKey("proxy_id", str)
"""Of this process: it writes its load and its pending claims under it."""
STORE: web.AppKey[Store] = web.AppKey("store")
REDIS_MEMORY = web.AppKey("redis_memory", RedisMemoryWatch)
EXECUTOR: web.AppKey[Executor] = web.AppKey("executor")
TOKENIZERS = web.AppKey("tokenizers", Tokenizers)
SECRET = web.AppKey("secret", DeploymentSecret)
FLEET = web.AppKey("fleet", Fleet)
ENGINES = web.AppKey("engines", EngineFleet)
ENGINE_HANDLER = web.AppKey("engine_handler", EngineHandler)
DISPATCH = web.AppKey("dispatch", Dispatch)
LOADS = web.AppKey("loads", LoadTable)
HELD = web.AppKey("held", HeldRequests)
GENERATION = web.AppKey("generation", GenerationHandler)
TOKENIZE = web.AppKey("tokenize", TokenizeHandlers)
HEALTH = web.AppKey("health", HealthHandlers)
REPORTS = web.AppKey("reports", ReportHandlers)


def create_app(parts: AppParts) -> web.Application:
    """Starts nothing: its resources are opened when a runner sets it up."""
    metrics = ProxyMetrics()
    departure = Departure(delay_s=parts.drain_delay_s, grace_s=parts.drain_s)
    middlewares = [access_middleware(metrics), error_middleware, departure.middleware()]
    if parts.cors_origins:
        middlewares.append(cors_middleware(parts.cors_origins))
    bodies = Bodies()
    middlewares.append(bodies.middleware())
    app = web.Application(client_max_size=MAX_BODY_BYTES, middlewares=middlewares)
    if parts.cors_origins:
        app.on_response_prepare.append(cors_signal(parts.cors_origins))
    app.on_response_prepare.append(departure.close_connection)
    app[PARTS] = parts
    app[DEPARTURE] = departure
    app[BOOKS] = Books(metrics=metrics, stats=CacheStats())
    app[BODIES] = bodies
    app[LOG] = QuietLog(logging.getLogger("proxy"))
    app[PROXY_ID] = new_proxy_id()
    app.on_shutdown.append(_tell_those_in_hand)
    app.cleanup_ctx.extend([_store, _keeper, _executor, _tokenizers, _secret, _fleet, _engines, _loads, _handlers])
    app.add_routes(
        [
            web.post("/v1/chat/completions", _calls(DISPATCH, Dispatch.chat)),
            web.post("/v1/completions", _calls(DISPATCH, Dispatch.completion)),
            web.post("/tokenize", _calls(DISPATCH, Dispatch.tokenize)),
            web.post("/detokenize", _calls(DISPATCH, Dispatch.detokenize)),
            web.get("/v1/models", _calls(REPORTS, ReportHandlers.models)),
            web.get("/v1/models/{name:.+}", _calls(REPORTS, ReportHandlers.model)),
            web.get("/health", _calls(HEALTH, HealthHandlers.health)),
            web.get("/ready", _calls(HEALTH, HealthHandlers.ready)),
            web.get("/metrics", _calls(REPORTS, ReportHandlers.metrics)),
            web.get("/cache/stats", _calls(REPORTS, ReportHandlers.cache_stats)),
        ]
    )
    if parts.engines.urls:
        app.add_routes([web.route("*", "/{path:.*}", _calls(DISPATCH, Dispatch.anything_else))])
    return app


def _calls(
    key: web.AppKey[T], method: Callable[[T, web.Request], Awaitable[web.StreamResponse]]
) -> Callable[[web.Request], Awaitable[web.StreamResponse]]:
    """A route's handler: `method` of what stands under `key`, which is there once the application is set up."""

    async def handle(request: web.Request) -> web.StreamResponse:
        return await method(request.app[key], request)

    return handle


async def _tell_those_in_hand(app: web.Application) -> None:
    """The proxy has taken leave; what handlers still run has had its time."""
    error = shutting_down()
    app[HELD].turn_away(error)
    app[BODIES].turn_away(error)
    app[FLEET].fail_all(error)
    await app[ENGINES].fail_all()


async def _store(app: web.Application) -> AsyncIterator[None]:
    async with app[PARTS].open_store() as store:
        app[STORE] = store
        app[BOOKS].metrics.index_available.set_function(lambda: store.index_available)
        app[REDIS_MEMORY] = RedisMemoryWatch(store, app[BOOKS].metrics, app[LOG])
        async with _running(app[REDIS_MEMORY].run()):
            yield


async def _keeper(app: web.Application) -> AsyncIterator[None]:
    namespaces = [engine_namespace()] if app[PARTS].engines.urls else []
    async with _running(Keeper(app[STORE], keeper_id=app[PROXY_ID], namespaces=namespaces).run()):
        yield


async def _executor(app: web.Application) -> AsyncIterator[None]:
    executor = ThreadPoolExecutor(TOKENIZE_THREADS, thread_name_prefix="tokenize")
    app[EXECUTOR] = executor
    yield
    executor.shutdown(wait=False, cancel_futures=True)


async def _tokenizers(app: web.Application) -> AsyncIterator[None]:
    async with Tokenizers.open(app[EXECUTOR]) as tokenizers:
        app[TOKENIZERS] = tokenizers
        yield


async def _secret(app: web.Application) -> AsyncIterator[None]:
    app[SECRET] = DeploymentSecret(app[STORE], app[PARTS].secret, app[LOG])
    async with _running(app[SECRET].run()):
        yield


async def _fleet(app: web.Application) -> AsyncIterator[None]:
    app[FLEET] = Fleet(app[STORE], app[TOKENIZERS], app[BOOKS].metrics, app[LOG], app[PARTS].worker_token)
    async with _running(app[FLEET].run()):
        yield


async def _engines(app: web.Application) -> AsyncIterator[None]:
    namespace = engine_namespace()
    families = EngineFamilies(app[STORE].index(namespace), app[LOG])
    async with EngineFleet.open(
        app[PARTS].engines,
        namespace=namespace,
        make_claims=families.claims_of,
        metrics=app[BOOKS].metrics,
        log=app[LOG],
    ) as fleet:
        app[ENGINES] = fleet
        if not fleet.links:
            yield
            return
        async with _running(families.run(fleet.answering)), _running(fleet.run()):
            yield


async def _loads(app: web.Application) -> AsyncIterator[None]:
    app[LOADS] = LoadTable(app[STORE], Destinations(app[FLEET], app[ENGINES]), app[PROXY_ID], app[LOG])
    app[FLEET].measured_rate = app[LOADS].prefill_rate
    async with _running(app[LOADS].run()):
        yield


async def _handlers(app: web.Application) -> AsyncIterator[None]:
    books = app[BOOKS]
    placer = Placer(
        fleet=app[FLEET],
        predictor=Predictor(books.metrics, app[LOG]),
        policy=app[PARTS].policy,
        loads=app[LOADS],
        recent=RecentPlacements(),
        proxy_id=app[PROXY_ID],
        metrics=books.metrics,
    )
    rebalancer = Rebalancer(placer=placer, loads=app[LOADS], metrics=books.metrics)
    app[FLEET].on_idle = rebalancer.offer
    app[HELD] = HeldRequests(partial(_takes_requests, app), books.metrics, patience_s=app[PARTS].held_s)
    reader = PromptReader(app[EXECUTOR])
    app[GENERATION] = GenerationHandler(
        fleet=app[FLEET],
        secret=app[SECRET],
        reader=reader,
        placer=placer,
        rebalancer=rebalancer,
        held=app[HELD],
        books=books,
    )
    engines, served = app[ENGINES], ServedModels(app[FLEET], app[ENGINES])
    answers = AnswerClaims(reader)
    app[ENGINE_HANDLER] = EngineHandler(
        fleet=engines,
        store=app[STORE],
        secret=app[SECRET],
        new_prompts=partial(_engine_prompts, await _engine_renderer(app), reader),
        placer=placer,
        loads=app[LOADS],
        books=books,
        answers=answers,
        rules=HeaderRules(passed=app[PARTS].engines.passed_headers),
    )
    app[TOKENIZE] = TokenizeHandlers(app[FLEET], reader)
    app[DISPATCH] = Dispatch(
        served=served,
        generation=app[GENERATION],
        tokenize=app[TOKENIZE],
        engines=app[ENGINE_HANDLER] if engines.links else None,
        threads=reader,
    )
    app[HEALTH] = HealthHandlers(
        store=app[STORE],
        redis_memory=app[REDIS_MEMORY],
        secret=app[SECRET],
        fleet=app[FLEET],
        engines=engines,
        loads=app[LOADS],
        departure=app[DEPARTURE],
        has_redis=app[PARTS].has_redis,
        proxy_id=app[PROXY_ID],
    )
    app[REPORTS] = ReportHandlers(served, books.metrics, books.stats)
    async with _running(answers.run()):
        yield


def _takes_requests(app: web.Application, name: str) -> bool:
    """Whether a worker that serves the model is ready and stays, or the wait for one is in vain."""
    try:
        model = app[FLEET].model(name)
    except NoWorkerReady:
        return False
    except PrefixCacheError:
        return True
    return any(not app[LOADS].is_draining(link) for link in app[FLEET].ready_links(model.namespace))


def _engine_prompts(renderer: Renderer | None, threads: TokenizingThreads, block_size: int) -> EnginePrompts:
    return EnginePrompts(renderer=renderer, threads=threads, block_size=block_size)


async def _engine_renderer(app: web.Application) -> Renderer | None:
    """Loaded before the first request is taken. Raises ConfigError."""
    folder = app[PARTS].engines.tokenizer
    if folder is None:
        return None
    return await asyncio.get_running_loop().run_in_executor(
        app[EXECUTOR], lambda: Renderer(TokenizerFiles.from_folder(folder))
    )


@asynccontextmanager
async def _running(work: Coroutine[Any, Any, None]) -> AsyncIterator[None]:
    """A background task, cancelled and awaited on exit."""
    task = asyncio.create_task(work)
    try:
        yield
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
