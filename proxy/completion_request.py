"""Request validation: the bytes of a text completion request -> CompletionRequest, or an error that names the field."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import msgspec
from msgspec import UNSET, Raw, UnsetType

from prefixcache.errors import InvalidRequest
from prefixcache.limits import MAX_GENERATIONS
from proxy.body_fields import check_ids, decoded, refuse_unless_no_ops
from proxy.sampling_fields import (
    SHARED_NO_OPS,
    GenerationOptions,
    SamplingFields,
    check_max_tokens,
    check_top_logprobs,
    generation_options,
)

USUAL_MAX_TOKENS = 16
"""OpenAI's default of this surface."""

NO_OPS: Mapping[str, tuple[Any, ...]] = {
    **SHARED_NO_OPS,
    "prompt_logprobs": (),
    "response_format": ({"type": "text"},),
    "suffix": (),
    "truncate_prompt_tokens": (),
}
"""Fields that are not honoured, each with the values that ask for nothing."""


class CompletionFields(SamplingFields, kw_only=True, forbid_unknown_fields=True):
    prompt: Raw
    """A text, a list of texts, a list of token ids or a list of such lists: decoded when it is known which."""
    logprobs: int | None = None
    echo: bool | None = None
    add_special_tokens: bool | None = None

    prompt_logprobs: Raw | UnsetType = UNSET
    response_format: Raw | UnsetType = UNSET
    suffix: Raw | UnsetType = UNSET
    truncate_prompt_tokens: Raw | UnsetType = UNSET


_decoder = msgspec.json.Decoder(CompletionFields)
_PROMPT_HEAD = re.compile(rb"(\[?)[ \t\r\n]*(.?)", re.DOTALL)
_text_decoder = msgspec.json.Decoder(str)
_texts_decoder = msgspec.json.Decoder(list[str])
_ids_decoder = msgspec.json.Decoder(list[int])
_id_lists_decoder = msgspec.json.Decoder(list[list[int]])

RawPrompt = str | list[int]
"""A text to be tokenized, or token ids."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CompletionRequest:
    """A text completion request whose every field is valid. Whether it fits the model is decided later."""

    options: GenerationOptions
    prompts: tuple[RawPrompt, ...]
    in_list: bool = False
    """Whether the prompts stood in a list; then an error names their place in it."""
    echo: bool = False
    """The prompt's text stands before each of its answers."""
    add_special_tokens: bool = True
    """Whether texts get the tokenizer's own first and last tokens."""

    def check_vocabulary(self, vocab_size: int) -> None:
        """Raises InvalidRequest for a token id that the model has not."""
        for place, prompt in enumerate(self.prompts):
            if not isinstance(prompt, str):
                check_ids(self.name_of(place), prompt, vocab_size)

    def name_of(self, place: int) -> str:
        """The field that one of the prompts is."""
        return f"prompt[{place}]" if self.in_list else "prompt"


def parse_completion_request(body: bytes) -> CompletionRequest:
    """Raises InvalidRequest. Costs one pass over the body."""
    fields = decoded(_decoder, body)
    refuse_unless_no_ops(fields, NO_OPS)
    echo = bool(fields.echo)
    top_logprobs = None if fields.logprobs is None else check_top_logprobs("logprobs", fields.logprobs)
    if echo and top_logprobs is not None:
        raise InvalidRequest("logprobs are not supported together with echo", param="logprobs")
    max_tokens = fields.max_tokens
    if max_tokens is not None:
        check_max_tokens("max_tokens", max_tokens, least=0 if echo else 1)
    options = generation_options(
        fields, max_tokens=max_tokens, usual_max_tokens=USUAL_MAX_TOKENS, top_logprobs=top_logprobs
    )
    prompts, in_list = _prompts(fields.prompt)
    if len(prompts) * options.n > MAX_GENERATIONS:
        raise InvalidRequest(
            f"{len(prompts)} prompts with n = {options.n} are {len(prompts) * options.n} generations, "
            f"at most {MAX_GENERATIONS} are allowed",
            param="prompt",
        )
    return CompletionRequest(
        options=options,
        prompts=prompts,
        in_list=in_list,
        echo=echo,
        add_special_tokens=fields.add_special_tokens is not False,
    )


def _prompts(raw: Raw) -> tuple[tuple[RawPrompt, ...], bool]:
    """The prompts, and whether they stood in a list of prompts: the first item of the list tells."""
    head = _PROMPT_HEAD.match(raw)
    assert head is not None, "the pattern matches anything"
    is_list, item = head.groups()
    prompts: list[RawPrompt]
    if not is_list:
        prompts = [decoded(_text_decoder, raw, within="prompt")]
    elif item == b'"':
        prompts = [*decoded(_texts_decoder, raw, within="prompt")]
    elif item == b"[":
        prompts = [*decoded(_id_lists_decoder, raw, within="prompt")]
    else:
        prompts = [decoded(_ids_decoder, raw, within="prompt")]
    in_list = bool(is_list) and item in (b'"', b"[")
    for place, prompt in enumerate(prompts):
        if not prompt:
            name = f"prompt[{place}]" if in_list else "prompt"
            raise InvalidRequest(f"{name} must not be empty", param=name)
    return tuple(prompts), in_list
