"""OpenAI's own client with its own retries, and why it made each of them."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from contextvars import ContextVar
from typing import Any

import openai

from tests.compose.account import Account, Seen, account_of
from tests.support.sim_oracle import ExpectedAnswer

ANSWER_TIMEOUT_S = 60.0

_failed_attempts: ContextVar[list[str]] = ContextVar("failed_attempts")
_seen: ContextVar[Seen] = ContextVar("seen")


class _Watched(openai.DefaultAsyncHttpxClient):
    """Notes every attempt that brought no answer, and whose answer it was, for the task that made it."""

    async def send(self, request: Any, **options: Any) -> Any:
        try:
            response = await super().send(request, **options)
        except Exception as error:
            _failed_attempts.get().append(type(error).__name__)
            raise
        if response.is_error:
            again = response.headers.get("retry-after")
            _failed_attempts.get().append(f"{response.status_code} {'' if again else 'without Retry-After'}".strip())
        _seen.get().worker = response.headers.get("x-prefixcache-worker", "")
        return response


class Client:
    """Asks, and gives account of each answer."""

    def __init__(self, client: openai.AsyncOpenAI) -> None:
        self._client = client

    async def ask(self, body: Mapping[str, Any], expected: ExpectedAnswer) -> Account:
        """Never raises for what the other side does."""
        attempts: list[str] = []
        _failed_attempts.set(attempts)
        seen, error, was_told = Seen(), None, False
        _seen.set(seen)
        asked_at = time.monotonic()
        try:
            await (self._read_stream if body.get("stream") else self._read_whole)(body, seen)
        except openai.APIStatusError as failure:
            error = f"{failure.status_code} {failure.message}"
        except openai.APIConnectionError as failure:
            error = f"{failure!r} from {failure.__cause__!r}"
        except openai.APIError as failure:
            error, was_told = failure.message, True
        return account_of(
            seen,
            expected,
            is_stream=bool(body.get("stream")),
            asked_at=asked_at,
            ended_at=time.monotonic(),
            error=error,
            was_told=was_told,
            failed_attempts=attempts,
        )

    async def _read_whole(self, body: Mapping[str, Any], seen: Seen) -> None:
        answer = await self._client.chat.completions.create(**body)
        seen.arrivals.append(time.monotonic())
        [choice] = answer.choices
        seen.text, seen.finish_reason = choice.message.content or "", choice.finish_reason
        _take_usage(answer.usage, seen)

    async def _read_stream(self, body: Mapping[str, Any], seen: Seen) -> None:
        stream = await self._client.chat.completions.create(**body)
        seen.has_begun = True
        async for chunk in stream:
            for choice in chunk.choices:
                if choice.delta.content:
                    seen.arrivals.append(time.monotonic())
                    seen.text += choice.delta.content
                seen.finish_reason = choice.finish_reason or seen.finish_reason
            _take_usage(chunk.usage, seen)


def _take_usage(usage: Any, seen: Seen) -> None:
    if usage is not None:
        seen.prompt_tokens, seen.completion_tokens = usage.prompt_tokens, usage.completion_tokens
        seen.cached_tokens = usage.prompt_tokens_details.cached_tokens


@asynccontextmanager
async def open_client(url: str, *, timeout_s: float = ANSWER_TIMEOUT_S) -> AsyncIterator[Client]:
    """`url`: http://127.0.0.1:PORT. The number of retries is the client's default."""
    async with openai.AsyncOpenAI(
        base_url=f"{url}/v1",
        api_key="unused",
        timeout=timeout_s,
        http_client=_Watched(trust_env=False, timeout=timeout_s),
    ) as client:
        yield Client(client)
