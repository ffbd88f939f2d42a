"""What a client makes of a stream: the whole answer again."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any


def folded_chat(chunks: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The chat completion that the chunks of a stream add up to."""
    return _folded(chunks, "chat.completion", _add_chat)


def folded_completion(chunks: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The text completion that the chunks of a stream add up to."""
    return _folded(chunks, "text_completion", _add_text)


def _folded(
    chunks: Sequence[dict[str, Any]], kind: str, add: Callable[[dict[str, Any], dict[str, Any]], None]
) -> dict[str, Any]:
    choices: dict[int, dict[str, Any]] = {}
    usage = None
    for chunk in chunks:
        usage = chunk.get("usage") or usage
        for part in chunk["choices"]:
            choice = choices.setdefault(part["index"], {"index": part["index"], "logprobs": None})
            assert "finish_reason" not in choice, f"choice {part['index']} goes on after its end"
            add(choice, part)
            _add_logprobs(choice, part["logprobs"])
            if part["finish_reason"] is not None:
                choice["finish_reason"] = part["finish_reason"]
    first = chunks[0]
    return {
        **{name: first[name] for name in ("id", "created", "model", "system_fingerprint")},
        "object": kind,
        "choices": [choices[index] for index in sorted(choices)],
        "usage": usage,
    }


def _add_chat(choice: dict[str, Any], part: dict[str, Any]) -> None:
    message = choice.setdefault("message", {})
    for name, value in part["delta"].items():
        message[name] = message[name] + value if name == "content" and name in message else value


def _add_text(choice: dict[str, Any], part: dict[str, Any]) -> None:
    choice["text"] = choice.get("text", "") + part["text"]


def _add_logprobs(choice: dict[str, Any], more: dict[str, Any] | None) -> None:
    if more is None:
        return
    so_far = choice["logprobs"] or {}
    choice["logprobs"] = {
        name: so_far.get(name, []) + value if isinstance(value, list) else value for name, value in more.items()
    }
