"""Every field of a request, inside and outside its range: refused with its name and value, or taken."""

from __future__ import annotations

import math

import msgspec
import pytest

from prefixcache.errors import ContextLengthExceeded, InvalidRequest, RequestError
from prefixcache.limits import MAX_LOGIT_BIAS_TOKENS, MAX_STOP_TOKEN_IDS, MAX_TOP_LOGPROBS
from prefixcache.protocol import Generate, Sampling
from tests.support.requests import generate
from worker.request_check import check_request
from worker.runner import RunnerLimits

LIMITS = RunnerLimits(block_size=4, num_blocks=16, max_model_len=64, vocab_size=100, kv_bytes_per_token=1)


def changed(**fields: object) -> Generate:
    return msgspec.structs.replace(generate("r", [1, 2, 3]), **fields)


def sampled(**fields: object) -> Generate:
    return changed(sampling=msgspec.structs.replace(Sampling(seed=0), **fields))


@pytest.mark.parametrize(
    ("request_", "named"),
    [
        (changed(prompt_ids=b""), "prompt_ids is empty"),
        (changed(prompt_ids=b"abcde"), "prompt_ids has 5 bytes"),
        (changed(output_ids=b"a"), "output_ids has 1 bytes"),
        (generate("r", [1, 100]), r"prompt_ids has token id 100, not in the vocabulary 0 \.\. 99"),
        (generate("r", [1, 2**32 - 1]), "prompt_ids has token id 4294967295"),
        (generate("r", [1], output=[100]), "output_ids has token id 100"),
        (generate("r", [1], max_tokens=0), "max_tokens is 0"),
        (generate("r", [1], max_tokens=-(2**63)), "max_tokens is -9223372036854775808"),
        (generate("r", [1], output=[2, 3], max_tokens=2), "max_tokens is 2, but 2 output tokens are there already"),
        (generate("r", [1] * 60, max_tokens=5), "60 prompt tokens and max_tokens 5"),
        (generate("r", [1], max_tokens=2**63), "max_tokens 9223372036854775808"),
        (changed(root=-1), r"root is -1, not in 0 \.\. 18446744073709551615"),
        (changed(root=2**64), "root is 18446744073709551616"),
        (changed(choice=-1), "choice is -1"),
        (changed(choice=2**64), "choice is 18446744073709551616"),
        (changed(waited_s=-0.1), "waited_s is -0.1, not a finite number >= 0"),
        (changed(waited_s=math.inf), "waited_s is inf"),
        (changed(waited_s=math.nan), "waited_s is nan"),
        (changed(predicted_hit_tokens=-1), "predicted_hit_tokens is -1"),
        (changed(predicted_hit_tokens=4), r"predicted_hit_tokens is 4, not in 0 \.\. 3"),
        (changed(stop_token_ids=(1, 100)), "stop_token_ids has token id 100"),
        (changed(stop_token_ids=(-1,)), "stop_token_ids has token id -1"),
        (changed(stop_token_ids=(1,) * (MAX_STOP_TOKEN_IDS + 1)), "stop_token_ids has 257 entries, the limit is 256"),
        (sampled(seed=-1), "seed is -1"),
        (sampled(seed=2**64), "seed is 18446744073709551616"),
        (sampled(temperature=-0.5), "temperature is -0.5"),
        (sampled(top_p=0.0), "top_p is 0.0"),
        (sampled(top_p=1.5), "top_p is 1.5"),
        (sampled(top_k=0), "top_k is 0"),
        (sampled(top_k=-1), "top_k is -1"),
        (sampled(min_p=-0.1), "min_p is -0.1"),
        (sampled(min_p=1.1), "min_p is 1.1"),
        (sampled(presence_penalty=-2.1), "presence_penalty is -2.1"),
        (sampled(frequency_penalty=2.1), r"frequency_penalty is 2.1, not in -2.0 \.\. 2.0"),
        (sampled(repetition_penalty=0.0), "repetition_penalty is 0.0"),
        (sampled(repetition_penalty=1e-310), "repetition_penalty is 1e-310"),
        (sampled(logit_bias={100: 1.0}), "logit_bias has token id 100"),
        (sampled(logit_bias={-1: 1.0}), "logit_bias has token id -1"),
        (sampled(logit_bias={1: 0.0, 7: 100.5}), "logit_bias of token 7 is 100.5"),
        (sampled(logit_bias=dict.fromkeys(range(MAX_LOGIT_BIAS_TOKENS + 1), 0.0)), "logit_bias has 1025 entries"),
        (sampled(min_tokens=-1), "min_tokens is -1"),
        (sampled(min_tokens=5), r"min_tokens is 5, not in 0 \.\. 4"),
        (sampled(top_logprobs=-1), "top_logprobs is -1"),
        (sampled(top_logprobs=MAX_TOP_LOGPROBS + 1), "top_logprobs is 21"),
    ],
)
def test_a_request_that_can_never_be_served_is_refused_with_field_and_value(request_: Generate, named: str) -> None:
    with pytest.raises(RequestError, match=named) as refusal:
        check_request(request_, LIMITS)
    assert refusal.value.param is not None
    assert refusal.value.param in named


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize(
    "field", ["temperature", "top_p", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty"]
)
def test_no_number_may_be_infinite_or_none_at_all(field: str, value: float) -> None:
    with pytest.raises(InvalidRequest, match=f"{field} is {value}"):
        check_request(sampled(**{field: value}), LIMITS)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_no_bias_may_be_infinite_or_none_at_all(value: float) -> None:
    with pytest.raises(InvalidRequest, match=f"logit_bias of token 5 is {value}"):
        check_request(sampled(logit_bias={5: value}), LIMITS)


@pytest.mark.parametrize(
    "request_",
    [
        sampled(seed=2**64 - 1, temperature=0.0, top_p=1e-9, min_p=1.0),
        sampled(temperature=1e300, top_p=1.0, top_k=1, min_p=0.0),
        sampled(presence_penalty=-2.0, frequency_penalty=2.0, repetition_penalty=0.01),
        sampled(presence_penalty=2.0, frequency_penalty=-2.0, repetition_penalty=10.0, top_k=2**40),
        sampled(logit_bias={0: -100.0, 99: 100.0}, min_tokens=4, top_logprobs=0),
        sampled(logit_bias=dict.fromkeys(range(100), 1.0), top_logprobs=MAX_TOP_LOGPROBS),
        changed(root=2**64 - 1, choice=2**64 - 1, stop_token_ids=(0, 99)),
        changed(root=0, stop_token_ids=(1,) * MAX_STOP_TOKEN_IDS),
    ],
)
def test_the_ends_of_every_range_are_taken(request_: Generate) -> None:
    prompt, output = check_request(request_, LIMITS)
    assert (prompt.tolist(), output.tolist()) == ([1, 2, 3], [])


def test_prompt_and_output_come_back_apart() -> None:
    prompt, output = check_request(generate("r", [0, 99], output=[5, 6], max_tokens=3), LIMITS)
    assert (prompt.tolist(), output.tolist()) == ([0, 99], [5, 6])


def test_prompt_and_answer_may_fill_the_context_to_the_last_token() -> None:
    check_request(generate("r", [1] * 60, max_tokens=4), LIMITS)
    with pytest.raises(ContextLengthExceeded):
        check_request(generate("r", [1] * 61, max_tokens=4), LIMITS)
