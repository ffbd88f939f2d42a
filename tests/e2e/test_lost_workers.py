"""A worker dies, or stands still, under 50 answers at once: every one of them comes as if nothing had happened."""

from __future__ import annotations

import asyncio
import os
import re
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from signal import SIGCONT, SIGKILL, SIGSTOP, Signals
from typing import Any

import pytest
from tokenizers import Tokenizer

from prefixcache.limits import WORKER_SILENCE_S
from prefixcache.rendering.tokenizer_files import TOKENIZER_JSON
from tests.support.bare_client import Reply, ask, post_bytes
from tests.support.program_fleet import Program, ProgramFleet, all_connected, all_ready, get_json, running_fleet
from tests.support.prompts import filler
from tests.support.scraping import scraped
from tests.support.seen_answer import LOGPROB_TOLERANCE, SeenAnswer
from tests.support.sim_requests import CHAT, COMPLETION, SMILES
from tests.support.tiny_models import tiny_model, write_model
from tests.support.tiny_tokenizer import tiny_tokenizer_files
from tests.support.valkey import Server
from tests.support.waiting import eventually

NUM_ANSWERS = 50
MAX_TOKENS = 120
TORCH_FLAGS = ("--dtype", "float32", "--threads", "1", "--num-blocks", "1600")
SIM_FLAGS = ("--num-blocks", "3000")
STRUCK_AT = 0.45
"""Of all tokens."""
STAGGER_S = 0.02
"""Between two requests, so that seams fall into all places."""
EUROS = {**SMILES, "logit_bias": {"226": 100.0, "130": 99.9, "172": 99.8}}
GAP_S = 2.0
"""Beside what it takes to compute the prompts again."""
LOOK_S = 0.5
"""Between two looks at the signs of life, and what a busy machine adds."""

pytestmark = pytest.mark.alone("it bounds the gaps that clients see")


@dataclass(frozen=True, slots=True, kw_only=True)
class Deployment:
    fleet: ProgramFleet
    proxy: Program
    workers: Mapping[str, Program]
    model: str
    accent: tuple[int, int]
    """Token ids of the two bytes of an é."""

    @property
    def port(self) -> int:
        return int(self.proxy.url.rpartition(":")[2])


@pytest.fixture(params=["torch", "sim"])
async def deployment(request: pytest.FixtureRequest, valkey: Server, tmp_path: Path) -> AsyncIterator[Deployment]:
    runner = request.param
    flags: Sequence[str]
    if runner == "torch":
        folder = tmp_path / "tiny"
        folder.mkdir()
        write_model(
            tiny_model("Llama", max_position_embeddings=4096, vocab_size=_tiny_tokenizer().get_vocab_size()), folder
        )
        flags, model, accent = (*TORCH_FLAGS, "--model", str(folder)), "tiny", _accent_of_tiny()
    else:
        flags, model, accent = SIM_FLAGS, "sim", (0xC3, 0xA9)
    async with running_fleet(tmp_path, valkey.url) as fleet:
        workers = {name: fleet.start_worker(name, *flags, runner=runner) for name in ("w0", "w1")}
        proxy = await fleet.start_proxy("proxy")
        await all_connected(workers.values(), [proxy])
        yield Deployment(fleet=fleet, proxy=proxy, workers=workers, model=model, accent=accent)


def _tiny_tokenizer() -> Tokenizer:
    return Tokenizer.from_str(tiny_tokenizer_files().files[TOKENIZER_JSON].decode())


def _accent_of_tiny() -> tuple[int, int]:
    first, second = _tiny_tokenizer().encode("é", add_special_tokens=False).ids
    return first, second


def _requests(deployment: Deployment) -> list[tuple[str, dict[str, Any]]]:
    """Path and body of each; every kind of request, streamed and not."""
    accents = {"logit_bias": {str(token): 100 for token in deployment.accent}, "temperature": 1.0, "seed": 5}
    sampled = {"temperature": 0.9, "top_p": 0.9, "seed": 11}
    kinds: Sequence[dict[str, Any]] = (
        {},
        {"stop": "to be filled in", "frequency_penalty": 0.5},
        {**sampled, "stop": "to be filled in"},
        accents,
        {**sampled, "presence_penalty": 0.4, "frequency_penalty": 0.3, "repetition_penalty": 1.2},
        {"logprobs": 2, "stop": "to be filled in"},
        {**sampled, "n": 2},
        SMILES if deployment.model == "sim" else accents,
        EUROS if deployment.model == "sim" else accents,
        {"stop": "to be filled in", "frequency_penalty": 0.5, "min_tokens": 10},
        {**sampled, "logprobs": 1, "n": 2, "frequency_penalty": 0.2},
    )
    requests = []
    for number in range(NUM_ANSWERS):
        fields = {
            "model": deployment.model,
            "max_tokens": MAX_TOKENS,
            "temperature": 0,
            "ignore_eos": True,
            **kinds[number % len(kinds)],
        }
        if number % 5 < 4:
            fields |= {"stream": True, "stream_options": {"include_usage": True}}
        text = filler(20 + number, seed=number)
        if number // len(kinds) % 2:
            requests.append((COMPLETION, {**fields, "prompt": text}))
        else:
            if "logprobs" in fields:
                fields |= {"top_logprobs": fields["logprobs"], "logprobs": True}
            requests.append((CHAT, {**fields, "messages": [{"role": "user", "content": text}]}))
    return requests


def _without_stops(requests: Sequence[tuple[str, dict[str, Any]]]) -> list[tuple[str, dict[str, Any]]]:
    return [(path, {name: value for name, value in body.items() if name != "stop"}) for path, body in requests]


def _fill_in_stops(requests: Sequence[tuple[str, dict[str, Any]]], texts: Sequence[SeenAnswer]) -> None:
    """Stop strings so long that a seam falls into them: from a sixth of the answer to its last characters."""
    for (_, body), seen in zip(requests, texts, strict=True):
        if "stop" in body:
            text = seen.choices[0].text
            body["stop"] = text[len(text) // 6 : -6]


async def _answers(
    deployment: Deployment, requests: Sequence[tuple[str, dict[str, Any]]]
) -> tuple[list[SeenAnswer], list[Reply]]:
    """All at once."""
    sent = [
        post_bytes(path, body, headers=f"x-request-id: number-{number}\r\n")
        for number, (path, body) in enumerate(requests)
    ]

    async def later(number: int) -> Reply:
        await asyncio.sleep(number * STAGGER_S)
        return await ask(deployment.port, sent[number])

    replies = await asyncio.gather(*(later(number) for number in range(len(sent))))
    for number, reply in enumerate(replies):
        assert (reply.end, reply.status) == ("complete", 200), (number, reply.end, reply.status, reply.content[-500:])
    seen = [
        SeenAnswer.of_stream(reply.content) if reply.is_stream else SeenAnswer.of_whole(reply.content)
        for reply in replies
    ]
    assert all(each.is_done and each.error is None for each in seen)
    return seen, replies


def _check_same(mine: SeenAnswer, true: SeenAnswer, about: object) -> None:
    assert mine.usage is not None and true.usage is not None
    for count in ("prompt_tokens", "completion_tokens"):
        assert mine.usage[count] == true.usage[count], (about, mine.usage, true.usage)
    assert mine.choices.keys() == true.choices.keys()
    for index, choice in mine.choices.items():
        expected = true.choices[index]
        assert choice.text == expected.text, about
        assert choice.finish_reason == expected.finish_reason, about
        assert (choice.token_bytes, choice.offsets) == (expected.token_bytes, expected.offsets), about
        assert choice.logprobs == pytest.approx(expected.logprobs, abs=LOGPROB_TOLERANCE), about


async def test_fifty_answers_go_on(deployment: Deployment) -> None:
    requests = _requests(deployment)
    plain, _ = await _answers(deployment, _without_stops(requests))
    _fill_in_stops(requests, plain)
    expected, undisturbed = await _answers(deployment, requests)
    num_tokens = sum(map(_num_tokens, expected))

    for how in (SIGSTOP, SIGKILL):
        log_chars = len(deployment.proxy.log.read_text())
        async with _lost_in_the_middle(deployment, how, after_tokens=int(STRUCK_AT * num_tokens)):
            seen, replies = await _answers(deployment, requests)
        for request, mine, true in zip(requests, seen, expected, strict=True):
            _check_same(mine, true, request)
        seams = _seams(deployment.proxy.log.read_text()[log_chars:])
        print(f"{how.name}: {len(seams)} choices went on elsewhere, after {sorted(seams.values())} tokens")
        assert len(seams) >= NUM_ANSWERS / 4, "it had a good part of them"
        _check_where_seams_are(requests, expected, seams)
        _check_gaps(requests, undisturbed, replies, how)
        await eventually(lambda: _is_idle(deployment), 20.0)


@asynccontextmanager
async def _lost_in_the_middle(deployment: Deployment, how: Signals, *, after_tokens: int) -> AsyncIterator[None]:
    """Sends the signal to one worker when so many tokens are there, and heals it at the end."""
    before = await _num_streamed(deployment)

    async def strike() -> Program:
        await eventually(lambda: _has_streamed(deployment, before + after_tokens), 60.0)
        workers = (await get_json(deployment.proxy.url + "/health"))["workers"]
        busiest = deployment.workers[max(workers, key=lambda worker: worker["running"])["id"]]
        os.kill(busiest.process.pid, how)
        return busiest

    striking = asyncio.create_task(strike())
    yield
    victim = await striking
    if how is SIGSTOP:
        os.kill(victim.process.pid, SIGCONT)
    else:
        victim.process.wait()
        restarted = deployment.fleet.restart(victim)
        await restarted.said(" ready at ")
    await all_ready(deployment.proxy, len(deployment.workers))


async def _num_streamed(deployment: Deployment) -> float:
    """Tokens that came to the proxy, but for the first of each choice."""
    counts = await scraped(deployment.proxy.url, "prefixcache_inter_token_latency_seconds_count")
    return sum(counts.values())


async def _has_streamed(deployment: Deployment, least: float) -> bool:
    return await _num_streamed(deployment) >= least


def _num_tokens(seen: SeenAnswer) -> int:
    assert seen.usage is not None
    tokens: int = seen.usage["completion_tokens"]
    return tokens


def _seams(log: str) -> dict[tuple[int, int], int]:
    """(number of the request, choice) -> tokens that it had when it went elsewhere."""
    told = re.findall(r"request number-(\d+), choice (\d+): .* goes on at worker \S+ after (\d+) tokens", log)
    return {(int(number), int(choice)): int(tokens) for number, choice, tokens in told}


def _check_where_seams_are(
    requests: Sequence[tuple[str, dict[str, Any]]],
    expected: Sequence[SeenAnswer],
    seams: Mapping[tuple[int, int], int],
) -> None:
    """Some are inside of a stop string, where the token is a byte also inside of a character."""
    in_stops = in_characters = 0
    for (number, choice), num_tokens in seams.items():
        body, seen = requests[number][1], expected[number].choices[choice]
        if "stop" in body:
            assert seen.finish_reason == "stop"
            in_stops += num_tokens > len(seen.text)
        if len(bytes_in_turn := body.get("logit_bias", ())) > len("é"):
            in_characters += num_tokens % len(bytes_in_turn) != 0
    print(f"{in_stops} seams are inside of a stop string, {in_characters} inside of a character")
    assert in_stops, "a stop string begins after a sixth of an answer"
    assert in_characters or requests[0][1]["model"] != "sim"


def _check_gaps(
    requests: Sequence[tuple[str, dict[str, Any]]], undisturbed: Sequence[Reply], replies: Sequence[Reply], how: Signals
) -> None:
    """The longest, against what it takes to begin all of them; what may be a stop string is held back as it must be."""
    watched = [number for number, (_, body) in enumerate(requests) if "stream" in body and "stop" not in body]
    first_s = max(undisturbed[number].arrivals[0] - undisturbed[number].asked_at for number in watched)
    usual_s = max(undisturbed[number].longest_gap[0] for number in watched)
    longest_s = max(replies[number].longest_gap[0] for number in watched)
    print(f"longest gap {longest_s:.2f} s; undisturbed {usual_s:.2f} s, at most {first_s:.2f} s to the first token")
    silence_s = WORKER_SILENCE_S + LOOK_S if how is SIGSTOP else 0.0
    assert longest_s <= silence_s + GAP_S + first_s


async def _is_idle(deployment: Deployment) -> bool:
    health = await get_json(deployment.proxy.url + "/health")
    if any(worker["waiting"] or worker["running"] for worker in health["workers"]):
        return False
    urls = [f"http://{worker['address']}" for worker in health["workers"]]
    names = ("prefixcache_worker_requests_running", "prefixcache_worker_requests_waiting", "prefixcache_kv_cache_usage")
    return not any([sum((await scraped(url, name)).values()) for url in urls for name in names])
