"""A plain engine for tests and benchmarks: an OpenAI-compatible server with the prefix cache of vLLM and no model.

    python -m tests.support.lru_engine --port 8100 --capacity-blocks 1500 [--port 8101 ...] [--tokenizer DIR]

Its cache holds blocks of prompts from the start of their prefill, and of answers from their end. Prefill takes time by
uncached tokens, an answer by its tokens. It prints `ready` once it listens on every port, an engine on each.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, TextIO

import click
import uvloop
from aiohttp import web

from tests.support.engine_text import EngineAnswer, EngineText
from tests.support.lru_blocks import LruBlocks, block_chain

DEFAULT_ANSWER_TOKENS = 16
MOST_BODY_BYTES = 64 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSettings:
    """What it serves and how long that takes."""

    capacity_blocks: int
    block_tokens: int = 16
    models: tuple[str, ...] = ("lru",)
    """The model and, after it, names of adapters, each with a cache of its own."""
    max_model_len: int = 8192
    overhead_s: float = 0.002
    """Of every prefill, however much is cached."""
    prefill_s_per_token: float = 50e-6
    itl_s: float = 0.001
    has_concurrent_prefill: bool = False
    """Prefills overlap as if each had the engine to itself; else one waits for the other."""
    tells_cached_tokens: bool = True
    """Else `prompt_tokens_details` is null, as of a vLLM without --enable-prompt-tokens-details."""
    speaks: Literal["vllm", "sglang"] = "vllm"
    """Whose words it uses to tell about itself; caches and answers are the same."""
    renders: bool = True
    """Whether it answers /v1/chat/completions/render and /tokenize, which a router may use to look into prompts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Prompt:
    """One request's tokens and its answer to come."""

    body: Mapping[str, Any]
    ids: list[int]
    chain: list[int]
    """Of the prompt alone."""
    whole_chain: list[int]
    """With the answer."""
    answer: EngineAnswer


class Refusal(Exception):
    """An error as engines word it."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


class LruEngine:
    """One engine; `app` serves it. `log` gets a line of JSON for every prefill: t, worker, n, cached, blocks."""

    def __init__(
        self, settings: EngineSettings, text: EngineText, *, name: str = "0", log: TextIO | None = None
    ) -> None:
        self._settings = settings
        self._text = text
        self._name = name
        self._log = log
        self._blocks = LruBlocks(capacity_blocks=settings.capacity_blocks, block_tokens=settings.block_tokens)
        self._prefill = asyncio.Lock()
        self.num_waiting = 0
        self.num_running = 0
        self.most_running = 0
        self.prompt_tokens = 0
        self.cached_tokens = 0

    def app(self) -> web.Application:
        app = web.Application(client_max_size=MOST_BODY_BYTES)
        app.router.add_get("/health", self._health)
        app.router.add_get("/metrics", self._metrics)
        app.router.add_get("/v1/models", self._models)
        app.router.add_post("/v1/chat/completions", self._generate)
        app.router.add_post("/v1/completions", self._generate)
        app.router.add_post("/reset_prefix_cache", self._reset)
        if self._settings.speaks == "sglang":
            app.router.add_get("/model_info", self._model_info)
            app.router.add_get("/server_info", self._server_info)
        elif self._settings.renders:
            app.router.add_post("/v1/chat/completions/render", self._render)
            app.router.add_post("/tokenize", self._tokenize)
        app.middlewares.append(_worded_errors)
        return app

    # --- what it tells --------------------------------------------------------------------------------------

    async def _health(self, request: web.Request) -> web.Response:
        return web.Response()

    async def _models(self, request: web.Request) -> web.Response:
        model, *adapters = self._settings.models
        about = {"object": "model", "created": 1, "owned_by": "lru"}
        cards = [{"id": model, **about, "root": model, "parent": None, "max_model_len": self._settings.max_model_len}]
        cards += [{"id": name, **about, "root": f"/adapters/{name}", "parent": model} for name in adapters]
        return web.json_response({"object": "list", "data": cards})

    async def _metrics(self, request: web.Request) -> web.Response:
        """The families that tell of cache and load."""
        settings, labels = self._settings, f'engine="0",model_name="{self._settings.models[0]}"'
        cache = f'block_size="{settings.block_tokens}",enable_prefix_caching="True",engine="0"'
        families = [
            ("vllm:cache_config_info", "gauge", f'{cache},num_gpu_blocks="{settings.capacity_blocks}"', 1),
            ("vllm:num_requests_running", "gauge", labels, self.num_running),
            ("vllm:num_requests_waiting", "gauge", labels, self.num_waiting),
            ("vllm:kv_cache_usage_perc", "gauge", labels, len(self._blocks) / settings.capacity_blocks),
            ("vllm:prefix_cache_queries_total", "counter", labels, self.prompt_tokens),
            ("vllm:prefix_cache_hits_total", "counter", labels, self.cached_tokens),
        ]
        if settings.speaks == "sglang":
            families = [
                ("sglang:num_running_reqs", "gauge", labels, self.num_running),
                ("sglang:num_queue_reqs", "gauge", labels, self.num_waiting),
                ("sglang:prompt_tokens_total", "counter", labels, self.prompt_tokens),
                ("sglang:cached_tokens_total", "counter", labels, self.cached_tokens),
            ]
        lines = [
            f"# TYPE {name.removesuffix('_total')} {kind}\n{name}{{{labels}}} {float(value)}\n"
            for name, kind, labels, value in families
        ]
        return web.Response(text="".join(lines))

    async def _model_info(self, request: web.Request) -> web.Response:
        model = self._settings.models[0]
        return web.json_response({"model_path": model, "served_model_name": model, "is_generation": True})

    async def _server_info(self, request: web.Request) -> web.Response:
        settings = self._settings
        num_tokens = settings.capacity_blocks * settings.block_tokens
        sizes = {"page_size": settings.block_tokens, "max_total_num_tokens": num_tokens, "dp_size": 1}
        return web.json_response({"served_model_name": settings.models[0], "disable_radix_cache": False, **sizes})

    async def _reset(self, request: web.Request) -> web.Response:
        self._blocks.clear()
        return web.Response()

    async def _render(self, request: web.Request) -> web.Response:
        return web.json_response({"request_id": "render", "token_ids": self._text.chat_ids(await _body(request))})

    async def _tokenize(self, request: web.Request) -> web.Response:
        body = await _body(request)
        ids = self._text.chat_ids(body) if "messages" in body else self._text.prompt_ids(body["prompt"])
        return web.json_response({"count": len(ids), "max_model_len": self._settings.max_model_len, "tokens": ids})

    # --- what it generates ----------------------------------------------------------------------------------

    async def _generate(self, request: web.Request) -> web.StreamResponse:
        prompt = self._prompt(await _body(request))
        self.num_waiting += 1
        try:
            async with nullcontext() if self._settings.has_concurrent_prefill else self._prefill:
                cached_tokens = self._begin(prompt)
                uncached_tokens = len(prompt.ids) - cached_tokens
                await asyncio.sleep(self._settings.overhead_s + self._settings.prefill_s_per_token * uncached_tokens)
        finally:
            self.num_waiting -= 1
        self.num_running += 1
        self.most_running = max(self.most_running, self.num_running)
        try:
            answer = self._stream if prompt.body.get("stream") else self._whole
            return await answer(request, prompt, self._usage(prompt, cached_tokens))
        finally:
            self.num_running -= 1

    def _prompt(self, body: Mapping[str, Any]) -> _Prompt:
        settings, model = self._settings, body.get("model")
        if model not in settings.models:
            raise Refusal(404, f"The model `{model}` does not exist.")
        ids = self._text.chat_ids(body) if "messages" in body else self._text.prompt_ids(body["prompt"])
        num_tokens = body.get("max_completion_tokens") or body.get("max_tokens") or DEFAULT_ANSWER_TOKENS
        if len(ids) + num_tokens > settings.max_model_len:
            raise Refusal(
                400,
                f"The maximum context length is {settings.max_model_len} tokens, not {len(ids)} + {num_tokens}.",
            )
        adapter = "" if model == settings.models[0] else model
        salt = json.dumps([adapter, body.get("cache_salt")]).encode()
        answer = self._text.answer(ids, num_tokens)
        return _Prompt(
            body=body,
            ids=ids,
            chain=block_chain(ids, settings.block_tokens, salt=salt),
            whole_chain=block_chain([*ids, *answer.ids], settings.block_tokens, salt=salt),
            answer=answer,
        )

    def _begin(self, prompt: _Prompt) -> int:
        """Cached tokens; from now on the whole prompt is in the cache, as of a prompt that vLLM has scheduled."""
        cached_tokens = self._blocks.cached_tokens(prompt.chain, len(prompt.ids))
        self._blocks.hold(prompt.chain)
        self.prompt_tokens += len(prompt.ids)
        self.cached_tokens += cached_tokens
        if self._log is not None:
            line = {"t": time.time(), "worker": self._name, "n": len(prompt.ids), "cached": cached_tokens}
            self._log.write(json.dumps({**line, "blocks": prompt.whole_chain}) + "\n")
            self._log.flush()
        return cached_tokens

    def _usage(self, prompt: _Prompt, cached_tokens: int) -> dict[str, Any]:
        num_prompt, num_answer = len(prompt.ids), len(prompt.answer.ids)
        details = {"cached_tokens": cached_tokens} if self._settings.tells_cached_tokens else None
        return {
            "prompt_tokens": num_prompt,
            "completion_tokens": num_answer,
            "total_tokens": num_prompt + num_answer,
            "prompt_tokens_details": details,
        }

    async def _whole(self, request: web.Request, prompt: _Prompt, usage: Mapping[str, Any]) -> web.StreamResponse:
        await asyncio.sleep(self._settings.itl_s * len(prompt.answer.ids))
        self._blocks.hold(prompt.whole_chain)
        text = "".join(prompt.answer.texts)
        if "messages" in prompt.body:
            choice: dict[str, Any] = {"message": {"role": "assistant", "content": text}}
            kind = "chat.completion"
        else:
            choice, kind = {"text": text}, "text_completion"
        choices = [{"index": 0, **choice, "finish_reason": "length"}]
        return web.json_response({**_about(prompt.body, kind), "choices": choices, "usage": usage})

    async def _stream(self, request: web.Request, prompt: _Prompt, usage: Mapping[str, Any]) -> web.StreamResponse:
        response = web.StreamResponse(headers={"content-type": "text/event-stream; charset=utf-8"})
        await response.prepare(request)
        is_chat = "messages" in prompt.body
        about = _about(prompt.body, "chat.completion.chunk" if is_chat else "text_completion")

        async def send(content: Mapping[str, Any]) -> None:
            await response.write(b"data: " + json.dumps({**about, **content}, separators=(",", ":")).encode() + b"\n\n")

        if is_chat:
            await send(
                {"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}, "finish_reason": None}]}
            )
        last = len(prompt.answer.texts) - 1
        for number, text in enumerate(prompt.answer.texts):
            if number:
                await asyncio.sleep(self._settings.itl_s)
            new = {"delta": {"content": text}} if is_chat else {"text": text}
            await send({"choices": [{"index": 0, **new, "finish_reason": "length" if number == last else None}]})
        self._blocks.hold(prompt.whole_chain)
        if (prompt.body.get("stream_options") or {}).get("include_usage"):
            await send({"choices": [], "usage": usage})
        await response.write(b"data: [DONE]\n\n")
        await response.write_eof()
        return response


def _about(body: Mapping[str, Any], kind: str) -> dict[str, Any]:
    return {"id": "lru-1", "object": kind, "created": 1, "model": body["model"]}


async def _body(request: web.Request) -> dict[str, Any]:
    try:
        body = json.loads(await request.read())
    except ValueError as error:
        raise Refusal(400, f"The body is not JSON: {error}") from error
    if not isinstance(body, dict) or not ({"messages", "prompt"} & body.keys()):
        raise Refusal(400, "The body must be an object with messages or a prompt.")
    return body


@web.middleware
async def _worded_errors(
    request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
) -> web.StreamResponse:
    try:
        return await handler(request)
    except Refusal as refusal:
        error = {"message": str(refusal), "type": "BadRequestError", "param": None, "code": refusal.status}
        return web.json_response({"error": error}, status=refusal.status)


@asynccontextmanager
async def serving_engine(engine: LruEngine, port: int = 0) -> AsyncIterator[str]:
    """Gives the URL of a listening engine. An answer whose client leaves is ended, as in vLLM."""
    runner = web.AppRunner(engine.app(), handler_cancellation=True, access_log=None, shutdown_timeout=0.1)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", port).start()
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


async def serve(settings: EngineSettings, ports: tuple[int, ...], tokenizer: Path | None, log: TextIO | None) -> None:
    """One engine on each port, until it is cancelled."""
    text = EngineText(tokenizer)
    async with AsyncExitStack() as stack:
        for port in ports:
            engine = LruEngine(settings, text, name=str(port), log=log)
            await stack.enter_async_context(serving_engine(engine, port))
        print("ready", flush=True)
        await asyncio.Event().wait()


@click.command(help="Serve engines without a model, with an LRU cache of prefix blocks; one on each --port.")
@click.option("--port", "ports", type=int, multiple=True, required=True)
@click.option("--capacity-blocks", type=click.IntRange(1), required=True, help="Blocks of the cache of each engine.")
@click.option("--block-tokens", type=click.IntRange(1), default=16, show_default=True)
@click.option("--model", "models", multiple=True, default=["lru"], help="Served name; further ones are adapters.")
@click.option("--max-model-len", type=int, default=8192, show_default=True)
@click.option("--tokenizer", type=click.Path(path_type=Path), help="Folder of a model; default: bytes are tokens.")
@click.option("--overhead-us", type=float, default=2_000, show_default=True, help="Of every prefill.")
@click.option("--prefill-us", type=float, default=50, show_default=True, help="Of every uncached token.")
@click.option("--itl-us", type=float, default=1_000, show_default=True, help="Between two tokens.")
@click.option("--concurrent-prefill", is_flag=True, help="Prefills do not wait for each other.")
@click.option("--no-cached-tokens", is_flag=True, help="Report null instead of the cached tokens.")
@click.option("--speaks", type=click.Choice(["vllm", "sglang"]), default="vllm", show_default=True)
@click.option("--no-render", is_flag=True, help="Answer no /tokenize and no /v1/chat/completions/render.")
@click.option("--log", type=click.Path(path_type=Path), help="File that gets a line of JSON for every prefill.")
def main(
    ports: tuple[int, ...],
    tokenizer: Path | None,
    log: Path | None,
    overhead_us: float,
    prefill_us: float,
    itl_us: float,
    concurrent_prefill: bool,
    no_cached_tokens: bool,
    no_render: bool,
    **others: Any,
) -> None:
    settings = replace(
        EngineSettings(**others),
        overhead_s=overhead_us / 1e6,
        prefill_s_per_token=prefill_us / 1e6,
        itl_s=itl_us / 1e6,
        has_concurrent_prefill=concurrent_prefill,
        tells_cached_tokens=not no_cached_tokens,
        renders=not no_render,
    )
    with nullcontext() if log is None else log.open("a") as lines:
        uvloop.run(serve(settings, ports, tokenizer, lines))


if __name__ == "__main__":
    main()
