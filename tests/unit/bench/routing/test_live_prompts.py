"""Prompts made of a trace's blocks, and what the clients of a live run read of an answer."""

from __future__ import annotations

import json

import pytest

from prefixcache.simulation.trace import TraceRequest
from tests.bench.routing.live_load import usage_in
from tests.bench.routing.live_prompts import prompt_json

BLOCK = 32


def _ids(number: int, blocks: list[int], rest: int) -> list[int]:
    prompt_tokens = len(blocks) * BLOCK + rest
    request = TraceRequest(
        arrival_s=0.0, prompt_tokens=prompt_tokens, output_tokens=1, blocks=blocks, reusable_blocks=len(blocks)
    )
    ids: list[int] = json.loads(prompt_json(request, number, BLOCK))
    assert len(ids) == prompt_tokens and all(0 <= id < 256 for id in ids)
    return ids


def test_equal_blocks_are_equal_ids_and_others_are_not() -> None:
    one, other = _ids(1, [7, 8], 0), _ids(2, [7, 9], 0)
    assert one[:BLOCK] == other[:BLOCK]
    assert one[BLOCK:] != other[BLOCK:]
    assert one == _ids(3, [7, 8], 0)


def test_what_is_no_whole_block_is_a_requests_own() -> None:
    one, other = _ids(1, [7], 20), _ids(2, [7], 20)
    assert one[:BLOCK] == other[:BLOCK]
    assert one[BLOCK:] != other[BLOCK:]
    assert one == _ids(1, [7], 20)
    assert len(_ids(1, [], 5)) == 5


def test_usage_is_read_from_the_end_of_a_stream() -> None:
    usage = {"prompt_tokens": 40, "prompt_tokens_details": {"cached_tokens": 16}}
    events = [{"choices": [{"text": "x"}]}, {"choices": [], "usage": usage}]
    stream = b"".join(b"data: " + json.dumps(event).encode() + b"\n\n" for event in events)
    assert usage_in(stream[10:] + b"data: [DONE]\n\n") == {"prompt_tokens": 40, "cached_tokens": 16}


@pytest.mark.parametrize("tail", [b"", b'data: {"choices":[]}\n\n', b"data: [DONE]", b'{"error":{"message":"no"}}\n\n'])
def test_a_stream_that_did_not_end_is_no_answer(tail: bytes) -> None:
    with pytest.raises(ValueError, match="the stream ended with"):
        usage_in(tail)
