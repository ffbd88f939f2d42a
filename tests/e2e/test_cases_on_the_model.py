"""Public failures whose symptom only a real model shows: wrong text from a cache that is used in full.

The other cases are played without a model, in tests/cases.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator

import httpx
import pytest

from tests.cases.catalogue import Call, Placeholders, calls, changed
from tests.cases.outcome import Outcome
from tests.support.stack import RunningStack

MODEL = "SmolLM2-135M-Instruct"
TIMES = 3


@pytest.fixture
def client(stack: RunningStack) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=stack.url, timeout=60.0, trust_env=False) as opened:
        yield opened


def _send(client: httpx.Client, call: Call) -> Outcome:
    answer = client.request(call.method, call.path, content=call.content)
    return Outcome(status=answer.status_code, headers=answer.headers, content=answer.content)


@pytest.fixture
def placeholders() -> Placeholders:
    return Placeholders(model=MODEL, vocab_size=40_000)


@pytest.mark.parametrize(("num_tokens", "cached_tokens"), [(16, 0), (32, 16), (48, 32)])
def test_rw_120_a_whole_prompt_in_the_cache(
    client: httpx.Client, placeholders: Placeholders, num_tokens: int, cached_tokens: int
) -> None:
    (given,) = calls("RW-120", placeholders)
    call = changed(given, prompt=placeholders.ids(num_tokens))
    outcomes = [_send(client, call) for _ in range(2 * TIMES)]
    assert len({outcome.text for outcome in outcomes}) == 1
    by_worker: defaultdict[str, list[int]] = defaultdict(list)
    for outcome in outcomes:
        by_worker[outcome.headers["x-prefixcache-worker"]].append(outcome.cached_tokens)
    # The index says nothing of a prompt below one index block, so that both workers may be asked.
    for cached in by_worker.values():
        assert cached == [0, *[cached_tokens] * (len(cached) - 1)]
    assert max(map(len, by_worker.values())) > 1


def test_rw_072_stop_strings_that_span_tokens(client: httpx.Client, placeholders: Placeholders) -> None:
    given = calls("RW-072", placeholders)
    unstopped = _send(client, changed(given[1], stop=None)).text
    stop = unstopped[6:13]
    for stream in (True, False):
        outcome = _send(client, changed(given[0], stop=stop, stream=stream))
        assert (outcome.text, outcome.finish_reason) == (unstopped[: unstopped.index(stop)], "stop")
    for call in given:
        outcome = _send(client, call)
        stops = call.body["stop"]
        assert all(stop not in outcome.text for stop in ([stops] if isinstance(stops, str) else stops))


def test_rw_070_streamed_text_is_the_whole_text(client: httpx.Client, placeholders: Placeholders) -> None:
    (call,) = calls("RW-070", placeholders)
    streamed, whole = _send(client, call), _send(client, changed(call, stream=False))
    assert streamed.text == whole.text
    assert streamed.finish_reason == whole.finish_reason


def test_log_probabilities_do_not_depend_on_the_cache(client: httpx.Client, placeholders: Placeholders) -> None:
    """RW-124 in small: cold, cached, and beside others."""
    (given,) = calls("RW-120", placeholders)
    call = changed(given, prompt=placeholders.ids(200), logprobs=3)
    cold = _send(client, call)
    assert cold.cached_tokens == 0
    for _ in range(TIMES):
        again = _send(client, call)
        assert again.text == cold.text
        scores = [outcome.body["choices"][0]["logprobs"]["token_logprobs"] for outcome in (cold, again)]
        assert scores[1] == pytest.approx(scores[0], abs=1e-3)
