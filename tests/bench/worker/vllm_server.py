"""A real vLLM of the peers' folder, on one core of this machine."""

from __future__ import annotations

import os
import urllib.request
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path

from prefixcache.cli.children import end, spawn
from tests.support.ports import free_port
from tests.support.waiting import eventually

START_TIMEOUT_S = 600.0
STOP_PATIENCE_S = 20.0
FLAGS = (
    *("--max-model-len", "8192", "--max-num-seqs", "16", "--block-size", "32"),
    *("--enable-prefix-caching", "--enable-prompt-tokens-details", "--enforce-eager", "-cc.custom_ops+=none"),
)
ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
}


def installed_vllm() -> Path | None:
    """Its program, where PEERS_HOME has one."""
    home = Path(os.environ.get("PEERS_HOME") or Path.home() / ".cache" / "peers")
    program = home / "vllm" / "bin" / "vllm"
    return program if program.exists() else None


@contextmanager
def on_core(core: int) -> Iterator[None]:
    """Programs that are started in this block run on that core alone."""
    cores = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {core})
    try:
        yield
    finally:
        os.sched_setaffinity(0, cores)


@asynccontextmanager
async def running_vllm(program: Path, model: Path, dtype: str, core: int, log: Path) -> AsyncIterator[tuple[str, int]]:
    """Its URL and process id, once it serves the model under the folder's name."""
    port = free_port()
    command = [str(program), "serve", str(model), "--served-model-name", model.name, "--dtype", dtype]
    command += ["--host", "127.0.0.1", "--port", str(port), *FLAGS]
    search = os.pathsep.join((str(program.parent), os.environ.get("PATH", "")))
    environment = {**os.environ, **ENVIRONMENT, "VLLM_CPU_OMP_THREADS_BIND": str(core), "PATH": search}
    environment.pop("PYTHONPATH", None)
    with on_core(core), log.open("wb") as output:
        process = spawn(command, environment=environment, stdout=output, stderr=output)

    def is_ready() -> bool:
        assert process.poll() is None, f"vLLM ended:\n{log.read_text()[-4000:]}"
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=1.0) as answer:
                return bool(answer.status == 200)
        except OSError:
            return False

    try:
        await eventually(is_ready, START_TIMEOUT_S)
        yield f"http://127.0.0.1:{port}", process.pid
    finally:
        end(process, patience_s=STOP_PATIENCE_S)
