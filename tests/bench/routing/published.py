"""How far the simulator agrees with an earlier one, written apart from it, about the policies that both know.

Where a fleet thrashes the seed moves a hit rate by 3 points and times by a third and more, so there the figures of both
are means over twenty seeds, and times are not judged; elsewhere they are of one seed there and of three here. The
policies know the workers' prefill rate in both. Consistent hashing is compared with a sound hash in both: by the one
that the earlier simulator had (the lower half of CPython's hash of a tuple) workers get unequal shares of sixty
sessions, which costs 6 points of hit rate on coding_21.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import combinations
from operator import attrgetter

from prefixcache.simulation.outcome import Outcome
from tests.bench.report import Floor, Table

HIT_POINTS = 1.5
TIMES = 0.20

SEEDS = range(20)
THRASHING_S = 150.0
"""From this p99 on."""

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
        "longest_prefix": (47.5, 1.4, 503.0, 95.8),
        "dynamo_cost": (48.3, 3.4, 16.0, None),
        "llmd_sticky": (51.3, 1.6, 13.0, None),
        "least_ttft": (50.2, 1.6, 14.0, None),
        "pooled": (52.6, 1.3, 12.0, 2.2),
    },
    "coding_21": {
        "round_robin": (11.9, 47.6, 365.0, 83.1),
        "consistent_hash": (47.4, 28.7, 182.0, 46.5),
        "sglang_tree": (63.1, 1.78, 243.0, 46.4),
        "longest_prefix": (67.7, 5.55, 150.0, 25.0),
        "dynamo_cost": (35.3, 48.0, 152.0, 54.7),
        "llmd_sticky": (57.0, 20.4, 154.0, 33.5),
        "least_ttft": (57.4, 19.8, 155.0, 33.1),
        "pooled": (77.3, 0.67, 101.0, 9.3),
    },
    "coding_22": {
        "round_robin": (11.7, 56.8, 406.0, 98.6),
        "consistent_hash": (48.7, 28.5, 216.0, 55.6),
        "sglang_tree": (68.0, 1.31, 298.0, 49.1),
        "longest_prefix": (73.9, 1.84, 176.0, 23.4),
        "dynamo_cost": (37.8, 51.9, 187.0, 65.7),
        "llmd_sticky": (64.9, 12.5, 178.0, 30.6),
        "least_ttft": (65.1, 11.7, 178.0, 30.1),
        "pooled": (83.7, 0.54, 57.9, 6.23),
    },
}
"""8 workers, caches of 10 % of the unique blocks, 25 % on the coding traces."""


def thrashes(trace: str, policy: str) -> bool:
    """By the earlier simulator; not so where that does not know the policy or the trace."""
    figures = PUBLISHED.get(trace, {}).get(policy)
    return figures is not None and figures[2] >= THRASHING_S


def agreement(found: Mapping[tuple[str, str], Sequence[Outcome]]) -> tuple[Table, list[Floor]]:
    """By trace and policy, the outcomes of several seeds."""
    rows: list[Mapping[str, object]] = []
    floors: list[Floor] = []
    for trace, policies in PUBLISHED.items():
        here = {policy: expected for policy, expected in policies.items() if (trace, policy) in found}
        for policy, expected in here.items():
            outcomes = found[trace, policy]
            points, times = _off(expected, outcomes)
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
            floors.append(Floor(what=f"{trace}, {policy}: hit rate, points off", value=points, most=HIT_POINTS))
            if not thrashes(trace, policy):
                floors.append(Floor(what=f"{trace}, {policy}: times, off by", value=times, most=TIMES))
        if here:
            swapped = _swapped(trace, here, {policy: found[trace, policy] for policy in here})
            floors.append(Floor(what=f"{trace}: pairs of policies in another order", value=float(swapped), most=0.0))
    return Table(title="Agreement with an earlier simulator, least to most over the seeds", rows=rows), floors


def _off(expected: Figures, outcomes: Sequence[Outcome]) -> tuple[float, float]:
    """How far the means over the seeds are from the expected figures: points of hit rate, the worst of the times."""
    hit, *times = expected
    found = [
        _mean([figure(each) for each in outcomes])
        for figure in (attrgetter("ttft_p50_s"), attrgetter("ttft_p99_s"), attrgetter("ttft_mean_s"))
    ]
    points = abs(100 * _mean([each.hit_rate for each in outcomes]) - hit)
    return points, max(abs(is_ / was - 1) for was, is_ in zip(times, found, strict=True) if was is not None)


def _swapped(trace: str, expected: Mapping[str, Figures], found: Mapping[str, Sequence[Outcome]]) -> int:
    """Pairs that differ clearly there, by twice what is allowed, and the other way round here, in the mean."""
    swapped = 0
    for one, other in combinations(expected, 2):
        hits = [100 * _mean([each.hit_rate for each in found[name]]) for name in (one, other)]
        apart = expected[one][0] - expected[other][0]
        swapped += abs(apart) > 2 * HIT_POINTS and (hits[0] - hits[1]) * apart < 0
        medians = [_mean([each.ttft_p50_s for each in found[name]]) for name in (one, other)]
        ratio = expected[one][1] / expected[other][1]
        if thrashes(trace, one) != thrashes(trace, other):
            continue  # a median of one that thrashes is the half of its requests that met no queue
        swapped += max(ratio, 1 / ratio) > (1 + TIMES) ** 2 and (medians[0] - medians[1]) * (ratio - 1) < 0
    return swapped


def _span(values: Sequence[float]) -> str:
    return f"{min(values):.1f} .. {max(values):.1f}"


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
