"""The worker's own engine in this process, asked from the main thread: what it took is noted where its output comes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from threading import Event
from typing import Any

from transformers import PreTrainedModel

from prefixcache.metrics import WorkerMetrics
from prefixcache.protocol import End, Fail, Sampling, StepEntry, Usage
from tests.bench.worker.clock import Cost, Moment
from tests.support.requests import GREEDY, generate
from worker.engine import Engine, StepOutput
from worker.model_folder import ModelFolder
from worker.model_runner import TorchRunner, load_runner

ANSWER_TIMEOUT_S = 600.0


@dataclass(slots=True)
class Answers:
    """What came of requests that were submitted together."""

    num_requests: int
    began: Moment
    steps: list[tuple[Moment, int]] = field(default_factory=list)
    """When the output of each step that drew tokens came, and how many it drew."""
    usages: list[Usage] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)
    is_over: Event = field(default_factory=Event)

    @property
    def first_token(self) -> Cost:
        """From submitting them to the first token of any."""
        return self.steps[0][0] - self.began

    @property
    def cached_tokens(self) -> int:
        return sum(usage.cached_tokens for usage in self.usages)

    def full_steps(self) -> Iterator[tuple[Moment, Moment]]:
        """Beginning and end of every step in which all requests decoded and none was admitted."""
        for (began, num_before), (ended, num_drawn) in zip(self.steps, self.steps[1:], strict=False):
            if num_before == num_drawn == self.num_requests:
                yield began, ended


class DrivenEngine:
    """One engine; requests are asked one group after the other."""

    def __init__(self, runner: TorchRunner) -> None:
        self._engine = Engine(runner, metrics=WorkerMetrics(), on_output=self._take)
        self._ids = count()
        self._answers: Answers | None = None
        self.forwards: list[tuple[Moment, Moment]] = []
        """Beginning and end of the model's own forward in every step since the last request."""
        self._note_forwards(runner)

    def _note_forwards(self, runner: TorchRunner) -> None:
        (model,) = [part for part in vars(runner).values() if isinstance(part, PreTrainedModel)]
        began = [Moment.now()]

        def before(*_: Any) -> None:
            began[0] = Moment.now()

        def after(*_: Any) -> None:
            self.forwards.append((began[0], Moment.now()))

        model.register_forward_pre_hook(before)
        model.register_forward_hook(after)

    def start(self) -> None:
        self._engine.start()

    def stop(self) -> None:
        self._engine.stop()

    def ask(self, *prompts: Sequence[int], max_tokens: int = 1, sampling: Sampling = GREEDY) -> Answers:
        """Blocks until all of them have ended. Raises AssertionError where one fails."""
        requests = [
            generate(str(next(self._ids)), prompt, max_tokens=max_tokens, sampling=sampling) for prompt in prompts
        ]
        self.forwards.clear()
        self._answers = answers = Answers(len(prompts), Moment.now())
        for request in requests:
            self._engine.submit("bench", request)
        assert answers.is_over.wait(ANSWER_TIMEOUT_S), "the engine does not answer"
        assert not answers.failures, answers.failures
        return answers

    def first_token(self, prompt: Sequence[int], *, cached: int) -> Cost:
        """From submitting it to its first token; so many of its tokens must have been cached."""
        answers = self.ask(prompt)
        assert answers.cached_tokens == cached, f"{answers.cached_tokens} tokens were cached, expected were {cached}"
        return answers.first_token

    def forward_within(self, began: Moment, ended: Moment) -> Cost:
        """Of the model in the step between two outputs."""
        (forward,) = [
            last - first
            for first, last in self.forwards
            if began.wall_s <= first.wall_s and last.wall_s <= ended.wall_s
        ]
        return forward

    def _take(self, output: StepOutput) -> None:
        """Called by the step thread."""
        now, answers = Moment.now(), self._answers
        events = [event for _, event in output.events]
        num_drawn = sum(isinstance(event, StepEntry) for event in events)
        if answers is None:
            return
        if num_drawn:
            answers.steps.append((now, num_drawn))
        answers.usages += [event.usage for event in events if isinstance(event, End)]
        answers.failures += [event.message for event in events if isinstance(event, Fail)]
        if len(answers.usages) + len(answers.failures) == answers.num_requests:
            answers.is_over.set()


@contextmanager
def driven_engine(folder: Path, dtype: str, num_blocks: int) -> Iterator[DrivenEngine]:
    """Over the runner that the worker program would load, with one thread."""
    runner = load_runner(
        ModelFolder.open(folder),
        dtype=dtype,
        num_blocks=num_blocks,
        kv_memory=0,
        max_model_len=None,
        threads=1,
    )
    assert isinstance(runner, TorchRunner)
    engine = DrivenEngine(runner)
    engine.start()
    try:
        yield engine
    finally:
        engine.stop()
