"""How many requests fit, held to the worker's own scheduler."""

from __future__ import annotations

import pytest

from prefixcache.planning.kv_layout import KVLayout, LayerKV
from prefixcache.planning.plan import Plan
from tests.support.scheduler_steps import Steps, numbers

BLOCK = 16


def plan(
    num_blocks: int, *, weights: int | None = 1_000, memory: int | None = None, max_positions: int = 4_096
) -> Plan:
    return Plan(
        layout=KVLayout(layers=(LayerKV(num_kv_heads=1, key_dim=3, value_dim=2),) * 2),
        element_bytes=2,
        max_positions=max_positions,
        num_blocks=num_blocks,
        weights_bytes=weights,
        memory_bytes=memory,
    )


def test_sizes() -> None:
    planned = plan(10, memory=10_000)
    assert (planned.bytes_per_token, planned.bytes_per_block) == (20, 320)
    assert (planned.kv_bytes, planned.num_tokens) == (3_200, 160)
    assert planned.longest_tokens == 160
    assert plan(1_000).longest_tokens == 4_096
    assert planned.left_bytes == 5_800
    assert plan(10, weights=None, memory=10_000).left_bytes == 6_800
    assert plan(10).left_bytes is None


@pytest.mark.parametrize(
    ("num_blocks", "context", "shared", "requests", "sharing"),
    [
        (100, 160, 0, 10, None),
        (100, 161, 15, 9, 9),
        (100, 160, 96, 10, 23),  # 6 blocks once, 4 for each
        (100, 160, 97, 10, 23),
        (100, 160, 111, 10, 23),
        (100, 160, 112, 10, 31),
        (100, 160, 159, 10, 91),
        (100, 160, 160, 10, None),
        (100, 16, 15, 100, 100),
        (9, 160, 144, 0, 0),
        (10, 160, 144, 1, 1),
    ],
)
def test_requests_at_once(num_blocks: int, context: int, shared: int, requests: int, sharing: int | None) -> None:
    row = plan(num_blocks).row(context, shared)
    assert (row.num_requests, row.num_requests_sharing) == (requests, sharing)
    assert row.kv_bytes == row.num_blocks * 320


@pytest.mark.parametrize("shared", [0, 32, 40])
@pytest.mark.parametrize("context", [80, 96, 100])
def test_so_many_run_to_their_end_at_once_and_one_more_does_not(context: int, shared: int) -> None:
    num_blocks = 31
    row = plan(num_blocks).row(context, shared)
    fitting = row.num_requests_sharing if shared else row.num_requests
    assert fitting is not None
    assert _all_stay(fitting, num_blocks, context, shared)
    assert not _all_stay(fitting + 1, num_blocks, context, shared)


def _all_stay(num_requests: int, num_blocks: int, context: int, shared: int) -> bool:
    """Whether all are admitted before one has ended, and none is preempted."""
    steps = Steps(num_blocks=num_blocks, block_size=BLOCK, step_tokens=512, max_running=64)
    num_answers = 33  # one token past two blocks: a prompt alone must not decide
    prefix = numbers(0, shared)
    if shared:
        steps.add("first", [*prefix, 7], max_tokens=1)
        steps.run()
    ended_before = len(steps.ended)
    sequences = [
        steps.add(
            str(number),
            [*prefix, *numbers(1_000 * (number + 1), context - shared - num_answers)],
            max_tokens=num_answers,
        )
        for number in range(num_requests)
    ]
    while len(steps.ended) == ended_before:
        steps.step()
    started = all(sequence.first_token_at is not None for sequence in sequences)
    steps.run()
    return started and all(sequence.num_preemptions == 0 for sequence in sequences)


@pytest.mark.parametrize(
    ("max_positions", "asked", "contexts"),
    [
        (4_096, 4_096, [1_024, 2_048, 4_096]),
        (5_000, 3_000, [1_024, 2_048, 3_000, 4_096, 5_000]),
        (1_024, 1_024, [1_024]),
        (256, 100, [100, 256]),
    ],
)
def test_the_lengths_of_a_table(max_positions: int, asked: int, contexts: list[int]) -> None:
    assert plan(10, max_positions=max_positions).contexts(asked) == contexts
