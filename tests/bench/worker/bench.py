"""All parts of the benchmark, one after the other; each table is shown as soon as it is there."""

from __future__ import annotations

import asyncio
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from random import Random
from typing import TypeVar

import torch

from prefixcache.cli.valkey import EmbeddedValkey
from prefixcache.cpu import auto_dtype
from prefixcache.demo.model import ensure_demo_model
from tests.bench.report import Floor, Table, report
from tests.bench.worker.beside_vllm import measure_beside_vllm
from tests.bench.worker.decode import decode_blocks, measure_decode
from tests.bench.worker.driven_engine import driven_engine
from tests.bench.worker.memory import measure_growth, measure_memory
from tests.bench.worker.plain_model import PlainModel
from tests.bench.worker.prefill import measure_prefill, prefill_blocks
from tests.bench.worker.sizes import FULL, QUICK, Sizes
from tests.bench.worker.vllm_server import installed_vllm
from tests.support.program_fleet import ProgramFleet, running_fleet
from tests.support.tiny_models import tiny_model, write_model

Part = tuple[Table, list[Floor]]
T = TypeVar("T")

ENGINE_PARTS = {"prefill": (prefill_blocks, measure_prefill), "decode": (decode_blocks, measure_decode)}
PARTS = (*ENGINE_PARTS, "memory", "growth", "vllm")


def run(*, quick: bool, model: Path | None, only: Sequence[str], seed: int) -> None:
    """Exits with 1 where a floor is missed, unless `quick`."""
    sizes = QUICK if quick else FULL
    began_s = time.monotonic()
    torch.set_num_threads(1)
    with _folder(quick=quick, model=model) as (folder, dtype):
        print(f"{folder.name} in {dtype}, seed {seed}", flush=True)
        parts: list[Part] = []
        for part in _measure(folder, dtype, sizes, frozenset(only), seed):
            part[0].show()
            parts.append(part)
    about = {"model": folder.name, "dtype": dtype, "seed": seed, "took_s": round(time.monotonic() - began_s)}
    tables = [table for table, _ in parts]
    floors = [floor for _, its_floors in parts for floor in its_floors]
    report("worker-quick" if quick else "worker", tables, floors, about=about, judged=not quick)


@contextmanager
def _folder(*, quick: bool, model: Path | None) -> Iterator[tuple[Path, str]]:
    """The model's folder and what it is computed in: a tiny one in float32 for the smoke."""
    if model is not None or not quick:
        yield (model or ensure_demo_model(auto_dtype())), auto_dtype()
        return
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made) / "tiny"
        folder.mkdir()
        longest = max(QUICK.prompts) * 2
        yield write_model(tiny_model("Llama", max_position_embeddings=longest), folder), "float32"


def _measure(folder: Path, dtype: str, sizes: Sizes, only: frozenset[str], seed: int) -> Iterator[Part]:
    random = Random(seed)
    if not only.isdisjoint(ENGINE_PARTS):
        plain = PlainModel(folder, getattr(torch, dtype))
    for name, (num_blocks, measure) in ENGINE_PARTS.items():
        if name in only:
            with driven_engine(folder, dtype, num_blocks(sizes)) as engine:
                yield measure(engine, plain, sizes, random)
    if "memory" in only:
        yield _with_fleet(lambda fleet: measure_memory(fleet, folder, dtype, sizes, random))
    if "growth" in only:
        yield _with_fleet(lambda fleet: measure_growth(fleet, sizes, random))
    vllm = installed_vllm()
    if "vllm" not in only:
        return
    if sizes is QUICK or vllm is None:
        print(f"left out: vLLM: {'--quick' if sizes is QUICK else 'not installed'}")
        return
    yield from _with_fleet(lambda fleet: measure_beside_vllm(fleet, vllm, folder, dtype, sizes, random))


def _with_fleet(measure: Callable[[ProgramFleet], Awaitable[T]]) -> T:
    """Programs with a Redis of their own, all of them gone afterwards."""

    async def in_loop(redis_url: str, folder: Path) -> T:
        async with running_fleet(folder, redis_url) as fleet:
            return await measure(fleet)

    with EmbeddedValkey() as server, tempfile.TemporaryDirectory() as logs:
        return asyncio.run(in_loop(server.url, Path(logs)))
