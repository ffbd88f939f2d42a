"""Which of the waiting requests an idle worker gets; what becomes of it then is tested with its generation."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any, cast

import pytest
from msgspec.structs import replace

from prefixcache.load import IncarnationLoad
from prefixcache.metrics import ProxyMetrics
from proxy import rebalancer as rebalancer_module
from proxy.generation import Generation, MoveOutcome
from proxy.placement import Placement
from proxy.placer import Asked, ReservedPrompt
from proxy.rebalancer import Rebalancer
from proxy.worker_link import WorkerLink
from tests.support.manual_clock import ManualClock
from tests.unit.proxy.test_load_table import worker_load
from tests.unit.proxy.test_placer import Proxy, _world, prompt


class ReadyLink(WorkerLink):
    """One that needs no stream to be ready."""

    is_ready = True
    is_quiet = False

    @property
    def ready(self) -> bool:
        return self.is_ready

    @property
    def is_silent(self) -> bool:
        return self.is_quiet


@dataclass(frozen=True, slots=True, kw_only=True)
class FakeWhereabouts:
    reserved: ReservedPrompt[WorkerLink]
    received_at: float

    @property
    def placement(self) -> Placement[WorkerLink]:
        return self.reserved.placement

    @property
    def asked(self) -> Asked[WorkerLink]:
        return self.reserved.asked


@dataclass(slots=True, kw_only=True, eq=False)
class FakeGeneration:
    """Says where it is, and keeps where it was told to go."""

    whereabouts: FakeWhereabouts
    moves: list[tuple[WorkerLink, Callable[[MoveOutcome], None]]] = field(default_factory=list)

    def move_to(self, link: WorkerLink, on_settled: Callable[[MoveOutcome], None]) -> None:
        self.moves.append((link, on_settled))


class World:
    """One proxy whose prompts all wait for its first worker, and the second one, which is idle."""

    def __init__(self, proxy: Proxy, scopes: ExitStack) -> None:
        self.proxy = proxy
        self.scopes = scopes
        self.clock = ManualClock(100.0)
        for link in proxy.links:
            link.__class__ = ReadyLink
        self.busy, self.idle = proxy.links[:2]
        self.metrics = ProxyMetrics()
        self.rebalancer = Rebalancer(placer=proxy.placer, loads=proxy.table, metrics=self.metrics, clock=self.clock)

    async def wait(self, name: int, tokens: int = 1_000, received_at: float = 100.0, **options: Any) -> FakeGeneration:
        """A prompt placed on the busy worker, which has not started it."""
        links, self.proxy.links[:] = list(self.proxy.links), [self.busy]
        (reserved,) = await self.proxy.place(self.scopes, prompt(name, tokens), **options)
        self.proxy.links[:] = links
        whereabouts = FakeWhereabouts(reserved=reserved, received_at=received_at)
        generation = FakeGeneration(whereabouts=whereabouts)
        self.rebalancer.movable.add(cast(Generation, generation))
        return generation

    def moved(self, *generations: FakeGeneration) -> list[bool]:
        """Whether each was told to go to the idle worker, after a beat of it."""
        self.rebalancer.offer(self.idle)
        return [any(link is self.idle for link, _ in each.moves) for each in generations]

    def count(self, outcome: str) -> float:
        return float(self.metrics.steals.labels(outcome)._value.get())


async def _two_workers(scopes: ExitStack) -> World:
    _, (proxy,) = await _world(num_workers=2)
    return World(proxy, scopes)


async def test_the_one_with_most_before_it() -> None:
    with ExitStack() as scopes:
        world = await _two_workers(scopes)
        asked = [await world.wait(name) for name in range(3)]
        asked += [await world.wait(9, tokens=500)]
        ahead = dict(
            (generation, seconds)
            for seconds, generation in world.rebalancer._ahead(world.busy, world.rebalancer.movable)
        )
        seconds = [ahead[cast(Generation, each)] for each in asked]
        assert sorted(seconds[:3]) == pytest.approx([0.5, 1.5, 2.5]), "one after the other, and the short one first"
        assert seconds[3] == 0.0
        moved = world.moved(*asked)
        assert moved == [each == max(seconds) for each in seconds]


async def test_a_worker_that_failed_lately_is_asked_for_nothing() -> None:
    """It looks idle because nobody sends it anything."""
    with ExitStack() as scopes:
        world = await _two_workers(scopes)
        asked = [await world.wait(name) for name in range(3)]
        world.idle.breaker.hung()
        assert not any(world.moved(*asked))
        world.idle.breaker.answered()
        assert any(world.moved(*asked))


async def test_who_has_waited_longer_goes_first_and_gains_less() -> None:
    with ExitStack() as scopes:
        world = await _two_workers(scopes)
        late, early = await world.wait(1, received_at=99.0), await world.wait(2, received_at=90.0)
        assert world.moved(late, early) == [True, False]


async def test_what_others_have_waiting_there_counts_by_its_class() -> None:
    with ExitStack() as scopes:
        world = await _two_workers(scopes)
        alone = await world.wait(1)
        assert world.moved(alone) == [False], "nothing is before it"
        world.busy.ledger.place(5.0)
        assert world.moved(alone) == [False], "a longer one goes after it"
        world.busy.ledger.place(0.5)
        assert world.moved(alone) == [True]


async def test_it_must_gain_three_times_what_it_loses() -> None:
    """The busy worker has all of the prompt but its end, the idle one nothing: 0.96 s more there."""
    for ahead_s, is_moved in ((2.9, False), (3.0, True)):
        with ExitStack() as scopes:
            index, (proxy,) = await _world(num_workers=2)
            world = World(proxy, scopes)
            await index.apply(world.busy.incarnation, 1, prompt(1).index_hashes, [])
            one = await world.wait(1)
            assert one.whereabouts.placement.prefill_s == pytest.approx(0.04)
            for _ in range(2):  # short enough not to be sliced
                world.busy.ledger.place(ahead_s / 2).started()
            assert world.moved(one) == [is_moved]


async def test_one_at_a_time_for_a_worker() -> None:
    with ExitStack() as scopes:
        world = await _two_workers(scopes)
        asked = [await world.wait(name) for name in range(4)]
        world.busy.ledger.place(0.5)
        assert sum(world.moved(*asked)) == sum(world.moved(*asked)) == 1
        (first,) = [each for each in asked if each.moves]
        world.rebalancer.movable.discard(cast(Generation, first))
        first.moves[0][1]("stayed")
        assert sum(world.moved(*asked)) == 2
        assert world.count("stayed") == 1


@pytest.mark.parametrize(
    "why", ["waiting", "prefilling", "not ready", "draining", "another namespace", "its own", "silent", "not asked"]
)
async def test_a_worker_that_gets_nothing(why: str) -> None:
    with ExitStack() as scopes:
        world = await _two_workers(scopes)
        one = await world.wait(1)
        world.busy.ledger.place(0.5)
        if why == "waiting":
            world.idle.ledger.place(0.0)
        elif why == "prefilling":
            world.idle.ledger.place(0.0).started()
        elif why == "not ready":
            cast(ReadyLink, world.idle).is_ready = False
        elif why == "silent":
            cast(ReadyLink, world.idle).is_quiet = True
        elif why == "not asked":
            cast(ReadyLink, world.busy).is_quiet = True
        elif why == "draining":
            world.proxy.table.merge({world.idle.incarnation: IncarnationLoad(worker=worker_load(is_draining=True))})
        elif why == "another namespace":
            world.idle.update(replace(world.idle.record, namespace="f" * 16))
        else:
            world.idle = world.busy
        assert world.moved(one) == [False]


async def test_one_that_runs_gets_more() -> None:
    with ExitStack() as scopes:
        world = await _two_workers(scopes)
        one = await world.wait(1)
        world.busy.ledger.place(0.5)
        world.idle.ledger.place(5.0).first_token()
        assert world.moved(one) == [True], "it decodes, and prefills nothing"


async def test_only_what_fits_the_idle_worker() -> None:
    with ExitStack() as scopes:
        world = await _two_workers(scopes)
        world.idle.update(replace(world.idle.record, max_model_len=1_010))
        long, short = await world.wait(1, max_tokens=11), await world.wait(2, tokens=500, max_tokens=11)
        world.busy.ledger.place(0.25)
        assert world.moved(long, short) == [False, True]


async def test_no_more_than_so_many_are_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rebalancer_module, "MAX_STEAL_CANDIDATES", 2)
    with ExitStack() as scopes:
        world = await _two_workers(scopes)
        asked = [await world.wait(name) for name in range(5)]
        looked_at: list[object] = []
        original = world.proxy.placer.expectation_on

        def expectation_on(asked: Any, link: Any) -> Any:
            looked_at.append(asked)
            return original(asked, link)

        monkeypatch.setattr(world.proxy.placer, "expectation_on", expectation_on)
        assert sum(world.moved(*asked)) == 1
        assert len(looked_at) == 2
