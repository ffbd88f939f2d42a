"""Links to engines that do not exist: what a probe finds is scripted, and so are the claims."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any, cast

from prefixcache.metrics import ProxyMetrics
from proxy.engines.engine_link import EngineLink
from proxy.engines.engine_metrics import EngineMetrics
from proxy.engines.engine_model import EngineModel
from proxy.engines.http_pool import HttpPool
from proxy.engines.probe import EngineReport, ProbeFailed
from proxy.warnings_log import QuietLog
from tests.support.manual_clock import ManualClock


def report(*names: str, latency_s: float = 0.001, metrics: EngineMetrics | None = None, **fields: Any) -> EngineReport:
    """Of an engine that serves these models."""
    models = tuple(EngineModel(name=name, max_model_len=4_096) for name in names)
    return EngineReport(models=models, latency_s=latency_s, metrics=metrics or EngineMetrics(), **fields)


class ScriptedProber:
    """Finds what `finds` says at the time: a report, or why there is none."""

    def __init__(self, finds: EngineReport | str) -> None:
        self.finds = finds
        self.num_probes = 0
        self.num_forgotten = 0

    async def probe(self) -> EngineReport:
        self.num_probes += 1
        if isinstance(self.finds, str):
            raise ProbeFailed(self.finds)
        return self.finds

    def forget(self) -> None:
        self.num_forgotten += 1


class ScriptedClaims:
    """Counts how often they began anew."""

    def __init__(self, anchor: int) -> None:
        self.anchor = anchor
        self.generations: Sequence[int] = (9, 8)
        self.is_reannouncing = False
        self.num_claims = 0
        self.kept_share = 1.0
        self.num_begun = 0
        self.counted_tokens: float | None = None

    def begin_anew(self) -> None:
        self.num_begun += 1

    def claim(self, chain: Sequence[int], *, capacity_blocks: int | None, engine_blocks_per_index_block: float) -> None:
        raise AssertionError("a link claims nothing itself")

    def observe(self, *, predicted_tokens: int, cached_tokens: int | None, index_block_tokens: float) -> None:
        raise AssertionError("a link observes no prediction itself")

    def note_hits(self, counted_tokens: float | None) -> None:
        self.counted_tokens = counted_tokens


class ScriptedEngine:
    """One link, and all that stands around it."""

    def __init__(
        self,
        finds: EngineReport | str,
        *,
        engine_id: str = "e1:8000",
        clock: ManualClock | None = None,
        metrics: ProxyMetrics | None = None,
        capacity_blocks: int | None = None,
        anchor: int = 7,
    ) -> None:
        self.clock = clock or ManualClock(100.0)
        self.prober = ScriptedProber(finds)
        self.claims = ScriptedClaims(anchor)
        self.link = EngineLink(
            engine_id=engine_id,
            url=f"http://{engine_id}",
            pool=cast(HttpPool, None),
            prober=self.prober,
            claims=self.claims,
            namespace="0" * 16,
            capacity_blocks=capacity_blocks,
            metrics=metrics or ProxyMetrics(),
            log=QuietLog(logging.getLogger("test")),
            clock=self.clock,
        )

    async def finds(self, finds: EngineReport | str, *, times: int = 1) -> None:
        """Probes that find this."""
        self.prober.finds = finds
        for _ in range(times):
            await self.link.look()
