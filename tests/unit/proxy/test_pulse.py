"""When a worker is taken for hung."""

from __future__ import annotations

import asyncio

import pytest

from prefixcache.limits import (
    MAX_STEP_TOKENS,
    WORKER_DEEP_TOKENS,
    WORKER_SILENCE_S,
    WORKER_STUCK_CHUNKS,
    WORKER_STUCK_LEAST_S,
    WORKER_STUCK_UNKNOWN_S,
    WORKER_SUSPECT_S,
)
from prefixcache.protocol import Beat
from proxy import pulse as pulse_module
from proxy.pulse import SUSPECT_SHARE, Pulse, until_hung

FAST = 10_000.0


def _beat(step: int, running: int = 0, waiting: int = 0, prefilling: int = 0) -> Beat:
    return Beat(incarnation=1, step=step, running=running, waiting=waiting, prefilling=prefilling)


def _stuck_after_s(pulse: Pulse, prefill_rate: float | None, since: float = 0.0, depth_tokens: int = 0) -> float | None:
    """Seconds after `since`, to a hundredth."""

    def is_stuck(now: float) -> bool:
        return pulse.is_stuck(now, prefill_rate=prefill_rate, depth_tokens=depth_tokens)

    hundredths = (n for n in range(30_000) if is_stuck(since + n / 100))
    first = next(hundredths, None)
    return None if first is None else first / 100


def test_silence() -> None:
    pulse = Pulse(0.0)
    pulse.connected(48.0)
    assert not pulse.is_silent(48.0 + WORKER_SILENCE_S), "to connect may have taken long"
    assert pulse.is_silent(48.01 + WORKER_SILENCE_S), "also where no beat ever came"
    pulse.beat(_beat(0), 50.0)
    for age_s in (0.0, WORKER_SUSPECT_S, WORKER_SILENCE_S):
        now = 50.0 + age_s
        assert not pulse.is_silent(now)
        assert pulse.is_suspect(now, prefill_rate=None) == (age_s > WORKER_SUSPECT_S)
    assert pulse.is_silent(50.01 + WORKER_SILENCE_S)


def test_one_that_has_forgotten_requests() -> None:
    pulse = Pulse(0.0)
    pulse.beat(_beat(1, running=1, waiting=1), 10.0, num_ours=2)
    assert not pulse.is_forgetful(100.0)
    for now, running in ((10.5, 1), (11.0, 0), (11.5, 1)):
        pulse.beat(_beat(1, running=running), now, num_ours=2)
    assert not pulse.is_forgetful(10.5 + WORKER_SILENCE_S)
    assert pulse.is_forgetful(10.6 + WORKER_SILENCE_S)
    pulse.beat(_beat(1, running=1), 12.0, num_ours=1)
    assert not pulse.is_forgetful(100.0), "it was merely not told yet, or has ended"
    pulse.beat(_beat(1, running=1), 12.5, num_ours=2)
    assert not pulse.is_forgetful(12.5 + WORKER_SILENCE_S), "the time begins anew"
    pulse.beat(_beat(1, running=7), 13.0, num_ours=2)
    assert not pulse.is_forgetful(100.0), "others ask it, too"


def test_one_without_work_never_hangs() -> None:
    pulse = Pulse(0.0)
    assert _stuck_after_s(pulse, FAST) is None
    pulse.beat(_beat(7), 0.0)
    assert _stuck_after_s(pulse, FAST) is None
    pulse.beat(_beat(7, running=1), 100.0)
    assert _stuck_after_s(pulse, FAST) == pytest.approx(WORKER_STUCK_LEAST_S + 0.01), "by the beat without work"
    pulse.beat(_beat(7), 100.0)
    pulse.beat(_beat(7, waiting=1), 100.5)
    assert _stuck_after_s(pulse, FAST, since=100.0) == pytest.approx(WORKER_STUCK_LEAST_S + 0.01)


def test_any_step_counts_and_the_beat_alone_does_not() -> None:
    pulse = Pulse(0.0)
    for second in range(100):
        pulse.beat(_beat(second // 4, running=3, prefilling=1), float(second))
        assert not pulse.is_stuck(float(second), prefill_rate=FAST, depth_tokens=0)
    for second in range(100, 106):
        pulse.beat(_beat(24, running=3, prefilling=1), float(second))
    assert pulse.is_stuck(105.0, prefill_rate=FAST, depth_tokens=0) and pulse.stood_still_s(105.0) == 9.0


def test_a_slow_worker_has_the_time_of_ten_chunks() -> None:
    pulse = Pulse(0.0)
    pulse.beat(_beat(1, running=1), 0.0)
    slow = 100.0
    patience_s = WORKER_STUCK_CHUNKS * MAX_STEP_TOKENS / slow
    assert patience_s > WORKER_STUCK_LEAST_S
    assert _stuck_after_s(pulse, slow) == pytest.approx(patience_s, abs=0.02)
    suspect_s = SUSPECT_SHARE * patience_s
    pulse.beat(_beat(1, running=1), suspect_s)
    assert not pulse.is_suspect(suspect_s, prefill_rate=slow)
    assert pulse.is_suspect(suspect_s + 0.1, prefill_rate=slow)


@pytest.mark.parametrize("rate", [100.0, 1_000.0, 20_000.0])
@pytest.mark.parametrize("depth", [1_000, 8_192, 131_072])
@pytest.mark.parametrize("owed", [{"prefilling": 1}, {"waiting": 1}])
def test_a_chunk_deep_in_a_prompt_may_take_long(rate: float, depth: int, owed: dict[str, int]) -> None:
    """Its rate is a mean over all: a deep chunk is slower, and how deep it is is not known."""
    pulse = Pulse(0.0)
    pulse.beat(_beat(1, running=1, **owed), 0.0)
    at_the_head_s = MAX_STEP_TOKENS / rate
    honest_s = at_the_head_s * (1 + depth / WORKER_DEEP_TOKENS)
    stuck_after_s = _stuck_after_s(pulse, rate, depth_tokens=depth)
    assert stuck_after_s is not None and stuck_after_s > min(2 * honest_s, WORKER_STUCK_UNKNOWN_S)
    assert stuck_after_s <= max(10 * at_the_head_s, WORKER_STUCK_UNKNOWN_S) + 0.02
    suspect_s = SUSPECT_SHARE * max(WORKER_STUCK_LEAST_S, WORKER_STUCK_CHUNKS * at_the_head_s)
    pulse.beat(_beat(1, running=1, **owed), suspect_s)
    assert not pulse.is_suspect(suspect_s, prefill_rate=rate)
    assert pulse.is_suspect(suspect_s + 0.1, prefill_rate=rate), "new requests go elsewhere before that"
    pulse.beat(_beat(2, running=1), 0.0)
    assert _stuck_after_s(pulse, rate, depth_tokens=depth) == _stuck_after_s(pulse, rate), "decodes are no chunks"


def test_one_that_does_not_tell_who_prefills_may_do_so() -> None:
    pulse = Pulse(0.0)
    pulse.beat(_beat(1, running=1), 0.0, tells_prefilling=False)
    stuck_after_s = _stuck_after_s(pulse, FAST, depth_tokens=100_000)
    assert stuck_after_s is not None and stuck_after_s > 50
    assert _stuck_after_s(pulse, None) == pytest.approx(WORKER_STUCK_UNKNOWN_S + 0.01)


@pytest.mark.parametrize("rate", [None, 0.0])
@pytest.mark.parametrize(
    ("beat", "patience_s"),
    [
        (_beat(1, running=2, prefilling=1), WORKER_STUCK_UNKNOWN_S),
        (_beat(1, running=2, waiting=1), WORKER_STUCK_UNKNOWN_S),
        (_beat(1, running=2), WORKER_STUCK_LEAST_S),
    ],
)
def test_where_no_rate_is_known_a_chunk_may_take_long(beat: Beat, patience_s: float, rate: float | None) -> None:
    pulse = Pulse(0.0)
    pulse.beat(beat, 0.0)
    assert _stuck_after_s(pulse, rate) == pytest.approx(patience_s + 0.01)


async def test_the_watch_passes_over_time_in_which_the_loop_was_late(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pulse_module, "WORKER_SILENCE_S", 0.1)
    loop = asyncio.get_running_loop()
    asked: list[float] = []
    now = loop.time()
    steps = iter([0.01, 0.01, 0.5, 0.01])

    def time() -> float:
        return now

    async def sleep(_: float) -> None:
        nonlocal now
        now += next(steps)

    def what(at: float) -> str | None:
        asked.append(at)
        return "hangs" if len(asked) == 3 else None

    monkeypatch.setattr(loop, "time", time)
    monkeypatch.setattr(asyncio, "sleep", sleep)
    began = now
    assert await until_hung(what) == "hangs"
    assert [round(at - began, 2) for at in asked] == [0.01, 0.02, 0.53]
