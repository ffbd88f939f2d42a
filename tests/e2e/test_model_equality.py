"""The real model in float32: greedy answers are the same to the letter, cached or not, alone or four at a time."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from queue import Queue
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from prefixcache.cpu import auto_dtype
from prefixcache.metrics import WorkerMetrics
from prefixcache.protocol import End, Fail, Generate, Sampling, StepEntry, Usage
from prefixcache.rendering.renderer import Renderer
from prefixcache.types import CacheGeometry, pack_tokens
from worker.engine import Engine, StepOutput
from worker.model_folder import ModelFolder
from worker.model_runner import TorchRunner, load_runner

MAX_TOKENS = 12
STEP_TIMEOUT_S = 60.0

SYSTEM = (
    "You are a careful assistant. You answer in one or two plain sentences, you never invent facts, and you say so "
    "when you do not know. Units are metric, dates are day, month, year, and numbers below ten are spelled out."
)
QUESTIONS = (
    "What is the capital of France?",
    "Write one sentence about the sea.",
    "How many legs does a spider have, and why do people fear it?",
    "Translate 'good morning' into Spanish.",
    "def add(a, b):\n    return a +",
    "Name three fruits that are not red.",
    "Who wrote Romeo and Juliet?",
    "What is 7 plus 5? Answer with the number only.",
    "Ünïcödé and emoji 🦔🦔: what do you see?",
    "Is ice warmer than steam?",
)


@dataclass(slots=True)
class Answer:
    """What came of one request."""

    ids: list[int] = field(default_factory=list)
    usage: Usage | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A prompt and what transformers' own `generate` answers."""

    prompt: list[int]
    answer: list[int]


@pytest.fixture(scope="module")
def folder(demo_model: Path) -> ModelFolder:
    return ModelFolder.open(demo_model)


@pytest.fixture(scope="module")
def runner(folder: ModelFolder) -> TorchRunner:
    return load_runner(folder, dtype="float32", num_blocks=400, kv_memory=0, max_model_len=None, threads=1)


@pytest.fixture(scope="module")
def cases(folder: ModelFolder) -> list[Case]:
    renderer = Renderer(folder.tokenizer_files)
    model: Any = AutoModelForCausalLM.from_pretrained(folder.path, dtype=torch.float32)
    torch.set_num_threads(1)
    cases = []
    for question in QUESTIONS:
        messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": question}]
        prompt = list(renderer.encode(renderer.render(messages)))
        ids = torch.tensor([prompt])
        output = model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=MAX_TOKENS)
        cases.append(Case(prompt=prompt, answer=output[0, len(prompt) :].tolist()))
    return cases


@contextmanager
def _serving(runner: TorchRunner) -> Iterator[tuple[Engine, Queue[StepOutput]]]:
    outputs: Queue[StepOutput] = Queue()
    engine = Engine(runner, metrics=WorkerMetrics(), on_output=outputs.put, checks_integrity=True)
    engine.start()
    try:
        yield engine, outputs
    finally:
        engine.stop()
        assert engine.failure is None


def _answers(
    serving: tuple[Engine, Queue[StepOutput]], folder: ModelFolder, cases: Sequence[Case], *, roots: Sequence[int]
) -> list[Answer]:
    """Submits all cases at once and waits for their ends."""
    engine, outputs = serving
    answers = {str(number): Answer() for number in range(len(cases))}
    for number, (case, root) in enumerate(zip(cases, roots, strict=True)):
        engine.submit(
            "test",
            Generate(
                id=str(number),
                root=root,
                prompt_ids=pack_tokens(case.prompt),
                sampling=Sampling(seed=0, temperature=0),
                stop_token_ids=folder.stop_token_ids,
                max_tokens=MAX_TOKENS,
            ),
        )
    while any(answer.usage is None for answer in answers.values()):
        for _, event in outputs.get(timeout=STEP_TIMEOUT_S).events:
            assert not isinstance(event, Fail), event
            if isinstance(event, StepEntry):
                answers[event.id].ids += event.ids
            elif isinstance(event, End):
                answers[event.id].usage = event.usage
    return list(answers.values())


def _cached_tokens(answer: Answer) -> int:
    assert answer.usage is not None
    return answer.usage.cached_tokens


def test_uncached_and_cached_answers_are_those_of_generate(
    runner: TorchRunner, folder: ModelFolder, cases: list[Case]
) -> None:
    reusable = CacheGeometry().reusable_tokens
    with _serving(runner) as serving:
        for root, case in enumerate(cases, start=1):
            cold, warm = (_answers(serving, folder, [case], roots=[root])[0] for _ in range(2))
            assert (cold.ids, _cached_tokens(cold)) == (case.answer, 0)
            assert (warm.ids, _cached_tokens(warm)) == (case.answer, reusable(len(case.prompt)))


def test_four_at_a_time_share_their_prefix_and_answer_alike(
    runner: TorchRunner, folder: ModelFolder, cases: list[Case]
) -> None:
    with _serving(runner) as serving:
        for begin in range(0, len(cases), 4):
            batch = cases[begin : begin + 4]
            answers = _answers(serving, folder, batch, roots=[1] * len(batch))
            assert [answer.ids for answer in answers] == [case.answer for case in batch]
            assert all(_cached_tokens(answer) >= 48 for answer in answers[1:])


def test_answers_come_to_an_end(cases: list[Case], folder: ModelFolder) -> None:
    """Else nothing above would have shown that a stop token ends an answer."""
    assert any(case.answer[-1] in folder.stop_token_ids for case in cases)
    assert any(len(case.answer) == MAX_TOKENS for case in cases)


@pytest.mark.skipif(auto_dtype() != "bfloat16", reason="a CPU that multiplies bfloat16 itself")
def test_the_demo_model_may_be_served_deterministically(folder: ModelFolder) -> None:
    """Which is tried at load: after hits, cut and whole, beside another sequence, and on what decodes wrote."""
    settings: dict[str, Any] = {"num_blocks": 40, "kv_memory": 0, "max_model_len": None, "threads": 1}
    load_runner(folder, dtype="bfloat16", deterministic=True, **settings)
