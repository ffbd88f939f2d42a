"""Where a generation goes that its worker refuses, loses or gives back."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any, cast

import pytest

from prefixcache.errors import InvalidRequest, NoWorkerReady, Overloaded, Unavailable, WorkerFault
from prefixcache.limits import MAX_MOVES
from prefixcache.protocol import Abort, End, Fail, Generate, Hello, Started, Step, StepEntry, Usage, encode
from prefixcache.protocol import decode_from_proxy as decode
from proxy.generation import Generation, MoveOutcome
from proxy.held_requests import HeldRequests
from proxy.prompt_frames import PromptFrames
from proxy.sampling_fields import GenerationOptions
from proxy.scored_tokens import ScoredToken, ScoredTokens
from proxy.whereabouts import Ways, Whereabouts
from proxy.worker_link import WorkerLink
from proxy.worker_stream import WorkerStream
from tests.support.fake_worker import token_ids
from tests.support.manual_clock import ManualClock
from tests.support.memory_store import FaultyIndex
from tests.support.recording_transport import RecordingTransport
from tests.unit.proxy.test_generation import RENDERER
from tests.unit.proxy.test_placer import Proxy, _world, prompt

SPACE = "0123456789abcdef"
IDS = token_ids("hello")


class Wire:
    """The worker's end of one link's stream."""

    def __init__(self, link: WorkerLink, minor: int = 2) -> None:
        self.link = link
        stream = WorkerStream(link.worker_id, Hello(namespace=SPACE), lambda beat: None)
        self.transport = RecordingTransport(stream)
        stream.connection_made(self.transport)
        stream.data_received(encode(Hello(namespace=SPACE, incarnation=link.incarnation, minor=minor)))
        self._stream = link._stream = stream
        link._pulse.connected(asyncio.get_running_loop().time())

    def frames(self, kind: type[Any]) -> Sequence[Any]:
        return [frame for frame in map(decode, self.transport.frames()) if isinstance(frame, kind)]

    @property
    def last(self) -> Generate:
        return cast(Generate, self.frames(Generate)[-1])

    @property
    def num_asked_back(self) -> int:
        return sum(frame.if_waiting for frame in self.frames(Abort))

    @property
    def num_aborted(self) -> int:
        return sum(not frame.if_waiting for frame in self.frames(Abort))

    def say(self, frame: Any) -> None:
        self._stream.data_received(encode(frame))

    def ends(self, reason: Any = "stop", output_tokens: int = 0) -> None:
        usage = Usage(
            cached_tokens=0,
            computed_tokens=0,
            output_tokens=output_tokens,
            queue_s=0,
            prefill_s=0,
            decode_s=0,
            preemptions=0,
        )
        self.say(End(id=self.last.id, reason=reason, usage=usage))

    def answers(self) -> None:
        self.say(Started(id=self.last.id, cached_tokens=3))
        self.say(Step(entries=(StepEntry(id=self.last.id, index=0, ids=IDS),)))
        self.ends(output_tokens=len(IDS))


class World:
    """One generation placed by a real placer, on workers that the test plays."""

    def __init__(self, proxy: Proxy, index: FaultyIndex, scopes: ExitStack, minor: int = 2) -> None:
        self.proxy = proxy
        self.index = index
        self.wires = {link.worker_id: Wire(link, minor) for link in proxy.links}
        self.scopes = scopes
        self.movable: set[Generation] = set()
        self.texts: list[str] = []
        self.outcomes: list[MoveOutcome] = []
        self.tokens: list[ScoredToken] = []
        self.counts: list[int] = []
        self.clock = ManualClock(0.0)
        self.held = HeldRequests(lambda _: True, proxy.metrics)
        self._numbers = itertools.count(1)

    async def generation(self, *, is_alone: bool = True, num_choices: int = 1) -> Generation:
        """The first choice of a prompt."""
        return (await self.generations(is_alone=is_alone, n=num_choices))[0]

    async def generations(
        self,
        *,
        is_alone: bool = False,
        stops: tuple[str, ...] = (),
        is_scored: bool = False,
        **options: Any,
    ) -> list[Generation]:
        """All choices of a prompt."""
        asked = prompt()
        (reserved,) = await self.proxy.place(self.scopes, asked, **options)
        frames = PromptFrames(
            asked, GenerationOptions(model="tiny", **options), request_numbers=self._numbers, received_at=0.0
        )
        ways = Ways(placer=self.proxy.placer, held=self.held, metrics=self.proxy.metrics, clock=self.clock)
        return [
            Generation(
                Whereabouts(ways, reserved, frames, choice, self.scopes, is_alone=is_alone),
                detokenizer=RENDERER.detokenizer(),
                stop_strings=stops,
                scored=ScoredTokens(RENDERER.token_bytes) if is_scored else None,
                on_text=self._take_text,
                on_tokens=self.counts.append,
                movable=self.movable,
            )
            for choice in range(options.get("n", 1))
        ]

    def _take_text(self, text: str, tokens: Sequence[ScoredToken]) -> None:
        self.texts.append(text)
        self.tokens += tokens

    def count(self, outcome: str) -> float:
        return float(self.proxy.metrics.continuations.labels(outcome)._value.get())

    def at(self, generation: Generation) -> Wire:
        return self.wires[generation.whereabouts.placement.link.worker_id]

    def others(self, generation: Generation) -> list[Wire]:
        return [wire for wire in self.wires.values() if wire is not self.at(generation)]

    def is_quiet(self) -> bool:
        return all(link.ledger.is_idle for link in self.proxy.links) and not self.movable


async def _of(scopes: ExitStack, num_workers: int = 2, minor: int = 2) -> World:
    index, (proxy,) = await _world(num_workers=num_workers)
    return World(proxy, index, scopes, minor)


def _fail(wire: Wire, kind: Any, retry_after_s: float = 0.0) -> None:
    wire.say(Fail(id=wire.last.id, kind=kind, message="told", retry_after_s=retry_after_s))


async def test_it_is_moved_back_and_forth_a_bounded_number_of_times() -> None:
    with ExitStack() as scopes:
        world = await _of(scopes)
        async with await world.generation() as generation:
            ids: list[str] = []
            for _ in range(MAX_MOVES):
                assert world.movable == {generation}
                before, (other,) = world.at(generation), world.others(generation)
                ids.append(before.last.id)
                generation.move_to(other.link, world.outcomes.append)
                assert before.num_asked_back and world.movable == set(), "nobody asks for it twice"
                before.ends("aborted")
                assert world.at(generation) is other
            assert world.outcomes == ["moved"] * MAX_MOVES
            assert world.movable == set(), "it waits where it is from now on"
            assert len({*ids, world.at(generation).last.id}) == 1 + MAX_MOVES, "no id comes twice"
            world.at(generation).answers()
            assert generation.done.done() and generation.error is None
            assert (generation.cached_tokens, generation.output_tokens) == (0, len(IDS))
        assert world.texts == ["hello"]
    assert world.is_quiet()


@pytest.mark.parametrize(("minor", "is_alone"), [(1, True), (2, False)])
async def test_one_that_cannot_be_moved(minor: int, is_alone: bool) -> None:
    with ExitStack() as scopes:
        world = await _of(scopes, minor=minor)
        async with await world.generation(is_alone=is_alone):
            assert world.movable == set()


async def test_one_that_goes_on_to_an_older_worker_is_not_movable_any_more() -> None:
    with ExitStack() as scopes:
        world = await _of(scopes)
        async with await world.generation() as generation:
            before, (other,) = world.at(generation), world.others(generation)
            older = world.wires[other.link.worker_id] = Wire(other.link, minor=1)
            assert world.movable == {generation}
            _fail(before, "overloaded")
            assert world.at(generation) is older and world.movable == set(), "it would end what it has begun"
    assert world.is_quiet()


async def test_what_has_started_is_not_movable_any_more() -> None:
    for started in (Started(id="1", cached_tokens=0), Step(entries=(StepEntry(id="1", index=0, ids=IDS),))):
        with ExitStack() as scopes:
            world = await _of(scopes)
            async with await world.generation() as generation:
                world.at(generation).say(started)
                assert world.movable == set()


@pytest.mark.parametrize("crossing", ["started", "step", "end"])
async def test_what_crosses_the_asking_decides(crossing: str) -> None:
    with ExitStack() as scopes:
        world = await _of(scopes)
        async with await world.generation() as generation:
            wire, (other,) = world.at(generation), world.others(generation)
            generation.move_to(other.link, world.outcomes.append)
            if crossing == "started":
                wire.say(Started(id=wire.last.id, cached_tokens=0))
            elif crossing == "step":
                wire.say(Step(entries=(StepEntry(id=wire.last.id, index=0, ids=IDS),)))
            else:
                wire.ends("stop")
            assert world.outcomes == [("failed" if crossing == "end" else "stayed")]
            assert not other.frames(Generate)
            if crossing != "end":
                wire.ends("stop", output_tokens=len(IDS))
            assert generation.finish_reason == "stop"
    assert world.is_quiet() and len(world.outcomes) == 1


@pytest.mark.parametrize("kind", ["overloaded", "draining", "worker_fault"])
async def test_a_failure_that_crosses_the_asking_makes_the_move(kind: str) -> None:
    with ExitStack() as scopes:
        world = await _of(scopes)
        async with await world.generation() as generation:
            (other,) = world.others(generation)
            before = world.at(generation)
            generation.move_to(other.link, world.outcomes.append)
            _fail(before, kind)
            assert world.at(generation) is other and world.outcomes == ["moved"]
            other.answers()
            assert generation.error is None


async def test_a_wrong_request_that_crosses_the_asking_is_wrong() -> None:
    with ExitStack() as scopes:
        world = await _of(scopes)
        async with await world.generation() as generation:
            (other,) = world.others(generation)
            generation.move_to(other.link, world.outcomes.append)
            _fail(world.at(generation), "refused")
            assert isinstance(generation.error, InvalidRequest)
            assert world.outcomes == ["failed"] and not other.frames(Generate)
    assert world.is_quiet()


async def test_a_proxy_that_shuts_down_sends_nothing_anywhere() -> None:
    for asked in (False, True):
        with ExitStack() as scopes:
            world = await _of(scopes)
            async with await world.generation() as generation:
                (other,) = world.others(generation)
                if asked:
                    generation.move_to(other.link, world.outcomes.append)
                world.at(generation)._stream.fail_all(Unavailable("shutting down"))
                assert type(generation.error) is Unavailable
                assert not other.frames(Generate)
        assert world.is_quiet()


async def test_its_scope_ends_while_it_is_asked_back() -> None:
    with ExitStack() as scopes:
        world = await _of(scopes)
        async with await world.generation() as generation:
            wire, (other,) = world.at(generation), world.others(generation)
            generation.move_to(other.link, world.outcomes.append)
        assert world.outcomes == ["left"]
        assert [frame.if_waiting for frame in wire.frames(Abort)] == [True, False]
        wire.ends("aborted")
        assert not other.frames(Generate)
    assert world.is_quiet() and world.outcomes == ["left"]


async def test_the_idle_worker_is_lost_before_it_is_given_back() -> None:
    with ExitStack() as scopes:
        world = await _of(scopes, num_workers=3)
        async with await world.generation() as generation:
            before = world.at(generation)
            idle, third = world.others(generation)
            generation.move_to(idle.link, world.outcomes.append)
            idle.transport.abort()
            before.ends("aborted")
            assert world.at(generation) in (before, third), "wherever the policy wants it"
            world.at(generation).answers()
            assert generation.error is None and world.outcomes == ["moved"]
    assert world.is_quiet()


async def test_every_worker_is_tried_once() -> None:
    with ExitStack() as scopes:
        world = await _of(scopes, num_workers=4)
        async with await world.generation() as generation:
            for again_s in (9.0, 3.0, 6.0, 4.0):
                assert generation.error is None
                _fail(world.at(generation), "overloaded", again_s)
            assert isinstance(generation.error, Overloaded) and generation.error.retry_after_s == 3
        assert [len(wire.frames(Generate)) for wire in world.wires.values()] == [1] * 4
    assert world.is_quiet()


async def test_a_choice_that_is_refused_takes_its_load_along() -> None:
    with ExitStack() as scopes:
        world = await _of(scopes)
        async with await world.generation(num_choices=2) as generation:
            before, (other,) = world.at(generation), world.others(generation)
            _fail(before, "overloaded")
            assert world.at(generation) is other
            assert (before.link.ledger.num_waiting, other.link.ledger.num_waiting) == (1, 1), "the other choice stays"
    assert world.is_quiet()


async def test_an_idle_worker_is_free_again_whatever_goes_wrong_on_the_way(monkeypatch: pytest.MonkeyPatch) -> None:
    with ExitStack() as scopes:
        world = await _of(scopes)
        async with await world.generation() as generation:
            wire, (other,) = world.at(generation), world.others(generation)

            def fails(*_: object) -> None:
                raise RuntimeError("a fault of our own")

            monkeypatch.setattr(Whereabouts, "move", fails)
            generation.move_to(other.link, world.outcomes.append)
            wire.ends("aborted")
            assert world.outcomes == ["failed"]
            assert isinstance(generation.error, RuntimeError)


async def test_what_is_told_where_nobody_takes_it() -> None:
    for kinds, error in (
        (("draining", "draining"), NoWorkerReady),
        (("draining", "overloaded"), Overloaded),
        (("overloaded", "draining"), Overloaded),
        (("overloaded", "worker_fault"), Overloaded),
        (("worker_fault", "overloaded"), Overloaded),
        (("worker_fault", "worker_fault"), WorkerFault),
    ):
        with ExitStack() as scopes:
            world = await _of(scopes)
            async with await world.generation() as generation:
                for kind in kinds:
                    _fail(world.at(generation), kind)
                assert type(generation.error) is error, kinds
        assert world.is_quiet()


async def test_a_worker_that_is_lost_before_anything_is_sent() -> None:
    with ExitStack() as scopes:
        world = await _of(scopes)
        generation = await world.generation()
        world.at(generation).transport.abort()
        with pytest.raises(NoWorkerReady):
            async with generation:
                raise AssertionError("it was sent to nobody")
    assert world.is_quiet()
