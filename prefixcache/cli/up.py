"""`prefixcache up`: embedded Valkey, workers and one proxy on this machine, by one command."""

from __future__ import annotations

import asyncio
import http.client
import json
import os
import secrets
import signal
import socket
import sys
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from prefixcache.cli.children import die_with_parent
from prefixcache.cli.programs import program_command
from prefixcache.cli.stack import Stack, StopSignals
from prefixcache.cli.valkey import EmbeddedValkey
from prefixcache.config import file_setting, settings_command
from prefixcache.cpu import auto_dtype, usable_cores
from prefixcache.errors import ConfigError, IndexUnavailable, Unavailable
from prefixcache.worker_token import ENVIRONMENT_NAME as WORKER_TOKEN

_HOST = "127.0.0.1"
_DEMO = "demo"
_SIM = "sim"
_POLL_S = 0.1
_WORKER_NICENESS = 5
"""Workers fill every core; the proxy and the index answer in between within their deadlines."""


@settings_command("up", help="Start Valkey, workers and a proxy on this machine; Ctrl-C ends them all.")
@click.option("--port", type=click.IntRange(1, 65535), default=8000, help="Port of the proxy on 127.0.0.1.")
@click.option("--workers", type=click.IntRange(1, 64), default=2, help="Worker processes.")
@click.option(
    "--runner",
    type=click.Choice(["torch", "sim"]),
    default="torch",
    help="torch computes a model; sim starts simulated workers, which need none (their costs: PREFIXCACHE_SIM_...).",
)
@click.option(
    "--model",
    metavar="demo|DIR|NAME",
    help="`demo` (a small model, downloaded once) or a folder; with --runner sim just a name.  [default: demo, or sim]",
)
@click.option("--redis", metavar="URL", help="Redis or Valkey to use instead of an embedded one.")
@click.option(
    "--start-timeout", type=click.IntRange(1, 86_400), default=300, help="Seconds until every worker must be ready."
)
@click.pass_context
def up(
    context: click.Context,
    port: int,
    workers: int,
    runner: str,
    model: str | None,
    redis: str | None,
    start_timeout: int,
) -> None:
    if "MAKELEVEL" in os.environ:
        die_with_parent(signal.SIGTERM)  # a `make up` that is killed outright must not leave its stack behind
    _require_free(port)
    if redis is not None:
        asyncio.run(_require_answer(redis))
    engine = _sim_engine(model) if runner == "sim" else _torch_engine(model or _DEMO, workers)
    stop = StopSignals()
    with ExitStack() as resources:
        url = redis or resources.enter_context(EmbeddedValkey()).url
        stack = resources.enter_context(Stack())
        environment = {**os.environ, "PREFIXCACHE_REDIS": url, **file_setting(context)}
        secret = environment.pop("PREFIXCACHE_SECRET", None) or secrets.token_hex(16)
        environment[WORKER_TOKEN] = _worker_token(shared=redis is not None)
        names = [_worker_name(number, shared=redis is not None) for number in range(1, workers + 1)]
        for name in names:
            command = [*program_command("worker"), "--name", name, *engine.flags]
            stack.start(name, command, environment, niceness=_WORKER_NICENESS)
        # URL and secrets travel in the environment: any user of the machine can read a command line. Only the proxy
        # knows the secret: workers chain hashes from the root that it sends.
        proxy_environment = {**environment, "PREFIXCACHE_SECRET": secret}
        stack.start("proxy", [*program_command("proxy"), "--host", _HOST, "--port", str(port)], proxy_environment)
        if _wait_until_ready(stack, stop, port, names, start_timeout):
            _print_ready(port, engine.model)
            while not stop.wait(_POLL_S):
                stack.check()
        click.echo("stopping", err=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Engine:
    """What every worker of the stack runs."""

    model: str
    flags: tuple[str, ...]


def _torch_engine(model: str, workers: int) -> _Engine:
    folder = _model_folder(model)
    flags = ["--runner", "torch", "--model", str(folder)]
    if "PREFIXCACHE_THREADS" not in os.environ:
        flags += ["--threads", str(max(1, usable_cores() // workers))]
    return _Engine(model=folder.name, flags=tuple(flags))


def _sim_engine(name: str | None) -> _Engine:
    model = _SIM if name is None else name
    if not model or "/" in model:
        raise ConfigError(f"--model {model}: with --runner sim it only names the simulated model, no folder is read")
    return _Engine(model=model, flags=("--runner", "sim", "--model", model))


def _worker_name(number: int, *, shared: bool) -> str:
    """Unique in the Redis it registers in: others may run a stack on a shared one."""
    return f"{socket.gethostname()}-{os.getpid()}-{number}" if shared else f"worker-{number}"


def _worker_token(*, shared: bool) -> str:
    """The one that is set, else a new one; on a shared Redis none: the proxies and workers of others do not know it."""
    return os.environ.get(WORKER_TOKEN) or ("" if shared else secrets.token_hex(16))


async def _require_answer(url: str) -> None:
    from prefixcache.store import RedisStore  # the embedded server needs no client here

    async with RedisStore.open(url, looks_up=False) as store:
        try:
            await store.ping()
        except IndexUnavailable as error:
            raise ConfigError(f"--redis: {error}") from error


def _require_free(port: int) -> None:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((_HOST, port))
        except OSError as error:
            raise ConfigError(
                f"port {port} on {_HOST} cannot be used ({error.strerror}): stop the program that has it, "
                "or choose another with `make up PORT=...` or `prefixcache up --port ...`"
            ) from error


def _model_folder(model: str) -> Path:
    if model != _DEMO:
        folder = Path(model).resolve()
        if not (folder / "config.json").is_file():
            raise ConfigError(f"--model {model}: no model folder there ({folder / 'config.json'} is missing)")
        return folder
    from prefixcache.demo.model import MODEL_NAME, ensure_demo_model  # numpy and tokenizers, needed here alone

    with _progress_bar(f"converting {MODEL_NAME}") as progress:
        return ensure_demo_model(auto_dtype(), progress=progress)


@contextmanager
def _progress_bar(label: str) -> Iterator[Callable[[int, int], None]]:
    """A bar that appears with the first step, so that nothing is printed where nothing is to be done."""
    with ExitStack() as resources:
        bars: list[Any] = []

        def step(_done: int, total: int) -> None:
            if not bars:
                bars.append(resources.enter_context(click.progressbar(length=total, label=label, file=sys.stderr)))
            bars[0].update(1)

        yield step


def _wait_until_ready(stack: Stack, stop: StopSignals, port: int, names: Collection[str], timeout_s: float) -> bool:
    """True when every worker of ours is ready, False when a stop signal came first."""
    began = time.monotonic()
    told = -1
    while True:
        stack.check()
        ready = len(_ready_workers(port) & set(names))
        if ready >= len(names):
            return True
        waited_s = time.monotonic() - began
        if waited_s > timeout_s:
            raise Unavailable(f"only {ready} of {len(names)} workers became ready within {timeout_s:.0f} s")
        if ready != told:
            click.echo(f"loading: {ready} of {len(names)} workers ready after {waited_s:.0f} s", err=True)
            told = ready
        if stop.wait(_POLL_S):
            return False


def _ready_workers(port: int) -> set[str]:
    """Names of the workers that the proxy can send requests to."""
    connection = http.client.HTTPConnection(_HOST, port, timeout=2.0)
    try:
        connection.request("GET", "/health")
        workers = json.loads(connection.getresponse().read())["workers"]
        return {worker["id"] for worker in workers if worker["ready"]}
    except (OSError, http.client.HTTPException, ValueError, KeyError):
        return set()
    finally:
        connection.close()


def _print_ready(port: int, model: str) -> None:
    url = f"http://{_HOST}:{port}/v1"
    click.echo(f"ready {url}\n\ntry it:\n{_example(url, model)}\n")


def _example(url: str, model: str) -> str:
    question = {"role": "user", "content": "What is the capital of France?"}
    body = {"model": model, "messages": [question], "max_tokens": 32, "temperature": 0}
    return f"curl {url}/chat/completions -H 'content-type: application/json' -d '{json.dumps(body)}'"
