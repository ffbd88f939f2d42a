"""Cost of a whole match: 8 holders and 8 candidates with their loads, pending claims, four kinds of chain.

all hold it    every holder has the whole chain
spread         every holder ends at another depth: as many binary searches
diverges       every holder has the first half, nobody the rest
cold           nobody holds anything
"""

from __future__ import annotations

import secrets
import time
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from hashlib import sha1

from prefixcache.index.base import REQUEST_ID_BYTES, Commit
from prefixcache.index.boundaries import Boundaries
from prefixcache.index.keys import NamespaceKeys
from prefixcache.index.scripts import Script
from prefixcache.load import ProxyLoad, WorkerLoad
from tests.bench.index.bench import Bench, Recorder, Writer, call_costs, percentile, spread
from tests.bench.index.flat_layout import FlatLayout
from tests.bench.index.tree_shapes import new_hashes
from tests.bench.report import Floor, Table

HOLDERS = 8
PROXY_IDS = ("00000000000000a1", "00000000000000a2")
PENDING_REQUESTS = 2
MOST_SERVER_MS = {128: (0.08, 0.05), 2_048: (0.25, 0.15), 8_192: (0.7, 0.4)}
"""Index blocks -> server CPU a call: the floor and what is very good."""
SEARCHED_MS = {(128, "spread"): 0.16, (128, "diverges"): 0.1}
"""Floors of their own: a short chain costs little to walk, so that eight holders who end before its last block, which
is as many binary searches or one, weigh more than all the rest."""
MOST_CLIENT_P99_MS = 2.0
FLAT_COMMANDS_A_REPEAT = 10_000
"""Bounds the time that the other layout may take."""
_EMPTY_TEXT = "return 1"
EMPTY = Script(name="empty", text=_EMPTY_TEXT, sha1=sha1(_EMPTY_TEXT.encode(), usedforsecurity=False).hexdigest())


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    name: str
    chain: Sequence[int]
    depths: dict[int, int]


class Fleet:
    """Eight holders and as many candidates of one index, which two proxies have sent work to."""

    def __init__(self, bench: Bench, keys: NamespaceKeys, holders: Sequence[Writer], candidates: Sequence[int]) -> None:
        self._bench = bench
        self.keys = keys
        self.index = holders[0].index
        self.holders = holders
        self.candidates = candidates
        self._version = 0

    @classmethod
    async def open(cls, bench: Bench) -> Fleet:
        keys = bench.new_keys()
        index = bench.index(keys)
        holders = [await Writer.register(index) for _ in range(HOLDERS)]
        return cls(bench, keys, holders, [(await index.register()).incarnation for _ in range(HOLDERS)])

    async def tell_loads(self, chains: Sequence[Sequence[int]]) -> None:
        """Writes again what expires: records of load of every incarnation, pending claims on every chain."""
        self._version += 1
        everybody = [*(holder.incarnation for holder in self.holders), *self.candidates]
        for incarnation in everybody:
            await self.index.renew(
                incarnation,
                WorkerLoad(
                    version=self._version,
                    rest_s=0.5,
                    prefill_rate=5_000.0,
                    inter_token_latency_s=0.02,
                    available_blocks=1_000,
                    oldest_age_s=60.0,
                ),
            )
        load = ProxyLoad(version=self._version, running=3, prefilling_s=0.2, waiting_s=(0.1, 0.5, 2.0, 0.0, 0.0))
        for proxy_id in PROXY_IDS:
            await self.index.exchange_loads(proxy_id, dict.fromkeys(everybody, load), everybody)
        for chain in chains:
            for incarnation in everybody[:PENDING_REQUESTS]:
                self._version += 1
                await self.index.commit(
                    Commit(
                        verb="place",
                        request_id=secrets.token_bytes(REQUEST_ID_BYTES),
                        boundaries=Boundaries.of(chain),
                        incarnation=incarnation,
                        proxy_id=PROXY_IDS[0],
                        load=ProxyLoad(version=self._version, running=3),
                    )
                )

    async def check(self, case: Case) -> Recorder:
        """One whole match, looked at: what is timed does find what was written. Returns how to run it again."""
        index, recorder = self._bench.recorded_index(self.keys)
        match = await index.match(case.chain, candidates=self.candidates)
        assert match.depths == case.depths, (case.name, match.depths, case.depths)
        assert set(match.loads) == {*case.depths, *self.candidates}, (case.name, match.loads)
        for load in match.loads.values():
            assert load.worker is not None and len(load.proxies) == len(PROXY_IDS), (case.name, load)
        assert len(match.pending) == PENDING_REQUESTS, (case.name, match.pending)
        return recorder


@dataclass(frozen=True, slots=True)
class CaseCosts:
    """Of one case, ms; an entry for each repeat."""

    server: list[float] = field(default_factory=list)
    client_p50: list[float] = field(default_factory=list)
    client_p99: list[float] = field(default_factory=list)
    flat_server: list[float] = field(default_factory=list)
    flat_client: list[float] = field(default_factory=list)

    def row(self, case: Case, empty_ms: float) -> dict[str, object]:
        server, flat_server = spread(self.server), spread(self.flat_server)
        return {
            "chain": case.name,
            "blocks": len(case.chain),
            "server ms": server,
            "x empty": server[1] / empty_ms,
            "client p50 ms": spread(self.client_p50)[1],
            "client p99 ms": spread(self.client_p99),
            "flat: server ms": flat_server,
            "flat: client CPU ms": spread(self.flat_client)[1],
            "flat / own": flat_server[1] / server[1],
        }

    def floors(self, case: Case) -> list[Floor]:
        most, very_good = MOST_SERVER_MS[len(case.chain)]
        most = SEARCHED_MS.get((len(case.chain), case.name), most)
        what = f"match of {len(case.chain)} blocks, {case.name}"
        p99_ms = min(self.client_p99)
        return [
            # The least: whatever else runs on the machine can only add to it.
            Floor(what=f"{what}: server ms, least", value=min(self.server), most=most, very_good=very_good),
            Floor(what=f"{what}: client p99 ms, quietest repeat", value=p99_ms, most=MOST_CLIENT_P99_MS),
        ]


async def measure_match(bench: Bench, flat: FlatLayout) -> tuple[Table, list[Floor]]:
    bench.server.flush()
    fleet = await Fleet.open(bench)
    cases = [case for num_blocks in bench.sizes.match_blocks for case in await _cases(bench, fleet, flat, num_blocks)]
    costs = [CaseCosts() for _ in cases]
    empty_ms: list[float] = []
    for _ in range(bench.sizes.repeats):
        nothing = partial(bench.hot.run, EMPTY, "bench:{empty}:meta")
        empty_ms.append((await call_costs(bench.server, [nothing] * bench.sizes.match_calls)).mean_ms)
        for case, its_costs in zip(cases, costs, strict=True):
            await _repeat(bench, fleet, flat, case, its_costs)
    empty = spread(empty_ms)
    rows: list[dict[str, object]] = [{"chain": "empty script", "blocks": "", "server ms": empty}]
    floors: list[Floor] = []
    for case, its_costs in zip(cases, costs, strict=True):
        rows.append(its_costs.row(case, empty[1]))
        if len(case.chain) in MOST_SERVER_MS:
            floors += its_costs.floors(case)
    title = f"Whole match, {HOLDERS} holders and {HOLDERS} candidates; least / median / most of the repeats"
    return Table(title=title, rows=rows), floors


async def _repeat(bench: Bench, fleet: Fleet, flat: FlatLayout, case: Case, costs: CaseCosts) -> None:
    """One repeat of a case: the bare script for the server's cost, the whole call for the client's, the flat layout."""
    num_calls = bench.sizes.match_calls
    await fleet.tell_loads([case.chain])
    recorder = await fleet.check(case)
    costs.server.append((await call_costs(bench.server, [recorder.again] * num_calls)).mean_ms)
    match = partial(fleet.index.match, case.chain, candidates=fleet.candidates)
    client_s = (await call_costs(bench.server, [match] * num_calls)).client_s
    costs.client_p50.append(percentile(client_s, 0.5) * 1e3)
    costs.client_p99.append(percentile(client_s, 0.99) * 1e3)
    assert await flat.match(case.chain) == case.depths
    num_calls = max(min(FLAT_COMMANDS_A_REPEAT // len(case.chain), num_calls), 1)
    began_s = time.process_time()
    flat_costs = await call_costs(bench.server, [partial(flat.match, case.chain)] * num_calls)
    costs.flat_client.append((time.process_time() - began_s) / num_calls * 1e3)
    costs.flat_server.append(flat_costs.mean_ms)


async def _cases(bench: Bench, fleet: Fleet, flat: FlatLayout, num_blocks: int) -> list[Case]:
    """The chains of one length, written to both layouts."""
    whole, ends, half = (new_hashes(bench.random, num_blocks) for _ in range(3))
    spread_depths = sorted(bench.random.sample(range(1, num_blocks + 1), HOLDERS))
    everybody = [writer.incarnation for writer in fleet.holders]
    cases = [
        Case(name="all hold it", chain=whole, depths=dict.fromkeys(everybody, num_blocks)),
        Case(name="spread", chain=ends, depths=dict(zip(everybody, spread_depths, strict=True))),
        Case(name="diverges", chain=half, depths=dict.fromkeys(everybody, num_blocks // 2)),
        Case(name="cold", chain=new_hashes(bench.random, num_blocks), depths={}),
    ]
    for case in cases:
        for writer in fleet.holders:
            held = array("Q", case.chain[: case.depths.get(writer.incarnation, 0)])
            await writer.store(held)
            await flat.load(writer.incarnation, held)
    return cases
