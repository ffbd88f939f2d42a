"""The worker's HTTP: health, metrics and the tokenizer files that a proxy renders and tokenizes with."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from aiohttp import web

from prefixcache.metrics import CONTENT_TYPE, WorkerMetrics, exposition
from worker.engine import Engine
from worker.self_question import SelfQuestion


class ServedTokenizer(Protocol):
    """The tokenizer files of a model and their fingerprint."""

    @property
    def files(self) -> Mapping[str, bytes]: ...

    @property
    def fingerprint(self) -> str: ...


def application(
    *, engine: Engine, metrics: WorkerMetrics, tokenizer: ServedTokenizer, question: SelfQuestion
) -> web.Application:
    """Routes of one worker. /health tells at once whether it takes requests, /health/answer whether tokens come."""
    files = tokenizer.files

    async def health(_request: web.Request) -> web.Response:
        load = engine.load
        body = {"serving": engine.is_serving, "step": load.step, "running": load.running, "waiting": load.waiting}
        return web.json_response(body, status=200 if engine.is_serving else 503)

    async def answer(_request: web.Request) -> web.Response:
        verdict = await question.verdict()
        body = {"answers": verdict.answers, "reason": verdict.reason}
        return web.json_response(body, status=200 if verdict.answers else 503)

    async def metric_values(_request: web.Request) -> web.Response:
        return web.Response(body=exposition(metrics.registry), headers={"Content-Type": CONTENT_TYPE})

    async def manifest(_request: web.Request) -> web.Response:
        sizes = {name: len(content) for name, content in files.items()}
        return web.json_response({"fingerprint": tokenizer.fingerprint, "files": sizes})

    async def tokenizer_file(request: web.Request) -> web.Response:
        name = request.match_info["name"]
        if name not in files:
            return web.json_response({"error": f"no tokenizer file {name!r}"}, status=404)
        return web.Response(body=files[name], content_type="application/octet-stream")

    app = web.Application()
    app.router.add_get("/health", health)
    app.router.add_get("/health/answer", answer)
    app.router.add_get("/metrics", metric_values)
    app.router.add_get("/tokenizer/manifest", manifest)
    app.router.add_get("/tokenizer/files/{name}", tokenizer_file)
    return app
