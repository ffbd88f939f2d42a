"""The cases of given.jsonl, their placeholders filled in, and the requests that each one asks for."""

from __future__ import annotations

import json
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

WORDS = "the and you of to in is it that with for a user assistant system tool hello world answer question".split()
"""Words that are one token, or close to it, with the tokenizers of the tests and with the demo model's."""

FIRST_TEXT_ID = 3
"""Ids below it are special tokens in every tokenizer that the cases are played with."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """One HTTP request of a case."""

    method: str
    path: str
    content: bytes

    @property
    def body(self) -> dict[str, Any]:
        value: dict[str, Any] = json.loads(self.content)
        return value


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One failure seen in public, and what must be true here instead."""

    id: str
    kind: str
    attempt: Mapping[str, Any]
    """The field `try` as it stands in the file."""
    expect: str


@dataclass(slots=True)
class Placeholders:
    """Fills in $MODEL, $FILL:n, $UNIQUE:n and $IDS:n wherever they stand in a value."""

    model: str
    vocab_size: int = 256
    _num_unique: int = field(default=0, init=False)

    def filled(self, value: Any) -> Any:
        """The value with every placeholder replaced; a list item "$IDS:n" becomes n items."""
        if isinstance(value, str):
            return self._text(value)
        if isinstance(value, Mapping):
            return {key: self.filled(item) for key, item in value.items()}
        if isinstance(value, Sequence):
            items: list[Any] = []
            for item in value:
                name, _, count = item.partition(":") if isinstance(item, str) else ("", "", "")
                items += self.ids(int(count)) if name == "$IDS" else [self.filled(item)]
            return items
        return value

    def _text(self, value: str) -> str:
        name, _, count = value.partition(":")
        match name:
            case "$MODEL":
                return self.model
            case "$FILL":
                return self.text(int(count), seed="fill")
            case "$UNIQUE":
                self._num_unique += 1
                return self.text(int(count), seed=f"unique {self._num_unique}")
            case _:
                return value

    def text(self, num_tokens: int, *, seed: str) -> str:
        """About `num_tokens` tokens of text, always the same for one seed."""
        chosen = random.Random(seed)
        return " ".join(chosen.choice(WORDS) for _ in range(num_tokens))

    def ids(self, count: int) -> list[int]:
        """`count` ids of ordinary tokens; another count gives another beginning."""
        chosen = random.Random(f"ids {count}")
        return [chosen.randrange(FIRST_TEXT_ID, self.vocab_size) for _ in range(count)]


def _load() -> dict[str, Case]:
    lines = (Path(__file__).parent / "given.jsonl").read_text(encoding="utf-8").splitlines()
    found = [json.loads(line) for line in lines]
    return {
        entry["id"]: Case(id=entry["id"], kind=entry["try"]["kind"], attempt=entry["try"], expect=entry["expect"])
        for entry in found
    }


CASES: Mapping[str, Case] = _load()


def calls(case_id: str, placeholders: Placeholders) -> list[Call]:
    """The requests of a case in their order.

    http, fault, fake_worker  its one request           repeat    that request as often as told
    sequence                  the steps that are requests; steps in words are for the test to carry out
    matrix                    the base with each of `vary` laid over its body
    concurrent                that of each client, to be sent at once; of a case without a number, its one request
    raw_http                  the body as bytes, never parsed here
    """
    case = CASES[case_id]
    attempt = case.attempt
    match case.kind:
        case "sequence":
            requests = [step for step in attempt["steps"] if isinstance(step, Mapping)]
        case "matrix":
            base = attempt["base"]
            requests = [{**base, "body": {**base["body"], **variant}} for variant in attempt["vary"]]
        case "repeat":
            requests = [attempt["request"]] * attempt["times"]
        case "concurrent":
            requests = [attempt["request"]] * attempt.get("clients", 1)
        case "raw_http":
            raw = attempt["raw_body"].replace("$MODEL", placeholders.model)
            return [Call(method="POST", path=attempt["path"], content=raw.encode())]
        case _:
            requests = [attempt["request"]]
    return [call_of(placeholders.filled(request)) for request in requests]


def call_of(request: Mapping[str, Any], **fields: Any) -> Call:
    """A request as it stands in the file; `fields` are laid over its body."""
    content = json.dumps({**request["body"], **fields}).encode()
    return Call(method=request["method"], path=request["path"], content=content)


def changed(call: Call, **fields: Any) -> Call:
    """The same request with `fields` laid over its body."""
    return Call(method=call.method, path=call.path, content=json.dumps({**call.body, **fields}).encode())


def without(call: Call, *names: str) -> Call:
    """The same request without some fields of its body."""
    body = {name: value for name, value in call.body.items() if name not in names}
    return Call(method=call.method, path=call.path, content=json.dumps(body).encode())
