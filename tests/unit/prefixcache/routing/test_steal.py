"""What an idle worker takes."""

from __future__ import annotations

from prefixcache.routing.steal import STEAL_OVERHEAD_S, Waiting, to_steal
from tests.support.seeds import seeded


def waiting(request: str, ahead_s: float, there_s: float = 1.0, here_s: float = 1.0) -> Waiting[str]:
    return Waiting(request=request, ahead_s=ahead_s, prefill_there_s=there_s, prefill_here_s=here_s)


def test_a_move_has_to_bring_three_times_the_prefill_that_it_costs() -> None:
    least_s = 3 * (1.0 + STEAL_OVERHEAD_S)
    assert to_steal([waiting("a", least_s + 0.001, here_s=2.0)]) == "a"
    assert to_steal([waiting("a", least_s, here_s=2.0)]) is None
    assert to_steal([waiting("a", 0.0)]) is None, "it would begin at once where it is"


def test_what_the_idle_worker_has_more_of_comes_even_without_a_wait() -> None:
    assert to_steal([waiting("a", 0.0, there_s=2.0, here_s=0.1)]) == "a"


def test_the_one_that_gains_most_and_the_first_of_equals() -> None:
    queue = [waiting("near", 1.0), waiting("far", 5.0), waiting("cold", 9.0, here_s=4.0), waiting("equal", 5.0)]
    assert to_steal(queue) == "far"
    assert to_steal(queue[::-1]) == "equal"


def test_nothing_waits() -> None:
    assert to_steal([]) is None


def test_the_chosen_one_gains_and_no_other_one_gains_more() -> None:
    source = seeded("steal")
    for _ in range(300):
        queue = [
            waiting(str(number), source.uniform(0, 10), source.uniform(0, 5), source.uniform(0, 5))
            for number in range(source.randint(0, 8))
        ]
        gains = {each.request: each.ahead_s - 3 * (each.prefill_here_s - each.prefill_there_s + 0.02) for each in queue}
        taken = to_steal(queue)
        if taken is None:
            assert max(gains.values(), default=0.0) <= 0.0
        else:
            assert gains[taken] == max(gains.values()) > 0.0
