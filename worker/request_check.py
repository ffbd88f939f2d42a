"""Whether a request can be served: the only place where the worker looks at what a proxy sent.

The proxy has checked what its client sent already; a proxy of another version, or a broken one, must not reach the
engine with a value that a step would fail on. Types are the decoder's matter, so that only values are left here.
"""

from __future__ import annotations

from array import array

from prefixcache.errors import ContextLengthExceeded, InvalidRequest
from prefixcache.limits import (
    MAX_LOGIT_BIAS,
    MAX_LOGIT_BIAS_TOKENS,
    MAX_PENALTY,
    MAX_REPETITION_PENALTY,
    MAX_STOP_TOKEN_IDS,
    MAX_TOP_LOGPROBS,
    MIN_REPETITION_PENALTY,
)
from prefixcache.protocol import Generate, Sampling
from prefixcache.types import unpack_tokens
from worker.runner import RunnerLimits

_INFINITY = float("inf")


def check_request(request: Generate, limits: RunnerLimits) -> tuple[array[int], array[int]]:
    """Prompt and output ids of a request that the runner can serve, in time linear in their number.

    Raises InvalidRequest or ContextLengthExceeded naming the field and its value.
    """
    prompt = _unpack("prompt_ids", request.prompt_ids, limits.vocab_size)
    output = _unpack("output_ids", request.output_ids, limits.vocab_size)
    if not prompt:
        raise InvalidRequest("prompt_ids is empty; at least one token is needed", param="prompt_ids")
    _check_length(request, len(prompt), len(output), limits.max_model_len)
    _check_range("root", request.root, 0, 2**64 - 1)
    _check_range("choice", request.choice, 0, 2**64 - 1)
    if not 0 <= request.waited_s < _INFINITY:
        raise InvalidRequest(f"waited_s is {request.waited_s}, not a finite number >= 0", param="waited_s")
    if request.predicted_hit_tokens is not None:
        _check_range("predicted_hit_tokens", request.predicted_hit_tokens, 0, len(prompt))
    _check_count("stop_token_ids", len(request.stop_token_ids), MAX_STOP_TOKEN_IDS)
    for token in request.stop_token_ids:
        _check_id("stop_token_ids", token, limits.vocab_size)
    _check_sampling(request.sampling, request.max_tokens, limits.vocab_size)
    return prompt, output


def _check_length(request: Generate, num_prompt_tokens: int, num_output_tokens: int, max_model_len: int) -> None:
    if request.max_tokens <= num_output_tokens:
        raise InvalidRequest(
            f"max_tokens is {request.max_tokens}, but {num_output_tokens} output tokens are there already",
            param="max_tokens",
        )
    if num_prompt_tokens + request.max_tokens > max_model_len:
        raise ContextLengthExceeded(
            f"{num_prompt_tokens} prompt tokens and max_tokens {request.max_tokens} are together over the context "
            f"length of {max_model_len} tokens",
            param="max_tokens",
        )


def _check_sampling(sampling: Sampling, max_tokens: int, vocab_size: int) -> None:
    _check_range("seed", sampling.seed, 0, 2**64 - 1)
    if not 0 <= sampling.temperature < _INFINITY:
        raise InvalidRequest(f"temperature is {sampling.temperature}, not a finite number >= 0", param="temperature")
    if not 0 < sampling.top_p <= 1:
        raise InvalidRequest(f"top_p is {sampling.top_p}, not in (0, 1]", param="top_p")
    if sampling.top_k is not None and sampling.top_k < 1:
        raise InvalidRequest(f"top_k is {sampling.top_k}; it must be at least 1", param="top_k")
    _check_range("min_p", sampling.min_p, 0, 1)
    _check_range("presence_penalty", sampling.presence_penalty, -MAX_PENALTY, MAX_PENALTY)
    _check_range("frequency_penalty", sampling.frequency_penalty, -MAX_PENALTY, MAX_PENALTY)
    _check_range("repetition_penalty", sampling.repetition_penalty, MIN_REPETITION_PENALTY, MAX_REPETITION_PENALTY)
    _check_count("logit_bias", len(sampling.logit_bias), MAX_LOGIT_BIAS_TOKENS)
    for token, bias in sampling.logit_bias.items():
        _check_id("logit_bias", token, vocab_size)
        _check_range("logit_bias", bias, -MAX_LOGIT_BIAS, MAX_LOGIT_BIAS, of=f" of token {token}")
    _check_range("min_tokens", sampling.min_tokens, 0, max_tokens)
    if sampling.top_logprobs is not None:
        _check_range("top_logprobs", sampling.top_logprobs, 0, MAX_TOP_LOGPROBS)


def _unpack(field: str, packed: bytes, vocab_size: int) -> array[int]:
    try:
        ids = unpack_tokens(packed)
    except ValueError:
        raise InvalidRequest(f"{field} has {len(packed)} bytes, not a multiple of 4", param=field) from None
    if ids:
        _check_id(field, max(ids), vocab_size)
    return ids


def _check_id(field: str, token: int, vocab_size: int) -> None:
    if not 0 <= token < vocab_size:
        raise InvalidRequest(f"{field} has token id {token}, not in the vocabulary 0 .. {vocab_size - 1}", param=field)


def _check_count(field: str, count: int, most: int) -> None:
    if count > most:
        raise InvalidRequest(f"{field} has {count} entries, the limit is {most}", param=field)


def _check_range(field: str, value: float, low: float, high: float, *, of: str = "") -> None:
    if not low <= value <= high:
        raise InvalidRequest(f"{field}{of} is {value}, not in {low} .. {high}", param=field)
