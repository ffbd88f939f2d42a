"""The state of one request: what is refused, how its tokens are counted, when it ends."""

from __future__ import annotations

import msgspec
import pytest

from prefixcache.errors import ContextLengthExceeded, RequestError
from prefixcache.hashing import block_hashes
from prefixcache.protocol import Generate, Sampling
from prefixcache.types import pack_tokens
from tests.support.requests import generate
from worker.runner import RunnerLimits
from worker.sequence import Sequence

LIMITS = RunnerLimits(block_size=4, num_blocks=16, max_model_len=64, vocab_size=100, kv_bytes_per_token=1)


def sequence(request: Generate, *, arrived_at: float = 0.0) -> Sequence:
    return Sequence("owner", request, LIMITS, arrived_at=arrived_at)


def changed(**fields: object) -> Generate:
    return msgspec.structs.replace(generate("r", [1, 2, 3]), **fields)


@pytest.mark.parametrize(
    ("request_", "named"),
    [
        (changed(prompt_ids=b""), "prompt_ids is empty"),
        (changed(prompt_ids=b"abcde"), "5 bytes"),
        (changed(output_ids=b"a"), "output_ids has 1 bytes"),
        (generate("r", [1, 100]), "token id 100"),
        (generate("r", [1, 2**32 - 1]), "token id 4294967295"),
        (generate("r", [1], output=[100]), "output_ids has token id 100"),
        (generate("r", [1], max_tokens=0), "max_tokens is 0"),
        (generate("r", [1], output=[2, 3], max_tokens=2), "2 output tokens are there already"),
        (generate("r", [1] * 60, max_tokens=5), "60 prompt tokens and max_tokens 5"),
        (generate("r", [1], max_tokens=2**63), "max_tokens 9223372036854775808"),
        (changed(root=-1), "root is -1"),
        (changed(root=2**64), "root is 18446744073709551616"),
        (changed(sampling=Sampling(seed=-1)), "seed is -1"),
        (changed(sampling=Sampling(seed=0, temperature=-0.5)), "temperature is -0.5"),
        (changed(sampling=Sampling(seed=0, temperature=float("nan"))), "temperature is nan"),
        (changed(sampling=Sampling(seed=0, temperature=float("inf"))), "temperature is inf"),
        (changed(sampling=Sampling(seed=0, top_p=0.0)), "top_p is 0.0"),
        (changed(sampling=Sampling(seed=0, top_p=1.5)), "top_p is 1.5"),
        (changed(choice=-1), "choice is -1"),
    ],
)
def test_a_request_that_can_never_be_served_is_refused_with_the_value(request_: Generate, named: str) -> None:
    with pytest.raises(RequestError, match=named):
        sequence(request_)


def test_prompt_and_answer_may_fill_the_context_to_the_last_token() -> None:
    assert sequence(generate("r", [1] * 60, max_tokens=4)).num_tokens == 60
    with pytest.raises(ContextLengthExceeded):
        sequence(generate("r", [1] * 61, max_tokens=4))


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
