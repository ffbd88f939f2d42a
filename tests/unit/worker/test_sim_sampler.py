"""Drawing in plain Python: what each setting does, and that log probabilities are those of the draws."""

from __future__ import annotations

import math
from collections import Counter

import pytest

from prefixcache.errors import WorkerFault
from prefixcache.protocol import Sampling
from tests.support.requests import GREEDY, sample_spec
from worker.runner import SampleSpec
from worker.sim_model import FLOOR_LOGIT, VOCAB_SIZE
from worker.sim_sampler import draw

A, B, C, D = map(ord, "abcd")
LOGITS = {A: 2.0, B: 1.0, C: 0.0}


def drawn(spec: SampleSpec) -> int:
    return draw(LOGITS, spec).token_id


def draws(num_draws: int = 3_000, temperature: float = 1.0, **settings: float) -> Counter[str]:
    """How often each token comes, over as many places of one output."""
    sampling = Sampling(seed=5, temperature=temperature, **settings)  # type: ignore[arg-type]  # top_k is whole
    return Counter(chr(drawn(sample_spec(sampling, index=index))) for index in range(num_draws))


def test_greedy_takes_the_greatest_and_the_lower_of_equals() -> None:
    assert drawn(sample_spec(GREEDY)) == A
    assert draw({C: 1.0, B: 1.0, A: 0.5}, sample_spec(GREEDY)).token_id == B


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_draws_follow_the_distribution(temperature: float) -> None:
    weights = {chr(token): math.exp(logit / temperature) for token, logit in LOGITS.items()}
    counts = draws(temperature=temperature)
    for token, weight in weights.items():
        assert counts[token] / 3_000 == pytest.approx(weight / sum(weights.values()), abs=0.03)


def test_a_draw_depends_on_seed_choice_and_index_alone() -> None:
    def sequence(seed: int, choice: int) -> list[int]:
        sampling = Sampling(seed=seed)
        return [drawn(sample_spec(sampling, choice=choice, index=index)) for index in range(60)]

    assert sequence(1, 0) == sequence(1, 0)
    assert sequence(1, 0) != sequence(2, 0)
    assert sequence(1, 0) != sequence(1, 1)


def test_truncation() -> None:
    assert set(draws(top_k=1)) == {"a"}
    assert set(draws(top_k=2)) == {"a", "b"}
    assert set(draws(top_p=0.6)) == {"a"}  # shares are 0.67, 0.24, 0.09
    assert set(draws(top_p=0.7)) == {"a", "b"}
    assert set(draws(min_p=0.2)) == {"a", "b"}  # relative to the greatest: 1, 0.37, 0.14
    assert set(draws(min_p=1.0)) == {"a"}
    assert set(draws()) == {"a", "b", "c"}


def test_bias_lifts_a_token_from_the_floor_and_bans_one() -> None:
    assert drawn(sample_spec(Sampling(seed=0, temperature=0, logit_bias={D: 100.0}))) == D
    assert drawn(sample_spec(Sampling(seed=0, temperature=0, logit_bias={A: -100.0}))) == B


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_ban_of_every_candidate_leaves_the_others_on_the_floor(temperature: float) -> None:
    banned = dict.fromkeys((A, B, C), -100.0)
    for index in range(20):
        spec = sample_spec(Sampling(seed=3, temperature=temperature, logit_bias=banned), index=index)
        assert drawn(spec) not in (A, B, C)


@pytest.mark.parametrize(
    ("sampling", "output", "token"),
    [
        (Sampling(seed=0, temperature=0, presence_penalty=1.5), [A], B),
        (Sampling(seed=0, temperature=0, presence_penalty=0.5), [A, A, A], A),
        (Sampling(seed=0, temperature=0, frequency_penalty=0.5), [A, A, A], B),
        (Sampling(seed=0, temperature=0, frequency_penalty=-1), [B, B], B),
        (Sampling(seed=0, temperature=0, repetition_penalty=4), [A], B),
        (Sampling(seed=0, temperature=0, presence_penalty=1.5), [], A),
    ],
)
def test_penalties_count_the_output(sampling: Sampling, output: list[int], token: int) -> None:
    assert drawn(sample_spec(sampling, output=output)) == token


def test_the_repetition_penalty_counts_the_prompt_too() -> None:
    assert drawn(sample_spec(Sampling(seed=0, temperature=0, repetition_penalty=4), prompt=[A])) == B


def test_stop_ids_wait_for_min_tokens() -> None:
    sampling = Sampling(seed=0, temperature=0, min_tokens=2)
    assert drawn(sample_spec(sampling, index=1, stop_token_ids=[A])) == B
    assert drawn(sample_spec(sampling, index=2, stop_token_ids=[A])) == A


def test_if_only_stop_ids_may_follow_another_token_comes() -> None:
    sampling = Sampling(seed=0, temperature=0, min_tokens=2)
    assert drawn(sample_spec(sampling, index=1, stop_token_ids=[A, B, C])) == 0
    with pytest.raises(WorkerFault, match="leave no token to draw"):
        drawn(sample_spec(sampling, index=1, stop_token_ids=range(VOCAB_SIZE)))


def test_log_probabilities_are_of_the_models_own_distribution() -> None:
    sampling = Sampling(seed=0, temperature=0, logit_bias={D: 100.0}, top_logprobs=4)
    result = draw(LOGITS, sample_spec(sampling)).logprobs
    assert result is not None
    normalizer = math.log(sum(math.exp(logit) for logit in LOGITS.values()))
    assert [token for token, _ in result.top] == [A, B, C, 0]
    logits = [*LOGITS.values(), FLOOR_LOGIT]
    assert [logprob for _, logprob in result.top] == pytest.approx([logit - normalizer for logit in logits])
    assert result.logprob == pytest.approx(FLOOR_LOGIT - normalizer)


def test_they_add_up_to_one() -> None:
    result = draw(LOGITS, sample_spec(Sampling(seed=0, top_logprobs=VOCAB_SIZE))).logprobs
    assert result is not None
    assert sorted(token for token, _ in result.top) == list(range(VOCAB_SIZE))
    assert sum(math.exp(logprob) for _, logprob in result.top) == pytest.approx(1)


def test_they_come_only_where_asked_for() -> None:
    assert draw(LOGITS, sample_spec(GREEDY)).logprobs is None
    alone = draw(LOGITS, sample_spec(Sampling(seed=0, temperature=0, top_logprobs=0))).logprobs
    assert alone is not None and alone.top == () and alone.logprob < 0


def test_a_forced_token_has_its_own_log_probability() -> None:
    result = draw(LOGITS, sample_spec(Sampling(seed=0, top_logprobs=1)), forced=B)
    assert result.token_id == B
    assert result.logprobs is not None
    assert result.logprobs.logprob < result.logprobs.top[0][1]
