"""The worker program: `python -m worker`."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
import sys
from pathlib import Path
from random import Random
from types import FrameType

import click
import uvloop

from prefixcache.config import settings_command
from prefixcache.cpu import usable_cores
from prefixcache.errors import ConfigError
from prefixcache.store import RedisStore
from worker.config import WorkerConfig, parse_address, parse_memory, unique_worker_id
from worker.model_folder import ModelFolder
from worker.runner import Runner
from worker.server import bind
from worker.service import ServedModel, Worker, serve

logger = logging.getLogger(__name__)

_EXIT_ENGINE_FAILED = 1
_EXIT_CONFIG = 2


@settings_command("worker", help="Serves one model: holds its KV cache and computes answers for proxies.")
@click.option("--redis", required=True, metavar="URL", help="Redis or Valkey of the deployment.")
@click.option(
    "--model",
    required=True,
    type=click.Path(file_okay=False, path_type=Path),
    help="Folder in Hugging Face layout with safetensors weights.",
)
@click.option("--name", metavar="ID", help="Name of this worker.  [default: made of host name and process id]")
@click.option("--listen", default="127.0.0.1:0", metavar="HOST:PORT", help="Port 0 takes a free one.")
@click.option("--advertise", metavar="HOST:PORT", help="What proxies connect to.  [default: where it listens]")
@click.option(
    "--served-model-name",
    multiple=True,
    metavar="NAME",
    help="Name that clients ask for; repeatable.  [default: the folder's name]",
)
@click.option(
    "--dtype", default="auto", type=click.Choice(["auto", "float32", "bfloat16"]), help="Type of the tensors."
)
@click.option("--kv-memory", default="2GiB", metavar="SIZE", help="Memory for KV blocks.")
@click.option("--num-blocks", type=click.IntRange(min=1), metavar="N", help="KV blocks, in place of --kv-memory.")
@click.option(
    "--max-model-len",
    type=click.IntRange(min=2),
    metavar="N",
    help="Most tokens of prompt and answer.  [default: what model and KV blocks allow]",
)
@click.option("--threads", type=click.IntRange(min=1), metavar="N", help="CPU threads.  [default: all usable cores]")
@click.option("--key-prefix", default="prefixcache", metavar="TEXT", help="First part of every Redis key.")
def main(
    redis: str,
    model: Path,
    name: str | None,
    listen: str,
    advertise: str | None,
    served_model_name: tuple[str, ...],
    dtype: str,
    kv_memory: str,
    num_blocks: int | None,
    max_model_len: int | None,
    threads: int | None,
    key_prefix: str,
) -> None:
    """Checks the settings, loads the model and serves until a signal comes."""
    logging.basicConfig(stream=sys.stderr, level=logging.INFO, format="%(levelname)s %(name)s %(message)s")
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, _leave)
    try:
        config = WorkerConfig(
            redis_url=redis,
            model=model,
            worker_id=name or unique_worker_id(),
            listen=parse_address(listen, setting="--listen"),
            advertise=parse_address(advertise, setting="--advertise") if advertise else None,
            served_names=served_model_name,
            dtype=dtype,
            kv_memory_bytes=parse_memory(kv_memory, setting="--kv-memory"),
            num_blocks=num_blocks,
            max_model_len=max_model_len,
            threads=threads or usable_cores(),
            key_prefix=key_prefix,
        )
        folder = ModelFolder.open(config.model)
        with bind(config.listen) as bound:
            runner = _load(folder, config)
            code = uvloop.run(_serve(config, folder, runner, bound))
    except ConfigError as error:
        click.echo(f"worker: {error}", err=True)
        code = _EXIT_CONFIG
    sys.exit(code)


def _leave(_number: int, _frame: FrameType | None) -> None:
    """A signal before there is anything to shut down."""
    sys.exit(0)


def _load(folder: ModelFolder, config: WorkerConfig) -> Runner:
    # OpenMP reads this when torch is loaded. Threads that spin make a step 40 times slower beside a busy neighbour.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    from worker.model_runner import load_runner

    return load_runner(
        folder,
        dtype=config.dtype,
        num_blocks=config.num_blocks,
        kv_memory_bytes=config.kv_memory_bytes,
        max_model_len=config.max_model_len,
        threads=config.threads,
    )


async def _serve(config: WorkerConfig, folder: ModelFolder, runner: Runner, bound: socket.socket) -> int:
    """Until a signal, or until the engine ends by itself; the exit code."""
    loop = asyncio.get_running_loop()
    stopping = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stopping.set)
    model = ServedModel(
        name=folder.name,
        revision=folder.revision,
        served_names=config.served_names or (folder.name,),
        tokenizer=folder.tokenizer_files,
        stop_token_ids=folder.stop_token_ids,
    )
    async with (
        RedisStore.open(config.redis_url, key_prefix=config.key_prefix) as store,
        serve(
            runner,
            model=model,
            worker_id=config.worker_id,
            bound=bound,
            advertise=config.advertise,
            open_index=store.index,
            registry=store.registry(),
            random=Random(),
        ) as worker,
    ):
        ready = asyncio.create_task(_log_when_ready(worker), name="ready")
        ends = [asyncio.create_task(event.wait()) for event in (stopping, worker.failed)]
        await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
        for task in (ready, *ends):
            task.cancel()
        await asyncio.gather(ready, *ends, return_exceptions=True)
        logger.info("worker %s shuts down", config.worker_id)
        return _EXIT_ENGINE_FAILED if worker.failed.is_set() else 0


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
