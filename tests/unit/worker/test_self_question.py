"""Whether an engine gives tokens: from what others get, by its own question, busy, hanging and broken."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import cast

from prefixcache.errors import Overloaded
from prefixcache.limits import SELF_QUESTION_S, SELF_STUCK_S
from prefixcache.protocol import End, Fail, Generate, StepEntry, Usage
from tests.support.manual_clock import ManualClock
from worker.engine import Engine, Event, Owner, StepOutput
from worker.engine_load import EngineLoad
from worker.self_question import SelfQuestion

USAGE = Usage(cached_tokens=0, computed_tokens=1, output_tokens=1, queue_s=0, prefill_s=0, decode_s=0, preemptions=0)


@dataclass(slots=True)
class FakeEngine:
    """What a question sees of an engine."""

    is_serving: bool = True
    failure: Exception | None = None
    is_full: bool = False
    step: int = 0
    submitted: list[tuple[Owner, Generate]] = field(default_factory=list)

    @property
    def load(self) -> EngineLoad:
        return EngineLoad(step=self.step, running=0, waiting=0, prefilling=0)

    def submit(self, owner: Owner, request: Generate) -> int:
        if self.is_full:
            raise Overloaded("full", retry_after_s=1)
        self.submitted.append((owner, request))
        return 0


class World:
    def __init__(self) -> None:
        self.clock = ManualClock(1_000.0)
        self.engine = FakeEngine()
        self.question = SelfQuestion(cast(Engine, self.engine), clock=self.clock, wait_s=0.0)

    def deliver(self, owner: Owner, *events: Event) -> None:
        outputs = [(owner, event) for event in events]
        self.question.deliver(StepOutput(events=outputs, load=self.engine.load, index_changed=False))

    def token(self, owner: Owner = "somebody") -> None:
        self.engine.step += 1
        events: list[Event] = [StepEntry(id="x", index=0, ids=(1,))]
        if owner is self.question:
            events.append(End(id="x", reason="length", usage=USAGE))
        self.deliver(owner, *events)

    async def answers(self) -> bool:
        return (await self.question.verdict()).answers

    async def reason(self) -> str:
        return (await self.question.verdict()).reason


async def test_nothing_is_asked_while_others_get_tokens() -> None:
    world = World()
    for _ in range(5):
        world.token()
        world.clock.now += SELF_QUESTION_S - 0.1
        assert await world.answers()
    assert not world.engine.submitted
    world.clock.now += 0.1
    await world.question.verdict()
    (submitted,) = world.engine.submitted
    assert submitted[0] is world.question
    assert (submitted[1].max_tokens, len(submitted[1].prompt_ids)) == (1, 4)


async def test_it_does_not_answer_before_its_first_token() -> None:
    world = World()
    assert await world.reason() == "the first token is not there yet"
    world.token(world.question)
    assert await world.answers()


async def test_one_question_at_a_time_and_seldom() -> None:
    world = World()
    await world.question.verdict()
    world.clock.now += SELF_QUESTION_S
    await world.question.verdict()
    assert len(world.engine.submitted) == 1, "the first one is still in hand"
    world.token(world.question)
    world.clock.now += SELF_QUESTION_S
    await world.question.verdict()
    assert len(world.engine.submitted) == 2


async def test_busy_is_not_hanging() -> None:
    """A prefill of minutes: steps, and no token for anybody."""
    world = World()
    world.token()
    for _ in range(10):
        world.clock.now += SELF_STUCK_S - 1
        world.engine.step += 1
        assert await world.answers()


async def test_no_step_while_a_token_is_due_is_hanging() -> None:
    world = World()
    world.token()
    world.clock.now += SELF_QUESTION_S
    assert await world.answers(), "asked just now"
    world.clock.now += SELF_STUCK_S - 0.1
    assert await world.answers()
    world.clock.now += 0.1
    assert await world.reason() == f"a token is due, and no step was made for {SELF_STUCK_S:.0f} s"
    world.token()
    assert await world.answers(), "a token of anybody mends it"


async def test_a_full_engine_is_judged_by_its_steps() -> None:
    world = World()
    world.token()
    world.engine.is_full = True
    world.clock.now += SELF_QUESTION_S
    assert await world.answers()
    world.engine.step += 1
    world.clock.now += SELF_STUCK_S
    assert await world.answers()
    world.clock.now += SELF_STUCK_S
    assert not await world.answers()


async def test_a_question_that_fails_says_why() -> None:
    world = World()
    world.token()
    world.clock.now += SELF_QUESTION_S
    await world.question.verdict()
    world.deliver(world.question, Fail(id="x", kind="worker_fault", message="the step broke"))
    assert await world.reason() == "a question of one token failed: the step broke"
    world.deliver("somebody", Fail(id="y", kind="worker_fault", message="theirs"))
    world.clock.now += SELF_QUESTION_S
    await world.question.verdict()
    assert len(world.engine.submitted) == 2, "it asks again"
    world.token(world.question)
    assert await world.answers()


async def test_a_failure_of_others_says_nothing() -> None:
    world = World()
    world.token()
    world.deliver("somebody", Fail(id="y", kind="worker_fault", message="theirs"))
    assert await world.answers()


async def test_one_that_does_not_serve_does_not_answer() -> None:
    world = World()
    world.token()
    world.engine.is_serving = False
    assert await world.reason() == "the worker is shutting down"
    world.engine.failure = RuntimeError("broken")
    assert await world.reason() == "broken"
    assert not world.engine.submitted
