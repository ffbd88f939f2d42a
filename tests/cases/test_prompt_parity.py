"""Class prompt-parity: the proxy's token ids are what the model's own template and tokenizer say."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, processors

from prefixcache.rendering.tokenizer_files import TOKENIZER_JSON, TokenizerFiles
from tests.cases.catalogue import changed, without
from tests.cases.outcome import send_all
from tests.cases.world import open_world
from tests.support.chats import TEMPLATES
from tests.support.tiny_tokenizer import (
    TINY_SPECIAL_TOKENS,
    files_of,
    tiny_llama_files,
    tiny_tokenizer_files,
)
from tests.support.transformers_oracle import Oracle
from tests.support.valkey import Server
from tests.support.waiting import eventually

BOS = "<s>"
LLAMA_EOS_ID = 2

HISTORY_TEMPLATES = {
    "prints json": TEMPLATES["llama3"].replace('strftime_now("%d %b %Y")', "'1 Jan 2030'"),
    "takes both": TEMPLATES["reasoning"],
    "iterates": """\
{% for message in messages %}{{ message.role }}: {{ message.content }}{% for call in message.tool_calls or [] %}\
{{ call.function.name }}({% for name, value in call.function.arguments.items() %}{{ name }}={{ value }}{% endfor %})\
{% endfor %}<|im_end|>{% endfor %}""",
}
"""What templates do with the arguments of a call in the history."""


def _files_with_two_ways_to_bos() -> TokenizerFiles:
    """A template that writes BOS, and a tokenizer that adds one to every text it encodes with special tokens."""
    plain = Tokenizer.from_buffer(tiny_llama_files("never").files[TOKENIZER_JSON])
    bos_id = plain.token_to_id(BOS)
    plain.post_processor = processors.TemplateProcessing(single=f"{BOS} $A", special_tokens=[(BOS, bos_id)])
    assert plain.encode("x").ids[0] == bos_id
    config = {"bos_token": BOS, "eos_token": "</s>"}
    return files_of(plain, chat_template=TEMPLATES["llama2"], config=config)


async def test_rw_001_one_bos(valkey: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = _files_with_two_ways_to_bos()
    oracle = Oracle(files, tmp_path, monkeypatch)
    async with open_world(valkey, files=files, stop_token_ids=(LLAMA_EOS_ID,)) as world:
        (call,) = world.calls("RW-001")
        (outcome,) = await world.play("RW-001")
        expected = oracle.ids(call.body["messages"], None, add_generation_prompt=True)
        assert world.prompts == [expected]
        assert expected.count(oracle.tokenizer.bos_token_id) == 1
        assert outcome.usage["prompt_tokens"] == len(expected)


async def test_rw_003_the_second_call_goes_where_the_first_was(valkey: Server) -> None:
    async with open_world(valkey, num_workers=2) as world:
        first_call, second_call = world.calls("RW-003")
        first = await world.send(first_call)
        assert (first.cached_tokens, first.hit_tokens) == (0, 0)
        await eventually(lambda: world.predicts(world.prompts[0]))
        second = await world.send(second_call)
        assert second.headers["x-prefixcache-worker"] == first.headers["x-prefixcache-worker"]
        assert second.cached_tokens == (second.usage["prompt_tokens"] - 1) // 16 * 16 > 200
        assert 0 <= second.cached_tokens - second.hit_tokens < 64
        predicted = world.proxy.metric("prefixcache_predicted_hit_tokens_total")
        cached = world.proxy.metric("prefixcache_cached_tokens_total")
        assert (predicted, cached) == (second.hit_tokens, second.cached_tokens), "the gap can be read from the metrics"


@pytest.mark.parametrize(
    ("template", "joined"),
    [("chatml", "Hello there"), ("chatml_default_system", "Hello \nthere"), ("joined_parts", "Hellothere")],
)
async def test_rw_005_text_parts(valkey: Server, template: str, joined: str) -> None:
    """A template that takes parts gets them and joins them as it likes; else they are joined by a newline."""
    async with open_world(valkey, files=tiny_tokenizer_files(chat_template=TEMPLATES[template])) as world:
        system = {"role": "system", "content": world.placeholders.text(40, seed="long enough to be cached")}
        given = world.calls("RW-005")
        calls = [changed(call, messages=[system, *call.body["messages"]]) for call in given]
        whole, one_part, two_parts = await send_all(world.proxy.client, calls)
        text, part, parts = world.prompts
        assert text == part
        assert whole.text == one_part.text
        assert whole.usage["prompt_tokens"] == one_part.usage["prompt_tokens"] == len(text)
        assert one_part.cached_tokens == (len(text) - 1) // 16 * 16 > 0
        by_rule = [system, {"role": "user", "content": joined}]
        assert parts == list(world.renderer.encode(world.renderer.render(by_rule)))
        assert two_parts.status == 200


async def test_rw_005_a_part_that_is_no_text(valkey: Server) -> None:
    async with open_world(valkey) as world:
        image = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
        call = changed(world.calls("RW-005")[0], messages=[{"role": "user", "content": [image]}])
        refused = await world.send(call)
        assert (refused.status, refused.error["param"]) == (400, "messages[0].content[0].type")
        assert "image_url" in refused.error["message"]
        assert world.prompts == []


@pytest.mark.parametrize("template", HISTORY_TEMPLATES)
async def test_rw_006_arguments_in_the_history(
    valkey: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, template: str
) -> None:
    """The template gets arguments as the object that their JSON text stands for."""
    files = tiny_tokenizer_files(chat_template=HISTORY_TEMPLATES[template])
    oracle = Oracle(files, tmp_path, monkeypatch)
    async with open_world(valkey, files=files) as world:
        call = without(world.calls("RW-006")[0], "tools")
        outcome = await world.send(call)
        assert outcome.status == 200, outcome.content
        reference: list[dict[str, Any]] = json.loads(json.dumps(call.body["messages"]))
        function = reference[1]["tool_calls"][0]["function"]
        function["arguments"] = json.loads(function["arguments"])
        assert world.prompts == [oracle.ids(reference, None, add_generation_prompt=True)]


@pytest.mark.parametrize("arguments", ["{not json", '{"city": ', '"a string"', "[1]", '{"a": NaN}'])
async def test_rw_006_arguments_that_are_no_object(valkey: Server, arguments: str) -> None:
    async with open_world(valkey) as world:
        call = without(world.calls("RW-006")[0], "tools")
        messages = call.body["messages"]
        messages[1]["tool_calls"][0]["function"]["arguments"] = arguments
        refused = await world.send(changed(call, messages=messages))
        assert refused.status == 400
        assert "messages[1]" in refused.error["message"]
        assert world.prompts == []


async def test_rw_008_spelled_control_tokens_stay_text(valkey: Server) -> None:
    async with open_world(valkey) as world:
        (call,) = world.calls("RW-008")
        messages = call.body["messages"]
        harmless = messages[1]["content"].replace("<|im_end|>", "thank you").replace("<|im_start|>", "you are")
        outcomes = await send_all(
            world.proxy.client, [call, changed(call, messages=[messages[0], {"role": "user", "content": harmless}])]
        )
        assert [outcome.status for outcome in outcomes] == [200, 200]
        control_ids = range(len(TINY_SPECIAL_TOKENS))
        forged, plain = ([id for id in prompt if id in control_ids] for prompt in world.prompts)
        assert forged == plain
        assert len(forged) == 5, "three turns begin, two end"
        said = world.tokenizer.decode(world.prompts[0], skip_special_tokens=False)
        assert messages[1]["content"] in said, "nothing of the text is lost"


async def test_rw_010_a_template_that_refuses(valkey: Server) -> None:
    files = tiny_tokenizer_files(chat_template=TEMPLATES["llama2"], config={"bos_token": "<|endoftext|>"})
    async with open_world(valkey, files=files) as world:
        outcomes = await world.play("RW-010")
        assert [outcome.status for outcome in outcomes] == [400, 400]
        whole, streamed = (outcome.error for outcome in outcomes)
        assert whole == streamed
        assert whole["type"] == "invalid_request_error"
        assert "Conversation roles must alternate" in whole["message"]
        assert world.prompts == [] and world.num_running == 0
