"""Text without a template: a caller's whole prompt to ids, ids to text, and what each token is."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer

from prefixcache.rendering.renderer import Renderer
from prefixcache.rendering.special_affixes import special_affixes
from prefixcache.rendering.tokenizer_files import TokenizerFiles
from tests.support.tiny_tokenizer import SpacePrefix, tiny_llama_files, tiny_tokenizer_files


def _with_post_processor(files: TokenizerFiles, before: str | None, after: str | None) -> TokenizerFiles:
    state = json.loads(files.files["tokenizer.json"])
    tokenizer = Tokenizer.from_str(json.dumps(state))
    names = [name for name in (before, after) if name is not None]
    special = {name: {"id": name, "ids": [tokenizer.token_to_id(name)], "tokens": [name]} for name in names}
    pieces: list[dict[str, Any]] = [{"Sequence": {"id": "A", "type_id": 0}}]
    if before is not None:
        pieces.insert(0, {"SpecialToken": {"id": before, "type_id": 0}})
    if after is not None:
        pieces.append({"SpecialToken": {"id": after, "type_id": 0}})
    state["post_processor"] = {
        "type": "TemplateProcessing",
        "single": pieces,
        "pair": pieces,
        "special_tokens": special,
    }
    return TokenizerFiles(files={**files.files, "tokenizer.json": json.dumps(state).encode()})


CALLS = "{% for m in messages %}{% for c in m.tool_calls %}BODY{% endfor %}{% endfor %}"
BYTE_LEVEL = tiny_tokenizer_files()
FILES = [
    BYTE_LEVEL,
    _with_post_processor(tiny_llama_files("prepend"), "<s>", None),
    _with_post_processor(tiny_llama_files("first"), "<s>", "</s>"),
    _with_post_processor(tiny_llama_files("always"), None, "</s>"),
    _with_post_processor(tiny_llama_files("never"), None, None),
]
RENDERERS = [(Renderer(files), Tokenizer.from_buffer(files.files["tokenizer.json"])) for files in FILES]

texts = st.lists(
    st.sampled_from(["hello ", "the", " ", "  ", "\n", "é", "日", "\N{BALLOON}", "<|im_end|>", "<s>", "12", "<|im_"]),
    max_size=12,
).map("".join)


@pytest.mark.parametrize("number", range(len(FILES)))
@given(text=texts, add_special_tokens=st.booleans())
def test_a_whole_prompt_is_encoded_as_the_tokenizer_does_it(number: int, text: str, add_special_tokens: bool) -> None:
    renderer, tokenizer = RENDERERS[number]
    ids = renderer.encode(renderer.raw(text, add_special_tokens=add_special_tokens))
    assert list(ids) == tokenizer.encode(text, add_special_tokens=add_special_tokens).ids


@pytest.mark.parametrize("number", range(len(FILES)))
@given(data=st.data())
def test_ids_are_decoded_with_their_special_tokens(number: int, data: st.DataObject) -> None:
    renderer, tokenizer = RENDERERS[number]
    ids = data.draw(st.lists(st.integers(0, renderer.vocab_size - 1), max_size=12))
    assert renderer.decode(ids) == tokenizer.decode(ids, skip_special_tokens=False)


def test_affixes() -> None:
    assert [[list(ids) for ids in special_affixes(tokenizer)] for _, tokenizer in RENDERERS] == [
        [[], []],
        [[1], []],
        [[1], [2]],
        [[], [2]],
        [[], []],
    ]


@given(text=texts)
def test_the_bytes_of_the_tokens_are_those_of_the_text(text: str) -> None:
    renderer, tokenizer = RENDERERS[0]
    ids = tokenizer.encode(text).ids
    joined = b"".join(renderer.token_bytes(id) or b"" for id in ids)
    assert joined.decode() == tokenizer.decode(ids, skip_special_tokens=True)


@pytest.mark.parametrize("space_prefix", ["prepend", "never"])
def test_bytes_of_a_byte_fallback_vocabulary(space_prefix: SpacePrefix) -> None:
    renderer = Renderer(tiny_llama_files(space_prefix))
    ids = list(renderer.encode(renderer.raw("a \N{BALLOON}日")))
    assert b"".join(renderer.token_bytes(id) or b"" for id in ids).decode().strip() == "a \N{BALLOON}日"
    assert renderer.token_bytes(1) is None, "a special token adds nothing"
    assert renderer.token_spelling(1) == "<s>"
    assert renderer.token_bytes(10**6) is None and renderer.token_spelling(10**6) is None


@pytest.mark.parametrize(
    ("template", "takes_parts"),
    [
        ("{% for m in messages %}{{ m.content }}{% endfor %}", False),
        ("{% for m in messages %}{{ m.content + '!' }}{% endfor %}", False),
        ("{% for m in messages %}{% for p in m.content %}{{ p.text }}{% endfor %}{% endfor %}", False),
        (
            "{% for m in messages %}{% if m.content is string %}{{ m.content }}"
            "{% else %}{% for p in m.content %}{{ p['text'] }}{% endfor %}{% endif %}{% endfor %}",
            True,
        ),
        ("{{ raise_exception('never') }}", False),
    ],
)
def test_whether_a_template_takes_parts(template: str, takes_parts: bool) -> None:
    assert Renderer(tiny_tokenizer_files(chat_template=template)).takes_parts is takes_parts


@pytest.mark.parametrize(
    ("template", "takes_objects"),
    [
        (CALLS.replace("BODY", "{{ c.function.arguments | tojson }}"), True),
        (CALLS.replace("BODY", "{% for key, value in c.function.arguments | items %}{{ key }}{% endfor %}"), True),
        ("{% for m in messages %}{{ m.content }}{% endfor %}", True),
        (CALLS.replace("BODY", "{{ '' + c.function.arguments }}"), False),
    ],
)
def test_whether_a_template_takes_argument_objects(template: str, takes_objects: bool) -> None:
    renderer = Renderer(tiny_tokenizer_files(chat_template=template))
    assert renderer.takes_argument_objects is takes_objects
