"""Prompts placed over a real index in memory, by two proxies that know of each other only through it."""

from __future__ import annotations

import asyncio
import logging
import random
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from typing import Any, cast

import pytest

from prefixcache.errors import NoWorkerReady, Unavailable
from prefixcache.index.base import Commit, Match
from prefixcache.metrics import ProxyMetrics
from prefixcache.rendering.renderer import Renderer
from prefixcache.routing.policies import POLICIES
from proxy.fleet import Fleet
from proxy.load_table import LoadTable
from proxy.model import Model
from proxy.placer import Placer, ReservedPrompt
from proxy.prediction import Predictor, Prompt
from proxy.recent_placements import RecentPlacements
from proxy.sampling_fields import GenerationOptions
from proxy.warnings_log import QuietLog
from proxy.worker_link import WorkerLink
from tests.support.memory_store import FaultyIndex, MemoryStore
from tests.support.reservations import idle_link
from tests.support.tiny_tokenizer import tiny_tokenizer_files
from tests.support.worker_records import worker_record

SPACE = worker_record().namespace
LONG = 1_000


def prompt(name: int = 1, tokens: int = LONG) -> Prompt:
    """One whose blocks nobody shares unless it has the same name."""
    hashes = [name * 10_000 + depth for depth in range(tokens // 64)]
    return Prompt(packed=bytes(4 * tokens), root=0, index_hashes=hashes, field="prompt")


class LinksAlone:
    """What a placer and a table need of a fleet."""

    def __init__(self, links: Sequence[WorkerLink]) -> None:
        self.links = links
        self.only_connected = False

    def ready_links(
        self, _namespace: str, *, besides: Callable[[WorkerLink], bool] = lambda _: False
    ) -> Sequence[WorkerLink]:
        connected = [link for link in self.links if link.stream is not None or not self.only_connected]
        return [link for link in connected if not besides(link)]


class Proxy:
    """One placer with its links."""

    def __init__(self, store: MemoryStore, proxy_id: str, incarnations: Sequence[int], seed: int) -> None:
        self.links = [idle_link(f"w{n}", incarnation=n) for n in incarnations]
        self.fleet = LinksAlone(self.links)
        fleet = cast(Fleet, self.fleet)
        self.metrics = ProxyMetrics()
        log = QuietLog(logging.getLogger("test"))
        self.table = LoadTable(store, fleet, proxy_id, log)
        self.recent = RecentPlacements()
        files = tiny_tokenizer_files()
        record = worker_record(tokenizer_fingerprint=files.fingerprint)
        self.model = Model.of(record, Renderer(files), store.index(SPACE))
        self.placer = Placer(
            fleet=fleet,
            predictor=Predictor(self.metrics, log),
            policy=POLICIES["eta"](random.Random(seed)),
            loads=self.table,
            recent=self.recent,
            proxy_id=proxy_id,
            metrics=self.metrics,
        )

    async def place(self, scopes: ExitStack, *prompts: Prompt, **options: Any) -> Sequence[ReservedPrompt[WorkerLink]]:
        return await self.placer.place(self.model, prompts, GenerationOptions(model="tiny", **options), scopes)

    async def worker_of(self, scopes: ExitStack, asked: Prompt) -> str:
        (reserved,) = await self.place(scopes, asked)
        return reserved.placement.link.worker_id

    def num_placed(self) -> int:
        return sum(link.ledger.num_waiting for link in self.links)

    def count(self, name: str, *labels: str) -> float:
        counter = getattr(self.metrics, name)
        return float((counter.labels(*labels) if labels else counter)._value.get())


async def _world(num_proxies: int = 1, num_workers: int = 4, seed: int = 1) -> tuple[FaultyIndex, list[Proxy]]:
    store = MemoryStore(lease_s=float("inf"))
    index = store.index(SPACE)
    incarnations = [(await index.register()).incarnation for _ in range(num_workers)]
    proxies = [Proxy(store, f"{1 + n:016x}", incarnations, seed + n) for n in range(num_proxies)]
    return index, proxies


async def _pending(index: FaultyIndex, asked: Prompt) -> dict[int, int]:
    return dict((await index.match(asked.index_hashes)).pending)


@pytest.mark.parametrize("seed", range(8))
async def test_equal_prompts_at_once_in_two_proxies_meet_on_one_worker(seed: int) -> None:
    index, proxies = await _world(num_proxies=2, seed=seed)
    with ExitStack() as scopes:
        workers = await asyncio.gather(*(proxy.worker_of(scopes, prompt()) for proxy in proxies))
        assert len(set(workers)) == 1
        assert len(await _pending(index, prompt())) == 1
        ahead = sum(sum(sum(link.ledger.waiting_s()) for link in proxy.links) for proxy in proxies)
        assert ahead == pytest.approx(LONG / 1_000 + 0.040), "prefilled once; the last 40 tokens are no index block"
        incarnations = [link.incarnation for link in proxies[0].links]
        told = await index.exchange_loads("f" * 16, {}, incarnations)
        waiting = [sum(record.waiting_s) for load in told.values() for record in load.proxies.values()]
        assert sum(waiting) == pytest.approx(ahead), "also what was written of the worker that was left again"
    assert await _pending(index, prompt()) == {}


@pytest.mark.parametrize("seed", range(8))
async def test_what_was_placed_of_late_is_told_with_the_commit_and_leaves_with_a_moved_prompt(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(WorkerLink, "claimed_capacity_tokens", property(lambda _: 1e9))
    index, proxies = await _world(num_proxies=2, seed=seed)
    with ExitStack() as scopes:
        (worker,) = set(await asyncio.gather(*(proxy.worker_of(scopes, prompt()) for proxy in proxies)))
        told = await index.exchange_loads("f" * 16, {}, [link.incarnation for link in proxies[0].links])
        for proxy in proxies:
            recent = {link.worker_id: link.ledger.recent_tokens for link in proxy.links}
            assert recent == {name: pytest.approx(LONG if name == worker else 0, abs=0.01) for name in recent}
        recent_tokens = [record.recent_tokens for load in told.values() for record in load.proxies.values()]
        assert sum(recent_tokens) == pytest.approx(2 * LONG, abs=0.01)


async def test_a_burst_through_one_proxy_meets_too() -> None:
    _, (proxy,) = await _world()
    with ExitStack() as scopes:
        workers = await asyncio.gather(*(proxy.worker_of(scopes, prompt()) for _ in range(3)))
        assert len(set(workers)) == 1
        assert proxy.count("rescored_decisions", "moved") == 0, "the process knows of its own without being told"
    assert proxy.num_placed() == 0


async def test_a_burst_of_equal_prompts_through_three_proxies_is_computed_a_few_times_only() -> None:
    """200 at once on 8 workers: nobody waits much longer for the others than a cold prefill takes."""
    _, proxies = await _world(num_proxies=3, num_workers=8)
    with ExitStack() as scopes:
        placing = [proxies[number % 3].place(scopes, prompt()) for number in range(200)]
        placed = [reserved.placement for (reserved,) in await asyncio.gather(*placing)]
    shares = Counter(each.link.worker_id for each in placed)
    assert sum(each.decision.hit_tokens == 0 for each in placed) <= len(shares) + 3, "each worker computes it once"
    assert max(shares.values()) <= 2 * 200 / 8, "none gets more than twice its fair share"
    assert max(shares.values()) >= 3, "they meet: alone it takes as long as 25 of those that follow"


async def test_other_prompts_spread() -> None:
    _, (proxy,) = await _world()
    with ExitStack() as scopes:
        workers = [await proxy.worker_of(scopes, prompt(name)) for name in range(4)]
    assert len(set(workers)) == 4


async def test_the_load_of_the_other_proxy_comes_with_the_match() -> None:
    _, (one, two) = await _world(num_proxies=2, num_workers=2)
    with ExitStack() as scopes:
        busy = await one.worker_of(scopes, prompt(1))
        assert await two.worker_of(scopes, prompt(2)) != busy


async def test_the_prompts_of_one_request_see_those_before() -> None:
    index, (proxy,) = await _world()
    with ExitStack() as scopes:
        reserved = await proxy.place(scopes, *(prompt(name) for name in (1, 2, 1, 3)))
        workers = [each.placement.link.worker_id for each in reserved]
        assert workers[0] == workers[2], "it has the same prefix"
        assert len(set(workers)) == 3, "the others spread"
        assert reserved[2].placement.decision.reason == "pending_prefix"
    assert await _pending(index, prompt()) == {}


async def test_a_short_prefill_does_not_wait_for_its_commit() -> None:
    index, (proxy,) = await _world()

    async def commit(commit: Commit) -> Mapping[int, int]:
        raise AssertionError(f"nobody waits for {commit}")

    index.commit = commit  # type: ignore[method-assign]  # must not be called
    with ExitStack() as scopes:
        await proxy.worker_of(scopes, prompt(tokens=255))
        assert await _pending(index, prompt(tokens=255)) != {}
    assert await _pending(index, prompt(tokens=255)) == {}


async def test_a_prompt_shorter_than_an_index_block_costs_the_index_nothing() -> None:
    index, (proxy,) = await _world()
    before = index.faults.num_calls
    with ExitStack() as scopes:
        (reserved,) = await proxy.place(scopes, prompt(tokens=63))
        assert reserved.placement.decision.reason == "no_prefix"
        assert proxy.num_placed() == 1, "it counts all the same"
    assert index.faults.num_calls == before
    assert proxy.count("own_placement_decisions", "no_answer") == 0


async def test_request_ids_are_unique_and_of_the_right_length() -> None:
    index, proxies = await _world(num_proxies=2)
    ids: list[bytes] = []
    original = index.post

    def post(commit: Commit) -> None:
        ids.append(commit.request_id)
        original(commit)

    index.post = post  # type: ignore[method-assign]  # sees what is written
    for proxy in proxies:
        with ExitStack() as scopes:
            await proxy.place(scopes, prompt(1), prompt(2))
    released = ids[-4:]
    assert len(set(ids)) == len(set(released)) == 4
    assert {len(request_id) for request_id in ids} == {12}


async def test_without_the_index_a_prompt_goes_where_its_prefix_went() -> None:
    index, (proxy,) = await _world()
    with ExitStack() as scopes:
        first = await proxy.worker_of(scopes, prompt())
    index.faults.unavailable = True
    for _ in range(5):
        with ExitStack() as scopes:
            (reserved,) = await proxy.place(scopes, prompt())
            assert reserved.placement.link.worker_id == first
            assert reserved.placement.decision.reason == "own_placements"
            assert reserved.placement.index_hit_tokens == 0
    assert proxy.count("own_placement_decisions", "no_answer") == 5
    index.faults.unavailable = False
    with ExitStack() as scopes:
        (reserved,) = await proxy.place(scopes, prompt())
        assert reserved.placement.decision.reason == "no_prefix", "the index answers, and nobody has claimed it"
    assert proxy.count("own_placement_decisions", "no_answer") == 5
    assert proxy.num_placed() == 0


async def test_without_the_index_equal_prompts_at_once_meet_and_others_spread() -> None:
    index, (proxy,) = await _world()
    index.faults.unavailable = True
    with ExitStack() as scopes:
        workers = [await proxy.worker_of(scopes, prompt(name)) for name in (1, 2, 3, 4, 1, 2, 3, 4)]
        assert workers[:4] == workers[4:] and len(set(workers)) == 4


async def test_a_commit_without_an_answer_costs_the_second_thought_alone() -> None:
    index, (proxy,) = await _world()
    with ExitStack() as scopes:
        placing = asyncio.create_task(proxy.place(scopes, prompt()))
        original = index.match

        async def match_then_outage(hashes: Any, **named: Any) -> Match:
            answer = await original(hashes, **named)
            index.faults.fail_next(1)
            return answer

        index.match = match_then_outage  # type: ignore[method-assign]  # the call after it fails
        (reserved,) = await placing
        assert reserved.placement.decision.reason == "no_prefix"
    assert proxy.count("index_commit_failures") == 1
    assert proxy.num_placed() == 0


async def test_a_worker_that_vanishes_while_the_index_is_asked() -> None:
    index, (proxy,) = await _world(num_workers=1)
    original = index.commit

    async def commit(commit: Commit) -> Mapping[int, int]:
        await original(commit)
        links, proxy.links[:] = list(proxy.links), []
        return {link.incarnation: 99 for link in links}

    index.commit = commit  # type: ignore[method-assign]  # nobody is left when it answers
    links = list(proxy.links)
    with ExitStack() as scopes:
        (reserved,) = await proxy.place(scopes, prompt())
        assert reserved.placement.link is links[0], "there is nobody to move to"
    with pytest.raises(Unavailable), ExitStack() as scopes:
        await proxy.place(scopes, prompt())
    assert links[0].ledger.is_idle
    assert await _pending(index, prompt()) == {}


@pytest.mark.parametrize("num_prompts", [1, 3])
async def test_cancelled_at_any_moment_it_leaves_nothing_behind(num_prompts: int) -> None:
    """Turn by turn of the loop until the placing outruns the cancellation."""
    num_cancelled = 0
    for turns in range(200):
        index, proxies = await _world(num_proxies=2)
        one, two = proxies
        asked = [prompt(name) for name in range(1, 1 + num_prompts)]
        with ExitStack() as scopes, ExitStack() as others:
            await two.place(others, prompt(1))  # so that the commit tells of something
            placing = asyncio.create_task(one.place(scopes, *asked))
            for _ in range(turns):
                await asyncio.sleep(0)
            placing.cancel()
            await asyncio.gather(placing, return_exceptions=True)
            num_cancelled += placing.cancelled()
        assert one.num_placed() == two.num_placed() == 0
        assert all(
            link.ledger.is_idle and sum(link.ledger.waiting_s()) == 0.0 for proxy in proxies for link in proxy.links
        )
        for each in asked:
            assert await _pending(index, each) == {}
        if not placing.cancelled():
            break
    assert num_cancelled >= 2 * num_prompts, "at the match and at each commit"
    assert not placing.cancelled()


async def test_a_new_worker_is_used_at_once_and_nobody_is_sent_elsewhere_for_it() -> None:
    index, (proxy,) = await _world(num_workers=2)
    chats = {name: proxy.links[name % 2] for name in range(8)}
    for batch, link in enumerate(proxy.links):
        stored = [block for name, at in chats.items() if at is link for block in prompt(name).index_hashes]
        await index.apply(link.incarnation, 1, stored, [])
        link.ledger.place(0.1 + batch / 100)
    incarnation = (await index.register()).incarnation
    proxy.links.append(idle_link("new", incarnation=incarnation))
    with ExitStack() as scopes:
        assert await proxy.worker_of(scopes, prompt(100)) == "new", "the others have something to do"
    for name, link in chats.items():
        with ExitStack() as scopes:
            assert await proxy.worker_of(scopes, prompt(name)) == link.worker_id


async def test_elsewhere_is_none_of_those_that_refused_and_takes_everything_along() -> None:
    index, (proxy,) = await _world(num_workers=3)
    with ExitStack() as scopes:
        (reserved,) = await proxy.place(scopes, prompt())
        refused: set[str] = set()
        for _ in range(2):
            refused.add(reserved.placement.link.worker_id)
            takers = [each for each in proxy.links if each.worker_id not in refused]
            reserved = proxy.placer.place_elsewhere(reserved, takers, scopes)
            link = reserved.placement.link
            assert link.worker_id not in refused
            assert set(await _pending(index, prompt())) == {link.incarnation}
            assert [each.ledger.num_waiting for each in proxy.links] == [int(each is link) for each in proxy.links]
        with pytest.raises(NoWorkerReady):
            proxy.placer.place_elsewhere(reserved, [], scopes)
        assert link.ledger.num_waiting == 1, "it is where it was"
    assert await _pending(index, prompt()) == {}
    assert proxy.num_placed() == 0


async def test_one_of_several_choices_leaves_the_others_where_they_are() -> None:
    index, (proxy,) = await _world(num_workers=2)
    with ExitStack() as scopes:
        (reserved,) = await proxy.place(scopes, prompt(), n=3)
        first = reserved.placement.link
        reserved.reservation.choices[1].gone()
        alone = proxy.placer.place_elsewhere(reserved, [each for each in proxy.links if each is not first], scopes)
        second = alone.placement.link
        assert (first.ledger.num_waiting, second.ledger.num_waiting) == (2, 1)
        assert set(await _pending(index, prompt())) == {first.incarnation, second.incarnation}
        reserved.reservation.choices[0].first_token()
        assert second.incarnation in await _pending(index, prompt())
    assert proxy.num_placed() == 0
    assert second.incarnation not in await _pending(index, prompt())


async def test_what_a_worker_has_by_now_of_a_prompt_that_waits_elsewhere() -> None:
    index, (proxy,) = await _world(num_workers=2)
    with ExitStack() as scopes, ExitStack() as others:
        (reserved,) = await proxy.place(scopes, prompt())
        here = reserved.placement.link
        other = next(link for link in proxy.links if link is not here)

        def expected() -> tuple[int, str, int]:
            found = proxy.placer.expectation_on(reserved.asked, other)
            return found.blocks, found.source, found.claimed_blocks

        assert expected() == (0, "claims", 0)
        half = prompt(tokens=LONG // 2)
        proxy.links.remove(here)
        (later,) = await proxy.place(others, half)
        assert expected() == (7, "pending", 0), "the deepest boundary that both have"
        later.reservation.settle()
        assert expected() == (7, "own_placements", 0), "it was placed there after the match"
        moved = proxy.placer.move(reserved, other, scopes).placement
        assert (moved.link, moved.decision.reason, moved.decision.hit_tokens) == (other, "stolen", 7 * 64)
        assert (moved.index_hit_tokens, moved.claimed_hit_tokens) == (0, None)
        assert moved.uncached_tokens == LONG - 7 * 64
        assert moved.best_hit_tokens == reserved.placement.best_hit_tokens
        assert moved.prefill_s == pytest.approx(moved.uncached_tokens / 1_000)
    assert await _pending(index, prompt()) == {}


async def test_what_a_worker_claimed_at_the_match_counts_when_it_is_moved_there() -> None:
    index, (proxy,) = await _world(num_workers=2)
    claiming, other = proxy.links
    await index.apply(claiming.incarnation, 1, prompt().index_hashes[:4], [])
    for _ in range(2):
        claiming.ledger.place(0.9)
    with ExitStack() as scopes:
        (reserved,) = await proxy.place(scopes, prompt())
        assert reserved.placement.link is other
        moved = proxy.placer.move(reserved, claiming, scopes).placement
        assert (moved.expectation.blocks, moved.expectation.claimed_blocks, moved.index_hit_tokens) == (4, 4, 256)
