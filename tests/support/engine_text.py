"""What an engine does with text, by its own means and none of the proxy's: template, tokenizer, answers."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import Tokenizer

from prefixcache.rendering.byte_tokenizer import byte_tokenizer_files

_WORDS = (
    "alder basin cedar dune ember fjord grove heath inlet juniper knoll larch meadow nettle orchard pebble quarry "
    "ridge slate thicket upland vale willow yarrow"
).split()
_NUM_STARTS = 256
"""Answers begin in so many ways."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineAnswer:
    """What is generated: one text for each token."""

    ids: Sequence[int]
    texts: Sequence[str]


class EngineText:
    """The tokenizer and template of a folder, or of the byte tokenizer; `folder` as a model's."""

    def __init__(self, folder: Path | None = None) -> None:
        if folder is None:
            files = byte_tokenizer_files().files
            tokenizer, template = files["tokenizer.json"].decode(), files["chat_template.jinja"].decode()
            settings = json.loads(files["tokenizer_config.json"])
        else:
            tokenizer = (folder / "tokenizer.json").read_text()
            settings = json.loads((folder / "tokenizer_config.json").read_text())
            own_file = folder / "chat_template.jinja"
            template = own_file.read_text() if own_file.exists() else settings["chat_template"]
        self._tokenizer = Tokenizer.from_str(tokenizer)
        # trim_blocks and lstrip_blocks as in transformers, for which templates are written.
        environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
        environment.filters["tojson"] = lambda value: json.dumps(value, ensure_ascii=False)
        self._template = environment.from_string(template)
        self._names = {name: settings.get(name) for name in ("bos_token", "eos_token")}
        first, following = ([self._ids(prefix + word) for word in _WORDS] for prefix in ("", " "))
        self._first_words, self._words = first, following

    def chat_ids(self, body: Mapping[str, Any]) -> list[int]:
        """Token ids of a chat request."""
        continues = bool(body.get("continue_final_message"))
        text = self._template.render(
            messages=[_plain(message) for message in body["messages"]],
            tools=body.get("tools"),
            add_generation_prompt=body.get("add_generation_prompt", not continues),
            **self._names,
            **body.get("chat_template_kwargs", {}),
        )
        return self._ids(text)

    def prompt_ids(self, prompt: str | Sequence[int]) -> list[int]:
        """Token ids of a prompt that the caller wrote as a whole."""
        return self._ids(prompt) if isinstance(prompt, str) else list(prompt)

    def answer(self, ids: Sequence[int], num_tokens: int) -> EngineAnswer:
        """Always the same one for a prompt."""
        digest = hashlib.sha256(repr(ids[-64:]).encode()).digest()
        place = int.from_bytes(digest[:2], "big") % _NUM_STARTS
        chosen = list(self._first_words[place % len(_WORDS)])
        while len(chosen) < num_tokens:
            place += 1 + digest[place % len(digest)]
            chosen += self._words[place % len(_WORDS)]
        del chosen[num_tokens:]
        return EngineAnswer(ids=chosen, texts=[self._tokenizer.decode([id]) for id in chosen])

    def _ids(self, text: str) -> list[int]:
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False).ids
        return ids


def _plain(message: Mapping[str, Any]) -> dict[str, Any]:
    """Text parts joined: what engines hand to templates that know texts only."""
    content = message.get("content")
    if isinstance(content, list):
        content = "".join(part.get("text", "") for part in content)
    return {**message, "content": content or ""}
