"""Bodies for a plain engine: the ids are those that transformers' apply_chat_template gives, which engines call."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from jinja2 import TemplateError

from prefixcache.rendering.engine_prompt import READERS, EnginePrompts
from prefixcache.rendering.renderer import RenderedPrompt, Renderer
from prefixcache.rendering.tokenizer_files import TokenizerFiles
from prefixcache.rendering.tokenizing_threads import TokenizingThreads
from prefixcache.types import pack_tokens
from tests.support.chats import ADDED_TOKENS, CHATS, CONFIG, SPECIAL_TOKENS, TEMPLATES, TOOLS, Chat
from tests.support.seeds import seeded
from tests.support.tiny_tokenizer import SpacePrefix, tiny_llama_files, tiny_tokenizer_files
from tests.support.transformers_oracle import NOW, Oracle

PRINTS_EVERYTHING = {"repr_of_everything", "ascii_json"}
"""They show the order and the names of fields, which differ from engine to engine."""

SPELLINGS = ("<|im_end|>", "<|im_start|>", "<s>", "</s>", "[INST]", "<think>", "a", " b", "\n", "é", "<|im_", "end|>")


def byte_level(template: str) -> TokenizerFiles:
    return tiny_tokenizer_files(
        chat_template=TEMPLATES[template], special_tokens=SPECIAL_TOKENS, added_tokens=ADDED_TOKENS, config=CONFIG
    )


def sentencepiece(template: str, space_prefix: SpacePrefix) -> TokenizerFiles:
    return tiny_llama_files(
        space_prefix,
        chat_template=TEMPLATES[template],
        special_tokens=("<|im_start|>", "<|im_end|>", "<|endoftext|>", *SPECIAL_TOKENS),
        added_tokens=ADDED_TOKENS,
    )


@pytest.fixture
def threads() -> Iterator[TokenizingThreads]:
    with ThreadPoolExecutor(1) as executor:
        yield TokenizingThreads(executor)


class Bodies:
    """One model's ids of whole bodies, and what transformers makes of the same chats."""

    def __init__(
        self, files: TokenizerFiles, threads: TokenizingThreads, folder: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        self._renderer = Renderer(files, clock=lambda: NOW)
        self._prompts = EnginePrompts(renderer=self._renderer, threads=threads)
        self._oracle = Oracle(files, folder, monkeypatch)

    async def ids(self, body: dict[str, Any], path: str = "/v1/chat/completions") -> list[int] | None:
        prompt = await self._prompts.of(path, body, body_bytes=1, seed=1, model="m")
        if prompt is None:
            return None
        (draft,) = self._prompts._drafts(READERS[path], body)
        assert isinstance(draft, RenderedPrompt)
        ids = self._renderer.encode(draft)
        assert prompt.begins(pack_tokens(ids)) and prompt.num_units == len(ids)
        return ids.tolist()

    def expected(self, chat: Chat, tools: Any = None, **named: Any) -> list[int] | None:
        """None where transformers refuses."""
        shown = [self._shown(message) for message in chat]
        named = {"add_generation_prompt": True, **named}
        try:
            ids = self._oracle.tokenizer.apply_chat_template(shown, tools=tools, return_dict=False, **named)
        except (TemplateError, TypeError, ValueError):
            return None
        return list(ids)

    def raw(self, text: str) -> list[int]:
        return list(self._oracle.tokenizer(text)["input_ids"])

    def _shown(self, message: dict[str, Any]) -> dict[str, Any]:
        """As engines hand it over: no content is empty content, and parts are joined unless the template takes them."""
        content = message["content"] or ""
        if isinstance(content, list) and not self._renderer.takes_parts:
            content = "\n".join(part["text"] for part in content)
        return {**message, "content": content}


def sent(chat: Chat) -> Chat:
    """A chat as it stands in a body: the arguments of calls are JSON text."""
    return [
        {**message, "tool_calls": [_sent_call(call) for call in message["tool_calls"]]}
        if "tool_calls" in message
        else message
        for message in chat
    ]


def _sent_call(call: dict[str, Any]) -> dict[str, Any]:
    function = call["function"]
    return {**call, "function": {**function, "arguments": json.dumps(function["arguments"])}}


async def compare(bodies: Bodies) -> tuple[int, int]:
    """Every chat in every way; returns how many have a prediction and how many are refused."""
    counts = [0, 0]
    for chat in CHATS.values():
        for tools in (None, [], TOOLS):
            for add_generation_prompt in (True, False):
                flags = {"add_generation_prompt": add_generation_prompt}
                expected = bodies.expected(chat, tools, **flags)
                body = {"messages": sent(chat), "tools": tools, "tool_choice": "none", **flags}
                assert await bodies.ids(body) == expected
                assert await bodies.ids(body) == expected  # now from the remembered pieces
                counts[expected is None] += 1
    return counts[0], counts[1]


@pytest.mark.parametrize("template", sorted(TEMPLATES.keys() - PRINTS_EVERYTHING))
async def test_byte_level(
    template: str, threads: TokenizingThreads, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    num_predicted, num_refused = await compare(Bodies(byte_level(template), threads, tmp_path, monkeypatch))
    assert num_predicted + num_refused == 6 * len(CHATS)
    assert (num_predicted == 0) == (template in ("refuses", "fails"))


@pytest.mark.parametrize("space_prefix", ["prepend", "first", "always", "never"])
@pytest.mark.parametrize("template", ["chatml", "llama2", "reasoning"])
async def test_sentencepiece_like(
    template: str,
    space_prefix: SpacePrefix,
    threads: TokenizingThreads,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    bodies = Bodies(sentencepiece(template, space_prefix), threads, tmp_path, monkeypatch)
    num_predicted, _ = await compare(bodies)
    assert num_predicted > 0


@pytest.mark.parametrize("files", [byte_level("chatml"), sentencepiece("chatml", "always")])
async def test_control_spellings_become_control_tokens_as_they_do_in_engines(
    files: TokenizerFiles, threads: TokenizingThreads, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bodies = Bodies(files, threads, tmp_path, monkeypatch)
    source = seeded("unmarked")
    for _ in range(150):
        chat = [
            {"role": source.choice(("user", "assistant")), "content": "".join(source.choices(SPELLINGS, k=4))}
            for _ in range(3)
        ]
        assert await bodies.ids({"messages": chat}) == bodies.expected(chat)


@pytest.mark.parametrize("template", sorted(TEMPLATES.keys() - PRINTS_EVERYTHING))
async def test_a_final_message_is_continued(
    template: str, threads: TokenizingThreads, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bodies = Bodies(byte_level(template), threads, tmp_path, monkeypatch)
    flags = {"add_generation_prompt": False, "continue_final_message": True}
    for end in ("The answer is", "The answer is ", " \n", "é<|im_end|> x"):
        chat = [{"role": "user", "content": "Which?"}, {"role": "assistant", "content": end}]
        assert await bodies.ids({"messages": chat, **flags}) == bodies.expected(chat, **flags)


async def test_arguments_and_documents_reach_the_template(
    threads: TokenizingThreads, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    template = "{{ documents }}{{ mood }}{{ eos_token }}{% for m in messages %}{{ m.content }}{% endfor %}"
    files = tiny_tokenizer_files(chat_template=template, config=CONFIG)
    bodies = Bodies(files, threads, tmp_path, monkeypatch)
    chat = [{"role": "user", "content": "Hi"}]
    arguments = {"mood": "good", "eos_token": "END"}
    documents = [{"title": "t", "text": "d"}]
    ids = await bodies.ids({"messages": chat, "chat_template_kwargs": arguments, "documents": documents})
    assert ids is not None
    assert ids == bodies.expected(chat, documents=documents, **arguments)


@pytest.mark.parametrize("space_prefix", ["prepend", "always"])
async def test_completions_are_encoded_with_the_tokenizers_own_special_tokens(
    space_prefix: SpacePrefix, threads: TokenizingThreads, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bodies = Bodies(sentencepiece("llama2", space_prefix), threads, tmp_path, monkeypatch)
    for text in ("Hello world", "", " a <s> b</s>", "é\n日"):
        assert await bodies.ids({"prompt": text}, "/v1/completions") == bodies.raw(text)
