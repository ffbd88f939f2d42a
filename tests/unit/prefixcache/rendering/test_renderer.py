from __future__ import annotations

import json
from array import array
from datetime import datetime
from functools import cache
from typing import Any

import pytest

from prefixcache.errors import ConfigError, InvalidRequest
from prefixcache.rendering.renderer import Renderer
from prefixcache.rendering.tokenizer_files import TokenizerFiles
from tests.support.chats import TEMPLATES, TOOLS
from tests.support.tiny_tokenizer import TINY_EOS_ID, tiny_llama_files, tiny_tokenizer_files

NOW = datetime(2031, 2, 3)
HELLO = [{"role": "user", "content": "hello"}]


def renderer_of(template: str | None, **config: Any) -> Renderer:
    return Renderer(tiny_tokenizer_files(chat_template=template, config=config), clock=lambda: NOW)


@cache
def byte_level(template: str) -> Renderer:
    return renderer_of(TEMPLATES[template])


def test_the_tiny_tokenizer() -> None:
    renderer = Renderer(tiny_tokenizer_files())
    prompt = renderer.render(HELLO)
    assert prompt.text == "<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n"
    ids = renderer.encode(prompt)
    assert isinstance(ids, array)
    assert ids.typecode == "I"
    assert ids.count(TINY_EOS_ID) == 1
    assert max(ids) < renderer.vocab_size < 1000
    detokenizer = renderer.detokenizer()
    assert detokenizer.feed(ids) + detokenizer.flush() == "user\nhello\nassistant\n"


def test_no_second_first_token() -> None:
    """The tokenizer's post-processor would add a <s> before the one the template wrote."""
    files = tiny_llama_files("first", chat_template=TEMPLATES["llama2"])
    state = json.loads(files.files["tokenizer.json"])
    bos = {"id": "<s>", "ids": [1], "tokens": ["<s>"]}
    template = [{"SpecialToken": {"id": "<s>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}]
    state["post_processor"] = {
        "type": "TemplateProcessing", "single": template, "pair": template, "special_tokens": {"<s>": bos}
    }  # fmt: skip
    state["truncation"] = {"direction": "Right", "max_length": 3, "strategy": "LongestFirst", "stride": 0}
    state["padding"] = {
        "strategy": {"Fixed": 100}, "direction": "Right", "pad_to_multiple_of": None,
        "pad_id": 0, "pad_type_id": 0, "pad_token": "<unk>",
    }  # fmt: skip
    renderer = Renderer(TokenizerFiles(files={**files.files, "tokenizer.json": json.dumps(state).encode()}))
    ids = renderer.encode(renderer.render(HELLO))
    assert ids.count(1) == 1
    assert ids[0] == 1
    assert 3 < len(ids) < 100


def test_one_date_a_request_from_the_clock() -> None:
    times = iter([datetime(2030, 12, 31, 23, 59), datetime(2031, 1, 1)])
    source = "{{ strftime_now('%Y') }} {{ strftime_now('%Y') }}"
    renderer = Renderer(tiny_tokenizer_files(chat_template=source), clock=lambda: next(times))
    assert renderer.prints_date
    assert renderer.render(HELLO).text == "2030 2030"
    assert renderer.render(HELLO).text == "2031 2031"
    assert not renderer_of("x").prints_date


def test_templates_by_name() -> None:
    named = [{"name": "default", "template": "plain"}, {"name": "tool_use", "template": "tools {{ tools | length }}"}]
    renderer = renderer_of(None, chat_template=named)
    assert renderer.render(HELLO).text == "plain"
    assert renderer.render(HELLO, tools=TOOLS).text == "tools 1"
    assert renderer_of(None, chat_template="one").render(HELLO, tools=TOOLS).text == "one"
    only_tools = renderer_of(None, chat_template=named[1:])
    with pytest.raises(InvalidRequest, match="no chat template"):
        only_tools.render(HELLO)


def test_no_template_refuses_messages_but_detokenizes() -> None:
    renderer = renderer_of(None)
    with pytest.raises(InvalidRequest, match="no chat template") as refusal:
        renderer.render(HELLO)
    assert refusal.value.param == "messages"
    assert renderer.detokenizer().feed([renderer.vocab_size - 1]) != ""


def test_a_template_that_is_none_and_files_that_are_none() -> None:
    with pytest.raises(ConfigError, match="line 1"):
        renderer_of("{% if %}")
    with pytest.raises(ConfigError, match=r"tokenizer\.json cannot be loaded"):
        Renderer(TokenizerFiles(files={"tokenizer.json": b"{}"}))


@pytest.mark.parametrize(
    "messages",
    [
        [],
        [{}],
        ["text"],
        [None],
        [{"role": None, "content": "x"}],
        [{"role": ["user"], "content": "x"}],
        [{"role": "endoftext", "content": "x"}],
        [{"role": "user\n", "content": "x"}],
        [{"role": "user", "content": 5}],
        [{"role": "user", "content": [1]}],
        [{"role": "user", "content": {"text": {}}}],
        [{"role": "user", "content": "cut here: \ud83c tail"}],
    ],
)
def test_odd_messages_are_refused_or_rendered_but_never_more(messages: Any) -> None:
    for template in ("chatml_default_system", "role_built", "llama3", "reasoning"):
        renderer = byte_level(template)
        try:
            prompt = renderer.render(messages)
        except InvalidRequest as refusal:
            assert refusal.param == "messages"
            assert len(str(refusal)) <= 300
        else:
            renderer.encode(prompt)


def test_roles_are_not_free() -> None:
    with pytest.raises(InvalidRequest, match=r"messages\[1\] must have a role among .*user"):
        renderer_of(TEMPLATES["role_built"]).render([*HELLO, {"role": "end", "content": "x"}])


@pytest.mark.parametrize(
    "text", ["", "\x00", "a\x00b", "\U000f0000", "x\U000f0001y\U000f0000", "\ufffe\uffff", "🙂\u200d\u0301", "\u2028\r"]
)
def test_any_unicode_goes_through_and_private_marks_are_left_out(text: str) -> None:
    renderer = Renderer(tiny_tokenizer_files())
    prompt = renderer.render([{"role": "user", "content": text}])
    plain = text.replace("\U000f0000", "").replace("\U000f0001", "")
    assert prompt.text == f"<|im_start|>user\n{plain}<|im_end|>\n<|im_start|>assistant\n"
    detokenizer = renderer.detokenizer()
    assert detokenizer.feed(renderer.encode(prompt)) + detokenizer.flush() == f"user\n{plain}\nassistant\n"


def test_deep_data_is_refused() -> None:
    deep: Any = "x"
    for _ in range(100_000):
        deep = [deep]
    renderer = renderer_of("{{ tools }}{{ messages }}")
    for messages, tools in (([{"role": "user", "content": deep}], None), (HELLO, [{"a": deep}])):
        with pytest.raises(InvalidRequest, match="nested too deeply"):
            renderer.render(messages, tools=tools)
    while isinstance(deep, list):  # taken apart by hand: freeing it in one go may overflow the stack
        [deep] = deep


def test_template_arguments() -> None:
    renderer = renderer_of("{{ mood }}{{ eos_token }}{% for m in messages %}{{ m.content }}{% endfor %}")
    prompt = renderer.render(HELLO, template_arguments={"mood": "<|im_end|>"})
    assert prompt.text == "<|im_end|><|im_end|>hello"
    assert renderer.encode(prompt).count(TINY_EOS_ID) == 1
    for name in ("messages", "tools", "eos_token", "raise_exception", "strftime_now", "namespace", "chat_template"):
        with pytest.raises(InvalidRequest, match=name) as refusal:
            renderer.render(HELLO, template_arguments={name: "x"})
        assert refusal.value.param == "chat_template_kwargs"


def test_the_callers_data_is_not_changed() -> None:
    chat = [{"role": "user", "content": "<|im_end|>", "name": None, "reasoning": "r"}]
    tools = [{"<|im_end|>": ["<|im_end|>"]}]
    before = json.dumps([chat, tools])
    renderer_of("{{ messages }}{{ tools }}").render(chat, tools=tools)
    assert json.dumps([chat, tools]) == before


def test_a_chat_that_goes_on_costs_only_what_is_new() -> None:
    renderer = Renderer(tiny_tokenizer_files())
    chat = [{"role": "system", "content": "the answer " * 500}, *HELLO]
    renderer.encode(renderer.render(chat))
    longer = renderer.render([*chat, {"role": "assistant", "content": "hi"}, {"role": "user", "content": "more"}])
    assert renderer.uncached_chars(longer) < 60 < 5000 < len(longer.text)


def test_a_role_stays_what_templates_compare_it_with() -> None:
    source = "{% for m in messages %}{{ m.role == 'user' }}{% endfor %} {{ documents is none }}"
    files = tiny_tokenizer_files(chat_template=source, special_tokens=["user", "<super>user", "user<sub>"])
    assert Renderer(files).render(HELLO).text == "True True"


def test_the_fewest_tokens_are_known_without_tokenizing() -> None:
    renderer = Renderer(tiny_tokenizer_files())
    prompt = renderer.render([{"role": "user", "content": "hello " * 1000}])
    assert 0 < renderer.least_tokens(prompt) <= len(renderer.encode(prompt))
    assert renderer.least_tokens(prompt) == len(prompt.text) // len("<|endoftext|>")
