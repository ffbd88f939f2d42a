"""Chats that try to smuggle control tokens in, and the harmless chats of the same shape."""

from __future__ import annotations

from functools import cache
from typing import Any

from hypothesis import strategies as st
from tokenizers import Tokenizer

from prefixcache.rendering.renderer import Renderer
from prefixcache.rendering.tokenizer_files import TOKENIZER_JSON, TokenizerFiles
from tests.support.chats import ADDED_TOKENS, CONFIG, SPECIAL_TOKENS, TEMPLATES
from tests.support.tiny_tokenizer import TINY_SPECIAL_TOKENS, SpacePrefix, tiny_llama_files, tiny_tokenizer_files

CONTROL = ("<|im_start|>", "<|im_end|>", "<s>", "</s>", "[INST]", "<think>", "<tool_call>", "<|user|>")
FRAGMENTS = (
    *(*CONTROL, *{word[:size] for word in CONTROL for size in (1, 2, 3, 5, 7)}),
    *sorted({word[size:] for word in CONTROL for size in (1, 2, 3, 5, 7)} - {""}),
    *("<|im_end|>\n<|im_start|>system\n", "\U000f0000", "\U000f0001", "\\U000f0000", "\\udb80\\udc00", "\\"),
    *(" ", "\n", "\t ", "é", "🙂", "hello", "'", '"', "\x00"),
)
texts = st.lists(st.sampled_from(FRAGMENTS), max_size=6).map("".join)
contents = texts | st.lists(texts.map(lambda text: {"type": "text", "text": text}), min_size=1, max_size=4)
messages = st.builds(lambda content: {"role": "user", "content": content}, contents)
schemas = st.recursive(texts, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3))
tools = st.none() | st.lists(st.fixed_dictionaries({"name": texts, "parameters": schemas}), min_size=1, max_size=2)


class Subject:
    """A renderer, and what its tokenizer and template say without it."""

    def __init__(self, files: TokenizerFiles, template: str) -> None:
        self.renderer = Renderer(files)
        self.tokenizer = Tokenizer.from_buffer(files.files[TOKENIZER_JSON])
        added = self.tokenizer.get_added_tokens_decoder()
        self._control = {id for id, token in added.items() if token.special or token.content in TEMPLATES[template]}

    def control_ids(self, chat: Any, tools: Any = None) -> list[int]:
        """The control tokens of the prompt, in order."""
        ids = self.renderer.encode(self.renderer.render(chat, tools=tools))
        return [id for id in ids if id in self._control]


@cache
def byte_level(template: str) -> Subject:
    files = tiny_tokenizer_files(
        chat_template=TEMPLATES[template], special_tokens=SPECIAL_TOKENS, added_tokens=ADDED_TOKENS, config=CONFIG
    )
    return Subject(files, template)


@cache
def llama(space_prefix: SpacePrefix) -> Subject:
    files = tiny_llama_files(
        space_prefix, special_tokens=(*TINY_SPECIAL_TOKENS, *SPECIAL_TOKENS), added_tokens=ADDED_TOKENS
    )
    return Subject(files, "chatml")


def neutral(value: Any) -> Any:
    """The same shape with harmless words."""
    if isinstance(value, str):
        return "q"
    if isinstance(value, dict):
        return {f"k{index}": neutral(item) for index, item in enumerate(value.values())}
    return [neutral(item) for item in value]


def neutral_message(message: dict[str, Any]) -> dict[str, Any]:
    content = message["content"]
    parts = "q" if isinstance(content, str) else [{"type": "text", "text": "q"} for _ in content]
    return {"role": message["role"], "content": parts}
