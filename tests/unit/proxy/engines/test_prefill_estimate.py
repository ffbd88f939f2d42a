"""Learnt rates: a straight answer from straight data, and no answer from none."""

from __future__ import annotations

import pytest

from proxy.engines.prefill_estimate import FIRST_TOKENS_PER_BYTE, PrefillEstimate
from tests.support.seeds import seeded


def test_nothing_is_known_at_first() -> None:
    estimate = PrefillEstimate()
    assert estimate.prefill_rate is None
    assert estimate.tokens_per_byte == FIRST_TOKENS_PER_BYTE


def test_the_rate_is_that_of_long_prefills() -> None:
    random_source, estimate = seeded("prefills"), PrefillEstimate()
    for _ in range(200):
        tokens = random_source.choice([8, 20, 3_000, 5_000])
        estimate.observe_prefill(uncached_tokens=tokens, seconds=0.05 + tokens / 2_000)
    assert estimate.prefill_rate == pytest.approx(2_000, rel=0.06)


def test_an_engine_that_became_slower_is_followed() -> None:
    estimate = PrefillEstimate()
    for seconds in [1.0] * 50 + [4.0] * 50:
        estimate.observe_prefill(uncached_tokens=4_000, seconds=seconds)
    assert estimate.prefill_rate == pytest.approx(1_000, rel=0.2)


@pytest.mark.parametrize(("tokens", "seconds"), [(0, 1.0), (-5, 1.0), (100, 0.0), (100, -1.0)])
def test_what_is_no_prefill_teaches_nothing(tokens: int, seconds: float) -> None:
    estimate = PrefillEstimate()
    estimate.observe_prefill(uncached_tokens=tokens, seconds=seconds)
    assert estimate.prefill_rate is None


def test_tokens_per_byte_come_to_what_is_counted() -> None:
    estimate = PrefillEstimate()
    estimate.observe_prompt(prompt_tokens=4_000, prompt_bytes=8_000)
    assert estimate.tokens_per_byte == pytest.approx(0.45, rel=0.02), "one prompt outweighs the first guess"
    for _ in range(20):
        estimate.observe_prompt(prompt_tokens=4_000, prompt_bytes=8_000)
    assert estimate.tokens_per_byte == pytest.approx(0.5, rel=0.01)
    for _ in range(1_000):
        estimate.observe_prompt(prompt_tokens=1_600, prompt_bytes=8_000)
    assert estimate.tokens_per_byte == pytest.approx(0.2, rel=0.01), "another language, another ratio"


@pytest.mark.parametrize(("tokens", "count"), [(0, 100), (100, 0), (-1, 100), (1, 10_000), (3_000, 100)])
def test_counts_that_bytes_cannot_explain_teach_nothing(tokens: int, count: int) -> None:
    estimate = PrefillEstimate()
    estimate.observe_prompt(prompt_tokens=tokens, prompt_bytes=count)
    assert estimate.tokens_per_byte == FIRST_TOKENS_PER_BYTE
