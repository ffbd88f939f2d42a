"""A fit of few terms: what it finds, what it leaves to the prior, and that nothing comes out negative."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

import pytest

from tests.support.seeds import seeded
from worker.least_squares import Observations, fitted

PRIOR = (9.0, 9.0, 9.0)
TRUTH = (2.0, 0.5, 3.0)


def fit(random: Random, count: int = 200, *, truth: tuple[float, ...] = TRUTH, noise: float = 0.0) -> Observations:
    found = Observations(3, forgotten=50)
    for _ in range(count):
        amounts = [random.uniform(0, 100) for _ in truth]
        seen = sum(term * amount for term, amount in zip(truth, amounts, strict=True))
        found.add(amounts, seen * random.uniform(1 - noise, 1 + noise))
    return found


def solve(observations: Observations, prior: Sequence[float], prior_weight: float = 1.0) -> list[float]:
    return fitted((observations,), prior=prior, prior_weight=prior_weight)


def test_without_observations_there_is_only_the_prior() -> None:
    empty = Observations(3, forgotten=50)
    assert solve(empty, PRIOR) == pytest.approx(PRIOR)
    assert empty.scale((1, 1, 1)) is None


@pytest.mark.parametrize(("noise", "within"), [(0.0, 0.01), (0.1, 0.4)])
def test_the_terms_are_found_whatever_the_prior(noise: float, within: float) -> None:
    assert solve(fit(seeded("terms"), noise=noise), PRIOR) == pytest.approx(TRUTH, abs=within)


def test_what_was_never_varied_is_left_to_the_prior() -> None:
    found = Observations(2, forgotten=50)
    for _ in range(100):
        found.add((100.0, 0.0), 200.0)
    assert solve(found, (7.0, 5.0)) == pytest.approx([2.0, 5.0], rel=1e-3)
    together = Observations(2, forgotten=50)
    for _ in range(100):
        together.add((100.0, 100.0), 600.0)
    first, second = solve(together, (1.0, 3.0))
    assert first + second == pytest.approx(6.0, rel=1e-3), "their sum is known"
    assert second - first == pytest.approx(2.0, rel=1e-3), "which is which is not"


def test_a_term_that_would_be_negative_is_left_away_and_the_others_are_fitted_without_it() -> None:
    found = Observations(2, forgotten=50)
    for amount in (10.0, 20.0, 30.0):
        found.add((amount, amount * amount), 5 * amount - 0.01 * amount * amount)
    terms = solve(found, (0.0, 0.0), 1e-6)
    only = Observations(1, forgotten=50)
    for amount in (10.0, 20.0, 30.0):
        only.add((amount,), 5 * amount - 0.01 * amount * amount)
    assert terms == pytest.approx([*solve(only, (0.0,), 1e-6), 0.0])
    assert solve(found, (-5.0, -5.0), 1e-6)[1] == 0.0


def test_nothing_is_negative_whatever_is_seen() -> None:
    random = seeded("negative")
    for _ in range(200):
        found, weight = Observations(3, forgotten=5), random.choice([1e-3, 1.0, 1e3])
        for _ in range(random.randrange(6)):
            found.add([random.choice([0.0, 1.0, random.uniform(0, 1e3)]) for _ in range(3)], random.uniform(0, 10))
        assert min(solve(found, [random.uniform(0, 2) for _ in range(3)], weight)) >= 0


def test_the_latest_observations_say_what_is_true() -> None:
    found = fit(seeded("before"))
    random = seeded("after")
    for _ in range(400):
        amounts = [random.uniform(0, 100) for _ in TRUTH]
        found.add(amounts, sum(amounts))
    assert solve(found, PRIOR) == pytest.approx((1.0, 1.0, 1.0), rel=0.01)


def test_terms_in_given_ratios_are_one_number() -> None:
    found = Observations(2, forgotten=50)
    found.add((3.0, 2.0), 14.0)
    assert found.scale((1.0, 2.0)) == pytest.approx(2.0)


def test_several_observations_are_fitted_together() -> None:
    one, other = Observations(2, forgotten=50), Observations(2, forgotten=50)
    for _ in range(20):
        one.add((100.0, 100.0), 700.0)
        other.add((0.0, 50.0), 250.0)
    terms = fitted((one, other), prior=(0.0, 0.0), prior_weight=1e-3)
    assert terms == pytest.approx([2.0, 5.0], rel=1e-3)


def test_a_weight_is_like_so_many_observations() -> None:
    heavy, often = Observations(1, forgotten=1e12), Observations(1, forgotten=1e12)
    heavy.add((2.0,), 6.0, 3.0)
    heavy.add((2.0,), 10.0)
    for seen in (6.0, 6.0, 6.0, 10.0):
        often.add((2.0,), seen)
    assert solve(heavy, (0.0,)) == pytest.approx(solve(often, (0.0,)))
