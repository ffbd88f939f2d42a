"""Decode beside plain transformers, batch by batch, and what the engine's step costs besides the model's forward."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from random import Random

from prefixcache.protocol import Sampling
from prefixcache.types import KV_BLOCK_SIZE
from tests.bench.report import Floor, Table
from tests.bench.worker.clock import Cost, spread
from tests.bench.worker.driven_engine import DrivenEngine
from tests.bench.worker.plain_model import PlainModel
from tests.bench.worker.prompts import new_prompt
from tests.bench.worker.sizes import Sizes
from tests.support.requests import GREEDY

SPARE_STEPS = 6
"""Requests of one batch may get their first token some steps apart."""
FLOORS: Mapping[int, float] = {1: 0.95, 8: 1.0, 32: 1.7}
"""Batch -> times as fast as plain transformers."""
MOST_OVERHEAD = 0.05
SAMPLINGS: Mapping[str, Sampling] = {
    "greedy": GREEDY,
    "sampled": Sampling(seed=1),
    "nucleus": Sampling(seed=1, top_p=0.95),
}
"""`sampled` is what a request without any of these fields asks for."""
JUDGED = ("greedy", "sampled")
"""Not the nucleus: after random tokens it is wider than after any text, half of the vocabulary."""


@dataclass(slots=True)
class _Batch:
    """Costs of a step, medians of each repeat."""

    own: list[Cost] = field(default_factory=list)
    plain: list[Cost] = field(default_factory=list)
    overheads: Mapping[str, list[float]] = field(default_factory=lambda: {name: [] for name in SAMPLINGS})
    """What a step costs over the model's forward in it, less 1."""


def decode_blocks(sizes: Sizes) -> int:
    """Of the engine's cache: every request of the largest batch at its longest."""
    most_tokens = sizes.context_tokens * 17 // 16 + 1 + sizes.decode_steps + SPARE_STEPS
    return max(sizes.batches) * (most_tokens // KV_BLOCK_SIZE + 2)


def measure_decode(engine: DrivenEngine, plain: PlainModel, sizes: Sizes, random: Random) -> tuple[Table, list[Floor]]:
    rows: list[dict[str, object]] = []
    floors: list[Floor] = []
    for size in sizes.batches:
        batch = _measure(engine, plain, sizes, _prompts(random, sizes, size))
        pairs = list(zip(batch.own, batch.plain, strict=True))
        rows.append(
            {
                "batch": size,
                "step, CPU ms": spread(1e3 * own.cpu_s for own in batch.own),
                "plain, CPU ms": spread(1e3 * of_plain.cpu_s for of_plain in batch.plain),
                "times as fast": spread(of_plain.cpu_s / own.cpu_s for own, of_plain in pairs),
                "by the clock": spread(of_plain.wall_s / own.wall_s for own, of_plain in pairs),
                **{f"over its forward, {name}": spread(batch.overheads[name]) for name in SAMPLINGS},
            }
        )
        if size in FLOORS:
            ratio = statistics.median(own.cpu_s / of_plain.cpu_s for own, of_plain in pairs)
            what = f"decode, batch {size}: step over plain transformers'"
            floors.append(Floor(what=what, value=ratio, most=1 / FLOORS[size]))
        if size == max(sizes.batches):
            for name in JUDGED:
                what = f"step of {size} decodes, {name}: overhead over the model's forward"
                floors.append(Floor(what=what, value=statistics.median(batch.overheads[name]), most=MOST_OVERHEAD))
    return Table(title=f"Decode after about {sizes.context_tokens:,} tokens", rows=rows), floors


def _prompts(random: Random, sizes: Sizes, size: int) -> list[list[int]]:
    """Of unequal lengths, so that plain transformers pads them, as any batch of real requests."""
    spread_tokens = sizes.context_tokens // 16
    return [
        new_prompt(random, sizes.context_tokens + random.randint(-spread_tokens, spread_tokens)) for _ in range(size)
    ]


def _measure(engine: DrivenEngine, plain: PlainModel, sizes: Sizes, prompts: Sequence[Sequence[int]]) -> _Batch:
    for prompt in prompts:
        engine.ask(prompt)
    batch = _Batch()
    padded = plain.prefilled(prompts)
    padded.decode(2)
    _steps(engine, sizes, prompts, GREEDY)
    for number in range(sizes.repeats):
        before = padded.decode(sizes.decode_steps) if number % 2 else None
        costs = {name: _steps(engine, sizes, prompts, sampling) for name, sampling in SAMPLINGS.items()}
        of_plain = before or padded.decode(sizes.decode_steps)
        batch.own.append(costs["greedy"][0])
        batch.plain.append(Cost.median(of_plain.costs))
        for name, (_, overhead) in costs.items():
            batch.overheads[name].append(overhead)
    return batch


def _steps(
    engine: DrivenEngine, sizes: Sizes, prompts: Sequence[Sequence[int]], sampling: Sampling
) -> tuple[Cost, float]:
    """Median cost of a step of the whole batch, and by how much those steps cost more than the forwards in them."""
    answers = engine.ask(*prompts, max_tokens=1 + sizes.decode_steps + SPARE_STEPS, sampling=sampling)
    steps = list(answers.full_steps())
    assert len(steps) >= sizes.decode_steps, f"only {len(steps)} steps decoded all {len(prompts)} requests"
    costs = [ended - began for began, ended in steps]
    forward_s = sum(engine.forward_within(began, ended).cpu_s for began, ended in steps)
    return Cost.median(costs), sum(cost.cpu_s for cost in costs) / forward_s - 1
