"""Draws: exact vectors, the distribution, and who may fail."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from prefixcache.errors import WorkerFault
from prefixcache.protocol import Sampling
from tests.support.seeds import seeded
from worker import sampler
from worker.runner import SampleSpec
from worker.sampler import sample, uniform


def _spec(
    *, temperature: float = 1.0, top_p: float = 1.0, seed: int = 0, choice: int = 0, index: int = 0
) -> SampleSpec:
    return SampleSpec(sampling=Sampling(seed=seed, temperature=temperature, top_p=top_p), choice=choice, index=index)


def _draws(logits: Sequence[float], count: int, *, temperature: float = 1.0, top_p: float = 1.0) -> list[int]:
    rows = torch.tensor(logits).expand(count, len(logits))
    specs = [_spec(temperature=temperature, top_p=top_p, seed=7, index=index) for index in range(count)]
    tokens = sample(rows, specs)
    assert all(isinstance(token, int) for token in tokens)
    return [token for token in tokens if isinstance(token, int)]


def _expected(logits: Sequence[float], spec: SampleSpec) -> int:
    """The definition, word for word: nucleus by descending weight, then the inverse distribution by ascending id."""
    best = max(logits)
    weights = [math.exp((value - best) / spec.sampling.temperature) for value in logits]
    total = math.fsum(weights)
    kept: list[int] = []
    mass = 0.0
    for token in sorted(range(len(logits)), key=lambda token: (-weights[token], token)):
        if kept and mass >= spec.sampling.top_p * total:
            break
        kept.append(token)
        mass += weights[token]
    kept.sort()
    target = uniform(spec.sampling.seed, spec.choice, spec.index) * math.fsum(weights[token] for token in kept)
    reach = itertools.accumulate(weights[token] for token in kept)
    return next(token for token, reached in zip(kept, reach, strict=True) if reached > target)


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
    assert _draws([0.5, 2.0, -1.0, 1.0, 1.5], 16, temperature=0.8) == [4, 1, 4, 4, 0, 3, 3, 1, 4, 3, 1, 1, 1, 1, 4, 3]
    assert _draws([0.5, 2.0, -1.0, 1.0, 1.5], 16, temperature=0.8, top_p=0.7) == [
        4,
        1,
        4,
        4,
        1,
        1,
        1,
        1,
        4,
        1,
        1,
        1,
        1,
        1,
        4,
        1,
    ]


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
        rows, specs = _random_batch(source)
        tokens = sample(torch.tensor(rows), specs)
        assert tokens == [_expected(row, spec) for row, spec in zip(rows, specs, strict=True)]


def _random_batch(source: random.Random) -> tuple[list[list[float]], list[SampleSpec]]:
    vocab_size = source.choice([1, 2, 17, 64, 600])
    spreads = [source.choice([0.1, 3.0, 12.0]) for _ in range(3)]
    rows = [torch.tensor([source.gauss(0, spread) for _ in range(vocab_size)]).tolist() for spread in spreads]
    specs = [
        _spec(
            temperature=source.uniform(0.2, 2.0),
            top_p=source.choice([1.0, source.uniform(0.01, 0.999)]),
            seed=source.getrandbits(64),
            choice=source.randrange(4),
            index=source.randrange(1_000),
        )
        for _ in rows
    ]
    return rows, specs


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_draw_does_not_depend_on_its_neighbours(dtype: torch.dtype) -> None:
    logits = torch.linspace(-2, 3, 40).repeat(3, 1).to(dtype)
    specs = [_spec(seed=seed, index=seed + 3, top_p=0.9) for seed in range(3)]
    together = sample(logits, specs)
    assert together == [sample(logits[:1], [spec])[0] for spec in specs]
    assert together == sample(logits.flip(0), specs[::-1])[::-1]


@pytest.mark.parametrize("bad", [[math.nan, 1.0, 2.0], [0.0, math.inf, 1.0], [-math.inf] * 3])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_unusable_logits_fail_their_row_alone(bad: list[float], temperature: float) -> None:
    logits: Tensor = torch.tensor([[0.0, 9.0, 0.0], bad, [9.0, 0.0, 0.0]])
    first, second, third = sample(logits, [_spec(temperature=0), _spec(temperature=temperature), _spec(temperature=0)])
    assert (first, third) == (1, 0)
    assert isinstance(second, WorkerFault)


def test_no_rows_give_no_tokens() -> None:
    assert sample(torch.empty(0, 8), []) == []
