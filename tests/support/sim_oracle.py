"""What a simulated worker must answer, computed without a worker: no blocks, no cache, no batch."""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from prefixcache.protocol import Sampling
from prefixcache.rendering.byte_tokenizer import BYTE_STOP_ID, byte_tokenizer_files
from prefixcache.rendering.renderer import Renderer
from worker.runner import SampleSpec
from worker.sim_model import next_logits
from worker.sim_sampler import draw


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpectedAnswer:
    """A chat's answer and its usage, apart from the cached tokens."""

    text: str
    finish_reason: str
    prompt_tokens: int
    completion_tokens: int


class SimOracle:
    """Answers are remembered by what they depend on."""

    def __init__(self) -> None:
        self._renderer = Renderer(byte_tokenizer_files())
        self._answers: dict[tuple[bytes, int, float, bool], ExpectedAnswer] = {}

    def answer(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        max_tokens: int,
        seed: int = 0,
        temperature: float = 0.0,
        ignore_eos: bool = False,
    ) -> ExpectedAnswer:
        """The answer to a chat."""
        prompt = self._renderer.encode(self._renderer.render(messages))
        sampling = Sampling(seed=seed, temperature=temperature)
        key = (prompt.tobytes() + seed.to_bytes(8, "little"), max_tokens, temperature, ignore_eos)
        if key not in self._answers:
            stop_token_ids = frozenset[int]() if ignore_eos else frozenset({BYTE_STOP_ID})
            self._answers[key] = self._computed(prompt, sampling, max_tokens, stop_token_ids)
        return self._answers[key]

    def _computed(
        self, prompt: array[int], sampling: Sampling, max_tokens: int, stop_token_ids: frozenset[int]
    ) -> ExpectedAnswer:
        tokens = prompt[:]
        output = array("I")
        while len(output) < max_tokens and not stop_token_ids.intersection(output[-1:]):
            spec = SampleSpec(
                sampling=sampling,
                choice=0,
                index=len(output),
                prompt_ids=prompt,
                output_ids=output,
                stop_token_ids=stop_token_ids,
            )
            token = draw(next_logits(tokens.tobytes(), output), spec).token_id
            tokens.append(token)
            output.append(token)
        detokenizer = self._renderer.detokenizer()
        return ExpectedAnswer(
            text=detokenizer.feed(output) + detokenizer.flush(),
            finish_reason="stop" if stop_token_ids.intersection(output[-1:]) else "length",
            prompt_tokens=len(prompt),
            completion_tokens=len(output),
        )
