"""From what a user says of a fleet to the cells that are run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from prefixcache.errors import ConfigError
from prefixcache.limits import LOAD_REPORT_S
from prefixcache.simulation.cells import Cell
from prefixcache.simulation.costs import Costs, PrefillCosts, StepCosts
from prefixcache.simulation.hot_prefix import with_hot_prefix
from prefixcache.simulation.mechanisms import Mechanisms
from prefixcache.simulation.policies import NAMES, usual_mechanisms
from prefixcache.simulation.scenario import Kill, Scenario
from prefixcache.simulation.sizes import LEAST_BLOCKS, USUAL_LOAD, capacity_blocks, prefill_rate
from prefixcache.simulation.trace import Trace


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """A fleet, up to what is tried in turn: workers, capacity, load and policy."""

    cache_tokens: int | None = None
    """Of each worker, in place of a capacity."""
    rate: float | None = None
    """Prefill tokens a second of each worker, in place of a load."""
    steps: StepCosts | None = None
    """In place of rate, overhead and inter-token latency."""
    overhead_s: float = 0.020
    inter_token_s: float = 0.025
    num_proxies: int = 1
    load_lag_s: float = LOAD_REPORT_S
    event_lag_s: float = 0.0
    rate_error: float = 0.0
    kills: tuple[Kill, ...] = ()
    changes: tuple[tuple[str, object], ...] = ()
    """Fields of the policies' usual mechanisms that are set otherwise."""

    def cell(
        self,
        trace: Trace,
        policy: str,
        num_workers: int,
        *,
        capacity: float = 0.10,
        load: float = USUAL_LOAD,
        arrival_speed: float = 1.0,
    ) -> Cell:
        """Raises ConfigError for what cannot be run."""
        if policy not in NAMES:
            raise ConfigError(f"no policy is called {policy!r}; there are {', '.join(NAMES)}")
        for kill in self.kills:
            if kill.worker > num_workers or num_workers == 1:
                raise ConfigError(f"worker {kill.worker} of {num_workers} cannot die: one that is there must remain")
        blocks = self._blocks(trace, capacity, num_workers)
        costs, made_for = self._costs(trace, num_workers, blocks, load)
        unique = max(trace.num_unique_blocks, 1)
        return Cell(
            trace=trace.faster(arrival_speed) if arrival_speed != 1.0 else trace,
            policy=policy,
            scenario=Scenario(
                num_workers=num_workers,
                capacity_blocks=blocks,
                costs=costs,
                num_proxies=self.num_proxies,
                load_lag_s=self.load_lag_s,
                event_lag_s=self.event_lag_s,
                rate_error=self.rate_error,
                kills=self.kills,
            ),
            mechanisms=self._mechanisms(policy),
            capacity=capacity if self.cache_tokens is None else blocks * num_workers / unique,
            load=made_for,
            arrival_speed=arrival_speed,
        )

    def _blocks(self, trace: Trace, capacity: float, num_workers: int) -> int:
        if self.cache_tokens is None:
            return capacity_blocks(trace, capacity, num_workers)
        blocks = self.cache_tokens // trace.block_tokens
        if blocks < LEAST_BLOCKS:
            raise ConfigError(
                f"a cache of {self.cache_tokens:,} tokens has fewer than {LEAST_BLOCKS} blocks of {trace.block_tokens} "
                f"tokens, those of {trace.name}"
            )
        return blocks

    def _costs(self, trace: Trace, num_workers: int, blocks: int, load: float) -> tuple[Costs, float | None]:
        if self.steps is not None:
            return self.steps, None
        rate = self.rate or prefill_rate(trace, num_workers, blocks, load)
        costs = PrefillCosts(prefill_rate=rate, overhead_s=self.overhead_s, inter_token_s=self.inter_token_s)
        return costs, None if self.rate else load

    def _mechanisms(self, policy: str) -> Mechanisms | None:
        return replace(usual_mechanisms(policy), **dict(self.changes)) if self.changes else None  # type: ignore[arg-type]


def hot(traces: Sequence[Trace], share: float, blocks: int) -> list[Trace]:
    """The traces, with a share of their conversations behind one new prefix."""
    return [with_hot_prefix(trace, share, blocks) for trace in traces] if share else list(traces)
