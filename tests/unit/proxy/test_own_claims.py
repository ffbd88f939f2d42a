"""What a process knows of its own requests in flight."""

from __future__ import annotations

from collections.abc import Mapping

from hypothesis import given
from hypothesis import strategies as st

from prefixcache.index.boundaries import Boundaries
from proxy.own_claims import OwnClaims


def _boundaries(prompt: str) -> Boundaries:
    return Boundaries.of([int.from_bytes(prompt[: depth + 1].encode()) for depth in range(len(prompt))])


def test_only_those_that_came_before_count() -> None:
    claims = OwnClaims()
    claims.add(_boundaries("aaaa"), 7, 2)
    assert claims.depths(_boundaries("aaab"), before=3) == {7: 3}
    assert claims.depths(_boundaries("aaab"), before=2) == {}
    claims.add(_boundaries("aa"), 7, 1)
    assert claims.depths(_boundaries("aaab"), before=2) == {7: 2}
    claims.remove(_boundaries("aaaa"), 7, 2)
    claims.remove(_boundaries("aa"), 7, 1)
    assert len(claims) == 0


prompts = st.text("ab", min_size=1, max_size=12)
requests = st.lists(st.tuples(prompts, st.integers(1, 3), st.booleans()), max_size=12)


@given(requests, prompts, st.integers(0, 13))
def test_it_says_what_a_list_of_the_requests_says(placed: list[tuple[str, int, bool]], asked: str, before: int) -> None:
    claims = OwnClaims()
    for number, (prompt, incarnation, _) in enumerate(placed):
        claims.add(_boundaries(prompt), incarnation, number)
    for number, (prompt, incarnation, is_left) in enumerate(placed):
        if is_left:
            claims.remove(_boundaries(prompt), incarnation, number)
    expected: dict[int, int] = {}
    for number, (prompt, incarnation, is_left) in enumerate(placed):
        if not is_left and number < before:
            shared = _shared(_boundaries(prompt), _boundaries(asked))
            if shared:
                expected[incarnation] = max(shared, expected.get(incarnation, 0))
    found: Mapping[int, int] = claims.depths(_boundaries(asked), before)
    assert found == expected


def _shared(one: Boundaries, other: Boundaries) -> int:
    """Depth of the deepest boundary of `other` that is one of `one`, too; 0 without any."""
    common = [depth for depth, block in zip(other.depths, other.hashes, strict=True) if block in one.hashes]
    return max(common, default=0)
