"""What a client saw of one request, whether it was streamed or not."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import httpx

from tests.cases.catalogue import Call
from tests.support.proxy_harness import events_of


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """Status, headers and everything that came after them."""

    status: int
    headers: Mapping[str, str]
    content: bytes

    @property
    def is_stream(self) -> bool:
        return self.headers["content-type"].startswith("text/event-stream")

    @property
    def body(self) -> dict[str, Any]:
        """The JSON of an answer that was not streamed."""
        assert self.headers["content-type"].startswith("application/json"), self.headers
        value: dict[str, Any] = json.loads(self.content)
        return value

    @property
    def events(self) -> list[Any]:
        """Every event of a stream, [DONE] included; parsed strictly."""
        assert self.is_stream, (self.status, self.content)
        return events_of(self.content.decode())

    @property
    def chunks(self) -> list[dict[str, Any]]:
        return [event for event in self.events if isinstance(event, dict)]

    @property
    def error(self) -> dict[str, Any]:
        """The error of a refusal: always a JSON body in OpenAI's envelope."""
        assert self.status >= 400, (self.status, self.content)
        error: dict[str, Any] = self.body["error"]
        assert set(error) == {"message", "type", "param", "code"} and error["message"]
        return error

    @property
    def texts(self) -> list[str]:
        """Text of each choice."""
        assert self.status == 200, self.content
        if not self.is_stream:
            return [_text_of(choice, "message") for choice in self.body["choices"]]
        found: dict[int, str] = {}
        for choice in self._streamed_choices():
            found[choice["index"]] = found.get(choice["index"], "") + _text_of(choice, "delta")
        return [found[index] for index in sorted(found)]

    @property
    def text(self) -> str:
        (text,) = self.texts
        return text

    @property
    def finish_reason(self) -> str:
        """Of an answer with one choice; there is exactly one."""
        choices = self._streamed_choices() if self.is_stream else self.body["choices"]
        (reason,) = [choice["finish_reason"] for choice in choices if choice["finish_reason"] is not None]
        assert isinstance(reason, str)
        return reason

    @property
    def usage(self) -> dict[str, Any]:
        """Token counts; in a stream they have to be asked for."""
        holders = self.chunks if self.is_stream else [self.body]
        (usage,) = [holder["usage"] for holder in holders if holder.get("usage") is not None]
        assert isinstance(usage, dict)
        return usage

    @property
    def cached_tokens(self) -> int:
        cached: int = self.usage["prompt_tokens_details"]["cached_tokens"]
        return cached

    @property
    def hit_tokens(self) -> int:
        """What the index predicted."""
        return int(self.headers["x-prefixcache-hit-tokens"])

    def _streamed_choices(self) -> Sequence[dict[str, Any]]:
        return [choice for chunk in self.chunks for choice in chunk.get("choices", ())]


def _text_of(choice: Mapping[str, Any], shape: str) -> str:
    """Chat completions have a message or delta, completions have the text itself."""
    text = choice["text"] if "text" in choice else choice[shape].get("content")
    return text or ""


async def send(client: httpx.AsyncClient, call: Call) -> Outcome:
    """Sends one request and reads its answer to the end."""
    headers = {"content-type": "application/json"}
    answer = await client.request(call.method, call.path, content=call.content, headers=headers)
    return Outcome(status=answer.status_code, headers=answer.headers, content=answer.content)


async def send_all(client: httpx.AsyncClient, calls: Sequence[Call]) -> list[Outcome]:
    """One after the other."""
    return [await send(client, call) for call in calls]
