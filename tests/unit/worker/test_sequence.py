"""The state of one request: how its tokens are counted, when it ends."""

from __future__ import annotations

import pytest

from prefixcache.errors import InvalidRequest
from prefixcache.hashing import block_hashes
from prefixcache.protocol import Generate
from prefixcache.types import pack_tokens
from tests.support.requests import generate
from worker.runner import RunnerLimits
from worker.sequence import Sequence

LIMITS = RunnerLimits(block_size=4, num_blocks=16, max_model_len=64, vocab_size=100, kv_bytes_per_token=1)


def sequence(request: Generate, *, arrived_at: float = 0.0) -> Sequence:
    return Sequence("owner", request, LIMITS, arrived_at=arrived_at)


def test_a_request_that_can_never_be_served_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="token id 100"):
        sequence(generate("r", [1, 100]))


def test_hashes_are_those_of_the_whole_prompt_and_go_on_with_the_output() -> None:
    prompt = list(range(10))
    state = sequence(generate("r", prompt, max_tokens=10))
    assert state.block_hash(1) == block_hashes(1, pack_tokens(prompt), 4)[1]
    state.append(50)
    state.append(51)
    assert state.block_hash(2) == block_hashes(1, pack_tokens([*prompt, 50, 51]), 4)[2]


@pytest.mark.parametrize(("num_tokens", "reusable"), [(1, 0), (4, 0), (5, 1), (8, 1), (9, 2)])
def test_one_token_is_always_computed(num_tokens: int, reusable: int) -> None:
    assert sequence(generate("r", [1] * num_tokens)).num_reusable_blocks == reusable


def test_it_ends_with_a_stop_id_or_its_last_token() -> None:
    state = sequence(generate("r", [1], max_tokens=3, stop_token_ids=[9]))
    assert state.append(5) is None
    assert state.append(9) == "stop"
    state = sequence(generate("r", [1], max_tokens=2, stop_token_ids=[9]))
    assert state.append(5) is None
    assert state.append(6) == "length"
    state = sequence(generate("r", [1], max_tokens=1, stop_token_ids=[9]))
    assert state.append(9) == "stop"


def test_a_drawn_token_outside_the_model_is_an_error() -> None:
    with pytest.raises(ValueError, match="100"):
        sequence(generate("r", [1])).append(100)


def test_a_continuation_goes_on_with_index_and_limit() -> None:
    state = sequence(generate("r", [1, 2], output=[3, 4, 5], max_tokens=5))
    assert state.sample_spec().index == 3
    assert state.append(6) is None
    assert state.append(7) == "length"
    assert state.usage(0.0).output_tokens == 2


def test_a_runner_is_told_prompt_and_output_apart_and_a_continuations_output_counts() -> None:
    state = sequence(generate("r", [1, 2], output=[3], max_tokens=5, stop_token_ids=[9, 9], choice=2))
    before = state.sample_spec()
    state.append(4)
    after = state.sample_spec()
    assert [(list(spec.prompt_ids), list(spec.output_ids), spec.index) for spec in (before, after)] == [
        ([1, 2], [3], 1),
        ([1, 2], [3, 4], 2),
    ]
    assert (after.choice, after.stop_token_ids) == (2, frozenset({9}))


def test_reused_tokens_are_counted_once_and_of_the_prompt_only() -> None:
    state = sequence(generate("r", [1] * 14, max_tokens=10))
    state.reuse([0])
    state.block_table.append(1)
    state.computed(4)
    state.reuse([2])
    assert state.cached_tokens == 8
    state.forget_blocks()
    state.reuse([0, 1, 2])
    assert state.cached_tokens == 8
    assert state.usage(0.0).computed_tokens == 4

    state = sequence(generate("r", [1] * 6, output=[2] * 6, max_tokens=10))
    state.reuse([0, 1])
    assert state.cached_tokens == 6


def test_copied_tokens_are_counted_apart_once_and_of_the_prompt_only() -> None:
    state = sequence(generate("r", [1] * 14, max_tokens=10))
    state.reuse([0], copied=(7, 3))
    assert (state.num_computed_tokens, state.num_registered_blocks, state.copied_block) == (7, 1, 7)
    assert (state.cached_tokens, state.copied_tokens) == (4, 3)
    state.block_table.append(1)
    state.computed(1)
    assert state.copied_block is None
    state.forget_blocks()
    state.reuse([0], copied=(7, 2))
    assert (state.cached_tokens, state.copied_tokens) == (4, 3)

    state = sequence(generate("r", [1] * 6, output=[2] * 6, max_tokens=10))
    state.reuse([0], copied=(7, 3))
    assert (state.cached_tokens, state.copied_tokens) == (4, 2)


def test_computed_tokens_are_those_of_prefills() -> None:
    state = sequence(generate("r", [1] * 6, max_tokens=10))
    state.computed(6)
    state.append(2)
    state.first_token_at = 1.0
    state.computed(1)
    assert state.usage(1.0).computed_tokens == 6
    state.append(3)
    state.forget_blocks()
    state.computed(8)
    assert state.usage(1.0).computed_tokens == 14


def test_usage_divides_its_time_into_three() -> None:
    state = sequence(generate("r", [1]), arrived_at=10.0)
    assert state.usage(12.0).queue_s == 2.0
    state.started_at = 13.0
    assert (state.usage(14.0).queue_s, state.usage(14.0).prefill_s) == (3.0, 1.0)
    state.first_token_at = 15.0
    usage = state.usage(19.0)
    assert (usage.queue_s, usage.prefill_s, usage.decode_s) == (3.0, 2.0, 4.0)
