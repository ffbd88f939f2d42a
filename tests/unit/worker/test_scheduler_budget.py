"""How long decodes wait for prefill chunks, on a clock on which a token behind 1,000 others takes twice its time."""

from __future__ import annotations

import math

import pytest

from tests.support.scheduler_steps import Steps, numbers
from tests.support.seeds import seeded
from worker.sequence import Sequence

RATE = 1_000.0
PAIR_S = 1e-6
BLOCK = 16
STEP = 512
STEP_S = 0.25


def made(*, step_s: float = STEP_S, num_blocks: int = 2_048, checks_integrity: bool = False) -> Steps:
    return Steps(
        num_blocks=num_blocks,
        block_size=BLOCK,
        step_tokens=STEP,
        max_running=32,
        rate=RATE,
        step_s=step_s,
        pair_s=PAIR_S,
        checks_integrity=checks_integrity,
    )


def with_a_decode(steps: Steps, *, max_tokens: int = 5_000) -> None:
    decode = steps.add("decode", numbers(900_000, 10), max_tokens=max_tokens)
    while decode.first_token_at is None:
        steps.step()


def chunks_of(steps: Steps, name: str, most: int = 1_000) -> list[int]:
    """Of one request until it has its first token; the decode gets its own in each step."""
    chunks: list[int] = []
    [sequence] = [sequence for sequence in steps.scheduler.live() if sequence.id == name]
    while sequence.first_token_at is None:
        shares = steps.step()
        assert shares.get("decode") == 1, "it waits for one chunk at most"
        chunks.append(shares.get(name, 0))
        assert len(chunks) < most
    return chunks


def test_chunks_get_shorter_as_a_prompt_gets_deeper_so_that_decodes_wait_alike() -> None:
    steps = made()
    with_a_decode(steps)
    steps.add("long", numbers(0, 8_000), max_tokens=1)
    starts, chunks = [0], chunks_of(steps, "long")
    for chunk in chunks[:-1]:
        starts.append(starts[-1] + chunk)
    assert sum(chunks) == 8_000
    assert chunks[0] == 224, "240 tokens would take 0.269 s"
    assert chunks[-2] == 16, "a block behind 8,000 tokens: 32 would take 0.28 s"
    for start, chunk in zip(starts[:-1], chunks[:-1], strict=True):
        longer = chunk + BLOCK
        assert longer / RATE + PAIR_S * longer * (start + longer / 2) > STEP_S, "no shorter than it must be"


def test_no_step_adds_more_than_that_to_what_decodes_take_whatever_comes() -> None:
    random = seeded("budget")
    steps = made(checks_integrity=True)
    with_a_decode(steps)
    for number in range(150):
        if random.random() < 0.3 and len(steps.scheduler.live()) < 20:
            shared = random.choice([0, random.randrange(3_000)])
            tail = [random.randrange(100_000, 800_000) for _ in range(random.choice([5, 40, 400, 2_000]))]
            steps.add(str(number), [*numbers(0, shared), *tail], max_tokens=random.choice([1, 20]))
        computed = {sequence: sequence.num_computed_tokens for sequence in steps.scheduler.running}
        shares = steps.step()
        assert shares["decode"] == 1
        chunks = [(name, count) for name, count in shares.items() if count > 1]
        deepest = max(computed.values(), default=0) + 3_000
        block_s = BLOCK / RATE + PAIR_S * BLOCK * deepest
        assert steps.chunks_s <= (STEP_S if len(chunks) > 1 else max(STEP_S, block_s)) + 1e-9


def test_without_decodes_nobody_waits_for_a_chunk() -> None:
    steps = made()
    steps.add("long", numbers(0, 4_000), max_tokens=1)
    assert steps.run() == [{"long": STEP}] * 7 + [{"long": 4_000 - 7 * STEP}]


def test_a_block_of_prefill_is_computed_however_long_it_takes() -> None:
    steps = made(step_s=0.001)
    with_a_decode(steps)
    steps.add("long", numbers(0, 200), max_tokens=1)
    assert chunks_of(steps, "long") == [16] * 12 + [8]


def beside_a_running_prefill(steps: Steps, *, deep_tokens: int) -> Sequence:
    """One that is first in order and whose block takes all of a step, but not this one's: another one runs."""
    steps.add("warm", numbers(0, deep_tokens), max_tokens=1)
    steps.run()
    with_a_decode(steps)
    steps.add("running", numbers(50_000, 300), max_tokens=1)
    assert steps.step() == {"decode": 1, "running": 176}
    return steps.add("deep", [*numbers(0, deep_tokens), *numbers(60_000, 40)], max_tokens=1, waited_s=1_000.0)


def test_short_ones_that_go_on_in_the_next_step_do_not_keep_it_from_a_deep_one() -> None:
    """Behind 11,200 tokens a block takes 0.195 s. Each short one would leave less than that of its second step."""
    steps = made(step_s=0.2)
    deep = beside_a_running_prefill(steps, deep_tokens=11_200)
    for number in range(5):
        steps.add(f"short{number}", numbers(100_000 + 1_000 * number, 120), max_tokens=1)
        steps.step()
    assert deep.started_at is not None
    assert min(sequence.started_at or 1e9 for sequence in steps.ended if "short" in sequence.id) > deep.started_at


def test_what_the_step_has_no_room_for_is_passed_by_what_ends_with_it() -> None:
    steps = made(step_s=0.2)
    beside_a_running_prefill(steps, deep_tokens=11_200)
    steps.add("little", numbers(70_000, 40), max_tokens=1)
    steps.add("too long", numbers(80_000, 90), max_tokens=1)
    assert steps.step() == {"decode": 1, "running": 124, "little": 40}
    assert steps.step() == {"decode": 1, "deep": 16}


def test_one_whose_slice_is_over_keeps_its_blocks_where_the_step_has_no_room_for_its_next_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A slice of 1,024 tokens ends in the step in which a short one leaves less than a block."""
    steps = Steps(num_blocks=1_024, block_size=16, step_tokens=256, max_running=16, rate=256.0)
    long = steps.add("long", numbers(0, 6_000), max_tokens=1)
    for _ in range(4):
        steps.step()
    steps.add("short", numbers(10_000, 250), max_tokens=2)
    monkeypatch.setattr(steps.scheduler, "_give_back", lambda sequence: pytest.fail(f"{sequence.id} gave its blocks"))
    steps.scheduler.waiting.remove(next(iter(steps.scheduler.waiting)))
    [short] = [sequence for sequence in steps.scheduler.live() if sequence.id == "short"]
    steps.scheduler.running.append(short)
    short.started_at = steps.now
    held = list(long.block_table)
    assert steps.step() == {"short": 250}
    assert long.block_table == held
    assert steps.step() == {"short": 1, "long": 240}


def test_inf_is_no_limit_in_time() -> None:
    steps = made(step_s=math.inf)
    with_a_decode(steps)
    steps.add("long", numbers(0, 4_000), max_tokens=1)
    assert chunks_of(steps, "long") == [496] * 8 + [32]
