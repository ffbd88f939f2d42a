"""The worker program: `python -m worker`."""

from __future__ import annotations

import asyncio
import logging
import signal
import socket
import sys
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import fields
from pathlib import Path
from random import Random
from types import FrameType
from typing import Any, get_args

import click
import uvloop
from click.core import ParameterSource

from prefixcache.config import ENVIRONMENT_PREFIX, FiniteRange, settings_command, worker_token_option
from prefixcache.cpu import usable_cores
from prefixcache.errors import ConfigError
from prefixcache.limits import DRAIN_TIMEOUT_S, MAX_STEP_S
from prefixcache.memory import DEFAULT_KV_MEMORY, parse_memory
from prefixcache.metrics import WorkerMetrics
from prefixcache.rendering.byte_tokenizer import BYTE_STOP_ID, byte_tokenizer_files
from prefixcache.routing.order import Order
from prefixcache.store import RedisStore
from prefixcache.worker_token import check_token
from worker import huge_pages, torch_environment
from worker.config import (
    ATTENTIONS,
    DEVICES,
    SimConfig,
    TorchConfig,
    WorkerConfig,
    check_worker_id,
    parse_address,
    step_s,
    unique_worker_id,
)
from worker.loading_server import answering_while_loading
from worker.model_folder import ModelFolder
from worker.runner import Runner
from worker.server import bind
from worker.service import ServedModel, Worker, serve
from worker.sim_costs import CostModel
from worker.sim_model import REVISION
from worker.sim_runner import DEFAULT_NUM_BLOCKS, SimRunner

logger = logging.getLogger(__name__)

_EXIT_ENGINE_FAILED = 1
_EXIT_CONFIG = 2


_ONLY_WITH = {
    "torch": ("device", "attention", "dtype", "kv_memory", "threads", "deterministic"),
    "sim": tuple(f"sim_{field.name}" for field in fields(CostModel)),
}
"""Settings that one runner has and the other has not."""


def _sim_options(function: Callable[..., None]) -> Callable[..., None]:
    """One flag for each term of the simulation's cost model."""
    helps = {
        "prefill_us": "Microseconds for each uncached prompt token.",
        "prefill_us_per_1k_context": "Microseconds more for each of them, for every 1,000 tokens before it.",
        "step_ms": "Milliseconds that every step takes.",
        "itl_ms": "Milliseconds that a step with decodes takes besides.",
        "itl_per_sequence_ms": "Milliseconds for each decode in a step.",
        "itl_per_1k_context_ms": "Milliseconds for every 1,000 tokens of the decodes' contexts.",
        "speed": "Divides all of these: 10 for ten times as fast, inf for no waiting at all.",
    }
    for field in reversed(fields(CostModel)):
        flag = f"--sim-{field.name.replace('_', '-')}"
        option = click.option(flag, type=float, default=field.default, help=f"Simulation: {helps[field.name]}")
        function = option(function)
    return function


@settings_command("worker", help="Serves one model: holds its KV cache and computes answers for proxies.")
@click.option("--redis", required=True, metavar="URL", help="Redis or Valkey of the deployment.")
@click.option(
    "--runner",
    default="torch",
    type=click.Choice(list(_ONLY_WITH)),
    help="torch computes a model; sim is an engine without one, whose steps only take their time.",
)
@click.option(
    "--model",
    metavar="DIR|NAME",
    help="Folder in Hugging Face layout with safetensors weights; with --runner sim just a name.  [default: sim]",
)
@click.option("--name", metavar="ID", help="Name of this worker.  [default: made of host name and process id]")
@click.option("--listen", default="127.0.0.1:0", metavar="HOST:PORT", help="Port 0 takes a free one.")
@click.option("--advertise", metavar="HOST:PORT", help="What proxies connect to.  [default: where it listens]")
@click.option(
    "--served-model-name",
    multiple=True,
    metavar="NAME",
    help="Name that clients ask for; repeatable.  [default: the model's name]",
)
@click.option(
    "--device",
    default="auto",
    type=click.Choice(DEVICES),
    help="Where the model is computed; auto takes CUDA where torch sees it.",
)
@click.option(
    "--attention",
    default="auto",
    type=click.Choice(ATTENTIONS),
    help="What computes attention; auto takes the fastest that serves the model on this device.",
)
@click.option(
    "--dtype", default="auto", type=click.Choice(["auto", "float32", "bfloat16"]), help="Type of the tensors."
)
@click.option(
    "--kv-memory",
    default=DEFAULT_KV_MEMORY,
    metavar="SIZE|PERCENT",
    help="Memory for KV blocks; a percentage is of what is available once the weights are loaded.",
)
@click.option(
    "--num-blocks",
    type=click.IntRange(min=1),
    metavar="N",
    help=f"KV blocks, in place of --kv-memory.  [default with --runner sim: {DEFAULT_NUM_BLOCKS}]",
)
@click.option(
    "--max-model-len",
    type=click.IntRange(min=2),
    metavar="N",
    help="Most tokens of prompt and answer.  [default: what model and KV blocks allow]",
)
@click.option(
    "--order",
    default="mean",
    type=click.Choice(get_args(Order)),
    help="What is kept low of the times to the first token: the mean, or the longest at the price of the mean.",
)
@click.option(
    "--step-ms",
    type=float,
    default=1e3 * MAX_STEP_S,
    show_default=True,
    metavar="MS",
    help="What prefill chunks add at most to a step while others get their next token; inf for whole chunks always.",
)
@click.option(
    "--drain-timeout",
    type=FiniteRange(min=0),
    default=DRAIN_TIMEOUT_S,
    metavar="SECONDS",
    help="Once told to end, it finishes what it has for so long; the rest goes on elsewhere. 0: at once.",
)
@click.option("--threads", type=click.IntRange(min=1), metavar="N", help="CPU threads.  [default: all usable cores]")
@click.option(
    "--deterministic",
    is_flag=True,
    help="Serve only if a trial at load shows that nothing cached, no cut and no neighbour changes a bit of an answer.",
)
@click.option("--key-prefix", default="prefixcache", metavar="TEXT", help="First part of every Redis key.")
@worker_token_option
@_sim_options
def main(
    redis: str,
    runner: str,
    model: str | None,
    name: str | None,
    listen: str,
    advertise: str | None,
    served_model_name: tuple[str, ...],
    device: str,
    attention: str,
    dtype: str,
    kv_memory: str,
    num_blocks: int | None,
    max_model_len: int | None,
    order: Order,
    step_ms: float,
    drain_timeout: float,
    threads: int | None,
    deterministic: bool,
    key_prefix: str,
    worker_token: str | None,
    **sim: float,
) -> None:
    """Checks the settings, loads the model and serves until a signal comes."""
    logging.basicConfig(stream=sys.stderr, level=logging.INFO, format="%(levelname)s %(name)s %(message)s")
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, _leave)
    try:
        _refuse_settings_of_others(runner)
        config = WorkerConfig(
            redis_url=redis,
            engine=_sim_config(model, sim)
            if runner == "sim"
            else _torch_config(model, device, attention, dtype, kv_memory, threads, deterministic),
            worker_id=unique_worker_id() if name is None else check_worker_id(name),
            listen=parse_address(listen, setting="--listen"),
            advertise=parse_address(advertise, setting="--advertise", least_port=1) if advertise else None,
            served_names=served_model_name,
            order=order,
            step_s=step_s(step_ms),
            drain_s=drain_timeout,
            num_blocks=num_blocks,
            max_model_len=max_model_len,
            key_prefix=key_prefix,
            worker_token=check_token(worker_token),
        )
        with bind(config.listen) as bound:
            engine, metrics = config.engine, WorkerMetrics()
            metrics.identify(worker=config.worker_id, model="")
            with answering_while_loading(bound, metrics):
                loaded = _load_torch(config, engine) if isinstance(engine, TorchConfig) else _load_sim(config, engine)
            code = uvloop.run(_serve(config, *loaded, bound, metrics))
    except ConfigError as error:
        click.echo(f"worker: {error}", err=True)
        code = _EXIT_CONFIG
    sys.exit(code)


def _leave(_number: int, _frame: FrameType | None) -> None:
    """A signal before there is anything to shut down."""
    sys.exit(0)


def _refuse_settings_of_others(runner: str) -> None:
    """A setting that would do nothing is a misunderstanding."""
    context = click.get_current_context()
    for other, names in _ONLY_WITH.items():
        for name in names if other != runner else ():
            source = context.get_parameter_source(name)
            if source in (None, ParameterSource.DEFAULT):
                continue
            flag = f"--{name.replace('_', '-')}"
            places = {
                ParameterSource.ENVIRONMENT: f"{ENVIRONMENT_PREFIX}_{name.upper()} in the environment",
                ParameterSource.DEFAULT_MAP: f"{flag[2:]} in the configuration file",
            }
            raise ConfigError(f"{places.get(source, flag)} means nothing with --runner {runner}; leave it away")


def _torch_config(
    model: str | None,
    device: str,
    attention: str,
    dtype: str,
    kv_memory: str,
    threads: int | None,
    deterministic: bool,
) -> TorchConfig:
    if model is None:
        raise ConfigError("--model is missing; it names the folder of the model to serve")
    return TorchConfig(
        model=Path(model),
        device=device,
        attention=attention,
        dtype=dtype,
        kv_memory=parse_memory(kv_memory, setting="--kv-memory"),
        threads=threads or usable_cores(),
        deterministic=deterministic,
    )


def _sim_config(model: str | None, costs: Mapping[str, float]) -> SimConfig:
    stated = {name.removeprefix("sim_"): value for name, value in costs.items()}
    return SimConfig(model_name="sim" if model is None else model, costs=CostModel(**stated))


def _load_torch(config: WorkerConfig, engine: TorchConfig) -> tuple[ServedModel, Runner]:
    folder = ModelFolder.open(engine.model)
    torch_environment.settle()
    from worker.model_runner import load_runner

    runner = load_runner(
        folder,
        device=engine.device,
        attention=engine.attention,
        dtype=engine.dtype,
        num_blocks=config.num_blocks,
        kv_memory=engine.kv_memory,
        max_model_len=config.max_model_len,
        threads=engine.threads,
        deterministic=engine.deterministic,
    )
    if runner.cache.device.type == "cpu":
        huge_pages.gather()
    model = ServedModel(
        name=folder.name,
        revision=folder.revision,
        served_names=config.served_names or (folder.name,),
        tokenizer=folder.tokenizer_files,
        stop_token_ids=folder.stop_token_ids,
    )
    return model, runner


def _load_sim(config: WorkerConfig, engine: SimConfig) -> tuple[ServedModel, Runner]:
    runner = SimRunner(
        costs=engine.costs, num_blocks=config.num_blocks or DEFAULT_NUM_BLOCKS, max_model_len=config.max_model_len
    )
    model = ServedModel(
        name=engine.model_name,
        revision=REVISION,
        served_names=config.served_names or (engine.model_name,),
        tokenizer=byte_tokenizer_files(),
        stop_token_ids=(BYTE_STOP_ID,),
    )
    return model, runner


async def _serve(
    config: WorkerConfig, model: ServedModel, runner: Runner, bound: socket.socket, metrics: WorkerMetrics
) -> int:
    """Until a signal and the drain that follows, or until the engine ends by itself; the exit code."""
    loop = asyncio.get_running_loop()
    told_to_end, told_again = asyncio.Event(), asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, lambda: (told_again if told_to_end.is_set() else told_to_end).set())
    async with (
        RedisStore.open(config.redis_url, key_prefix=config.key_prefix, looks_up=False) as store,
        serve(
            runner,
            model=model,
            worker_id=config.worker_id,
            bound=bound,
            advertise=config.advertise,
            metrics=metrics,
            open_index=store.index,
            registry=store.registry(),
            random=Random(),
            order=config.order,
            step_s=config.step_s,
            worker_token=config.worker_token,
        ) as worker,
    ):
        ready = asyncio.create_task(_log_when_ready(worker), name="ready")
        try:
            await _first_of(told_to_end.wait(), worker.failed.wait())
            if config.drain_s and not worker.failed.is_set():
                logger.info("worker %s drains: it takes nothing new", config.worker_id)
                await _first_of(worker.drain(), told_again.wait(), worker.failed.wait(), timeout_s=config.drain_s)
        finally:
            ready.cancel()
            await asyncio.gather(ready, return_exceptions=True)
        load = worker.engine.load
        logger.info("worker %s shuts down with %d requests in hand", config.worker_id, load.running + load.waiting)
        return _EXIT_ENGINE_FAILED if worker.failed.is_set() else 0


async def _first_of(*waits: Coroutine[Any, Any, object], timeout_s: float | None = None) -> None:
    """Returns when one of them is over, or after `timeout_s`; the others are cancelled."""
    tasks = [asyncio.create_task(wait) for wait in waits]
    try:
        done, _ = await asyncio.wait(tasks, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    for task in done:
        task.result()


async def _log_when_ready(worker: Worker) -> None:
    await worker.publisher.registered()
    record = worker.record
    logger.info(
        "worker %s ready at %s: model %s, %d KV blocks of %d tokens, context of %d tokens",
        record.worker_id,
        record.address,
        record.served_names[0],
        record.num_blocks,
        record.block_size,
        record.max_model_len,
    )


if __name__ == "__main__":
    main()
