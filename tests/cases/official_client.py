"""A stream as OpenAI's own client reports it."""

from __future__ import annotations

from typing import Any

import openai


async def read_to_the_error(
    client: openai.AsyncOpenAI, body: dict[str, Any]
) -> tuple[str, list[str | None], openai.APIError | None]:
    """Text, finish reasons and the error of a stream as the official client reports them."""
    known = {name: value for name, value in body.items() if name != "ignore_eos"}
    extra = {name: value for name, value in body.items() if name == "ignore_eos"}
    texts: list[str] = []
    reasons: list[str | None] = []
    try:
        async for chunk in await client.chat.completions.create(**known, extra_body=extra):
            texts.append(chunk.choices[0].delta.content or "")
            reasons.append(chunk.choices[0].finish_reason)
    except openai.APIError as error:
        return "".join(texts), reasons, error
    return "".join(texts), reasons, None
