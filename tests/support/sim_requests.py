"""Requests to simulated workers that use what a request can ask for, and whose answers the oracle knows."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any

from tests.support.bare_client import post_bytes
from tests.support.prompts import filler
from tests.support.sim_oracle import ExpectedAnswer, SimOracle

CHAT = "/v1/chat/completions"
COMPLETION = "/v1/completions"

SMILES = {
    "temperature": 0,
    "logit_bias": {"240": 100.0, "159": 99.9375, "153": 99.875, "130": 99.8125},
    "frequency_penalty": 0.25,
    "max_tokens": 200,
}
"""Penalties that make the text one emoji after the other, four tokens each: nearly every seam is inside a character."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """One request and what is true of its answer."""

    path: str
    body: Mapping[str, Any]
    expected: Sequence[ExpectedAnswer]

    @property
    def is_stream(self) -> bool:
        return bool(self.body.get("stream"))

    @property
    def content(self) -> bytes:
        return post_bytes(self.path, self.body)


class SimRequests:
    """Makes them, some with a system prompt that others have, too."""

    def __init__(self, random: Random, oracle: SimOracle, *, num_systems: int = 8, model: str = "sim") -> None:
        self._random = random
        self._oracle = oracle
        self._model = model
        self._systems = [filler(100 + 30 * number, seed=number) for number in range(num_systems)]
        self._makers: Sequence[Callable[[], dict[str, Any]]] = (
            self._greedy,
            self._greedy,
            self._sampled,
            self._penalized,
            self._smiles,
            self._stopped,
            self._scored,
        )

    def ordinary(self, *, max_tokens: Sequence[int] = (8, 32, 96, 200)) -> Asked:
        """Of any kind, an answer of a few seconds at most."""
        random = self._random
        fields = random.choice(self._makers)()
        fields.setdefault("max_tokens", random.choice(max_tokens))
        if random.random() < 0.15:
            fields["n"] = random.choice([2, 3])
        stream = random.random() < 0.6
        streamed = {"stream": True, "stream_options": {"include_usage": True}} if stream else {}
        return self.asked({**fields, **streamed}, is_chat=random.random() < 0.7)

    def endless(self) -> Asked:
        """One whose client is going to leave."""
        fields = {"temperature": 0, "max_tokens": 1_000, "ignore_eos": True, "stream": self._random.random() < 0.5}
        # The truth of as much as may come before it leaves.
        return self.asked(fields, is_chat=self._random.random() < 0.7, known_tokens=300)

    def asked(self, fields: Mapping[str, Any], *, is_chat: bool = True, known_tokens: int | None = None) -> Asked:
        """A new prompt with these fields."""
        body = {**(self._chat() if is_chat else self._completion()), **fields}
        if is_chat and "logprobs" in body:
            body["logprobs"] = True
        if "stop" in body:
            body |= self._stop_within(body)
        true = body if known_tokens is None else {**body, "max_tokens": min(known_tokens, body["max_tokens"])}
        return Asked(
            path=CHAT if is_chat else COMPLETION,
            body={"model": self._model, **body},
            expected=self._oracle.answers(true),
        )

    def _chat(self) -> dict[str, Any]:
        system = {"role": "system", "content": self._random.choice(self._systems)}
        user = {"role": "user", "content": f"Question {self._random.randrange(10**6)}: what then, étienne?"}
        return {"messages": [system, user]}

    def _completion(self) -> dict[str, Any]:
        random = self._random
        prompts = [
            f"{random.choice(self._systems)} Number {random.randrange(10**6)}" for _ in range(random.choice((1, 1, 2)))
        ]
        return {"prompt": prompts[0] if len(prompts) == 1 else prompts}

    def _stop_within(self, body: dict[str, Any]) -> dict[str, Any]:
        """A stop string that does come, late in the answer of the first choice, if it is long enough."""
        text = self._oracle.answers({name: value for name, value in body.items() if name != "stop"})[0].text
        start = int(len(text) * self._random.uniform(0.5, 0.9))
        return {"stop": [text[start : start + 6] or "never", "nor this one"]}

    # --- kinds ----------------------------------------------------------------------------------------------

    def _greedy(self) -> dict[str, Any]:
        return {"temperature": 0}

    def _sampled(self) -> dict[str, Any]:
        return {"temperature": 1.0, "top_p": 0.9, "seed": self._random.randrange(2**32)}

    def _penalized(self) -> dict[str, Any]:
        return {**self._sampled(), "presence_penalty": 0.5, "frequency_penalty": 0.2, "repetition_penalty": 1.1}

    def _smiles(self) -> dict[str, Any]:
        return dict(SMILES)

    def _stopped(self) -> dict[str, Any]:
        return {"temperature": 0, "ignore_eos": True, "max_tokens": 150, "stop": []}

    def _scored(self) -> dict[str, Any]:
        return {**self._sampled(), "logprobs": 1}
