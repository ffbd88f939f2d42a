"""OpenAI's schema: the pydantic types of the official package, read strictly, and what the package leaves optional.

The package itself accepts anything: it builds its objects without validation and keeps fields it does not know.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, TypeVar

from openai import BaseModel
from openai.types import Completion, Model
from openai.types.chat import ChatCompletion, ChatCompletionChunk

Type = TypeVar("Type", bound=BaseModel)

ALWAYS_THERE: Mapping[str, frozenset[str]] = {
    "ChatCompletion": frozenset({"id", "object", "created", "model", "choices", "usage"}),
    "ChatCompletion.choices": frozenset({"index", "message", "logprobs", "finish_reason"}),
    "ChatCompletion.choices.message": frozenset({"role", "content", "refusal"}),
    "ChatCompletionChunk": frozenset({"id", "object", "created", "model", "choices"}),
    "ChatCompletionChunk.choices": frozenset({"index", "delta", "finish_reason"}),
    "Completion": frozenset({"id", "object", "created", "model", "choices"}),
    "Completion.choices": frozenset({"index", "text", "logprobs", "finish_reason"}),
}
"""Fields that OpenAI's specification requires, null or not, by the place where they stand."""

OWN_FIELDS = frozenset({"Model.max_model_len", "Model.root", "Model.parent"})
"""What this project adds, in the words of vLLM."""


def conforms(kind: type[Type], data: Mapping[str, Any]) -> Type:
    """The value as the package's type; fails for a wrong type, an unknown field or a missing one."""
    value = kind.model_validate(data, strict=True)
    unknown = set(_unknown(value, kind.__name__)) - OWN_FIELDS
    assert not unknown, f"fields that OpenAI does not have: {sorted(unknown)}"
    missing = sorted(_missing(data, kind.__name__))
    assert not missing, f"fields that OpenAI always has: {missing}"
    return value


def _unknown(value: Any, place: str) -> Iterator[str]:
    if isinstance(value, BaseModel):
        yield from (f"{place}.{name}" for name in value.model_extra or {})
        for name in type(value).model_fields:
            yield from _unknown(getattr(value, name), f"{place}.{name}")
    elif isinstance(value, list):
        for item in value:
            yield from _unknown(item, place)


def _missing(data: Any, place: str) -> Iterator[str]:
    if isinstance(data, Mapping):
        yield from (f"{place}.{name}" for name in ALWAYS_THERE.get(place, frozenset()) - data.keys())
        for name, item in data.items():
            yield from _missing(item, f"{place}.{name}")
    elif isinstance(data, list):
        for item in data:
            yield from _missing(item, place)


def chat_completion(data: Mapping[str, Any]) -> ChatCompletion:
    return conforms(ChatCompletion, data)


def chat_chunk(data: Mapping[str, Any]) -> ChatCompletionChunk:
    return conforms(ChatCompletionChunk, data)


def completion(data: Mapping[str, Any]) -> Completion:
    return conforms(Completion, data)


def completion_chunk(data: Mapping[str, Any]) -> Completion:
    """The package has one type for both; OpenAI's own chunks have a null finish reason in all but the last."""
    choices = [{**choice, "finish_reason": choice["finish_reason"] or "stop"} for choice in data["choices"]]
    return conforms(Completion, {**data, "choices": choices})


def model(data: Mapping[str, Any]) -> Model:
    return conforms(Model, data)
