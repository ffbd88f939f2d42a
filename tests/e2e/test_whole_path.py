"""The product as a user meets it: `prefixcache up`, a real model, and clients that share a prefix."""

from __future__ import annotations

import json
import os
import re
import signal
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import openai
import psutil
import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.support.huge_pages import needs_huge_pages
from tests.support.prompts import filler
from tests.support.stack import RunningStack, running_stack
from tests.support.waiting import eventually

MODEL = "SmolLM2-135M-Instruct"
GREEDY_TOKENS = 18
"""More than a KV block, so that every answer crosses from one into the next."""
QUESTIONS = (
    "What is the capital of France?",
    "Write one sentence about the sea.",
    "How many legs does a spider have?",
    "Translate 'good morning' into Spanish.",
    "What colour is the sky on a clear day?",
    "Name three fruits.",
    "Who wrote Romeo and Juliet?",
    "What is 7 plus 5?",
    "Give me a synonym for happy.",
    "Is ice warmer than steam?",
)


def _get(stack: RunningStack, path: str) -> str:
    with urllib.request.urlopen(stack.url + path, timeout=10) as answer:
        text: str = answer.read().decode()
        return text


def _chat(stack: RunningStack, messages: list[dict[str, str]], **fields: Any) -> tuple[dict[str, Any], dict[str, str]]:
    """One chat without streaming: the body, and the headers in lower case."""
    body = {"model": MODEL, "messages": messages, "temperature": 0, "max_tokens": 8, **fields}
    request = urllib.request.Request(
        stack.url + "/v1/chat/completions", json.dumps(body).encode(), {"content-type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=120) as answer:
        return json.loads(answer.read()), {name.lower(): value for name, value in answer.headers.items()}


def _system_and_user(system: str, question: str) -> list[dict[str, str]]:
    return [{"role": "system", "content": system}, {"role": "user", "content": question}]


def _cached(answer: dict[str, Any]) -> int:
    cached: int = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
    return cached


def _counter(stack: RunningStack, name: str) -> float:
    families = text_string_to_metric_families(_get(stack, "/metrics"))
    return sum(sample.value for family in families for sample in family.samples if sample.name == name)


def test_prints_a_ready_line_and_a_curl_line_that_works(stack: RunningStack) -> None:
    lines = stack.output.splitlines()
    assert lines[0] == f"ready {stack.url}/v1"
    (command,) = [line for line in lines if line.startswith("curl ")]
    url, body = command.split()[1], command.split(" -d ")[1].strip("'")
    request = urllib.request.Request(url, body.encode(), {"content-type": "application/json"})
    with urllib.request.urlopen(request, timeout=60) as answer:
        assert json.loads(answer.read())["choices"][0]["message"]["role"] == "assistant"


@needs_huge_pages
async def test_both_workers_put_what_they_hold_into_huge_pages(stack: RunningStack) -> None:
    await eventually(lambda: len(re.findall(r" MiB of memory are in huge pages\n", stack.log.read_text())) == 2, 60.0)


def test_the_second_chat_reuses_the_shared_system_prompt(stack: RunningStack) -> None:
    system = filler(1400, seed=1)
    first, first_headers = _chat(stack, _system_and_user(system, "What do rivers carry?"))
    second, second_headers = _chat(stack, _system_and_user(system, "And what do harbors keep?"))
    assert first["usage"]["prompt_tokens"] >= 1500
    assert _cached(first) == 0
    assert _cached(second) >= 0.9 * second["usage"]["prompt_tokens"]
    assert second_headers["x-prefixcache-worker"] == first_headers["x-prefixcache-worker"]
    assert second_headers["x-prefixcache-reason"] == "longest_prefix"
    predicted = int(second_headers["x-prefixcache-hit-tokens"])
    assert 0 <= _cached(second) - predicted < 64, "a right prediction is at most one index block too low"


def test_a_prompt_whose_first_word_differs_reuses_at_most_one_index_block(stack: RunningStack) -> None:
    system = filler(600, seed=2)
    _chat(stack, _system_and_user(system, "What do rivers carry?"))
    other, _ = _chat(stack, _system_and_user("Nevertheless " + system, "What do rivers carry?"))
    assert _cached(other) <= 64


def test_usage_cache_stats_and_metrics_agree(stack: RunningStack) -> None:
    def totals() -> dict[str, Any]:
        whole: dict[str, Any] = json.loads(_get(stack, "/cache/stats"))["total"]["since_start"]
        return whole

    names = ("prefixcache_prompt_tokens_total", "prefixcache_cached_tokens_total")
    before, counted_before = totals(), [_counter(stack, name) for name in names]
    system = filler(300, seed=3)
    answers = [_chat(stack, _system_and_user(system, question))[0] for question in QUESTIONS[:4]]
    prompt_tokens = sum(answer["usage"]["prompt_tokens"] for answer in answers)
    cached_tokens = sum(_cached(answer) for answer in answers)
    assert cached_tokens > 0
    after, counted_after = totals(), [_counter(stack, name) for name in names]
    assert after["prompt_tokens"] - before["prompt_tokens"] == prompt_tokens
    assert after["cached_tokens"] - before["cached_tokens"] == cached_tokens
    assert after["hit_rate"] == pytest.approx(after["cached_tokens"] / after["prompt_tokens"])
    assert [new - old for new, old in zip(counted_after, counted_before, strict=True)] == [prompt_tokens, cached_tokens]


def test_greedy_text_equals_transformers_cold_cached_and_four_at_a_time(stack: RunningStack, demo_model: Path) -> None:
    expected = _generate_with_transformers(demo_model)
    conversations = [[{"role": "user", "content": question}] for question in QUESTIONS]

    def text_of(messages: list[dict[str, str]]) -> tuple[str, int]:
        answer, _ = _chat(stack, messages, max_tokens=GREEDY_TOKENS)
        content: str = answer["choices"][0]["message"]["content"]
        return content, _cached(answer)

    cold = [text_of(messages) for messages in conversations]
    cached = [text_of(messages) for messages in conversations]
    with ThreadPoolExecutor(4) as pool:
        together = list(pool.map(text_of, conversations))
    assert [text for text, _ in cold] == expected
    assert [text for text, _ in cached] == expected
    assert [text for text, _ in together] == expected
    assert all(count > 0 for _, count in cached)


def _generate_with_transformers(folder: Path) -> list[str]:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer: Any = AutoTokenizer.from_pretrained(folder)
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    model.eval()
    texts = []
    for question in QUESTIONS:
        messages = [{"role": "user", "content": question}]
        inputs = tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, return_tensors="pt", return_dict=True
        )
        with torch.inference_mode():
            output = model.generate(**inputs, do_sample=False, max_new_tokens=GREEDY_TOKENS)
        texts.append(tokenizer.decode(output[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True))
    return texts


def test_the_openai_client_streams_the_same_text_with_its_usage(stack: RunningStack) -> None:
    with openai.OpenAI(base_url=stack.url + "/v1", api_key="unused") as client:
        messages: Any = [{"role": "user", "content": QUESTIONS[0]}]
        whole = client.chat.completions.create(model=MODEL, messages=messages, temperature=0, max_tokens=24)
        chunks = list(
            client.chat.completions.create(
                model=MODEL,
                messages=messages,
                temperature=0,
                max_tokens=24,
                stream=True,
                stream_options={"include_usage": True},
            )
        )
    streamed = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert "Paris" in streamed
    assert streamed == whole.choices[0].message.content
    assert chunks[-1].usage is not None and whole.usage is not None
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens
    assert chunks[-1].usage.prompt_tokens_details is not None


@pytest.mark.parametrize(
    ("how", "runner"), [(signal.SIGINT, "sim"), (signal.SIGTERM, "sim"), (signal.SIGKILL, "torch")]
)
def test_no_child_outlives_the_command(demo_model: Path, tmp_path: Path, how: signal.Signals, runner: str) -> None:
    model = ["--model", str(demo_model)] if runner == "torch" else []
    with running_stack(tmp_path, ["--runner", runner, *model, "--workers", "1"]) as running:
        children = running.descendants()
        assert len(children) >= 3, "embedded server, worker, proxy"
        os.kill(running.process.pid, how)
        _, alive = psutil.wait_procs(children, timeout=20)
        assert alive == []
        code = running.process.wait(20)
    assert code == (0 if how != signal.SIGKILL else -signal.SIGKILL)
