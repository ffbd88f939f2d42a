"""What is ahead of a new request, from all that is known of a worker."""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, cast

import pytest

from prefixcache.errors import IndexUnavailable
from prefixcache.limits import LOAD_RECORD_S
from prefixcache.load import IncarnationLoad, ProxyLoad, WorkerLoad, by_class
from proxy.fleet import Fleet
from proxy.load_ledger import LoadLedger
from proxy.load_table import LoadTable
from proxy.warnings_log import QuietLog
from proxy.worker_link import WorkerLink
from tests.support.manual_clock import ManualClock
from tests.support.memory_store import MemoryStore
from tests.support.reservations import idle_link
from tests.support.worker_records import worker_record

SPACE = worker_record().namespace


class LinksAlone:
    """What the table needs of a fleet."""

    def __init__(self, links: Sequence[WorkerLink]) -> None:
        self.links = links


class World:
    """Two proxies, each with its table and its link to one worker, over one store."""

    def __init__(self, proxy_ids: Sequence[str] = ("a" * 16, "b" * 16)) -> None:
        self.clock = ManualClock(1_000.0)
        self.store = MemoryStore(clock=self.clock, lease_s=float("inf"))
        self.index = self.store.index(SPACE)
        self.links = [idle_link("w", incarnation=1, clock=self.clock) for _ in proxy_ids]
        self.tables = [
            LoadTable(
                self.store,
                cast(Fleet, LinksAlone([link])),
                proxy_id,
                QuietLog(logging.getLogger("test")),
                self.clock,
            )
            for proxy_id, link in zip(proxy_ids, self.links, strict=True)
        ]

    async def register(self) -> None:
        assert (await self.index.register()).incarnation == 1

    def ahead_s(self, of: int = 0) -> float:
        return self.tables[of].ahead_s(self.links[of])


def worker_load(version: int = 1, **fields: Any) -> WorkerLoad:
    usual: dict[str, Any] = {
        "rest_s": 0.0,
        "prefill_rate": 0.0,
        "inter_token_latency_s": 0.0,
        "available_blocks": 0,
        "oldest_age_s": 0.0,
    }
    return WorkerLoad(version=version, **{**usual, **fields})


def told(worker: WorkerLoad | None = None, **proxies: ProxyLoad) -> dict[int, IncarnationLoad]:
    return {1: IncarnationLoad(worker=worker, proxies=proxies)}


def waits(seconds: float, *, version: int = 1, prefilling_s: float = 0.0) -> ProxyLoad:
    return ProxyLoad(version=version, prefilling_s=prefilling_s, waiting_s=(0.0, 0.0, seconds, 0.0, 0.0))


def test_without_any_word_of_others_the_own_ledger_is_all() -> None:
    world = World()
    assert world.ahead_s() == 0.0
    world.links[0].ledger.place(2.0)
    started = world.links[0].ledger.place(1.0)
    started.started()
    world.clock.now += 0.25
    assert world.ahead_s() == 2.75


def test_all_that_waits_is_ahead_and_the_larger_word_on_what_has_started() -> None:
    world = World()
    (table, _), (link, _) = world.tables, world.links
    link.ledger.place(0.5)
    link.ledger.place(1.0).started()
    table.merge(told(worker_load(rest_s=8.0), b=waits(3.0, prefilling_s=2.0), c=waits(4.0, prefilling_s=2.5)))
    assert world.ahead_s() == 8.0 + 0.5 + 3.0 + 4.0
    table.merge(told(worker_load(version=2, rest_s=1.0), b=waits(3.0, prefilling_s=2.0)))
    assert world.ahead_s() == (1.0 + 2.0) + 0.5 + 3.0, "the proxies know of more than the worker had told"


def test_what_waits_is_told_by_class_whoever_sent_it() -> None:
    world = World()
    (table, _), (link, _) = world.tables, world.links
    for seconds in (0.1, 0.2, 20.0):
        link.ledger.place(seconds)
    table.merge(told(b=ProxyLoad(version=1, waiting_s=(1.0, 2.0, 3.0, 4.0, 5.0)), c=waits(8.0)))
    rest_s, waiting_s = table.ahead(link)
    assert rest_s == 0.0
    assert waiting_s == pytest.approx((1.3, 2.0, 11.0, 4.0, 25.0))


@pytest.mark.parametrize(
    ("sliced_s", "expected"),
    [
        ([], (0.0, 0.0, 3.0, 0.0, 0.0)),
        ([2.0], (0.0, 0.0, 3.0, 0.0, 0.0)),
        ([12.0], (0.0, 0.0, 3.0, 9.0, 0.0)),
        ([20.0], (0.0, 0.0, 3.0, 0.0, 17.0)),
        ([0.5], (0.0, 0.5, 3.0, 0.0, 0.0)),
        ([20.0, 8.0, 2.0], (0.0, 0.0, 3.0, 7.0, 20.0)),
        ([20.0, 8.0, 4.0, 0.5], (0.0, 0.5, 4.0, 8.0, 20.0)),
        ([20.0, 0.5], (0.0, 0.5, 3.0, 0.0, 17.0)),
    ],
)
def test_a_sliced_prefill_counts_once_whoever_tells_of_it(sliced_s: list[float], expected: tuple[float, ...]) -> None:
    """The proxy that sent it has told of it, too, as it thinks; what the worker says is the least there is."""
    world = World()
    table, link = world.tables[0], world.links[0]
    table.merge(told(worker_load(sliced_s=by_class(sliced_s)), b=waits(3.0)))
    assert table.ahead(link) == (0.0, expected)


def test_own_records_come_from_the_ledger_never_from_the_index() -> None:
    world = World()
    world.tables[0].merge({1: IncarnationLoad(proxies={"a" * 16: waits(100.0), "b" * 16: waits(3.0)})})
    assert world.ahead_s() == 3.0


def test_times_are_counted_down_but_what_waits_is_not() -> None:
    world = World()
    world.tables[0].merge(told(worker_load(rest_s=2.0), b=waits(3.0, prefilling_s=1.0)))
    world.clock.now += 0.5
    assert world.ahead_s() == 1.5 + 3.0
    world.clock.now += 2.0
    assert world.ahead_s() == 3.0


def test_a_record_that_is_not_written_again_counts_for_nothing() -> None:
    world = World()
    table = world.tables[0]
    begin = world.clock.now
    table.merge(told(worker_load(rest_s=50.0), b=waits(3.0), c=waits(4.0)))
    world.clock.now = begin + 2.0
    table.merge(told(worker_load(rest_s=48.0), b=waits(3.0), c=waits(4.0, version=2)))
    assert world.ahead_s() == 48.0 + 7.0
    world.clock.now = begin + LOAD_RECORD_S
    assert world.ahead_s() == 4.0, "c wrote again, the others did not"
    world.clock.now = begin + 2.0 + LOAD_RECORD_S
    assert world.ahead_s() == 0.0


def test_an_answer_that_was_overtaken_is_ignored() -> None:
    world = World()
    table = world.tables[0]
    table.merge(told(b=waits(1.0, version=7)))
    table.merge(told(b=waits(9.0, version=6)))
    assert world.ahead_s() == 1.0
    table.merge(told())
    assert world.ahead_s() == 0.0


def test_what_the_worker_says_of_itself() -> None:
    world = World()
    (table, _), (link, _) = world.tables, world.links
    assert table.prefill_rate(link) is None and not table.is_draining(link)
    assert table.worker(link) is None
    table.merge(told(worker_load(prefill_rate=0.0)))
    assert table.prefill_rate(link) is None, "not measured yet"
    table.merge(told(worker_load(version=2, prefill_rate=7_000.0, is_draining=True)))
    assert table.prefill_rate(link) == 7_000.0 and table.is_draining(link)
    assert table.worker(link) == worker_load(version=2, prefill_rate=7_000.0, is_draining=True)
    world.clock.now += LOAD_RECORD_S
    assert not table.is_draining(link) and table.worker(link) is None
    assert table.prefill_rate(link) == 7_000.0, "a rate does not run out"


def test_those_with_the_least_ahead_are_asked_for() -> None:
    world = World()
    links = [idle_link(f"w{n}", incarnation=n + 10, clock=world.clock) for n in range(20)]
    for place, link in enumerate(links):
        link.ledger.place(float((place * 7) % 20))
    least = world.tables[0].least_loaded(links)
    assert least == [links[(place * 3) % 20].incarnation for place in range(8)]


async def test_the_load_of_one_proxy_is_seen_by_the_other() -> None:
    world = World()
    await world.register()
    one, two = world.tables
    entry = world.links[0].ledger.place(2.0)
    await one.exchange()
    await two.exchange()
    assert (world.ahead_s(0), world.ahead_s(1)) == (2.0, 2.0)
    entry.started()
    await one.exchange()
    world.clock.now += 0.5
    await two.exchange()
    assert (world.ahead_s(0), world.ahead_s(1)) == (1.5, 1.5)
    entry.gone()
    await one.exchange()
    await two.exchange()
    assert (world.ahead_s(0), world.ahead_s(1)) == (0.0, 0.0)


async def test_a_proxy_that_dies_leaves_nothing_for_long() -> None:
    world = World()
    await world.register()
    one, two = world.tables
    world.links[0].ledger.place(2.0)
    await one.exchange()
    for _ in range(20):
        await two.exchange()
        assert world.ahead_s(1) == 2.0
        world.clock.now += LOAD_RECORD_S / 20
    world.clock.now += 0.01
    await two.exchange()
    assert world.ahead_s(1) == 0.0


async def test_nothing_is_written_of_a_worker_that_has_had_nothing_for_long() -> None:
    world = World()
    await world.register()
    one = world.tables[0]
    written: list[int] = []
    original = world.index.exchange_loads

    async def exchange_loads(proxy_id: str, own: Any, incarnations: Any) -> Any:
        written.append(len(own))
        return await original(proxy_id, own, incarnations)

    world.index.exchange_loads = exchange_loads  # type: ignore[method-assign]  # counts what is written
    await one.exchange()
    entry = world.links[0].ledger.place(1.0)
    await one.exchange()
    entry.gone()
    await one.exchange()
    world.clock.now += LOAD_RECORD_S
    await one.exchange()
    assert written == [0, 1, 1, 0]


async def test_an_outage_forgets_the_others_by_itself_and_they_come_back_by_themselves() -> None:
    world = World()
    await world.register()
    one, two = world.tables
    world.links[0].ledger.place(2.0)
    await one.exchange()
    await two.exchange()
    world.store.unavailable = True
    with pytest.raises(IndexUnavailable):
        await two.exchange()
    assert world.ahead_s(1) == 2.0
    world.clock.now += LOAD_RECORD_S
    assert (world.ahead_s(0), world.ahead_s(1)) == (2.0, 0.0)
    world.store.unavailable = False
    await one.exchange()
    await two.exchange()
    assert world.ahead_s(1) == 2.0


def cache(name: str, *, capacity_tokens: float | None = 2_000.0, incarnation: int = 1) -> WorkerLink:
    """A destination as far as its cache is concerned."""
    link = SimpleNamespace(
        worker_id=name, incarnation=incarnation, claimed_capacity_tokens=capacity_tokens, ledger=LoadLedger()
    )
    return cast(WorkerLink, link)


def test_what_was_placed_of_late_is_kept_where_all_capacities_are_known() -> None:
    table = World().tables[0]
    links = [cache("a"), cache("b"), cache("c", capacity_tokens=None)]
    table.note_placed(links[0], 500, among=lambda: links)
    assert table.recent_tokens(links[0]) == 0.0, "one of them is not known"
    table.note_placed(links[0], 500, among=lambda: links[:2])
    assert table.recent_tokens(links[0]) == 500.0


def test_it_fades_with_what_is_placed_anywhere_not_with_time() -> None:
    world = World()
    table, (one, other) = world.tables[0], (links := [cache("a"), cache("b", incarnation=2)])
    table.note_placed(one, 500, among=lambda: links)
    world.clock.now += 1_000.0
    table.note_placed(other, 1_000, among=lambda: links)
    assert table.recent_tokens(one) == pytest.approx(500 / math.e), "a quarter of all capacities came since"
    assert table.recent_tokens(other) == 1_000.0
    table.note_placed(one, 100, among=lambda: links)
    assert table.recent_tokens(one) == pytest.approx(500 * math.exp(-1.1) + 100)


def test_what_goes_elsewhere_after_all_was_not_placed() -> None:
    table, links = World().tables[0], [cache("a"), cache("b", incarnation=2)]
    table.note_placed(links[0], 300, among=lambda: links)
    table.note_placed(links[0], 500, among=lambda: links)
    table.note_left(links[0], 500)
    assert table.recent_tokens(links[0]) == pytest.approx(300 * math.exp(-0.5))
    table.note_left(links[1], 500)
    assert table.recent_tokens(links[1]) == 0.0, "never less than nothing"


def test_what_others_placed_of_late_counts_as_long_as_they_say_so() -> None:
    world = World()
    (table, _), (link, _) = world.tables, world.links
    link.ledger.recent_tokens = 100.0
    assert table.recent_tokens(link) == 100.0
    placed_tokens = {"a" * 16: 9.0, "b" * 16: 500.0, "c" * 16: 70.0}
    proxies = {name: ProxyLoad(version=1, recent_tokens=tokens) for name, tokens in placed_tokens.items()}
    table.merge({1: IncarnationLoad(proxies=proxies)})
    assert table.recent_tokens(link) == 670.0, "our own record does not count"
    world.clock.now += LOAD_RECORD_S
    assert table.recent_tokens(link) == 100.0


async def test_what_one_proxy_placed_of_late_is_known_to_the_other() -> None:
    world = World()
    await world.register()
    world.links[0].ledger.recent_tokens = 512.0
    world.links[0].ledger.place(1.0)
    for table in world.tables:
        await table.exchange()
    recent_tokens = [table.recent_tokens(link) for table, link in zip(world.tables, world.links, strict=True)]
    assert recent_tokens == [512.0, 512.0]


def test_nobody_is_asked_who_else_there_is_where_the_own_capacity_is_not_known() -> None:
    def among() -> Sequence[WorkerLink]:
        raise AssertionError("asked")

    World().tables[0].note_placed(idle_link("w1"), 500, among=among)
