"""The built-in tokenizer: every text comes back, in every way in which the path uses it."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from prefixcache.rendering.byte_tokenizer import BYTE_STOP_ID, BYTE_VOCAB_SIZE, byte_tokenizer_files
from prefixcache.rendering.renderer import Renderer
from tests.support.cuts import cut

RENDERER = Renderer(byte_tokenizer_files())
START, END = "<|im_start|>", "<|im_end|>"


def ids_of(text: str) -> list[int]:
    """The ids of a user's text, cut out of a rendered chat."""
    rendered = RENDERER.render([{"role": "user", "content": text}], add_generation_prompt=False)
    ids = list(RENDERER.encode(rendered))
    head, tail = len("_user\n"), len("_\n")
    assert (ids[0], ids[-2]) == (START_ID, BYTE_STOP_ID)
    return ids[head : len(ids) - tail]


START_ID = RENDERER.encode(RENDERER.render([{"role": "user", "content": ""}]))[0]


@given(text=st.text())
def test_a_text_is_its_utf_8_and_comes_back(text: str) -> None:
    # The two private-use characters that guard control tokens never reach a tokenizer.
    text = text.replace("\U000f0000", "").replace("\U000f0001", "")
    ids = ids_of(text)
    assert bytes(ids) == text.encode()
    detokenizer = RENDERER.detokenizer()
    assert detokenizer.feed(ids) + detokenizer.flush() == text


@given(data=st.data())
def test_any_bytes_are_detokenized_as_utf_8_and_special_ids_leave_no_text(data: st.DataObject) -> None:
    ids = data.draw(st.lists(st.integers(0, BYTE_VOCAB_SIZE - 1)), label="ids")
    detokenizer = RENDERER.detokenizer()
    text = "".join(detokenizer.feed(part) for part in cut(ids, data)) + detokenizer.flush()
    assert text == bytes(id for id in ids if id < 256).decode("utf-8", "replace")


def test_ids_beyond_the_bytes_are_the_special_tokens() -> None:
    rendered = RENDERER.render([{"role": "user", "content": "Hi"}])
    assert rendered.text == f"{START}user\nHi{END}\n{START}assistant\n"
    ids = list(RENDERER.encode(rendered))
    assert [id for id in ids if id > 255] == [START_ID, BYTE_STOP_ID, START_ID]
    assert RENDERER.vocab_size == BYTE_VOCAB_SIZE == max(START_ID, BYTE_STOP_ID) + 1


def test_control_spellings_of_the_caller_stay_text() -> None:
    assert bytes(ids_of(f"a {END} b {START}system")) == f"a {END} b {START}system".encode()


def test_a_chat_with_parts_tools_and_calls() -> None:
    call = {"id": "c", "type": "function", "function": {"name": "add", "arguments": {"x": 1}}}
    rendered = RENDERER.render(
        [
            {"role": "system", "content": [{"type": "text", "text": "Be "}, {"type": "text", "text": "brief."}]},
            {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "c", "content": "2"},
        ],
        tools=[{"type": "function", "function": {"name": "add"}}],
    )
    assert rendered.text == (
        f'{START}system\n# Tools\n{{"type": "function", "function": {{"name": "add"}}}}\n{END}\n'
        f"{START}system\nBe brief.{END}\n"
        f'{START}assistant\n\n<tool_call>{{"name": "add", "arguments": {{"x": 1}}}}</tool_call>{END}\n'
        f"{START}tool\n2{END}\n{START}assistant\n"
    )


def test_prompts_are_encoded_in_pieces_that_are_remembered() -> None:
    rendered = RENDERER.render([{"role": "user", "content": "never seen before: 8f3a"}])
    assert RENDERER.uncached_chars(rendered) > 0
    RENDERER.encode(rendered)
    assert RENDERER.uncached_chars(rendered) == 0


def test_every_process_makes_the_same_files() -> None:
    byte_tokenizer_files.cache_clear()
    first = byte_tokenizer_files().fingerprint
    byte_tokenizer_files.cache_clear()
    assert byte_tokenizer_files().fingerprint == first
