"""What a placed prompt writes, and that nothing of it is left behind."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping

import pytest

from prefixcache.index.base import Commit
from prefixcache.index.boundaries import Boundaries
from prefixcache.metrics import ProxyMetrics
from proxy.own_claims import OwnClaims
from proxy.reservation import Reservation
from proxy.worker_link import WorkerLink
from tests.support.memory_store import FaultyIndex
from tests.support.reservations import idle_link

CHAIN = list(range(101, 109))
BOUNDARIES = Boundaries.of(CHAIN)


class RecordingIndex(FaultyIndex):
    """Keeps what is written."""

    def __init__(self) -> None:
        super().__init__(lease_s=float("inf"))
        self.written: list[Commit] = []

    async def commit(self, commit: Commit) -> Mapping[int, int]:
        self.written.append(commit)
        return await super().commit(commit)

    def post(self, commit: Commit) -> None:
        self.written.append(commit)
        super().post(commit)

    def verbs(self) -> list[tuple[str, int, tuple[int, ...]]]:
        return [(commit.verb, commit.incarnation, commit.boundaries.depths) for commit in self.written]


async def _world() -> tuple[RecordingIndex, WorkerLink, WorkerLink]:
    index = RecordingIndex()
    one, two = [idle_link(name, incarnation=(await index.register()).incarnation) for name in ("w1", "w2")]
    return index, one, two


def _reservation(
    index: RecordingIndex, *, num_choices: int = 1, number: int = 1, own_claims: OwnClaims | None = None
) -> Reservation:
    return Reservation(
        index,
        BOUNDARIES,
        own_claims=own_claims if own_claims is not None else OwnClaims(),
        number=number,
        proxy_id="a" * 16,
        num_choices=num_choices,
        metrics=ProxyMetrics(),
    )


async def _pending(index: FaultyIndex) -> Mapping[int, int]:
    return (await index.match(CHAIN)).pending


def _is_zero(link: WorkerLink) -> bool:
    return link.ledger.is_idle and sum(link.ledger.waiting_s()) == 0.0


async def test_a_prompt_from_its_placement_to_its_end() -> None:
    index, link, _ = await _world()
    with _reservation(index) as reservation:
        reservation.take(link, prefill_s=2.0, claimed_blocks=0)
        assert sum(link.ledger.waiting_s()) == 2.0
        assert await reservation.commit() == {}
        assert await _pending(index) == {link.incarnation: 8}
        (choice,) = reservation.choices
        choice.started()
        choice.first_token()
        choice.first_token()
        choice.gone()
        assert _is_zero(link), "before the scope ends"
    assert index.verbs() == [
        ("place", link.incarnation, BOUNDARIES.depths),
        ("settle", link.incarnation, BOUNDARIES.depths),
    ]
    assert [sum(commit.load.waiting_s) for commit in index.written] == [2.0, 0.0]
    assert [commit.load.running for commit in index.written] == [0, 1]
    assert {commit.request_id for commit in index.written} == {bytes.fromhex("aa" * 8 + "00000001")}


@pytest.mark.parametrize("error", [None, RuntimeError, KeyboardInterrupt])
@pytest.mark.parametrize("started", [False, True])
async def test_whatever_ends_it_before_its_first_token_releases_it(
    started: bool, error: type[BaseException] | None
) -> None:
    index, link, _ = await _world()
    with contextlib.suppress(RuntimeError, KeyboardInterrupt), _reservation(index, num_choices=3) as reservation:
        reservation.take(link, prefill_s=2.0, claimed_blocks=0)
        reservation.post()
        if started:
            reservation.choices[1].started()
        assert (link.ledger.num_waiting, link.ledger.num_running) == ((2, 1) if started else (3, 0))
        if error is not None:
            raise error
    assert [verb for verb, *_ in index.verbs()] == ["place", "release"]
    assert await _pending(index) == {}
    assert _is_zero(link)
    assert index.written[-1].load.running == 0, "the release tells of the load without it"


async def test_only_blocks_that_the_worker_does_not_hold_are_claimed() -> None:
    index, link, _ = await _world()
    with _reservation(index) as reservation:
        reservation.take(link, prefill_s=1.0, claimed_blocks=3)
        reservation.post()
    assert index.verbs()[0] == ("place", link.incarnation, (4, 5, 6, 7, 8))


async def test_where_all_is_held_nothing_is_written() -> None:
    index, link, _ = await _world()
    with _reservation(index) as reservation:
        reservation.take(link, prefill_s=1.0, claimed_blocks=8)
        assert not reservation.has_claims_to_write
        reservation.post()
        reservation.choices[0].first_token()
    assert index.written == []
    assert _is_zero(link)


async def test_all_choices_prefill_once() -> None:
    index, link, _ = await _world()
    with _reservation(index, num_choices=4) as reservation:
        reservation.take(link, prefill_s=2.0, claimed_blocks=0)
        assert (link.ledger.num_waiting, sum(link.ledger.waiting_s())) == (4, 2.0)
        reservation.post()
        reservation.choices[2].first_token()
        reservation.choices[0].first_token()
    assert [verb for verb, *_ in index.verbs()] == ["place", "settle"], "once for the prompt"


async def test_a_move_takes_load_and_claims_along() -> None:
    index, one, two = await _world()
    own_claims = OwnClaims()
    with _reservation(index, own_claims=own_claims) as reservation:
        reservation.take(one, prefill_s=2.0, claimed_blocks=0)
        await reservation.commit()
        left_behind = reservation.choices[0]
        reservation.take(two, prefill_s=0.5, claimed_blocks=6)
        assert (sum(one.ledger.waiting_s()), sum(two.ledger.waiting_s())) == (0.0, 0.5)
        reservation.post()
        reservation.post_load_of(one)
        assert await _pending(index) == {two.incarnation: 8}, "also on the blocks that the new one holds already"
        assert own_claims.depths(BOUNDARIES, 2) == {two.incarnation: 8}
        left_behind.started()
        assert one.ledger.is_idle
        loads = (await index.match(CHAIN, candidates=[one.incarnation, two.incarnation])).loads
        waiting = {incarnation: sum(load.proxies["a" * 16].waiting_s) for incarnation, load in loads.items()}
        assert waiting == {one.incarnation: 0.0, two.incarnation: 0.5}
    assert await _pending(index) == {}
    assert _is_zero(one) and _is_zero(two)


async def test_a_claim_that_a_later_request_took_over_stays_when_the_first_is_released() -> None:
    index, link, _ = await _world()
    with _reservation(index, number=2) as later:
        with _reservation(index) as first:
            for reservation in (first, later):
                reservation.take(link, prefill_s=2.0, claimed_blocks=0)
                reservation.post()
        assert await _pending(index) == {link.incarnation: 8}
        assert sum(link.ledger.waiting_s()) == 2.0
    assert await _pending(index) == {}


async def test_a_store_that_is_away_costs_nothing_but_the_claims() -> None:
    index, link, _ = await _world()
    index.faults.unavailable = True
    with _reservation(index) as reservation:
        reservation.take(link, prefill_s=2.0, claimed_blocks=0)
        reservation.post()
        reservation.choices[0].first_token()
    assert _is_zero(link)


async def test_the_process_itself_knows_its_claims_from_the_placement_to_the_first_token() -> None:
    index, link, _ = await _world()
    own_claims = OwnClaims()
    with _reservation(index, own_claims=own_claims) as settled, _reservation(index, number=2, own_claims=own_claims):
        settled.take(link, prefill_s=2.0, claimed_blocks=0)
        assert own_claims.depths(BOUNDARIES, 2) == {link.incarnation: 8}, "before anything is written"
        settled.choices[0].first_token()
        assert len(own_claims) == 0
    with _reservation(index, own_claims=own_claims) as ended:
        ended.take(link, prefill_s=2.0, claimed_blocks=0)
        assert len(own_claims) > 0
    assert len(own_claims) == 0
