"""What a simulated worker must answer, computed without a worker: no blocks, no cache, no batch, no proxy."""

from __future__ import annotations

import json
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
    """One choice and its usage, apart from the cached tokens."""

    text: str
    finish_reason: str
    prompt_tokens: int
    completion_tokens: int
    logprobs: tuple[float, ...] = ()
    """Of every token drawn, where they were asked for."""
    choice: int = 0
    """Among those of its prompt."""


_SAMPLING = ("temperature", "top_p", "top_k", "presence_penalty", "frequency_penalty", "repetition_penalty")


class SimOracle:
    """Answers are remembered by what they depend on."""

    def __init__(self) -> None:
        self._renderer = Renderer(byte_tokenizer_files())
        self._answers: dict[str, Sequence[ExpectedAnswer]] = {}

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
        [answer] = self.answers(
            {
                "messages": messages,
                "max_tokens": max_tokens,
                "seed": seed,
                "temperature": temperature,
                "ignore_eos": ignore_eos,
            }
        )
        return answer

    def answers(self, body: Mapping[str, Any]) -> Sequence[ExpectedAnswer]:
        """Every choice of a chat or completion, in order.

        The body says all that the answer depends on: `max_tokens`, and a `seed` unless its temperature is 0.
        """
        drawn_by = {name: value for name, value in body.items() if name not in ("stream", "stream_options", "model")}
        key = json.dumps(drawn_by, sort_keys=True)
        if key not in self._answers:
            self._answers[key] = [
                self._computed(prompt, body, choice)
                for prompt in self._prompts(body)
                for choice in range(body.get("n", 1))
            ]
        return self._answers[key]

    def forget(self) -> None:
        """Of answers that are asked for once; a long run would keep them all."""
        self._answers.clear()

    def _prompts(self, body: Mapping[str, Any]) -> Sequence[array[int]]:
        if "messages" in body:
            return [self._renderer.encode(self._renderer.render(body["messages"]))]
        prompts = [body["prompt"]] if isinstance(body["prompt"], str) else body["prompt"]
        return [self._renderer.encode(self._renderer.raw(prompt, add_special_tokens=True)) for prompt in prompts]

    def _computed(self, prompt: array[int], body: Mapping[str, Any], choice: int) -> ExpectedAnswer:
        is_scored = bool(body.get("logprobs")) or ("prompt" in body and body.get("logprobs") is not None)
        sampling = Sampling(
            seed=body.get("seed", 0),
            logit_bias={int(token): bias for token, bias in body.get("logit_bias", {}).items()},
            min_tokens=body.get("min_tokens", 0),
            top_logprobs=0 if is_scored else None,
            **{name: body[name] for name in _SAMPLING if name in body},
        )
        stop_token_ids = frozenset[int]() if body.get("ignore_eos") else frozenset({BYTE_STOP_ID})
        stops = [body["stop"]] if isinstance(body.get("stop"), str) else body.get("stop", ())
        tokens, output = prompt[:], array("I")
        logprobs: list[float] = []
        detokenizer, text, num_passed = self._renderer.detokenizer(), "", 0
        reason, is_cut = "length", False
        while len(output) < body["max_tokens"]:
            spec = SampleSpec(
                sampling=sampling,
                choice=choice,
                index=len(output),
                prompt_ids=prompt,
                output_ids=output,
                stop_token_ids=stop_token_ids,
            )
            drawn = draw(next_logits(tokens.tobytes(), output), spec)
            tokens.append(drawn.token_id)
            output.append(drawn.token_id)
            if drawn.logprobs is not None:
                logprobs.append(drawn.logprobs.logprob)
            if drawn.token_id in stop_token_ids:
                reason = "stop"
                break
            text += detokenizer.feed((drawn.token_id,))
            if len(output) <= sampling.min_tokens:
                num_passed = len(text)  # of these characters, none belongs to a stop string
            elif found := [start for stop in stops if (start := text.find(stop, num_passed)) >= 0]:
                # Of what is complete at the same character, the longest goes.
                text, reason, is_cut = text[: min(found)], "stop", True
                break
        return ExpectedAnswer(
            text=text if is_cut else text + detokenizer.flush(),
            finish_reason=reason,
            prompt_tokens=len(prompt),
            completion_tokens=len(output),
            logprobs=tuple(logprobs),
            choice=choice,
        )
