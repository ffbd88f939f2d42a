"""What the last turn of a long chat costs, tokenized by a proxy that has seen the turns before it."""

from __future__ import annotations

import asyncio
import json
import statistics
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from random import Random
from typing import Any

from tokenizers import Tokenizer

from prefixcache.limits import TOKENIZE_THREADS
from prefixcache.rendering.engine_prompt import EnginePrompts
from prefixcache.rendering.renderer import Renderer
from prefixcache.rendering.tokenizer_files import TOKENIZER_JSON, TokenizerFiles
from prefixcache.rendering.tokenizing_threads import TokenizingThreads
from tests.bench.report import Floor, Table
from tests.bench.routing.load import words

MOST_OF_WHOLE = 0.05
NUM_CHATS = 7
WORDS_A_MESSAGE = 150
"""Fifty turns of these have 16,000 tokens and more."""

Message = Mapping[str, str]


def measure_tokenizing(tokenizer: Path, num_turns: int) -> tuple[Table, list[Floor]]:
    """CPU time; chats that share nothing, and the two sides of each one after the other."""
    renderer = Renderer(TokenizerFiles.from_folder(tokenizer))
    plain = Tokenizer.from_file(str(tokenizer / TOKENIZER_JSON))
    with ThreadPoolExecutor(TOKENIZE_THREADS) as executor:
        prompts = EnginePrompts(renderer=renderer, threads=TokenizingThreads(executor))
        rows = [_one_chat(renderer, plain, prompts, number, num_turns) for number in range(NUM_CHATS)]
    shares = [row["new turn ms"] / row["whole ms"] for row in rows]
    table = Table(
        title=f"CPU of tokenizing turn {num_turns} of a chat whose turns before were seen",
        rows=[
            {
                "chats": NUM_CHATS,
                "tokens": round(statistics.median(row["tokens"] for row in rows)),
                "whole encode, ms": statistics.median(row["whole ms"] for row in rows),
                "new turn, ms": statistics.median(row["new turn ms"] for row in rows),
                "share, least / median / most": (min(shares), statistics.median(shares), max(shares)),
                "with template and hashing, ms": statistics.median(row["way ms"] for row in rows),
            }
        ],
    )
    what = "tokenizing a new turn over a whole encode"
    return table, [Floor(what=what, value=statistics.median(shares), most=MOST_OF_WHOLE)]


def _one_chat(
    renderer: Renderer, plain: Tokenizer, prompts: EnginePrompts, number: int, num_turns: int
) -> dict[str, float]:
    random = Random(f"chat {number}")
    messages: list[Message] = []
    for turn in range(num_turns):
        if turn:
            messages.append({"role": "assistant", "content": words(random, WORDS_A_MESSAGE)})
        messages.append({"role": "user", "content": f"Turn {turn} of {number}: {words(random, WORDS_A_MESSAGE)}"})
        if turn < num_turns - 1:
            renderer.encode(renderer.render(messages))
    rendered = renderer.render(messages)
    began_s = time.process_time()
    ids = renderer.encode(rendered)
    new_turn_s = time.process_time() - began_s
    began_s = time.process_time()
    whole_ids = plain.encode(rendered.text, add_special_tokens=False).ids
    whole_s = time.process_time() - began_s
    assert whole_ids == list(ids), "tokenized in pieces, a prompt has other ids"
    return {
        "tokens": len(ids),
        "new turn ms": 1e3 * new_turn_s,
        "whole ms": 1e3 * whole_s,
        "way ms": 1e3 * asyncio.run(_whole_way(prompts, messages, random)),
    }


async def _whole_way(prompts: EnginePrompts, messages: Sequence[Message], random: Random) -> float:
    """From the parsed body to the hashes, of one turn more."""
    answer = {"role": "assistant", "content": words(random, WORDS_A_MESSAGE)}
    more = {"role": "user", "content": words(random, WORDS_A_MESSAGE)}
    body: dict[str, Any] = {"model": "m", "messages": [*messages, answer, more]}
    size = len(json.dumps(body))
    began_s = time.process_time()
    prompt = await prompts.of("/v1/chat/completions", body, body_bytes=size, seed=1, model="m")
    took_s = time.process_time() - began_s
    assert prompt is not None and prompt.unit == "token"
    return took_s
