"""Draws: exact vectors, the distribution, each parameter, log probabilities, and who may fail."""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from prefixcache.errors import WorkerFault
from prefixcache.protocol import LEAST_LOGPROB, Sampling, TokenLogprobs
from tests.support.requests import sample_spec
from tests.support.sampling_reference import reference_token, reference_weights
from tests.support.seeds import seeded
from worker import sampler
from worker.draw import uniform
from worker.runner import Drawn, SampleSpec
from worker.sampler import sample

LOGITS = [0.5, 2.0, -1.0, 1.0, 1.5]


def _tokens(logits: Tensor, specs: Sequence[SampleSpec]) -> list[int]:
    results = sample(logits, specs)
    assert all(isinstance(result, Drawn) for result in results), results
    return [result.token_id for result in results if isinstance(result, Drawn)]


def _token(logits: Sequence[float], spec: SampleSpec) -> int:
    return _tokens(torch.tensor([logits]), [spec])[0]


def _draws(logits: Sequence[float], count: int, *, temperature: float = 1.0, top_p: float = 1.0) -> list[int]:
    return _drawn_by(Sampling(seed=7, temperature=temperature, top_p=top_p), logits, count)


def _drawn_by(sampling: Sampling, logits: Sequence[float], count: int) -> list[int]:
    rows = torch.tensor(logits).expand(count, len(logits))
    return _tokens(rows, [sample_spec(sampling, index=index) for index in range(count)])


@pytest.mark.parametrize(
    ("seed", "choice", "index", "expected"),
    [
        (0, 0, 0, 0.45407064605822545),
        (0, 0, 1, 0.029030963974499113),
        (0, 1, 0, 0.7175055992456031),
        (2**64 - 1, 7, 123_456, 0.26791920850297146),
    ],
)
def test_uniform_vectors(seed: int, choice: int, index: int, expected: float) -> None:
    assert uniform(seed, choice, index) == expected


def test_uniform_depends_on_each_of_its_numbers() -> None:
    values = {uniform(seed, choice, index) for seed in range(4) for choice in range(4) for index in range(64)}
    assert len(values) == 4 * 4 * 64
    assert all(0 <= value < 1 for value in values)


def test_sampled_vectors() -> None:
    """A worker of another version must go on with the same draws."""
    assert _draws(LOGITS, 16, temperature=0.8) == [4, 1, 4, 4, 0, 3, 3, 1, 4, 3, 1, 1, 1, 1, 4, 3]
    assert _draws(LOGITS, 16, temperature=0.8, top_p=0.7) == [4, 1, 4, 4, 1, 1, 1, 1, 4, 1, 1, 1, 1, 1, 4, 1]


def test_zero_temperature_takes_the_first_of_the_greatest() -> None:
    assert _draws([1.0, 3.0, 3.0, -2.0], 5, temperature=0) == [1] * 5


def test_a_small_temperature_nears_greedy() -> None:
    assert set(_draws([1.0, 3.0, 2.9, -2.0], 50, temperature=1e-3)) == {1}
    assert set(_draws([1.0, 3.0, 2.9, -2.0], 50, temperature=5e-324)) == {1}


def test_frequencies_follow_the_softmax() -> None:
    logits = [0.0, math.log(2.0), math.log(5.0), -math.inf]
    draws = _draws(logits, 4_000)
    shares = [draws.count(token) / len(draws) for token in range(4)]
    assert shares == pytest.approx([1 / 8, 2 / 8, 5 / 8, 0], abs=0.025)


def test_frequencies_follow_the_temperature() -> None:
    draws = _draws([0.0, math.log(3.0)], 4_000, temperature=2.0)
    assert draws.count(1) / len(draws) == pytest.approx(math.sqrt(3) / (1 + math.sqrt(3)), abs=0.025)


@pytest.mark.parametrize(
    ("top_p", "kept"),
    [(1e-9, {2}), (0.5, {2}), (0.51, {2, 0}), (0.75, {2, 0}), (0.76, {2, 0, 1}), (0.99, {0, 1, 2, 3})],
)
def test_top_p_keeps_the_fewest_tokens_that_reach_it(top_p: float, kept: set[int]) -> None:
    shares = [0.25, 0.15, 0.5, 0.1]
    assert set(_draws([math.log(share) for share in shares], 200, top_p=top_p)) == kept


@pytest.mark.parametrize("vocab_size", [1, 3, 49, 1_000])
def test_of_equal_tokens_top_p_keeps_the_lower_ids(vocab_size: int) -> None:
    assert set(_draws([1.25] * vocab_size, 20, top_p=1e-12)) == {0}


def test_a_share_that_is_reached_exactly_suffices() -> None:
    assert set(_draws([2.0] * 4, 60, top_p=0.5)) == {0, 1}


def test_the_least_draw_passes_over_tokens_without_weight(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sampler, "uniform", lambda *_numbers: 0.0)
    assert _draws([-math.inf, -math.inf, 0.0, 1.0], 1) == [2]


def test_the_greatest_draw_is_the_last_token_with_weight(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sampler, "uniform", lambda *_numbers: 1 - 2.0**-53)
    assert _draws([0.1, 0.7, 0.3, -math.inf, -math.inf], 1) == [2]


def test_draws_equal_the_definition() -> None:
    source = seeded("sampler")
    for _ in range(100):
        rows, specs = _random_batch(source, plain=True)
        assert _tokens(torch.tensor(rows), specs) == list(map(reference_token, rows, specs))


def test_every_parameter_together_with_every_other_equals_the_definition() -> None:
    source = seeded("sampling parameters")
    for _ in range(150):
        rows, specs = _random_batch(source, plain=False)
        assert _tokens(torch.tensor(rows), specs) == list(map(reference_token, rows, specs))


def _random_batch(source: random.Random, *, plain: bool) -> tuple[list[list[float]], list[SampleSpec]]:
    vocab_size = source.choice([2, 17, 64, 600])
    spreads = [source.choice([0.1, 3.0, 12.0]) for _ in range(3)]
    rows = [torch.tensor([source.gauss(0, spread) for _ in range(vocab_size)]).tolist() for spread in spreads]
    return rows, [_random_spec(source, vocab_size, plain=plain) for _ in rows]


def _random_spec(source: random.Random, vocab_size: int, *, plain: bool) -> SampleSpec:
    def some(count: int) -> list[int]:
        return [source.randrange(vocab_size) for _ in range(source.randrange(count))]

    seed, top_p = source.getrandbits(64), source.choice([1.0, source.uniform(0.01, 0.999)])
    if plain:
        sampling = Sampling(seed=seed, top_p=top_p, temperature=source.uniform(0.2, 2.0))
    else:
        sampling = Sampling(
            seed=seed,
            top_p=top_p,
            temperature=source.choice([0.0, source.uniform(0.2, 2.0)]),
            top_k=source.choice([None, 1, source.randint(1, vocab_size), vocab_size + 5]),
            min_p=source.choice([0.0, source.random(), 1.0]),
            presence_penalty=source.choice([0.0, source.uniform(-2, 2)]),
            frequency_penalty=source.choice([0.0, source.uniform(-2, 2)]),
            repetition_penalty=source.choice([1.0, source.uniform(0.5, 2)]),
            logit_bias={token: source.uniform(-100, 100) for token in source.choice([[], some(20)])},
            min_tokens=source.choice([0, 5, 50]),
        )
    return sample_spec(
        sampling,
        prompt=[0, *some(40)],
        output=some(40),
        choice=source.randrange(4),
        stop_token_ids=source.sample(range(vocab_size), min(2, vocab_size - 1)),
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_draw_does_not_depend_on_its_neighbours(dtype: torch.dtype) -> None:
    logits = torch.linspace(-2, 3, 40).repeat(4, 1).to(dtype)
    specs = [
        sample_spec(Sampling(seed=0, top_p=0.9), index=3),
        sample_spec(Sampling(seed=1, top_k=9, presence_penalty=1.0, top_logprobs=2), output=[39, 39, 2]),
        sample_spec(Sampling(seed=2, temperature=0, logit_bias={4: 5.5}, top_logprobs=5)),
        sample_spec(Sampling(seed=3, min_p=0.2, repetition_penalty=1.5), prompt=[38]),
    ]
    together = sample(logits, specs)
    assert together == [sample(logits[:1], [spec])[0] for spec in specs]
    assert together == sample(logits.flip(0), specs[::-1])[::-1]


def test_the_models_logits_stay_as_they_are() -> None:
    for dtype in (torch.float32, torch.float64):
        logits = torch.tensor([LOGITS, LOGITS], dtype=dtype)
        _tokens(logits, [sample_spec(Sampling(seed=0)), sample_spec(Sampling(seed=0, logit_bias={1: -9.0}))])
        assert logits.tolist() == [LOGITS, LOGITS]


# --- one parameter at a time ------------------------------------------------------------------------------


def test_parameter_vectors() -> None:
    """A worker of another version must go on with the same draws."""

    def draws(output: Sequence[int] = (), **parameters: object) -> list[int]:
        sampling = Sampling(seed=7, temperature=0.8, **parameters)  # type: ignore[arg-type]  # one name a call
        specs = [sample_spec(sampling, prompt=[1, 4], output=output, index=index) for index in range(12)]
        return _tokens(torch.tensor(LOGITS).expand(12, 5), specs)

    assert draws(top_k=2) == [4, 1, 4, 4, 1, 1, 1, 1, 4, 1, 1, 1]
    assert draws(min_p=0.25) == [4, 1, 4, 4, 1, 3, 3, 1, 4, 3, 1, 1]
    assert draws(repetition_penalty=1.5) == [4, 1, 4, 4, 0, 3, 3, 0, 4, 3, 1, 3]
    assert draws([1, 1, 4], frequency_penalty=1.75) == [3, 1, 4, 4, 0, 3, 3, 0, 4, 3, 1, 3]
    assert draws([1, 1, 4], presence_penalty=-1.25) == [4, 1, 4, 4, 0, 1, 1, 1, 4, 1, 1, 1]
    assert draws(logit_bias={2: 3.5, 1: -100.0}) == [4, 2, 4, 4, 0, 2, 2, 2, 4, 2, 2, 2]


@pytest.mark.parametrize(
    ("top_k", "kept"), [(1, {2}), (2, {2, 0}), (3, {0, 1, 2}), (4, {0, 1, 2, 3}), (9, {0, 1, 2, 3})]
)
def test_top_k_keeps_the_most_likely(top_k: int, kept: set[int]) -> None:
    logits = [math.log(share) for share in (0.25, 0.15, 0.5, 0.1)]
    assert set(_drawn_by(Sampling(seed=7, top_k=top_k), logits, 200)) == kept


def test_of_equal_tokens_top_k_keeps_the_lower_ids() -> None:
    assert set(_drawn_by(Sampling(seed=7, top_k=3), [1.0, 2.0, 1.0, 1.0, 1.0], 200)) == {0, 1, 2}


def test_top_p_counts_what_top_k_left() -> None:
    """Of 0.5 and 0.25 the first is two thirds, which is enough for 0.6 but is half of everything."""
    logits = [math.log(share) for share in (0.25, 0.15, 0.5, 0.1)]
    assert set(_drawn_by(Sampling(seed=7, top_p=0.6), logits, 200)) == {0, 2}
    assert set(_drawn_by(Sampling(seed=7, top_p=0.6, top_k=2), logits, 200)) == {2}


@pytest.mark.parametrize(("min_p", "kept"), [(0.19, {0, 1, 2, 3}), (0.21, {0, 1, 2}), (0.4, {0, 2}), (1.0, {2})])
def test_min_p_is_a_fraction_of_the_most_likely(min_p: float, kept: set[int]) -> None:
    logits = [math.log(share) for share in (0.25, 0.15, 0.5, 0.1)]
    assert set(_drawn_by(Sampling(seed=7, min_p=min_p), logits, 300)) == kept


def test_presence_counts_a_token_once_and_frequency_each_time() -> None:
    logits = [3.0, 2.5, 0.0]
    presence = Sampling(seed=0, temperature=0, presence_penalty=0.4)
    frequency = Sampling(seed=0, temperature=0, frequency_penalty=0.4)
    for output, by_presence, by_frequency in [([], 0, 0), ([0], 0, 0), ([0, 0], 0, 1), ([0, 0, 1, 1], 0, 0)]:
        assert _token(logits, sample_spec(presence, output=output)) == by_presence
        assert _token(logits, sample_spec(frequency, output=output)) == by_frequency


def test_presence_and_frequency_pass_over_the_prompt_and_repetition_does_not() -> None:
    logits = [3.0, 2.5, -1.0]
    strong = Sampling(seed=0, temperature=0, presence_penalty=2.0, frequency_penalty=2.0)
    assert _token(logits, sample_spec(strong, prompt=[0, 0])) == 0
    repetition = Sampling(seed=0, temperature=0, repetition_penalty=1.5)
    assert _token(logits, sample_spec(repetition, prompt=[0, 0])) == 1
    assert _token(logits, sample_spec(repetition, prompt=[0], output=[1])) == 0


def test_repetition_makes_negative_logits_smaller() -> None:
    repetition = Sampling(seed=0, temperature=0, repetition_penalty=2.0)
    assert _token([-1.0, -1.5], sample_spec(repetition, prompt=[0])) == 1


def test_repetition_counts_before_the_other_penalties() -> None:
    """3 / 2 - 1 is below 0.75; (3 - 1) / 2 would not be."""
    both = Sampling(seed=0, temperature=0, repetition_penalty=2.0, presence_penalty=1.0)
    assert _token([3.0, 0.75], sample_spec(both, output=[0])) == 1


def test_stop_ids_are_not_drawn_before_min_tokens() -> None:
    greedy = Sampling(seed=0, temperature=0, min_tokens=2)
    drawn = [
        _token([1.0, 5.0, 4.0], sample_spec(greedy, output=[0] * index, stop_token_ids=[1, 2])) for index in range(3)
    ]
    assert drawn == [0, 0, 1]
    assert _token([1.0, 5.0, 4.0], sample_spec(greedy)) == 1


def test_where_no_token_is_left_the_row_fails_alone() -> None:
    logits = torch.tensor([LOGITS, LOGITS])
    blocked = sample_spec(Sampling(seed=0, min_tokens=1), stop_token_ids=range(5))
    failed, drawn = sample(logits, [blocked, sample_spec()])
    assert isinstance(failed, WorkerFault)
    assert "leave no token" in str(failed)
    assert drawn == Drawn(token_id=1, logprobs=None)


def test_a_row_that_cannot_be_drawn_fails_alone() -> None:
    outside = sample_spec(Sampling(seed=0, logit_bias={99: 1.0}))
    failed, drawn = sample(torch.tensor([LOGITS, LOGITS]), [outside, sample_spec()])
    assert isinstance(failed, IndexError)
    assert drawn == Drawn(token_id=1, logprobs=None)


@pytest.mark.parametrize(
    "parameters",
    [
        {},
        {"temperature": 1.7},
        {"top_k": 3},
        {"top_p": 0.85},
        {"min_p": 0.3},
        {"repetition_penalty": 1.4},
        {"presence_penalty": 0.9, "frequency_penalty": -0.3},
        {"logit_bias": {2: 3.0, 0: -100.0}},
        {"temperature": 1.3, "top_k": 4, "top_p": 0.95, "min_p": 0.1, "frequency_penalty": 0.5, "logit_bias": {3: 1.0}},
    ],
)
def test_frequencies_pass_a_chi_square_test(parameters: dict[str, float]) -> None:
    """Pearson's statistic of 5,000 draws stays below its 99.9 % quantile; the seed is fixed."""
    spec = sample_spec(Sampling(seed=2_024, **parameters), prompt=[1, 4], output=[1, 1, 3])  # type: ignore[arg-type]
    weights = reference_weights(LOGITS, spec)
    specs = [sample_spec(spec.sampling, prompt=[1, 4], output=[1, 1, 3], index=index) for index in range(5_000)]
    counts = Counter(_tokens(torch.tensor(LOGITS).expand(5_000, 5), specs))
    assert set(counts) <= set(weights)
    expected = {token: 5_000 * weight / math.fsum(weights.values()) for token, weight in weights.items()}
    expected = {token: count for token, count in expected.items() if count >= 5}  # Cochran's rule
    statistic = sum((counts[token] - count) ** 2 / count for token, count in expected.items())
    assert statistic < [0, 10.83, 13.82, 16.27, 18.47][len(expected) - 1]


# --- log probabilities ------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_log_probabilities_are_the_log_softmax_of_the_models_own_logits(dtype: torch.dtype) -> None:
    source = seeded("logprobs")
    logits = torch.tensor([[source.gauss(0, 4) for _ in range(300)] for _ in range(4)]).to(dtype)
    sampling = Sampling(seed=9, temperature=1.5, top_k=40, logit_bias={7: 30.0}, presence_penalty=2.0, top_logprobs=6)
    asked = [sample_spec(sampling, output=[7, 8]), sample_spec(), sample_spec(Sampling(seed=1, top_logprobs=0))]
    results = sample(logits, [*asked, sample_spec(Sampling(seed=4, temperature=0, top_logprobs=20))])
    truth = logits.double().log_softmax(-1)
    for row, count in [(0, 6), (2, 0), (3, 20)]:
        drawn = results[row]
        assert isinstance(drawn, Drawn) and drawn.logprobs is not None
        assert drawn.logprobs.logprob == pytest.approx(float(truth[row, drawn.token_id]), abs=1e-5)
        order = sorted(range(300), key=lambda token, row=row: (-float(logits[row, token]), token))  # type: ignore[misc]
        assert [token for token, _ in drawn.logprobs.top] == order[:count]
        values = [value for _, value in drawn.logprobs.top]
        assert values == pytest.approx(truth[row, order[:count]].tolist(), abs=1e-5)
    assert isinstance(results[1], Drawn) and results[1].logprobs is None


def test_greedys_token_is_the_first_alternative_also_among_equals() -> None:
    greedy = Sampling(seed=0, temperature=0, top_logprobs=2)
    (result,) = sample(torch.tensor([[1.0, 3.0, 3.0, 3.0]]), [sample_spec(greedy)])
    assert isinstance(result, Drawn) and result.logprobs is not None
    assert result.token_id == 1
    assert [token for token, _ in result.logprobs.top] == [1, 2]


def test_no_log_probability_is_below_what_json_can_say() -> None:
    greedy = Sampling(seed=0, temperature=0, top_logprobs=20)
    (result,) = sample(torch.tensor([[-math.inf, 0.0, -1e30]]), [sample_spec(greedy)])
    expected = TokenLogprobs(0.0, ((1, 0.0), (2, LEAST_LOGPROB), (0, LEAST_LOGPROB)))
    assert result == Drawn(token_id=1, logprobs=expected)


# --- who may fail -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("bad", [[math.nan, 1.0, 2.0], [0.0, math.inf, 1.0], [-math.inf] * 3])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("top_logprobs", [None, 2])
def test_unusable_logits_fail_their_row_alone(bad: list[float], temperature: float, top_logprobs: int | None) -> None:
    logits = torch.tensor([[0.0, 9.0, 0.0], bad, [9.0, 0.0, 0.0]])
    spec = sample_spec(Sampling(seed=0, temperature=temperature, top_logprobs=top_logprobs))
    first, second, third = sample(logits, [sample_spec(), spec, sample_spec()])
    assert (first, third) == (Drawn(token_id=1, logprobs=None), Drawn(token_id=0, logprobs=None))
    assert isinstance(second, WorkerFault)


def test_no_rows_give_no_tokens() -> None:
    assert sample(torch.empty(0, 8), []) == []
