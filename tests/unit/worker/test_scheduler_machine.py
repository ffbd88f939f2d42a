"""Random histories of a scheduler: requests of all lengths, shared prefixes, aborts, little room. Each request ends."""

from __future__ import annotations

from random import Random

import pytest

from prefixcache.routing import slices
from prefixcache.routing.order import AGEING, Order
from prefixcache.routing.slices import HALVING, MOST_COMPUTED, PASSING
from tests.support.scheduler_steps import Steps, numbers
from tests.support.seeds import seeded
from worker.sequence import Sequence

RATE = 512.0
SLICE = 32
"""Tokens of a slice in the histories, so that several fit into each other in little room."""
BLOCK = 4
STEP = 24


class History:
    """One scheduler and what happens to it."""

    def __init__(self, random: Random, *, order: Order, num_blocks: int) -> None:
        self.random = random
        self.steps = Steps(
            num_blocks=num_blocks,
            block_size=BLOCK,
            step_tokens=STEP,
            max_running=8,
            order=order,
            rate=SLICE / slices.SLICE_S,
        )
        self.num_blocks = num_blocks
        self.added: list[Sequence] = []
        self.aborted: set[str] = set()
        self.most_live = 30
        self.most_sliced = 0

    def act(self) -> None:
        """A request arrives, one is aborted, or a step is made."""
        chance = self.random.random()
        live = self.steps.scheduler.live()
        if chance < 0.1 and len(live) < self.most_live:
            self.add()
        elif chance < 0.12 and len(live) < 2:
            self.add_ever_shorter()
        elif chance < 0.13 and live:
            sequence = self.random.choice(live)
            self.aborted.add(sequence.id)
            self.steps.scheduler.finish(sequence)
        elif live:
            self.step()

    def add_ever_shorter(self) -> None:
        """Each in time to pass the one before."""
        length = self.num_blocks * BLOCK // 2
        while length > PASSING * SLICE:
            self.add_prompt(self.tail(length), max_tokens=1, waited_s=1_000.0)
            for _ in range(2):
                self.step()
            length = round(length / 2.7)

    def add(self) -> None:
        """Of one of a few conversations, with a tail of its own or none, at times as long as the cache allows."""
        random = self.random
        most = self.num_blocks * BLOCK
        max_tokens = random.choice([1, 1, 4, 60])
        length = random.choice([random.randrange(1, most >> random.randrange(5)), most - max_tokens])
        shared = min(random.choice([0, random.randrange(1, most // 2), length]), length)
        prompt = numbers(10_000 * random.randrange(3), shared)
        prompt += self.tail(length - shared)
        self.add_prompt(prompt[: most - max_tokens], max_tokens=max_tokens, waited_s=random.choice([0.0, 0.0, 9.0]))

    def tail(self, length: int) -> list[int]:
        return [self.random.randrange(50_000, 1_000_000) for _ in range(length)]

    def add_prompt(self, prompt: list[int], *, max_tokens: int, waited_s: float = 0.0) -> None:
        self.added.append(self.steps.add(str(len(self.added)), prompt, max_tokens=max_tokens, waited_s=waited_s))

    def step(self) -> None:
        scheduler = self.steps.scheduler
        has_begun = {sequence for sequence in scheduler.live() if sequence.started_at is not None}
        left_before = self.left()
        assert self.steps.step(), "a step with work to do computed nothing"
        left = self.left()
        assert scheduler.prefill_tokens >= 0
        assert scheduler.waiting_tokens >= 0
        assert len(scheduler.sliced_tokens) == len(left)
        self.most_sliced = max(self.most_sliced, len(left))
        # At the choice it was neither more than before, but for what was evicted, nor more than now and this step's.
        both = [max(left_before[sequence], left[sequence] + STEP) for sequence in left_before.keys() & left.keys()]
        for sequence in set(scheduler.running) - has_begun:
            uncached_tokens = sequence.num_prompt_tokens - sequence.cached_tokens
            assert not both or uncached_tokens <= max(PASSING * SLICE, HALVING * min(both)), f"{sequence.id} passed"

    def left(self) -> dict[Sequence, int]:
        """What each sliced prefill still needs."""
        scheduler = self.steps.scheduler
        running = {sequence: sequence.num_uncomputed_tokens for sequence in scheduler._sliced}
        return running | {each.sequence: each.num_uncached_tokens for each in scheduler.waiting._cut.values()}

    def check_end(self) -> None:
        """Once everything has ended: nothing was lost, held or computed too often."""
        ended = {sequence.id for sequence in self.steps.ended}
        assert ended | self.aborted == {sequence.id for sequence in self.added}
        assert self.steps.pool.num_in_use == 0
        assert self.steps.scheduler.sliced_tokens == ()
        for sequence in self.steps.ended:
            computed = sequence.cached_tokens + sequence.copied_tokens + sequence.prefilled_tokens
            assert computed >= sequence.num_prompt_tokens
            if not sequence.num_preemptions:
                most = MOST_COMPUTED * sequence.num_prompt_tokens + SLICE + STEP
                assert sequence.prefilled_tokens <= most + sequence.num_prompt_tokens


@pytest.mark.parametrize("order", ["mean", "tail"])
@pytest.mark.parametrize(("num_blocks", "nested"), [(20, 1), (40, 1), (100, 2), (400, 3)])
def test_every_request_ends_however_many_sliced_prefills_stand_within_each_other(
    order: Order, num_blocks: int, nested: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each step computes something, and of what was evicted nothing is computed again and again."""
    monkeypatch.setattr(slices, "LEAST_SLICE_TOKENS", SLICE)
    history = History(seeded(f"scheduler {order} {num_blocks}"), order=order, num_blocks=num_blocks)
    history.add_ever_shorter()
    for number in range(1_000):
        history.most_live = (1, 6, 30)[number // 100 % 3]
        history.act()
    num_left = 0
    while history.steps.scheduler.has_work:
        history.step()
        num_left += 1
        assert num_left < 10_000, f"{history.steps.scheduler.live()} do not end"
    history.check_end()
    assert history.most_sliced >= nested, "too little was sliced: this shows nothing"


@pytest.mark.parametrize("order", ["mean", "tail"])
def test_under_a_load_that_it_can_carry_nobody_waits_for_ever(order: Order) -> None:
    """Three quarters of its time is asked for, mostly by short prefills; each long one takes 12 s by itself."""
    random = seeded(f"waits {order}")
    steps = Steps(num_blocks=1_000, block_size=16, step_tokens=256, order=order, rate=RATE, checks_integrity=False)
    names, ends_at, arrives_at = 0, 300.0, 0.0
    while steps.now < ends_at or steps.scheduler.has_work:
        while arrives_at <= steps.now < ends_at:
            length = 6_000 if random.random() < 0.02 else random.randrange(1, 200)
            steps.add(str(names), [random.randrange(1_000_000) for _ in range(length)], max_tokens=1)
            names, arrives_at = names + 1, arrives_at + random.expovariate(0.75 * RATE / (0.02 * 6_000 + 0.98 * 100))
        if steps.scheduler.has_work:
            steps.step()
        else:
            steps.now = max(arrives_at, steps.now)
    longest_s = max((sequence.first_token_at or 0.0) - sequence.arrived_at for sequence in steps.ended)
    assert len(steps.ended) == names
    assert longest_s < 200.0, f"{longest_s} s to the first token"


def test_whatever_the_load_nobody_is_passed_by_what_comes_much_later() -> None:
    """The bound of every wait: it is over once all is computed that came until p / AGEING after the request.

    p is what the request takes by itself and, where one that is cut stands before it, what that one takes. More comes
    all the time than can be computed.
    """
    random = seeded("ageing")
    longest = 1_500
    steps = Steps(num_blocks=4_000, block_size=16, step_tokens=256, rate=RATE, checks_integrity=False)
    arrives_at, waits_for = 0.0, list[Sequence]()
    num_passed = 0
    while steps.now < 150.0:
        while arrives_at <= steps.now:
            length = longest if random.random() < 0.1 else random.randrange(16, 200)
            prompt = [random.randrange(1_000_000) for _ in range(length)]
            waits_for.append(steps.add(str(arrives_at), prompt, max_tokens=1))
            arrives_at += random.expovariate(1.2 * RATE / (0.1 * longest + 0.9 * 108))
        if not steps.scheduler.has_work:
            steps.now = arrives_at
            continue
        steps.step()
        begun = [sequence for sequence in waits_for if sequence.started_at is not None]
        waits_for = [sequence for sequence in waits_for if sequence.started_at is None]
        for passed in waits_for:
            bound_s = (passed.num_prompt_tokens + longest) / RATE / AGEING
            for sequence in begun:
                num_passed += sequence.arrived_at > passed.arrived_at
                assert sequence.arrived_at <= passed.arrived_at + bound_s
    assert num_passed > 100, "too few passed: this shows nothing"
