"""A prompt with its answer, as the next turn has it: what is claimed of both must be what that turn begins with."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from prefixcache.rendering.engine_prompt import EnginePrompt, EnginePrompts
from prefixcache.rendering.renderer import Renderer
from prefixcache.rendering.tokenizing_threads import TokenizingThreads
from tests.support.tiny_tokenizer import TINY_TEMPLATE, tiny_llama_files, tiny_tokenizer_files

CHAT = "/v1/chat/completions"
QUESTION = "the answer to the question of a user is hello world and " * 10
ANSWER = "world of answers, and the user: hello! " * 20
DROPS_ALL_BUT_LAST = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n"
    "{% if message.role != 'assistant' or loop.last %}{{ message.content }}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""Shows an answer only as long as it is the last message."""
WRITES_ANOTHER_BEGINNING = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n<think>\n\n</think>\n\n{% endif %}"
)
"""Begins an answer with what it leaves out of those that are history."""
COUNTS_QUESTIONS = "{{ messages | selectattr('role', 'equalto', 'user') | list | length }}" + TINY_TEMPLATE
"""Begins every prompt with what grows from turn to turn."""
LOOKS_AT_THE_LAST = "{{ messages[-1].role[:1] }}" + TINY_TEMPLATE
"""Begins a prompt by its last message."""
NO_TWO_ANSWERS = "{% if messages | length > 2 %}{{ raise_exception('too long') }}{% endif %}" + TINY_TEMPLATE


def renderer(template: str) -> Renderer:
    return Renderer(tiny_tokenizer_files(chat_template=template))


@pytest.fixture
def threads() -> Iterator[TokenizingThreads]:
    with ThreadPoolExecutor(1) as executor:
        yield TokenizingThreads(executor)


async def prompt_of(prompts: EnginePrompts, body: dict[str, Any]) -> EnginePrompt:
    prompt = await prompts.of(CHAT, body, body_bytes=1, seed=1, model="m")
    assert prompt is not None
    return prompt


def chat(*texts: str, **fields: Any) -> dict[str, Any]:
    roles = ("user", "assistant")
    return {
        "model": "m",
        "messages": [{"role": roles[at % 2], "content": text} for at, text in enumerate(texts)],
        **fields,
    }


@pytest.mark.parametrize(
    "used",
    [None, Renderer(tiny_tokenizer_files()), Renderer(tiny_llama_files("always"))],
    ids=["bytes", "tokens", "llama"],
)
@pytest.mark.parametrize("question", [QUESTION, "hi"], ids=["long", "shorter than a block"])
async def test_it_is_what_the_next_turn_begins_with(
    used: Renderer | None, question: str, threads: TokenizingThreads
) -> None:
    prompts = EnginePrompts(renderer=used, threads=threads)
    for end in range(0, 120, 7):
        answer = ANSWER[: len(ANSWER) - end]
        body = chat(question, tools=[{"type": "function", "function": {"name": "f", "parameters": {}}}])
        prompt = await prompt_of(prompts, body)
        then = await prompt_of(prompts, {**body, "messages": chat(question, answer, QUESTION)["messages"]})
        chain = prompts.answered(body, prompt, answer)
        assert len(chain) > len(prompt.chain) + 1
        assert chain == then.chain[: len(chain)]
        # All of it but the last token, and not a block that holds anything else.
        said = await prompt_of(prompts, {**body, "messages": chat(question, answer)["messages"]})
        width = prompts.geometry.index_block_units
        assert said.num_units // width - 1 <= len(chain) <= said.num_units // width


@pytest.mark.parametrize(
    "template", [DROPS_ALL_BUT_LAST, WRITES_ANOTHER_BEGINNING, COUNTS_QUESTIONS, LOOKS_AT_THE_LAST, NO_TWO_ANSWERS]
)
async def test_nothing_is_added_where_history_is_written_another_way(template: str, threads: TokenizingThreads) -> None:
    prompts = EnginePrompts(renderer=renderer(template), threads=threads)
    body = chat(QUESTION)
    prompt = await prompt_of(prompts, body)
    assert prompts.answered(body, prompt, ANSWER) == prompt.chain


@pytest.mark.parametrize(
    ("texts", "fields"),
    [
        ((QUESTION,), {"add_generation_prompt": False}),
        ((QUESTION, "begin"), {"add_generation_prompt": False, "continue_final_message": True}),
    ],
)
async def test_what_is_no_new_message_adds_nothing(
    texts: tuple[str, ...], fields: dict[str, Any], threads: TokenizingThreads
) -> None:
    for used in (None, Renderer(tiny_tokenizer_files())):
        prompts = EnginePrompts(renderer=used, threads=threads)
        body = chat(*texts, **fields)
        prompt = await prompt_of(prompts, body)
        assert prompts.answered(body, prompt, ANSWER) == prompt.chain


async def test_an_answer_that_is_no_unicode_adds_nothing(threads: TokenizingThreads) -> None:
    prompts = EnginePrompts(renderer=Renderer(tiny_tokenizer_files()), threads=threads)
    prompt = await prompt_of(prompts, chat(QUESTION))
    assert prompts.answered(chat(QUESTION), prompt, "\ud800" * 1_000) == prompt.chain
