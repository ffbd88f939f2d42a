"""Runs every target on every seed and makes a table and floors of it."""

from __future__ import annotations

import statistics
import sys
from collections import Counter
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path

from tests.bench.report import Floor, Table
from tests.bench.routing.engines import Engines, running_engines
from tests.bench.routing.load import Tally, run_chats
from tests.bench.routing.replay import hit_rate, imbalance, partitioned_hit_rate, pooled_hit_rate
from tests.bench.routing.sizes import Sizes
from tests.bench.routing.targets import Target, running_target

BLOCK_TOKENS = 16
MOST_LOST_OF_BOUND = 0.01
"""Of the hit rate that an infinite shared cache would have, where all chats fit."""
VERY_GOOD_LOST_OF_POOLED = -0.03
"""Of the hit rate of one pooled cache, where they do not: prefix routing can beat it by keeping chats apart."""
MOST_IMBALANCE = 1.2
VERY_GOOD_IMBALANCE = 1.15


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """One target, one capacity, one seed."""

    hit_rate: float
    bound: float
    """Hit rate of one infinite cache for the same requests."""
    pooled: float
    """Hit rate of one cache as large as those of all engines together."""
    partitioned: float
    """Hit rate if every chat had stayed on one engine from its beginning."""
    imbalance: float
    tally: Tally


@dataclass(frozen=True, slots=True, kw_only=True)
class Routed:
    """All seeds of a target at one capacity."""

    target: Target
    capacity_blocks: int
    outcomes: Sequence[Outcome]

    @property
    def hit_rate(self) -> float:
        return statistics.median(outcome.hit_rate for outcome in self.outcomes)

    @property
    def of_bound(self) -> float:
        return statistics.median(outcome.hit_rate / outcome.bound for outcome in self.outcomes)

    @property
    def of_pooled(self) -> float:
        return statistics.median(outcome.hit_rate / outcome.pooled for outcome in self.outcomes)

    @property
    def partitioned_of_pooled(self) -> float:
        return statistics.median(outcome.partitioned / outcome.pooled for outcome in self.outcomes)

    @property
    def imbalances(self) -> list[float]:
        return [outcome.imbalance for outcome in self.outcomes]

    def row(self) -> dict[str, object]:
        ttft_s = sorted(time_s for outcome in self.outcomes for time_s in outcome.tally.ttft_s) or [float("nan")]
        rates = [outcome.hit_rate for outcome in self.outcomes]
        return {
            "target": self.target.name,
            "hit rate, median": self.hit_rate,
            "least / most": (min(rates), max(rates)),
            "of the bound": self.of_bound,
            "of one pooled LRU": self.of_pooled,
            "fixed chats, of one pooled LRU": self.partitioned_of_pooled,
            "imbalance, median / most": (statistics.median(self.imbalances), max(self.imbalances)),
            "TTFT ms p50 / p99": (1e3 * statistics.median(ttft_s), 1e3 * ttft_s[int(0.99 * len(ttft_s))]),
            "errors": sum(outcome.tally.num_errors for outcome in self.outcomes),
        }

    def decisions_row(self) -> dict[str, object]:
        """Why our proxy chose as it did, and how far its predictions were off."""
        reasons = sum((outcome.tally.reasons for outcome in self.outcomes), Counter[str]())
        tallies = [outcome.tally for outcome in self.outcomes]
        prompt_tokens = sum(tally.prompt_tokens for tally in tallies)
        return {
            "target": self.target.name,
            "blocks an engine": self.capacity_blocks,
            "predicted, not cached": sum(tally.over_predicted_tokens for tally in tallies) / prompt_tokens,
            "cached, not predicted": sum(tally.under_predicted_tokens for tally in tallies) / prompt_tokens,
            **{reason: number for reason, number in sorted(reasons.items())},
        }


async def measure(
    targets: Sequence[Target],
    sizes: Sizes,
    seeds: Sequence[int],
    tokenizer: Path,
    folder: Path,
    *,
    engine_flags: tuple[str, ...] = (),
) -> list[Routed]:
    """Targets are interleaved: each seed is run on all of them before the next.

    `engine_flags` are those of all engines, besides what a target asks of them.
    """
    outcomes: dict[tuple[Target, int], list[Outcome]] = {
        (target, capacity): [] for capacity in (sizes.ample_blocks, sizes.tight_blocks) for target in targets
    }
    async with AsyncExitStack() as stack:
        engines: dict[tuple[int, tuple[str, ...]], Engines] = {}
        for target, capacity in outcomes:
            kind = (capacity, target.engine_flags)
            if kind not in engines:
                engines[kind] = await stack.enter_async_context(
                    running_engines(
                        folder, sizes.num_engines, capacity, tokenizer, flags=(*engine_flags, *target.engine_flags)
                    )
                )
        for seed in seeds:
            for target, capacity in outcomes:
                behind = engines[capacity, target.engine_flags]
                outcome = await _run(target, behind, sizes, seed, tokenizer, folder)
                outcomes[target, capacity].append(outcome)
                print(
                    f"seed {seed}, {capacity} blocks, {target.name}: hit rate {outcome.hit_rate:.3f}, "
                    f"imbalance {outcome.imbalance:.2f}",
                    file=sys.stderr,
                )
    return [
        Routed(target=target, capacity_blocks=capacity, outcomes=found)
        for (target, capacity), found in outcomes.items()
    ]


async def _run(target: Target, engines: Engines, sizes: Sizes, seed: int, tokenizer: Path, folder: Path) -> Outcome:
    async with running_target(target, engines.urls, tokenizer, folder) as urls:
        await engines.empty()
        tally = await run_chats(urls, sizes.workload, seed)
    prefills = engines.new_prefills()
    pooled_blocks = sizes.num_engines * engines.capacity_blocks
    return Outcome(
        hit_rate=hit_rate(prefills),
        bound=pooled_hit_rate(prefills, capacity_blocks=None, block_tokens=BLOCK_TOKENS),
        pooled=pooled_hit_rate(prefills, capacity_blocks=pooled_blocks, block_tokens=BLOCK_TOKENS),
        partitioned=partitioned_hit_rate(
            prefills,
            num_engines=sizes.num_engines,
            capacity_blocks=engines.capacity_blocks,
            block_tokens=BLOCK_TOKENS,
        ),
        imbalance=imbalance(prefills, sizes.num_engines),
        tally=tally,
    )


def tables(routed: Sequence[Routed], sizes: Sizes) -> list[Table]:
    made = [
        Table(
            title=f"Chats on {sizes.num_engines} engines of {capacity} blocks",
            rows=[each.row() for each in routed if each.capacity_blocks == capacity],
        )
        for capacity in (sizes.ample_blocks, sizes.tight_blocks)
    ]
    if decisions := [each.decisions_row() for each in routed if each.target.is_ours]:
        made.append(Table(title="Decisions of our proxy, shares of the prompt tokens", rows=decisions))
    return made


def floors(routed: Sequence[Routed], sizes: Sizes) -> list[Floor]:
    """Of our proxy in every form that routes by prefix."""
    found: list[Floor] = []
    peer_rates = [
        each.hit_rate for each in routed if not each.target.is_ours and each.capacity_blocks == sizes.tight_blocks
    ]
    for each in routed:
        if not (each.target.is_ours and each.target.routes_by_prefix):
            continue
        name = f"{each.target.name}, {each.capacity_blocks} blocks"
        num_errors = sum(outcome.tally.num_errors for outcome in each.outcomes)
        found.append(Floor(what=f"{name}: failed requests", value=num_errors, most=0))
        if each.capacity_blocks == sizes.ample_blocks:
            found.append(
                Floor(what=f"{name}: share of the bound lost", value=1 - each.of_bound, most=MOST_LOST_OF_BOUND)
            )
            continue
        found += [
            Floor(
                what=f"{name}: share of one pooled LRU's hit rate lost",
                value=1 - each.of_pooled,
                most=0.0,
                very_good=VERY_GOOD_LOST_OF_POOLED,
            ),
            Floor(
                what=f"{name}: imbalance, median",
                value=statistics.median(each.imbalances),
                most=MOST_IMBALANCE,
                very_good=VERY_GOOD_IMBALANCE,
            ),
        ]
        if peer_rates:
            found.append(
                Floor(what=f"{name}: hit rate below the best peer's", value=max(peer_rates) - each.hit_rate, most=0.0)
            )
    return found
