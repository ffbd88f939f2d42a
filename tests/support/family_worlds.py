"""A tiny model behind a whole engine, in waves of requests that share prefixes, held to the model's plain forward."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from prefixcache.protocol import Sampling, StepEntry
from tests.support.engine_harness import RunningEngine, running_engine
from tests.support.packed_steps import runner_of
from tests.support.requests import generate
from tests.support.tiny_models import tiny_model
from worker.attention.backend import AttentionBackend
from worker.kv_cache import KVCache
from worker.scheduler import Scheduler

MAX_TOKENS = 5
LONGEST = 256
"""Of a sequence: what the tiny models have positions for."""
_MAX_RUNNING = 6
_TOLERANCE = 1e-4
"""Of log probabilities; two right computations in float32 differ by 1e-6 to 1e-5."""


@dataclass(slots=True, kw_only=True)
class Answered:
    """A request, and what the engine answered."""

    prompt: Sequence[int]
    output: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    cached_tokens: int = 0
    copied_tokens: int = 0


class FamilyWorld:
    """One model, served with random sizes of blocks and chunks, and so few blocks that some are evicted."""

    def __init__(self, name: str, make: Callable[[KVCache], AttentionBackend], source: random.Random) -> None:
        self._plain = tiny_model(name)
        self._source = source
        self.block_size = source.choice([4, 16])
        self._runner = runner_of(
            tiny_model(name), num_blocks=LONGEST // self.block_size, block_size=self.block_size, make=make
        )
        self._num_requests = 0

    def play(self, monkeypatch: pytest.MonkeyPatch) -> int:
        """Plays all waves and compares every answer; how many tokens were reused."""
        step_tokens = _MAX_RUNNING + self._source.choice([self.block_size, 23, 64])
        scheduler = partial(Scheduler, step_tokens=step_tokens, max_running=_MAX_RUNNING)
        monkeypatch.setattr("worker.engine.Scheduler", scheduler)
        source, tokens = self._source, self._tokens
        with running_engine(self._runner) as engine:
            first = tokens(source.randint(20, 60))
            (turn,) = self._answer(engine, [first], root=1)
            cut, twin = source.randint(1, len(first)), tokens(33)
            wave = [first, first[:cut] + tokens(9), tokens(17), twin, twin]
            warm = self._answer(engine, wave, root=1)
            cold = [self._answer(engine, [prompt], root=2 + place)[0] for place, prompt in enumerate(wave)]
            second_turn = self._answer(engine, [[*first, *turn.output, *tokens(5)]], root=1)
            engine.assert_nothing_is_held()
        assert [answer.output for answer in warm] == [answer.output for answer in cold]
        assert not any(answer.cached_tokens + answer.copied_tokens for answer in (turn, *cold))
        assert warm[0].cached_tokens + warm[0].copied_tokens == len(first) - 1
        for answer in (turn, *warm, *cold, *second_turn):
            self._check(answer)
        return sum(answer.cached_tokens for answer in (*warm, *second_turn))

    def _tokens(self, count: int) -> list[int]:
        return [self._source.randrange(3, 500) for _ in range(count)]

    def _answer(self, engine: RunningEngine, prompts: Sequence[list[int]], *, root: int) -> list[Answered]:
        """All at once, greedily."""
        names = [str(self._num_requests + place) for place in range(len(prompts))]
        self._num_requests += len(prompts)
        sampling = Sampling(seed=0, temperature=0, top_logprobs=0)
        for name, prompt in zip(names, prompts, strict=True):
            engine.submit(generate(name, prompt, max_tokens=MAX_TOKENS, root=root, sampling=sampling))
        engine.wait_ended(*names)
        answers = []
        for name, prompt in zip(names, prompts, strict=True):
            usage = engine.end(name).usage
            entries = [event for event in engine.events[name] if isinstance(event, StepEntry)]
            answers.append(
                Answered(
                    prompt=prompt,
                    output=engine.tokens(name),
                    logprobs=[each.logprob for entry in entries for each in entry.logprobs or ()],
                    cached_tokens=usage.cached_tokens,
                    copied_tokens=usage.copied_tokens,
                )
            )
        return answers

    def _check(self, answer: Answered) -> None:
        assert len(answer.output) == len(answer.logprobs) == MAX_TOKENS
        logits = plain_logits(self._plain, [*answer.prompt, *answer.output], LONGEST)[len(answer.prompt) - 1 : -1]
        logprobs = logits.log_softmax(dim=-1)
        told = torch.tensor(answer.logprobs)
        drawn = logprobs.gather(1, torch.tensor(answer.output).unsqueeze(1)).squeeze(1)
        assert (drawn - told).abs().max() < _TOLERANCE, answer
        assert (drawn - logprobs.max(dim=-1).values).abs().max() < _TOLERANCE, answer


@torch.inference_mode()
def plain_logits(model: PreTrainedModel, tokens: Sequence[int], longest: int) -> Tensor:
    """[len(tokens), vocab_size] of the model's own forward, as it is beside a sequence of `longest` tokens.

    That other sequence is a second row of the batch: its positions end at the last one, for ropes that look at it.
    """
    positions = torch.arange(len(tokens))
    logits: Tensor = model(
        input_ids=torch.tensor([tokens, tokens]),
        position_ids=torch.stack((positions, positions + longest - len(tokens))),
        use_cache=False,
    ).logits
    return logits[0].float()
