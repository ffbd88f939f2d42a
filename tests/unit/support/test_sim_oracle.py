"""What the oracle adds to the simulated model: choices, stop strings, characters of several bytes."""

from __future__ import annotations

from typing import Any

from tests.support.sim_oracle import SimOracle
from tests.support.sim_requests import SMILES

CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 80, "temperature": 0}


def test_a_stop_string_ends_the_text_before_it() -> None:
    oracle = SimOracle()
    [whole] = oracle.answers({**CHAT, "ignore_eos": True})
    assert (whole.finish_reason, whole.completion_tokens) == ("length", 80)
    stop = whole.text[30:35]
    start = whole.text.index(stop)
    [cut] = oracle.answers({**CHAT, "ignore_eos": True, "stop": [stop, "never"]})
    assert (cut.text, cut.finish_reason, cut.completion_tokens) == (whole.text[:start], "stop", start + len(stop))
    [later] = oracle.answers({**CHAT, "ignore_eos": True, "stop": stop, "min_tokens": start + len(stop)})
    assert later.completion_tokens > cut.completion_tokens


def test_choices_differ_by_their_number_alone() -> None:
    oracle = SimOracle()
    body = {**CHAT, "temperature": 1.0, "seed": 3}
    one, two = oracle.answers({**body, "n": 2})
    assert [one] == oracle.answers(body)
    assert one.text != two.text and (one.choice, two.choice) == (0, 1)
    assert len(oracle.answers({"prompt": ["a", "b"], "n": 2, "max_tokens": 3, "temperature": 0})) == 4


def test_smiles_are_cut_inside_of_a_character() -> None:
    oracle = SimOracle()
    [even], [odd] = oracle.answers({**CHAT, **SMILES}), oracle.answers({**CHAT, **SMILES, "max_tokens": 79})
    assert even.text == "🙂" * 50
    assert odd.text == "🙂" * 19 + "\ufffd"


def test_log_probabilities_where_they_are_asked_for() -> None:
    oracle = SimOracle()
    [scored] = oracle.answers({**CHAT, "logprobs": True})
    assert len(scored.logprobs) == scored.completion_tokens
    assert oracle.answers(CHAT)[0].logprobs == ()
    [completion] = oracle.answers({"prompt": "hi", "max_tokens": 5, "temperature": 0, "logprobs": 0})
    assert len(completion.logprobs) == completion.completion_tokens
