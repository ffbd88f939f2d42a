"""`prefixcache up`: embedded Valkey, workers and one proxy on this machine, by one command.

What dies is started again. The end comes within seconds: first the proxy, whose streams get _PROXY_DRAIN_S, then the
workers, which have nothing of it any more. What they have of proxies elsewhere, by a shared Redis, they hand back at
once: it goes on on other workers.
"""

from __future__ import annotations

import asyncio
import http.client
import json
import os
import secrets
import signal
import socket
import time
from collections.abc import Collection
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import click

from prefixcache.cli.children import die_with_parent
from prefixcache.cli.demo_folder import DEMO, demo_folder
from prefixcache.cli.programs import program_command
from prefixcache.cli.stack import Stack
from prefixcache.cli.stop_signals import StopSignals
from prefixcache.cli.valkey import EmbeddedValkey
from prefixcache.config import file_setting, settings_command
from prefixcache.cpu import usable_cores
from prefixcache.errors import ConfigError, IndexUnavailable, Unavailable
from prefixcache.memory import MemoryShare, parse_memory
from prefixcache.worker_token import ENVIRONMENT_NAME as WORKER_TOKEN

_HOST = "127.0.0.1"
_SIM = "sim"
_PROXY = "proxy"
_POLL_S = 0.1
_WORKER_NICENESS = 5
"""Workers fill every core; the proxy and the index answer in between within their deadlines."""
_PROXY_DRAIN_S = 3


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
@click.option(
    "--kv-memory",
    metavar="SIZE|PERCENT",
    help="KV memory of each worker; a percentage is for all of them together.  [default: as the workers have it]",
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
    kv_memory: str | None,
    redis: str | None,
    start_timeout: int,
) -> None:
    if "MAKELEVEL" in os.environ:
        die_with_parent(signal.SIGTERM)  # a `make up` that is killed outright must not leave its stack behind
    _require_free(port)
    if redis is not None:
        asyncio.run(_require_answer(redis))
    if runner == "sim" and kv_memory is not None:
        raise ConfigError("--kv-memory means nothing with --runner sim, which keeps token ids alone; leave it away")
    engine = _sim_engine(model) if runner == "sim" else _torch_engine(model or DEMO, kv_memory, workers)
    stop = StopSignals()
    with ExitStack() as resources:
        stack = Stack()
        url = redis or _embedded_valkey(resources, stack)
        resources.enter_context(stack)
        environment = {**os.environ, "PREFIXCACHE_REDIS": url, **file_setting(context)}
        secret = environment.pop("PREFIXCACHE_SECRET", None) or secrets.token_hex(16)
        environment[WORKER_TOKEN] = _worker_token(shared=redis is not None)
        names = [_worker_name(number, shared=redis is not None) for number in range(1, workers + 1)]
        for name in names:
            command = [*program_command("worker"), "--name", name, "--drain-timeout", "0", *engine.flags]
            stack.start(name, command, environment, niceness=_WORKER_NICENESS)
        # URL and secrets travel in the environment: any user of the machine can read a command line. Only the proxy
        # knows the secret: workers chain hashes from the root that it sends.
        proxy_environment = {**environment, "PREFIXCACHE_SECRET": secret}
        drain = ["--drain-delay", "0", "--drain-timeout", str(_PROXY_DRAIN_S)]
        command = [*program_command("proxy"), "--host", _HOST, "--port", str(port), *drain]
        stack.start(_PROXY, command, proxy_environment, ends_first=True)
        if _wait_until_ready(stack, stop, port, names, start_timeout):
            _print_ready(port, engine.model)
            while not stop.wait(_POLL_S):
                stack.tend()
        click.echo("stopping", err=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Engine:
    """What every worker of the stack runs."""

    model: str
    flags: tuple[str, ...]


def _torch_engine(model: str, kv_memory: str | None, workers: int) -> _Engine:
    amount = None if kv_memory is None else parse_memory(kv_memory, setting="--kv-memory")
    folder = _model_folder(model)
    flags = ["--runner", "torch", "--model", str(folder)]
    if amount is not None:
        flags += ["--kv-memory", str(amount.divided(workers) if isinstance(amount, MemoryShare) else amount)]
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


def _embedded_valkey(resources: ExitStack, stack: Stack) -> str:
    """The URL of a server that `resources` ends and `stack` starts again when it dies."""
    embedded = resources.enter_context(EmbeddedValkey())
    stack.tend_to("valkey", embedded.process, embedded.start)
    return embedded.url


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
    if model != DEMO:
        folder = Path(model).resolve()
        if not (folder / "config.json").is_file():
            raise ConfigError(f"--model {model}: no model folder there ({folder / 'config.json'} is missing)")
        return folder
    return demo_folder()


def _wait_until_ready(stack: Stack, stop: StopSignals, port: int, names: Collection[str], timeout_s: float) -> bool:
    """True when every worker of ours is ready, False when a stop signal came first."""
    began = time.monotonic()
    told = -1
    while True:
        stack.tend()
        ready = _note_ready(stack, port, names)
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


def _note_ready(stack: Stack, port: int, names: Collection[str]) -> int:
    """Tells the stack who is ready; the number of workers that are."""
    found = _ready_workers(port)
    if found is None:
        return 0
    ready = found & set(names)
    for name in (_PROXY, *ready):
        stack.note_ready(name)
    return len(ready)


def _ready_workers(port: int) -> set[str] | None:
    """Names of the workers that the proxy can send requests to; None if it does not answer."""
    connection = http.client.HTTPConnection(_HOST, port, timeout=2.0)
    try:
        connection.request("GET", "/health")
        workers = json.loads(connection.getresponse().read())["workers"]
        return {worker["id"] for worker in workers if worker["ready"]}
    except (OSError, http.client.HTTPException, ValueError, KeyError):
        return None
    finally:
        connection.close()


def _print_ready(port: int, model: str) -> None:
    url = f"http://{_HOST}:{port}/v1"
    click.echo(f"ready {url}\n\ntry it:\n{_example(url, model)}\n")


def _example(url: str, model: str) -> str:
    question = {"role": "user", "content": "What is the capital of France?"}
    body = {"model": model, "messages": [question], "max_tokens": 32, "temperature": 0}
    return f"curl {url}/chat/completions -H 'content-type: application/json' -d '{json.dumps(body)}'"
