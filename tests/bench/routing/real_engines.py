"""Routers in front of real engines that run already, whose own counters tell what was cached.

    a seed:  each target started anew ──► turn 0 through target A, B, C ──► turn 1 through B, C, A ──► ...

A real engine's times change with whatever else its machine does, by more than routers differ. So all targets of a
seed stand beside each other and take turns of seconds: a turn of all chats through one of them after the other, each
with chats of its own that are equally long. Times are compared within a seed.
"""

from __future__ import annotations

import itertools
import random
import statistics
import sys
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path

import aiohttp

from tests.bench.report import Floor, Table
from tests.bench.routing.load import Chat, Tally, new_chats, talk, words
from tests.bench.routing.sizes import Workload
from tests.bench.routing.targets import Target, running_target

SALT_WORDS = 5
"""They have orders enough for all targets, even with a word twice."""
_QUERIED, _HIT = "vllm:prefix_cache_queries_total", "vllm:prefix_cache_hits_total"


@dataclass(frozen=True, slots=True, kw_only=True)
class Counted:
    """Prompt tokens by an engine's counters."""

    queried_tokens: float = 0.0
    hit_tokens: float = 0.0

    def __add__(self, other: Counted) -> Counted:
        return Counted(
            queried_tokens=self.queried_tokens + other.queried_tokens, hit_tokens=self.hit_tokens + other.hit_tokens
        )

    def __sub__(self, other: Counted) -> Counted:
        return Counted(
            queried_tokens=self.queried_tokens - other.queried_tokens, hit_tokens=self.hit_tokens - other.hit_tokens
        )


@dataclass(slots=True, kw_only=True)
class RealRun:
    """One target with the chats of one seed."""

    target: Target
    chats: list[Chat]
    tally: Tally = field(default_factory=Tally)
    counted: Counted = Counted()

    @property
    def hit_rate(self) -> float:
        """By the engines' counters."""
        return self.counted.hit_tokens / self.counted.queried_tokens if self.counted.queried_tokens else 0.0

    @property
    def client_hit_rate(self) -> float:
        return self.tally.cached_tokens / self.tally.prompt_tokens if self.tally.prompt_tokens else 0.0

    def ttft_s(self, share: float) -> float:
        """That quantile; infinite where nothing was answered, so that a target that fails is not the fastest."""
        times = sorted(self.tally.ttft_s)
        return times[min(int(share * len(times)), len(times) - 1)] if times else float("inf")

    @property
    def mean_ttft_s(self) -> float:
        return statistics.mean(self.tally.ttft_s or [float("inf")])


Seeds = Sequence[Sequence[RealRun]]
"""By seed, a run of each target."""


async def measure_real(
    engines: Sequence[str], targets: Sequence[Target], workload: Workload, seeds: Sequence[int], folder: Path
) -> Seeds:
    """Raises aiohttp.ClientError where an engine does not answer, AssertionError where a target does not start."""
    model, tokenizer = await _served_model(engines[0])
    workload = replace(workload, model=model)
    made: list[Sequence[RealRun]] = []
    for seed in seeds:
        runs = await _run_seed(engines, targets, workload, seed, tokenizer, folder)
        made.append(runs)
        for run in runs:
            figures = f"hit rate {run.hit_rate:.3f}, TTFT p50 {1e3 * run.ttft_s(0.5):.0f} ms"
            print(f"seed {seed}, {run.target.name}: {figures}", file=sys.stderr)
    return made


async def _run_seed(
    engines: Sequence[str],
    targets: Sequence[Target],
    workload: Workload,
    seed: int,
    tokenizer: Path | None,
    folder: Path,
) -> Sequence[RealRun]:
    # What an engine cached in an earlier run must not count in this one: new words, for each target in another order.
    orders = sorted(set(itertools.permutations(words(random.SystemRandom(), SALT_WORDS).split())))
    salts = random.SystemRandom().sample(orders, len(targets))
    runs = [
        RealRun(target=target, chats=new_chats(workload, seed, salt))
        for target, salt in zip(targets, salts, strict=True)
    ]
    async with AsyncExitStack() as stack:
        urls = [
            await stack.enter_async_context(running_target(target, engines, tokenizer, folder)) for target in targets
        ]
        places = list(range(len(runs)))
        for turn in range(workload.num_turns):
            shift = (seed + turn) % len(runs)
            for place in places[shift:] + places[:shift]:
                run = runs[place]
                random.Random(f"{seed} {turn}").shuffle(run.chats)
                before = await _counted(engines)
                await talk(urls[place], run.chats, workload, turn + 1, run.tally)
                run.counted += await _counted(engines) - before
    return runs


async def _served_model(engine: str) -> tuple[str, Path | None]:
    """Name of its first model, and its folder where that is on this machine."""
    async with aiohttp.ClientSession() as session, session.get(engine + "/v1/models", raise_for_status=True) as answer:
        model = (await answer.json())["data"][0]
    folder = Path(model.get("root") or "")
    return model["id"], folder if (folder / "tokenizer.json").exists() else None


async def _counted(engines: Sequence[str]) -> Counted:
    """Of all engines together."""
    total = Counted()
    async with aiohttp.ClientSession() as session:
        for url in engines:
            async with session.get(url + "/metrics", raise_for_status=True) as answer:
                total += read_counters(await answer.text())
    return total


def read_counters(text: str) -> Counted:
    """Of an engine's /metrics."""
    sums = {_QUERIED: 0.0, _HIT: 0.0}
    for line in text.splitlines():
        name = line.partition("{")[0].partition(" ")[0]
        if name in sums:
            sums[name] += float(line.rpartition(" ")[2])
    return Counted(queried_tokens=sums[_QUERIED], hit_tokens=sums[_HIT])


def real_table(seeds: Seeds) -> Table:
    rows = []
    for runs in zip(*seeds, strict=True):
        tallies = [run.tally for run in runs]
        rows.append(
            {
                "target": runs[0].target.name,
                "hit rate, median": statistics.median(run.hit_rate for run in runs),
                "least / most": (min(run.hit_rate for run in runs), max(run.hit_rate for run in runs)),
                "by its clients": statistics.median(run.client_hit_rate for run in runs),
                "TTFT ms p50 / p95": tuple(
                    1e3 * statistics.median(run.ttft_s(share) for run in runs) for share in (0.5, 0.95)
                ),
                "TTFT ms mean": 1e3 * statistics.median(run.mean_ttft_s for run in runs),
                "errors": sum(tally.num_errors for tally in tallies),
            }
        )
    return Table(title=f"Chats on real engines, medians of {len(seeds)} seeds", rows=rows)


def real_floors(seeds: Seeds) -> list[Floor]:
    """Of our proxy in every form that routes by prefix, against the best peer of each seed."""
    found: list[Floor] = []
    for place, first in enumerate(seeds[0]):
        if not (first.target.is_ours and first.target.routes_by_prefix):
            continue
        name = f"{first.target.name}, real engines"
        num_errors = sum(runs[place].tally.num_errors for runs in seeds)
        found.append(Floor(what=f"{name}: failed requests", value=num_errors, most=0))
        peers = [[run for run in runs if not run.target.is_ours] for runs in seeds]
        if not peers[0]:
            continue
        lost = statistics.median(
            max(peer.hit_rate for peer in each) - runs[place].hit_rate for runs, each in zip(seeds, peers, strict=True)
        )
        ratio = statistics.median(
            runs[place].ttft_s(0.5) / min(peer.ttft_s(0.5) for peer in each)
            for runs, each in zip(seeds, peers, strict=True)
        )
        found += [
            Floor(what=f"{name}: hit rate below the best peer's", value=lost, most=0.0),
            Floor(what=f"{name}: TTFT p50 over the best peer's", value=ratio, most=1.0),
        ]
    return found
