"""How tokens are drawn and when they end: the fields that every request for tokens has, and what is asked by them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

import msgspec
from msgspec import UNSET, Raw, UnsetType

from prefixcache.errors import InvalidRequest
from prefixcache.limits import (
    MAX_CHOICES,
    MAX_LOGIT_BIAS,
    MAX_LOGIT_BIAS_TOKENS,
    MAX_PENALTY,
    MAX_REPETITION_PENALTY,
    MAX_STOP_STRING_CHARS,
    MAX_STOP_STRINGS,
    MAX_STOP_TOKEN_IDS,
    MAX_TEMPERATURE,
    MAX_TOP_LOGPROBS,
    MIN_REPETITION_PENALTY,
)
from prefixcache.protocol import Sampling
from proxy.body_fields import check_count, check_ids, check_metadata, check_range, refuse_unless_no_op

_MAX_COUNT = 2**31 - 1
_TOKEN_ID = re.compile(r"[0-9]{1,10}")

SHARED_NO_OPS: Mapping[str, tuple[object, ...]] = {
    "length_penalty": (1,),
    "skip_special_tokens": (True,),
    "use_beam_search": (False,),
}
"""Fields of both surfaces that are not honoured, each with the values that ask for nothing."""


class _StreamOptions(msgspec.Struct, forbid_unknown_fields=True):
    include_usage: bool | None = None
    continuous_usage_stats: Raw | UnsetType = UNSET
    include_obfuscation: Raw | UnsetType = UNSET


class SamplingFields(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Null asks for the default everywhere."""

    model: str
    stream: bool | None = None
    stream_options: _StreamOptions | None = None
    n: int | None = None
    best_of: int | None = None
    max_tokens: int | None = None
    min_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool | None = None
    cache_salt: str | None = None
    user: str | None = None
    metadata: Raw | UnsetType = UNSET

    length_penalty: Raw | UnsetType = UNSET
    skip_special_tokens: Raw | UnsetType = UNSET
    use_beam_search: Raw | UnsetType = UNSET


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationOptions:
    """What is asked of every generation of a request. Whether it fits the model is decided later."""

    model: str
    stream: bool = False
    include_usage: bool = False
    n: int = 1
    """Choices of each prompt."""
    max_tokens: int | None = None
    """None: as many as fit the context, or `usual_max_tokens`."""
    usual_max_tokens: int | None = None
    seed: int | None = None
    """0 <= seed < 2**64; None: one for each prompt is made by the proxy."""
    sampling: Sampling = Sampling(seed=0)  # noqa: RUF009  (a frozen value)
    """Its own seed is never used."""
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    """Beside those of the model."""
    ignore_eos: bool = False
    """Whether those of the model do not count."""
    cache_salt: str = ""

    def check_vocabulary(self, vocab_size: int) -> None:
        """Raises InvalidRequest for a token id that the model has not."""
        check_ids("stop_token_ids", self.stop_token_ids, vocab_size)
        for id in self.sampling.logit_bias:
            if id >= vocab_size:
                raise InvalidRequest(
                    f"logit_bias has the token id {id}, the vocabulary has the ids 0 to {vocab_size - 1}",
                    param="logit_bias",
                )


def generation_options(
    fields: SamplingFields,
    *,
    max_tokens: int | None,
    usual_max_tokens: int | None = None,
    top_logprobs: int | None,
) -> GenerationOptions:
    """Raises InvalidRequest for a value out of its range."""
    if not fields.model:
        raise InvalidRequest("model must not be empty", param="model")
    check_metadata(fields.metadata)
    n = _n(fields)
    stream = bool(fields.stream)
    return GenerationOptions(
        model=fields.model,
        stream=stream,
        include_usage=_include_usage(fields.stream_options, stream),
        n=n,
        max_tokens=max_tokens,
        usual_max_tokens=usual_max_tokens,
        seed=_seed(fields.seed),
        sampling=_sampling(fields, max_tokens, top_logprobs),
        stop=_stop(fields.stop),
        stop_token_ids=_stop_token_ids(fields.stop_token_ids),
        ignore_eos=bool(fields.ignore_eos),
        cache_salt=fields.cache_salt or "",
    )


def check_max_tokens(name: str, value: int, *, least: int = 1) -> int:
    if value < least:
        raise InvalidRequest(f"{name} must be at least {least}", param=name)
    return value


def check_top_logprobs(name: str, value: int) -> int:
    check_range(name, value, 0, MAX_TOP_LOGPROBS)
    return value


def _n(fields: SamplingFields) -> int:
    n = fields.n if fields.n is not None else 1
    check_range("n", n, 1, MAX_CHOICES)
    if fields.best_of is not None and fields.best_of != n:
        raise InvalidRequest(f"best_of is only supported where it equals n, which is {n}", param="best_of")
    return n


def _sampling(fields: SamplingFields, max_tokens: int | None, top_logprobs: int | None) -> Sampling:
    given = {
        name: value
        for name in Sampling.__struct_fields__
        if name in _RANGES and (value := getattr(fields, name)) is not None
    }
    for name, value in given.items():
        check_range(name, value, *_RANGES[name])
    if given.get("top_p") == 0:
        raise InvalidRequest("top_p must be above 0 and at most 1", param="top_p")
    if max_tokens is not None and given.get("min_tokens", 0) > max_tokens:
        raise InvalidRequest(f"min_tokens must not be above max_tokens, which is {max_tokens}", param="min_tokens")
    if given.get("top_k") in (-1, 0):
        del given["top_k"]
    return Sampling(seed=0, logit_bias=_logit_bias(fields.logit_bias), top_logprobs=top_logprobs, **given)


_RANGES: Mapping[str, tuple[float, float]] = {
    "temperature": (0, MAX_TEMPERATURE),
    "top_p": (0, 1),
    "top_k": (-1, _MAX_COUNT),
    "min_p": (0, 1),
    "presence_penalty": (-MAX_PENALTY, MAX_PENALTY),
    "frequency_penalty": (-MAX_PENALTY, MAX_PENALTY),
    "repetition_penalty": (MIN_REPETITION_PENALTY, MAX_REPETITION_PENALTY),
    "min_tokens": (0, _MAX_COUNT),
}


def _logit_bias(given: Mapping[str, float] | None) -> dict[int, float]:
    if not given:
        return {}
    check_count("logit_bias", len(given), MAX_LOGIT_BIAS_TOKENS, "tokens")
    for key, bias in given.items():
        if not _TOKEN_ID.fullmatch(key):
            raise InvalidRequest("the keys of logit_bias must be token ids", param="logit_bias")
        check_range("logit_bias", bias, -MAX_LOGIT_BIAS, MAX_LOGIT_BIAS)
    return {int(key): bias for key, bias in given.items()}


def _include_usage(options: _StreamOptions | None, stream: bool) -> bool:
    if options is None:
        return False
    if not stream:
        raise InvalidRequest("stream_options is only allowed together with stream", param="stream_options")
    for name in ("continuous_usage_stats", "include_obfuscation"):
        refuse_unless_no_op(f"stream_options.{name}", getattr(options, name), (False,))
    return bool(options.include_usage)


def _seed(value: int | None) -> int | None:
    if value is None:
        return None
    if not -(2**63) <= value < 2**64:
        raise InvalidRequest("seed must fit 64 bits", param="seed")
    return value % 2**64


def _stop(value: str | list[str] | None) -> tuple[str, ...]:
    if value is None:
        return ()
    stops = [value] if isinstance(value, str) else value
    check_count("stop", len(stops), MAX_STOP_STRINGS, "strings")
    for stop in stops:
        if not stop:
            raise InvalidRequest("a stop string must not be empty", param="stop")
        if len(stop) > MAX_STOP_STRING_CHARS:
            raise InvalidRequest(f"a stop string is longer than {MAX_STOP_STRING_CHARS} characters", param="stop")
    return tuple(stops)


def _stop_token_ids(ids: list[int] | None) -> tuple[int, ...]:
    if not ids:
        return ()
    check_count("stop_token_ids", len(ids), MAX_STOP_TOKEN_IDS // 2, "ids")
    return tuple(dict.fromkeys(ids))
