"""A generation whose worker fails it, drains or is gone: it goes on elsewhere, and nobody sees where."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from contextlib import AsyncExitStack, ExitStack
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from prefixcache.errors import InvalidRequest, NoWorkerReady, Overloaded, Unavailable, WorkerFault
from prefixcache.limits import MAX_MOVES, RETRY_AFTER_S
from prefixcache.protocol import End, Generate, Sampling, Started, Step, StepEntry, Usage
from prefixcache.types import unpack_tokens
from proxy import held_requests
from proxy.generation import Generation
from proxy.generation_group import GenerationGroup
from tests.support.fake_worker import made_up_logprobs, token_ids
from tests.support.tiny_tokenizer import TINY_EOS_ID
from tests.support.waiting import eventually
from tests.unit.proxy.test_placer import prompt
from tests.unit.proxy.test_whereabouts import Wire, World, _fail, _of

TEXT = "Hello world, né \N{BALLOON} ok!"
IDS = token_ids(TEXT)


@pytest.fixture(autouse=True)
def _quick_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(held_requests, "HELD_POLL_S", 0.001)


async def _connected(scopes: ExitStack, num_workers: int = 2) -> World:
    """Workers that are there only while their stream is."""
    world = await _of(scopes, num_workers)
    world.proxy.fleet.only_connected = True
    return world


def _say(wire: Wire, ids: Sequence[int], index: int, *, is_scored: bool = False) -> None:
    logprobs = made_up_logprobs(ids, 1 if is_scored else None)
    wire.say(Step(entries=(StepEntry(id=wire.last.id, index=index, ids=tuple(ids), logprobs=logprobs),)))


def _end(wire: Wire, output_tokens: int, cached_tokens: int = 0, reason: Any = "stop") -> None:
    usage = Usage(
        cached_tokens=cached_tokens,
        computed_tokens=0,
        output_tokens=output_tokens,
        queue_s=0,
        prefill_s=0,
        decode_s=0,
        preemptions=0,
    )
    wire.say(End(id=wire.last.id, reason=reason, usage=usage))


def _output(wire: Wire) -> tuple[int, ...]:
    return tuple(unpack_tokens(wire.last.output_ids))


def _kill(wire: Wire) -> None:
    wire.transport.abort()


async def _play(
    cuts: Sequence[int], *, ids_a_step: int, num_repeated: int = 0, **options: Any
) -> tuple[World, Generation]:
    """All of IDS, by a worker that is lost after each of the `cuts`; the next one may repeat what came before."""
    is_scored = bool(options.get("is_scored"))
    with ExitStack() as scopes:
        world = await _connected(scopes, num_workers=1 + len(cuts))
        (member,) = await world.generations(max_tokens=100, **options)
        async with member as generation:
            done = 0
            for place, until in enumerate([*cuts, len(IDS)]):
                wire = world.at(generation)
                assert _output(wire) == IDS[:done]
                wire.say(Started(id=wire.last.id, cached_tokens=10 + place))
                begin = max(0, done - num_repeated)
                while begin < until and generation.finish_reason is None:
                    end = min(begin + ids_a_step, until)
                    _say(wire, IDS[begin:end], begin, is_scored=is_scored)
                    begin = end
                if generation.finish_reason is not None:
                    _end(wire, begin, reason="aborted")
                    break
                if until == len(IDS):
                    _end(wire, len(IDS) - len(_output(wire)), cached_tokens=99)
                else:
                    _kill(wire)
                    done = until
            assert generation.done.done() and generation.error is None
    assert world.is_quiet()
    return world, generation


@settings(max_examples=60, deadline=None)
@given(
    cuts=st.lists(st.integers(0, len(IDS) - 1), max_size=MAX_MOVES).map(sorted),
    ids_a_step=st.integers(1, 4),
    num_repeated=st.integers(0, 3),
    stop=st.sampled_from([None, "né \N{BALLOON}", "world", "ok!", "!?", "\N{BALLOON}"]),
    is_scored=st.booleans(),
)
async def test_any_seam_is_invisible(
    cuts: list[int], ids_a_step: int, num_repeated: int, stop: str | None, is_scored: bool
) -> None:
    options: dict[str, Any] = {"stops": (stop,) if stop else (), "is_scored": is_scored}
    world, generation = await _play(cuts, ids_a_step=ids_a_step, num_repeated=num_repeated, **options)
    whole, undisturbed = await _play([], ids_a_step=1, **options)
    assert "".join(world.texts) == "".join(whole.texts) == (TEXT.split(stop)[0] if stop else TEXT)
    assert world.tokens == whole.tokens
    assert generation.finish_reason == undisturbed.finish_reason
    assert generation.output_tokens == undisturbed.output_tokens
    assert sum(world.counts) >= generation.output_tokens


async def test_what_the_next_worker_is_told() -> None:
    with ExitStack() as scopes:
        world = await _connected(scopes, num_workers=3)
        sampling = Sampling(seed=0, temperature=0.5, presence_penalty=1.0, min_tokens=7)
        (member,) = await world.generations(max_tokens=20, seed=5, sampling=sampling, stop_token_ids=(9,))
        async with member as generation:
            first = world.at(generation).last
            _say(world.at(generation), IDS[:4], 0)
            _kill(world.at(generation))
            second = world.at(generation).last
            assert _output(world.at(generation)) == IDS[:4]
            assert (second.max_tokens, second.sampling, second.stop_token_ids) == (
                first.max_tokens,
                first.sampling,
                first.stop_token_ids,
            )
            assert (second.prompt_ids, second.root, second.choice) == (first.prompt_ids, first.root, first.choice)
            assert second.predicted_hit_tokens is None
            prefill_s = sum(world.at(generation).link.ledger.waiting_s())
            assert prefill_s == pytest.approx((1_000 + 4) / 1_000), "what was generated is computed, too"
    assert world.is_quiet()


async def test_the_account_is_one_of_the_whole() -> None:
    with ExitStack() as scopes:
        world = await _connected(scopes, num_workers=3)
        async with await world.generation() as generation:
            wire = world.at(generation)
            wire.say(Started(id=wire.last.id, cached_tokens=64))
            _kill(wire)  # nothing came of it: the next one begins
            began = world.at(generation)
            began.say(Started(id=began.last.id, cached_tokens=32))
            _say(began, IDS[:4], 0)
            _kill(began)
            wire = world.at(generation)
            wire.say(Started(id=wire.last.id, cached_tokens=0))
            _say(wire, IDS[4:], 4)
            _end(wire, len(IDS) - 4)
            assert (generation.cached_tokens, generation.output_tokens) == (32, len(IDS))
            assert generation.usage is None, "no worker can account for it"
            assert generation.whereabouts.begun.link is began.link
            assert generation.whereabouts.placement.link is wire.link
        assert (world.count("moved"), world.count("failed")) == (2, 0)


@pytest.mark.parametrize("max_tokens", [100, len(IDS)])
async def test_one_that_has_all_its_tokens_needs_nobody(max_tokens: int) -> None:
    """Only its worker's last word is missing."""
    ids = IDS if max_tokens == len(IDS) else (*IDS, TINY_EOS_ID)
    with ExitStack() as scopes:
        world = await _connected(scopes)
        (member,) = await world.generations(max_tokens=max_tokens)
        async with member as generation:
            before, (other,) = world.at(generation), world.others(generation)
            _say(before, ids, 0)
            _kill(before)
            assert generation.done.done() and generation.error is None
            assert generation.finish_reason == ("length" if ids is IDS else "stop")
            assert generation.output_tokens == len(ids)
            assert "".join(world.texts) == TEXT and not other.frames(Generate)
        assert world.count("whole") == 1
    assert world.is_quiet()


async def test_faults_are_bounded_and_a_worker_that_fails_it_does_not_get_it_again(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with ExitStack() as scopes:
        world = await _connected(scopes, num_workers=MAX_MOVES + 2)
        async with await world.generation() as generation:
            _say(world.at(generation), IDS[:1], 0)
            for _ in range(MAX_MOVES + 1):
                assert generation.error is None
                _fail(world.at(generation), "worker_fault")
            assert isinstance(generation.error, WorkerFault)
        assert sorted(len(wire.frames(Generate)) for wire in world.wires.values()) == [0] + [1] * (MAX_MOVES + 1)
        assert (world.count("moved"), world.count("failed")) == (MAX_MOVES, 1)
        told = [record.getMessage() for record in caplog.records if record.name == "proxy.whereabouts"]
        assert len(told) == MAX_MOVES + 1 and "goes on at worker w" in told[0] and "after 1 tokens" in told[0]
    assert world.is_quiet()


async def test_one_that_gets_on_is_not_what_breaks_its_workers() -> None:
    with ExitStack() as scopes:
        world = await _connected(scopes, num_workers=len(IDS) + MAX_MOVES)
        async with await world.generation() as generation:
            for place in range(len(IDS) - 1):
                _say(world.at(generation), IDS[place : place + 1], place)
                _fail(world.at(generation), "worker_fault")
                assert generation.error is None
            for _ in range(MAX_MOVES):
                assert generation.error is None
                _fail(world.at(generation), "worker_fault")
            assert isinstance(generation.error, WorkerFault), "no token came since"
    assert world.is_quiet()


@pytest.mark.parametrize("bad", [512, 2**32 - 1, 2**32, -1])
async def test_an_impossible_token_goes_nowhere(bad: int) -> None:
    """Neither to the client nor to the next worker, which would refuse it."""
    with ExitStack() as scopes:
        world = await _connected(scopes)
        async with await world.generation() as generation:
            before, (other,) = world.at(generation), world.others(generation)
            _say(before, IDS[:2], 0)
            _say(before, (IDS[2], bad), 2)
            assert _output(other) == IDS[:2] and before.num_aborted == 1
            _say(other, IDS[2:], 2)
            _end(other, len(IDS) - 2)
            assert generation.error is None
        assert "".join(world.texts) == TEXT
    assert world.is_quiet()


@pytest.mark.parametrize("num_before", [0, 2])
async def test_what_one_worker_had_begun_and_another_one_refuses_is_no_fault_of_the_client(num_before: int) -> None:
    with ExitStack() as scopes:
        world = await _connected(scopes, num_workers=3)
        async with await world.generation() as generation:
            world.at(generation).say(Started(id=world.at(generation).last.id, cached_tokens=0))
            _say(world.at(generation), IDS[:num_before], 0)
            _kill(world.at(generation))
            _fail(world.at(generation), "refused")
            assert generation.error is None, "another one may take it"
            _fail(world.at(generation), "refused")
            assert world.held.num_held == 1, "the first one may come back"
        with ExitStack() as others:
            lone = await _connected(others, num_workers=2)
            async with await lone.generation() as generation:
                lone.at(generation).say(Started(id=lone.at(generation).last.id, cached_tokens=0))
                _say(lone.at(generation), IDS[:num_before], 0)
                _fail(lone.at(generation), "worker_fault")
                _fail(lone.at(generation), "refused")
                assert isinstance(generation.error, WorkerFault) and "refused to go on" in str(generation.error)
    assert world.is_quiet()


async def test_workers_that_are_lost_before_they_began_are_not_its_fault() -> None:
    """As when all are killed at once: it was sent on to one whose end had not been seen yet."""
    with ExitStack() as scopes:
        world = await _connected(scopes, num_workers=2 * MAX_MOVES + 2)
        async with await world.generation() as generation:
            for _ in range(MAX_MOVES + 1):
                _kill(world.at(generation))
                assert generation.error is None
            for place in range(MAX_MOVES):
                world.at(generation).say(Started(id=world.at(generation).last.id, cached_tokens=0))
                _kill(world.at(generation))
                assert generation.error is None, f"{place} began it"
            world.at(generation).say(Started(id=world.at(generation).last.id, cached_tokens=0))
            _kill(world.at(generation))
            assert isinstance(generation.error, WorkerFault)
    assert world.is_quiet()


async def test_workers_that_drain_cost_nothing_however_many() -> None:
    with ExitStack() as scopes:
        world = await _connected(scopes, num_workers=MAX_MOVES + 3)
        async with await world.generation() as generation:
            for place in range(MAX_MOVES + 2):
                _say(world.at(generation), IDS[place : place + 1], place)
                _fail(world.at(generation), "draining")
                assert generation.error is None
            _say(world.at(generation), IDS[MAX_MOVES + 2 :], MAX_MOVES + 2)
            _end(world.at(generation), len(IDS) - MAX_MOVES - 2)
        assert "".join(world.texts) == TEXT
    assert world.is_quiet()


async def test_a_wrong_request_is_wrong_everywhere() -> None:
    with ExitStack() as scopes:
        world = await _connected(scopes)
        async with await world.generation() as generation:
            _fail(world.at(generation), "overloaded")
            _fail(world.at(generation), "refused")
            assert isinstance(generation.error, InvalidRequest)
    assert world.is_quiet()


async def test_what_the_proxy_finds_wrong_is_a_fault_too() -> None:
    with ExitStack() as scopes:
        world = await _connected(scopes, num_workers=3)
        async with await world.generation() as generation:
            first = world.at(generation)
            _say(first, IDS[:2], 0)
            _say(first, IDS[3:], 3)
            second = world.at(generation)
            assert second is not first and first.frames(Generate) and first.num_aborted == 1
            _end(second, 0, reason="aborted")
            third = world.at(generation)
            _say(third, IDS[2:], 2)
            _end(third, len(IDS) - 2)
            assert generation.error is None
        assert "".join(world.texts) == TEXT
    assert world.is_quiet()


async def test_a_lone_worker_that_is_lost_and_comes_back_goes_on_itself() -> None:
    with ExitStack() as scopes:
        world = await _connected(scopes, num_workers=1)
        async with await world.generation() as generation:
            _say(world.at(generation), IDS[:4], 0)
            _kill(world.at(generation))
            assert (world.held.num_held, world.is_quiet()) == (1, True), "it waits, and is nowhere"
            again = Wire(world.proxy.links[0])
            await eventually(lambda: again.frames(Generate))
            assert _output(again) == IDS[:4]
            _say(again, IDS[4:], 4)
            _end(again, len(IDS) - 4)
        assert "".join(world.texts) == TEXT
        assert (world.count("waited"), world.held.num_held) == (1, 0)
    assert world.is_quiet()


async def test_one_that_comes_back_is_the_last_to_be_asked() -> None:
    with ExitStack() as scopes:
        world = await _connected(scopes, num_workers=2)
        async with await world.generation() as generation:
            before, (other,) = world.at(generation), world.others(generation)
            _say(before, IDS[:1], 0)
            _kill(other)
            _kill(before)
            assert world.held.num_held == 1
            again = Wire(before.link)
            other_again = Wire(other.link)
            await eventually(lambda: other_again.frames(Generate))
            assert not again.frames(Generate)
    assert world.is_quiet()


async def test_one_that_failed_it_gets_it_again_only_as_another_process() -> None:
    with ExitStack() as scopes:
        world = await _connected(scopes, num_workers=2)
        async with await world.generation() as generation:
            before, (other,) = world.at(generation), world.others(generation)
            _kill(other)
            _fail(before, "worker_fault")
            assert world.held.num_held == 1, "the other one may come back"
            _kill(before)
            same = Wire(before.link)
            await asyncio.sleep(0.01)
            assert world.held.num_held == 1 and not same.frames(Generate)
            _kill(same)
            before.link._started_at += 1.0
            new = Wire(before.link)
            await eventually(lambda: new.frames(Generate))
    assert world.is_quiet()


async def test_where_all_there_are_have_failed_it_nobody_is_waited_for() -> None:
    with ExitStack() as scopes:
        world = await _connected(scopes, num_workers=1)
        async with await world.generation() as generation:
            _say(world.at(generation), IDS[:1], 0)
            _fail(world.at(generation), "worker_fault")
            assert isinstance(generation.error, WorkerFault) and world.held.num_held == 0
    assert world.is_quiet()


@pytest.mark.parametrize("has_token", [False, True])
async def test_nobody_comes_in_time(has_token: bool) -> None:
    with ExitStack() as scopes:
        world = await _connected(scopes, num_workers=1)
        world.held._patience_s = 0.01
        async with await world.generation() as generation:
            if has_token:
                _say(world.at(generation), IDS[:1], 0)
            _kill(world.at(generation))
            await generation.done
            assert type(generation.error) is Unavailable, "not NoWorkerReady, for which the whole request would wait"
        assert (world.count("failed"), world.held.num_held) == (1, 0)
    assert world.is_quiet()


async def test_a_client_that_leaves_while_it_waits_leaves_nothing(caplog: pytest.LogCaptureFixture) -> None:
    with ExitStack() as scopes:
        world = await _connected(scopes, num_workers=1)
        async with await world.generation() as generation:
            _say(world.at(generation), IDS[:1], 0)
            _kill(world.at(generation))
            assert world.held.num_held == 1
        again = Wire(world.proxy.links[0])
        await eventually(lambda: world.held.num_held == 0)
        await asyncio.sleep(0.01)
        assert not again.frames(Generate) and world.count("left") == 1
    assert world.is_quiet()
    assert not [record for record in caplog.records if record.levelno >= logging.ERROR]


async def test_a_client_that_leaves_in_the_moment_in_which_a_worker_comes() -> None:
    with ExitStack() as scopes:
        world = await _connected(scopes, num_workers=1)
        async with await world.generation() as generation:
            _say(world.at(generation), IDS[:1], 0)
            _kill(world.at(generation))
            again = Wire(world.proxy.links[0])
            world.held._look()
            assert generation._held is not None and generation._held.done()
        await asyncio.sleep(0.01)
        assert not again.frames(Generate) and world.count("left") == 1
    assert world.is_quiet()


@pytest.mark.parametrize("after_a_wait", [False, True])
async def test_a_fault_of_our_own_on_the_way_ends_it_and_leaves_its_neighbours(
    monkeypatch: pytest.MonkeyPatch, after_a_wait: bool
) -> None:
    with ExitStack() as scopes:
        world = await _connected(scopes, num_workers=1)
        members = await world.generations(n=2)
        async with AsyncExitStack() as entered:
            for member in members:
                await entered.enter_async_context(member)
            (wire,) = world.wires.values()
            for frame in wire.frames(Generate):
                wire.say(Step(entries=(StepEntry(id=frame.id, index=0, ids=IDS[:1]),)))

            def fails(*_: object, **__: object) -> None:
                raise RuntimeError("a fault of our own")

            if after_a_wait:
                _kill(wire)
                monkeypatch.setattr(world.proxy.placer, "place_elsewhere", fails)
                Wire(world.proxy.links[0])
                await asyncio.gather(*(member.done for member in members))
                assert all(isinstance(member.error, RuntimeError) for member in members)
            else:
                monkeypatch.setattr(world.proxy.placer, "takers", fails)
                _fail(wire, "worker_fault")
                assert isinstance(members[1].error, RuntimeError) and members[0].error is None
                _say_to(wire, 0, IDS[1:2], 1)
                assert len(members[0].whereabouts.output) == 2
    assert world.is_quiet()


def _say_to(wire: Wire, place: int, ids: Sequence[int], index: int) -> None:
    frame = wire.frames(Generate)[place]
    wire.say(Step(entries=(StepEntry(id=frame.id, index=index, ids=tuple(ids)),)))


async def test_too_many_wait_already() -> None:
    with ExitStack() as scopes:
        world = await _connected(scopes, num_workers=1)
        world.held.most_held = 0
        async with await world.generation() as generation:
            _say(world.at(generation), IDS[:1], 0)
            _kill(world.at(generation))
            assert isinstance(generation.error, Overloaded)
    assert world.is_quiet()


async def test_what_has_begun_waits_for_a_full_worker_and_asks_it_after_a_while() -> None:
    with ExitStack() as scopes:
        world = await _connected(scopes)
        async with await world.generation() as generation:
            before, (other,) = world.at(generation), world.others(generation)
            _say(before, IDS[:1], 0)
            _kill(before)
            _fail(other, "overloaded")
            await asyncio.sleep(0.01)
            assert (world.held.num_held, len(other.frames(Generate))) == (1, 1), "not at once again"
            world.clock.now += RETRY_AFTER_S
            await eventually(lambda: len(other.frames(Generate)) == 2)
            _say(other, IDS[1:], 1)
            _end(other, len(IDS) - 1)
        assert "".join(world.texts) == TEXT
    assert world.is_quiet()


async def test_patience_begins_anew_with_each_token() -> None:
    with ExitStack() as scopes:
        world = await _connected(scopes, num_workers=1)
        async with await world.generation() as generation:
            patience = None
            for place in range(2):
                _say(world.at(generation), IDS[place : place + 1], place)
                _kill(world.at(generation))
                assert generation.whereabouts._patience is not patience
                patience = generation.whereabouts._patience
                world.wires = {link.worker_id: Wire(link) for link in world.proxy.links}
                await eventually(lambda: world.at(generation).frames(Generate))
            _kill(world.at(generation))
            assert generation.whereabouts._patience is patience, "no token came since"
    assert world.is_quiet()


async def test_a_worker_with_too_short_a_context_does_not_get_the_rest_of_it() -> None:
    with ExitStack() as scopes:
        world = await _connected(scopes)
        (member,) = await world.generations(max_tokens=20)
        async with member as generation:
            before, (other,) = world.at(generation), world.others(generation)
            other.link.record = replace(other.link.record, max_model_len=1_000 + 19)
            _say(before, IDS[:4], 0)
            _kill(before)
            assert world.held.num_held == 1 and not other.frames(Generate)
            other.link.record = replace(other.link.record, max_model_len=1_000 + 20)
            await eventually(lambda: other.frames(Generate))
            assert other.last.max_tokens == 20
    assert world.is_quiet()


@pytest.mark.parametrize("usual", [None, 200])
async def test_without_a_limit_of_the_client_a_shorter_context_does(usual: int | None) -> None:
    """What is left is what there is room for; never more than the first one promised."""
    with ExitStack() as scopes:
        world = await _connected(scopes, num_workers=3)
        (member,) = await world.generations(usual_max_tokens=usual)
        async with member as generation:
            first, (second, third) = world.at(generation), world.others(generation)
            most = first.last.max_tokens
            assert most == (usual or 4096 - 1_000)
            second.link.record = replace(second.link.record, max_model_len=1_000 + 50)
            third.link.record = replace(third.link.record, max_model_len=1_000 + 4)
            _say(first, IDS[:4], 0)
            _kill(first)
            assert world.at(generation) is second, "the other one has no room for a single token"
            assert second.last.max_tokens == 50
            third.link.record = replace(third.link.record, max_model_len=100_000)
            _kill(second)
            assert world.at(generation) is third and third.last.max_tokens == 50
    assert world.is_quiet()


async def test_where_nobody_who_may_come_has_the_room_that_is_said_at_once(caplog: pytest.LogCaptureFixture) -> None:
    with ExitStack() as scopes:
        world = await _connected(scopes)
        (member,) = await world.generations(max_tokens=20)
        async with member as generation:
            before, (other,) = world.at(generation), world.others(generation)
            other.link.record = replace(other.link.record, max_model_len=1_000 + 19)
            _say(before, IDS[:4], 0)
            world.proxy.links.remove(before.link)
            before.link.record = replace(before.link.record, max_model_len=1_000 + 19)
            _kill(before)
            assert type(generation.error) is Unavailable and "1020 tokens" in str(generation.error)
            assert world.held.num_held == 0
    assert world.is_quiet()


async def test_one_that_fits_nobody_waits_without_trying_and_tells_it_once(caplog: pytest.LogCaptureFixture) -> None:
    with ExitStack() as scopes:
        world = await _connected(scopes)
        (member,) = await world.generations(max_tokens=20)
        async with member as generation:
            before, (other,) = world.at(generation), world.others(generation)
            other.link.record = replace(other.link.record, max_model_len=1_000 + 19)
            _say(before, IDS[:4], 0)
            _kill(before)
            for _ in range(5):
                world.held._look()
            assert world.held.num_held == 1 and not other.frames(Generate)
            again = Wire(before.link)
            await eventually(lambda: again.frames(Generate))
            assert generation.error is None
        placed = world.proxy.metrics.held_requests.labels("placed")._value.get()
        told = [record.getMessage() for record in caplog.records if "waits for a worker" in record.getMessage()]
        assert (placed, len(told), world.count("waited")) == (1, 1, 1)
    assert world.is_quiet()


async def test_where_the_only_one_with_room_failed_it_nobody_is_waited_for() -> None:
    with ExitStack() as scopes:
        world = await _connected(scopes)
        (member,) = await world.generations(max_tokens=20)
        async with member as generation:
            before, (other,) = world.at(generation), world.others(generation)
            other.link.record = replace(other.link.record, max_model_len=1_000 + 19)
            _say(before, IDS[:4], 0)
            _fail(before, "worker_fault")
            assert isinstance(generation.error, WorkerFault) and world.held.num_held == 0
    assert world.is_quiet()


async def test_siblings_stay_where_they_are() -> None:
    with ExitStack() as scopes:
        world = await _connected(scopes)
        members = await world.generations(n=3)
        async with GenerationGroup(members) as group:
            before, (other,) = world.at(members[0]), world.others(members[0])
            frames = before.frames(Generate)
            before.say(Step(entries=tuple(StepEntry(id=frame.id, index=0, ids=IDS[:2]) for frame in frames)))
            _fail(before, "worker_fault")  # the last choice
            assert [world.at(each) for each in members] == [before, before, other]
            assert (other.last.choice, _output(other)) == (2, IDS[:2])
            assert not group.done.done()
            _kill(before)
            assert [world.at(each) for each in members] == [other] * 3
            for frame in other.frames(Generate):
                other.say(Step(entries=(StepEntry(id=frame.id, index=2, ids=IDS[2:]),)))
                usage = Usage(
                    cached_tokens=0,
                    computed_tokens=0,
                    output_tokens=len(IDS) - 2,
                    queue_s=0,
                    prefill_s=0,
                    decode_s=0,
                    preemptions=0,
                )
                other.say(End(id=frame.id, reason="stop", usage=usage))
            await group.done
            assert group.error is None
            assert [each.output_tokens for each in members] == [len(IDS)] * 3
    assert world.is_quiet()


async def test_claims_on_a_worker_that_lost_all_choices_are_released_at_once() -> None:
    with ExitStack() as scopes:
        world = await _connected(scopes)
        async with AsyncExitStack() as members:
            for member in await world.generations(n=2):
                await members.enter_async_context(member)
            before, (other,) = world.at(member), world.others(member)
            assert set(await _pending(world)) == {before.link.incarnation}
            _kill(before)
            assert set(await _pending(world)) == {other.link.incarnation}
            assert before.link.ledger.is_idle and other.link.ledger.num_waiting == 2
    assert world.is_quiet() and await _pending(world) == {}
    claims = world.proxy.metrics.pending_claims
    placed, settled, released = (claims.labels(change)._value.get() for change in ("placed", "settled", "released"))
    assert placed == settled + released == 3


async def test_claims_on_a_lost_worker_are_released_while_there_is_no_other() -> None:
    with ExitStack() as scopes:
        world = await _connected(scopes, num_workers=1)
        async with await world.generation():
            assert await _pending(world)
            _kill(world.wires["w1"])
            assert world.held.num_held == 1 and await _pending(world) == {}
            again = Wire(world.proxy.links[0])
            await eventually(lambda: again.frames(Generate))
            assert await _pending(world)
    assert world.is_quiet() and await _pending(world) == {}


async def _pending(world: World) -> dict[int, int]:
    return dict((await world.index.match(prompt().index_hashes)).pending)


async def test_one_without_a_token_whose_sibling_has_begun_is_not_refused() -> None:
    """What would be a 429 alone would break the whole answer."""
    with ExitStack() as scopes:
        world = await _connected(scopes, num_workers=1)
        members = await world.generations(n=2)
        async with GenerationGroup(members) as group:
            (wire,) = world.wires.values()
            first, _ = wire.frames(Generate)
            wire.say(Step(entries=(StepEntry(id=first.id, index=0, ids=IDS[:2]),)))
            _fail(wire, "overloaded")
            assert world.held.num_held == 1 and group.error is None
            world.clock.now += RETRY_AFTER_S
            await eventually(lambda: len(wire.frames(Generate)) == 3)
    assert world.is_quiet()


async def test_a_proxy_that_shuts_down_ends_those_that_wait() -> None:
    with ExitStack() as scopes:
        world = await _connected(scopes, num_workers=1)
        async with await world.generation() as generation:
            _say(world.at(generation), IDS[:1], 0)
            _kill(world.at(generation))
            error = Unavailable("shutting down")
            world.held.turn_away(error)
            await generation.done
            assert generation.error is error
    assert world.is_quiet()


async def test_a_refusal_that_cost_nothing_is_left_to_the_whole_request() -> None:
    with ExitStack() as scopes:
        world = await _connected(scopes, num_workers=1)
        async with await world.generation() as generation:
            _fail(world.at(generation), "draining")
            assert isinstance(generation.error, NoWorkerReady) and world.held.num_held == 0
        assert world.count("failed") == 0, "it had not begun"
    assert world.is_quiet()
