from __future__ import annotations

import logging
from datetime import datetime
from typing import Any

import pytest

from prefixcache.errors import ConfigError, InvalidRequest
from prefixcache.rendering import template as template_module
from prefixcache.rendering.template import ChatTemplate

NOW = datetime(2031, 2, 3)


def render(source: str, **variables: Any) -> str:
    return ChatTemplate(source).render(variables, NOW)


def test_blocks_take_their_line_and_the_generation_tag_its_body() -> None:
    source = (
        "{% for m in ms %}\n  {% if m %}\n{{ m }}\n  {% endif %}\n{% endfor %}\n{% generation %}x{% endgeneration %}"
    )
    assert render(source, ms=["a", "", "b"]) == "a\nb\nx"


def test_break_and_continue() -> None:
    source = "{% for i in xs %}{% if i < 0 %}{% continue %}{% elif i == 4 %}{% break %}{% endif %}{{ i }}{% endfor %}"
    assert render(source, xs=[1, -2, 3, 4, 5]) == "13"


def test_tojson_keeps_unicode_and_markup() -> None:
    assert render("{{ x | tojson }}", x={"b": "<é>", "a": None}) == '{"b": "<é>", "a": null}'
    assert render("{{ x | tojson(indent=1, sort_keys=true) }}", x={"b": 1, "a": 2}) == '{\n "a": 2,\n "b": 1\n}'
    assert render("{{ x | tojson(ensure_ascii=true, separators=(',', ':')) }}", x=["é", 1]) == '["\\u00e9",1]'


def test_one_date_for_the_whole_request_also_inside_macros() -> None:
    template = ChatTemplate("{% macro d() %}{{ strftime_now('%Y-%m-%d') }}{% endmacro %}{{ d() }}")
    assert template.prints_date
    assert template.render({}, NOW) == "2031-02-03"
    assert not ChatTemplate("{{ date }} strftime_now").prints_date


def test_literals_are_all_that_the_template_may_write() -> None:
    literals = ChatTemplate("a{{ '<|x|>' ~ y }}{% if z == 'q' %}b{% endif %}{{ 3 }}").literals
    assert literals == {"a", "<|x|>", "q", "b"}


@pytest.mark.parametrize(
    ("source", "line"), [("{% for %}", 1), ("a\n{{ x | nofilter }}", 2), ("\n\n{% endif %}", 3), ("{{ 'x", 1)]
)
def test_source_that_is_no_template(source: str, line: int) -> None:
    with pytest.raises(ConfigError, match=f"line {line}:"):
        ChatTemplate(source)


def test_source_nested_too_deep_for_the_parser() -> None:
    with pytest.raises(ConfigError, match="cannot be compiled"):
        ChatTemplate("{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}")


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{{ raise_exception(5) }}", "5"),
        ("{{ missing.attribute }}", "'missing' is undefined"),
        ("{{ 1 + 'a' }}", "unsupported operand"),
        ("{{ 1 / 0 }}", "division by zero"),
        ("{{ [1][7] + 1 }}", "has no element 7"),
        ("{{ 'a'.index('b') }}", "substring not found"),
        ("{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}", "nested too deeply"),
        ("{% for i in range(1000000) %}{% endfor %}", "cannot render"),
        ("{% include 'x' %}", "no loader"),
        ("{{ ''.__class__.__mro__ }}", "unsafe"),
        ("{{ x.append(1) }}", "unsafe"),
        ("{{ namespace(_a=1) }}", "may not store"),
        ("{% set n = namespace() %}{% set n._a = 1 %}", "may not store"),
        ("{{ dict.__init__.__globals__ }}", "unsafe"),
    ],
)
def test_whatever_goes_wrong_is_the_requests_fault(source: str, message: str) -> None:
    template = ChatTemplate(source)
    with pytest.raises(InvalidRequest, match=message) as refusal:
        template.render({"x": []}, NOW)
    assert refusal.value.param == "messages"


def test_messages_to_the_client_are_short() -> None:
    with pytest.raises(InvalidRequest) as refusal:
        render("{{ raise_exception('x' * 5000) }}")
    assert str(refusal.value) == "x" * 297 + "..."


def test_a_failure_that_is_no_refusal_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    with pytest.raises(InvalidRequest):
        render("{{ 1 + 'a' }}")
    with pytest.raises(InvalidRequest):
        render("{{ raise_exception('no') }}")
    assert [(record.message, record.exc_info is not None) for record in caplog.records] == [
        ("chat template failed on a request", True)
    ]


def test_what_a_template_writes_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(template_module, "MAX_PROMPT_CHARS", 1000)
    source = "{% for a in x %}{% for b in x %}{% for c in x %}{{ c }}{% endfor %}{% endfor %}{% endfor %}"
    assert len(render(source, x=["y"] * 10)) == 1000
    with pytest.raises(InvalidRequest, match="over the limit of 1000 characters"):
        render(source, x=["y"] * 2000)  # 8e9 rounds if it went on


def test_dict_and_namespace_work_as_templates_use_them() -> None:
    assert render("{{ dict(a=1) }}{{ dict.fromkeys(['k']) }}") == "{'a': 1}{'k': None}"
    assert render("{% set n = namespace(self=1, b=2) %}{% set n.b = n.b + n.self %}{{ n.b }}") == "3"
