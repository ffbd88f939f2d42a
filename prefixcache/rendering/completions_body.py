"""The body of a text completion, as far as it becomes the prompt."""

from __future__ import annotations

from array import array
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from prefixcache.errors import InvalidRequest
from prefixcache.limits import MAX_PREDICTED_PROMPTS


@dataclass(frozen=True, slots=True, kw_only=True)
class CompletionForm:
    """The prompts of one request: texts, or token ids."""

    prompts: tuple[str | array[int], ...]
    add_special_tokens: bool
    """Whether the tokenizer's own first and last tokens are put around a text, as engines do unless told otherwise."""


def completion_form(body: Mapping[str, Any]) -> CompletionForm:
    """Raises InvalidRequest for a body that no engine takes, or of more prompts than are looked at.

    OverflowError for an id that is none.
    """
    prompt = body.get("prompt")
    prompts = prompt if isinstance(prompt, list) and not _is_ids(prompt) else [prompt]
    if not prompts:
        raise InvalidRequest("prompt must not be an empty list", param="prompt")
    if len(prompts) > MAX_PREDICTED_PROMPTS:
        raise InvalidRequest(f"more than {MAX_PREDICTED_PROMPTS} prompts are not looked at", param="prompt")
    return CompletionForm(
        prompts=tuple(_prompt(item) for item in prompts),
        add_special_tokens=body.get("add_special_tokens") is not False,
    )


def _prompt(item: object) -> str | array[int]:
    if isinstance(item, str):
        return item
    if isinstance(item, list) and item and _is_ids(item):
        return array("I", item)
    raise InvalidRequest("prompt must be a text, token ids or a list of either", param="prompt")


def _is_ids(items: list[Any]) -> bool:
    return bool(items) and all(type(item) is int for item in items)
