"""transformers as the oracle of rendering and tokenizing."""

from __future__ import annotations

from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer
from transformers.utils import chat_template_utils

from prefixcache.rendering.tokenizer_files import TokenizerFiles
from tests.support.chats import Chat
from tests.support.tiny_tokenizer import write_files

NOW = datetime(2031, 2, 3, 4, 5, 6)


class _FixedDatetime(datetime):
    @classmethod
    def now(cls, tz: Any = None) -> Any:
        return NOW


class Oracle:
    """One model folder, as transformers reads it. Its templates see NOW as the date."""

    def __init__(self, files: TokenizerFiles, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(chat_template_utils, "datetime", _FixedDatetime)
        self.tokenizer: Any = AutoTokenizer.from_pretrained(write_files(files, folder))

    def text(self, chat: Chat, tools: Any, *, add_generation_prompt: bool) -> str:
        return str(
            self.tokenizer.apply_chat_template(
                chat, tools=tools, add_generation_prompt=add_generation_prompt, tokenize=False
            )
        )

    def ids(self, chat: Chat, tools: Any, *, add_generation_prompt: bool, sanitize: bool = False) -> list[int]:
        return list(
            self.tokenizer.apply_chat_template(
                chat,
                tools=tools,
                add_generation_prompt=add_generation_prompt,
                return_dict=False,
                sanitize_control_tokens=sanitize,
            )
        )
