"""How far the simulator agrees with an earlier one, written apart from it, about the policies that both know.

Each figure of that one is from one seed. Where a fleet thrashes, neither simulator agrees with itself: with the seed
the hit rate moves by 3 to 5 points and the times by a third, and by 9 points with how sixty sessions are hashed to
eight workers. So less is asked there.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import combinations

from prefixcache.routing.consistent_hash import ConsistentHash
from prefixcache.simulation.outcome import Outcome
from tests.bench.report import Floor, Table

HIT_POINTS = 1.5
TIMES = 0.20
THRASHING_S = 150.0
"""From this p99 on."""
THRASHING_HIT_POINTS = 6.0
HASHED_HIT_POINTS = 9.0

Figures = tuple[float, float, float, float | None]
"""Hit rate in points; p50, p99 and, where it is known, the mean of the times to the first token, in seconds."""

PUBLISHED: Mapping[str, Mapping[str, Figures]] = {
    "mooncake_conversation_a": {
        "round_robin": (6.7, 11.0, 58.0, 15.0),
        "consistent_hash": (13.8, 6.5, 35.0, None),
        "sglang_tree": (19.3, 3.6, 27.0, None),
        "longest_prefix": (19.6, 4.3, 30.0, None),
        "dynamo_cost": (13.1, 4.0, 19.0, None),
        "llmd_sticky": (18.4, 2.1, 16.0, None),
        "least_ttft": (16.5, 2.2, 16.0, None),
        "pooled": (19.9, 1.75, 16.0, 2.65),
    },
    "toolagent_like": {
        "round_robin": (44.4, 13.0, 80.0, None),
        "consistent_hash": (48.8, 3.7, 43.0, None),
        "sglang_tree": (52.5, 3.6, 23.0, None),
        "longest_prefix": (46.7, 0.9, 490.0, None),
        "dynamo_cost": (48.3, 3.4, 16.0, None),
        "llmd_sticky": (51.3, 1.6, 13.0, None),
        "least_ttft": (50.2, 1.6, 14.0, None),
        "pooled": (52.6, 1.3, 12.0, 2.2),
    },
    "coding_21": {
        "round_robin": (11.9, 48.0, 365.0, 83.0),
        "consistent_hash": (39.2, 41.0, 196.0, 60.0),
        "sglang_tree": (59.2, 2.1, 256.0, 55.0),
        "longest_prefix": (67.3, 5.5, 154.0, 26.0),
        "dynamo_cost": (35.6, 47.0, 152.0, 54.0),
        "llmd_sticky": (56.8, 21.0, 148.0, 34.0),
        "least_ttft": (57.7, 18.0, 155.0, 33.0),
        "pooled": (77.3, 0.7, 101.0, 9.3),
    },
    "coding_22": {
        "round_robin": (11.7, 57.0, 406.0, 99.0),
        "consistent_hash": (43.3, 38.0, 239.0, 69.0),
        "sglang_tree": (67.5, 1.2, 274.0, 52.0),
        "longest_prefix": (74.4, 2.8, 163.0, 21.0),
        "dynamo_cost": (38.3, 50.0, 185.0, 64.0),
        "llmd_sticky": (64.2, 12.0, 175.0, 33.0),
        "least_ttft": (68.3, 7.3, 160.0, 26.0),
        "pooled": (83.7, 0.5, 58.0, 6.2),
    },
}
"""8 workers, caches of 10 % of the unique blocks, 25 % on the coding traces."""


def agreement(found: Mapping[tuple[str, str], Sequence[Outcome]]) -> tuple[Table, list[Floor]]:
    """By trace and policy, the outcomes of several seeds."""
    rows: list[Mapping[str, object]] = []
    floors: list[Floor] = []
    for trace, policies in PUBLISHED.items():
        here = {policy: expected for policy, expected in policies.items() if (trace, policy) in found}
        for policy, expected in here.items():
            outcomes = found[trace, policy]
            points, times = _off(expected, outcomes)
            thrashes = expected[2] >= THRASHING_S
            rows.append(
                {
                    "trace": trace,
                    "policy": policy,
                    "hit %, theirs": expected[0],
                    "ours": _span([100 * each.hit_rate for each in outcomes]),
                    "p50 s, theirs": expected[1],
                    "p50, ours": _span([each.ttft_p50_s for each in outcomes]),
                    "p99 s, theirs": expected[2],
                    "p99, ours": _span([each.ttft_p99_s for each in outcomes]),
                    "mean s, theirs": "" if expected[3] is None else expected[3],
                    "mean, ours": _span([each.ttft_mean_s for each in outcomes]),
                }
            )
            thrashing = HASHED_HIT_POINTS if policy == ConsistentHash.name else THRASHING_HIT_POINTS
            most = thrashing if thrashes else HIT_POINTS
            floors.append(Floor(what=f"{trace}, {policy}: hit rate, points off", value=points, most=most))
            if not thrashes:
                floors.append(Floor(what=f"{trace}, {policy}: times, off by", value=times, most=TIMES))
        if here:
            swapped = _swapped(here, {policy: found[trace, policy] for policy in here})
            floors.append(Floor(what=f"{trace}: pairs of policies in another order", value=float(swapped), most=0.0))
    return Table(title="Agreement with an earlier simulator, least to most over the seeds", rows=rows), floors


def _off(expected: Figures, outcomes: Sequence[Outcome]) -> tuple[float, float]:
    """How far the expected figures lie outside of what the seeds span: points of hit rate, the worst of the times."""
    points = _outside(expected[0], [100 * each.hit_rate for each in outcomes])
    times = [
        (expected[1], [each.ttft_p50_s for each in outcomes]),
        (expected[2], [each.ttft_p99_s for each in outcomes]),
    ]
    if expected[3] is not None:
        times.append((expected[3], [each.ttft_mean_s for each in outcomes]))
    return points, max(_outside(value, seen) / value for value, seen in times)


def _outside(value: float, seen: Sequence[float]) -> float:
    return max(min(seen) - value, value - max(seen), 0.0)


def _swapped(expected: Mapping[str, Figures], found: Mapping[str, Sequence[Outcome]]) -> int:
    """Pairs that differ clearly there, by twice what is allowed, and the other way round here, in the mean."""
    swapped = 0
    for one, other in combinations(expected, 2):
        thrashes = max(expected[one][2], expected[other][2]) >= THRASHING_S
        points = THRASHING_HIT_POINTS if thrashes else HIT_POINTS
        hits = [100 * _mean([each.hit_rate for each in found[name]]) for name in (one, other)]
        apart = expected[one][0] - expected[other][0]
        swapped += abs(apart) > 2 * points and (hits[0] - hits[1]) * apart < 0
        medians = [_mean([each.ttft_p50_s for each in found[name]]) for name in (one, other)]
        ratio = expected[one][1] / expected[other][1]
        clear = (1 + TIMES) ** 2 * (2 if thrashes else 1)
        swapped += max(ratio, 1 / ratio) > clear and (medians[0] - medians[1]) * (ratio - 1) < 0
    return swapped


def _span(values: Sequence[float]) -> str:
    return f"{min(values):.1f} .. {max(values):.1f}"


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
