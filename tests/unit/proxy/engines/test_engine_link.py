"""An engine from the outside: up, slow, down, and whether what it had cached is still there."""

from __future__ import annotations

import asyncio
import logging
import time

import pytest

from prefixcache.errors import EngineUnreachable, Unavailable
from prefixcache.index.base import Commit
from prefixcache.index.boundaries import Boundaries
from prefixcache.index.memory_index import MemoryIndex
from prefixcache.limits import ENGINE_STUCK_S, ENGINE_SUSPECT_S
from proxy.engines.engine_link import lost_its_cache, requests_of_others
from proxy.engines.engine_metrics import EngineMetrics
from proxy.engines.probe import EngineReport
from tests.support.engine_links import ScriptedEngine, report
from tests.support.waiting import eventually


def told(**fields: float) -> EngineReport:
    """A report of an engine with these metrics."""
    return report("m", metrics=EngineMetrics(**fields))  # type: ignore[arg-type]  # only floats are passed


async def test_it_is_up_after_the_first_probe_that_succeeds() -> None:
    engine = ScriptedEngine("connection refused")
    await engine.link.look()
    assert not engine.link.is_up and not engine.link.was_ever_up and engine.link.failure == "connection refused"
    assert engine.link.answered_at == 0
    began_at = time.time()
    await engine.finds(report("m"))
    assert began_at <= engine.link.answered_at <= time.time()
    assert engine.link.is_up and engine.link.failure is None
    assert engine.link.knows("m") and not engine.link.knows("n")
    assert engine.claims.num_begun == 0, "who was never up had nothing to lose"


async def test_one_failed_probe_changes_nothing_a_second_one_in_a_row_does() -> None:
    engine = ScriptedEngine(report("m"))
    await engine.link.look()
    await engine.finds("late")
    assert engine.link.is_up
    await engine.finds(report("m"))
    await engine.finds("late")
    assert engine.link.is_up, "the one before was made good"
    await engine.finds("dead")
    assert not engine.link.is_up and engine.link.failure == "dead"
    assert engine.link.knows("m") and [model.name for model in engine.link.models] == ["m"], "it may come back"


async def test_a_request_that_was_refused_takes_it_down_at_once() -> None:
    engine = ScriptedEngine(report("m"))
    await engine.link.look()
    engine.link.note_failure(EngineUnreachable("refused"))
    assert not engine.link.is_up and engine.link.failure == "refused"
    await engine.link.look()
    assert engine.link.is_up


async def test_who_waits_for_it_is_turned_away_when_it_goes_down() -> None:
    engine = ScriptedEngine(report("m"))
    await engine.link.look()
    with engine.link.held.join(10.0, is_stream=True) as first, engine.link.held.join(10.0, is_stream=True) as second:
        await first.come()
        engine.link.note_failure(EngineUnreachable("refused"))
        with pytest.raises(Unavailable, match="e1:8000 is down: refused"):
            await second.come()


async def test_a_failure_of_a_request_is_followed_by_a_probe_without_delay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("proxy.engines.engine_link.ENGINE_ASK_S", 3600.0)
    engine = ScriptedEngine(report("m"))
    task = asyncio.create_task(engine.link.run())
    try:
        await eventually(lambda: engine.link.is_up)
        assert engine.prober.num_probes == 1
        engine.link.note_failure(EngineUnreachable("refused"))
        assert not engine.link.is_up
        await eventually(lambda: engine.link.is_up)
        assert engine.prober.num_probes == 2
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def test_probing_goes_on_whatever_a_probe_raises(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("proxy.engines.engine_link.ENGINE_RETRY_FIRST_S", 0.001)
    engine = ScriptedEngine(report("m"))
    probe, raised = engine.prober.probe, [ZeroDivisionError("a defect")]

    async def broken_once() -> EngineReport:
        if raised:
            raise raised.pop()
        return await probe()

    monkeypatch.setattr(engine.prober, "probe", broken_once)
    task = asyncio.create_task(engine.link.run())
    try:
        await eventually(lambda: engine.link.is_up)
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
    assert "a defect" in caplog.text


@pytest.mark.parametrize(
    ("before", "after", "was_down", "lost"),
    [
        ({}, {}, False, False),
        ({}, {}, True, True),
        ({"queried_tokens": 5.0}, {"queried_tokens": 5.0}, False, False),
        ({"queried_tokens": 5.0}, {"queried_tokens": 4.0}, False, True),
        ({"hit_tokens": 5.0}, {"hit_tokens": 0.0}, False, True),
        ({"computed_tokens": 9.0}, {"computed_tokens": 0.0}, False, True),
        ({"computed_tokens": 9.0}, {}, False, False),
        ({"queried_tokens": 5.0}, {"queried_tokens": 6.0}, True, True),
        ({"started_at": 50.0}, {"started_at": 50.01}, True, False),
        ({"started_at": 50.0}, {"started_at": 90.0}, False, True),
        ({"started_at": 50.0}, {"started_at": 90.0}, True, True),
        ({"started_at": 50.0}, {}, True, True),
        ({"started_at": 50.0, "hit_tokens": 5.0}, {"started_at": 50.0, "hit_tokens": 4.0}, False, True),
    ],
)
async def test_when_the_cache_is_taken_for_lost(
    before: dict[str, float], after: dict[str, float], was_down: bool, lost: bool
) -> None:
    old, new = told(**before), told(**after)
    assert lost_its_cache(old.metrics, new.metrics, was_down=was_down) is lost
    engine = ScriptedEngine(old)
    await engine.link.look()
    process = engine.link.process
    if was_down:
        await engine.finds("dead", times=2)
    await engine.finds(new)
    assert engine.claims.num_begun == engine.prober.num_forgotten == int(lost)
    assert (engine.link.process != process) is lost, "own placements speak of the process that had the cache"
    await engine.finds(new)
    assert engine.claims.num_begun == int(lost), "once is enough"


async def test_a_late_list_of_models_makes_it_slow() -> None:
    engine = ScriptedEngine(report("m"))
    await engine.link.look()
    assert not engine.link.is_slow
    await engine.finds(report("m", latency_s=ENGINE_SUSPECT_S + 0.1))
    assert engine.link.is_slow and engine.link.is_up
    await engine.finds(report("m"))
    assert not engine.link.is_slow


async def test_a_probe_that_takes_long_makes_it_slow_before_it_ends() -> None:
    engine, gate = ScriptedEngine(report("m")), asyncio.Event()
    await engine.link.look()

    async def waits() -> EngineReport:
        await gate.wait()
        return report("m")

    engine.prober.probe = waits  # type: ignore[method-assign]  # the engine hangs
    task = asyncio.create_task(engine.link.look())
    await asyncio.sleep(0)
    assert not engine.link.is_slow
    engine.clock.now += ENGINE_SUSPECT_S + 0.1
    assert engine.link.is_slow
    gate.set()
    await task
    assert not engine.link.is_slow


async def test_requests_without_a_byte_for_long_make_it_slow() -> None:
    engine = ScriptedEngine(report("m"))
    await engine.link.look()
    entry = engine.link.ledger.place(1.0)
    entry.started()
    engine.clock.now += ENGINE_STUCK_S + 1
    assert engine.link.is_slow
    engine.link.note_progress()
    assert not engine.link.is_slow
    engine.clock.now += ENGINE_STUCK_S + 1
    assert engine.link.is_slow
    entry.gone()
    assert not engine.link.is_slow, "nothing is owed"


async def test_tokens_that_it_counts_are_a_sign_of_life() -> None:
    """A long answer that is not streamed sends no byte for minutes."""
    engine = ScriptedEngine(told(computed_tokens=10.0))
    await engine.link.look()
    engine.link.ledger.place(1.0).started()
    for computed in (20.0, 30.0):
        engine.clock.now += 0.9 * ENGINE_STUCK_S
        await engine.finds(told(computed_tokens=computed))
        assert not engine.link.is_slow
    for _ in range(2):
        engine.clock.now += 0.9 * ENGINE_STUCK_S
        await engine.finds(told(computed_tokens=30.0))
    assert engine.link.is_slow


async def test_a_request_after_a_long_rest_does_not_find_it_slow() -> None:
    engine = ScriptedEngine(report("m"))
    await engine.link.look()
    engine.clock.now += 10 * ENGINE_STUCK_S
    await engine.link.look()
    engine.link.ledger.place(1.0).started()
    assert not engine.link.is_slow


async def test_its_cache_is_counted_in_its_own_blocks() -> None:
    engine = ScriptedEngine(report("m"), capacity_blocks=500)
    assert (engine.link.block_size, engine.link.capacity_blocks) == (16, 500)
    await engine.finds(report("m", block_size=32, capacity_tokens=64_000))
    assert (engine.link.block_size, engine.link.capacity_blocks) == (32, 2_000), "the engine's own word wins"
    await engine.finds(report("m", block_size=1, capacity_tokens=64_000))
    assert (engine.link.block_size, engine.link.capacity_blocks) == (1, 64_000)
    assert ScriptedEngine(report("m")).link.capacity_blocks is None


async def test_what_it_is_claimed_to_hold_is_told_with_what_its_claims_are_kept_to() -> None:
    engine = ScriptedEngine(report("m"), capacity_blocks=500)
    engine.claims.num_claims = 40
    assert (engine.link.num_claims, engine.link.claimed_capacity_tokens) == (40, 8_000)
    engine.claims.kept_share = 0.5
    assert engine.link.claimed_capacity_tokens == 4_000
    assert ScriptedEngine(report("m")).link.claimed_capacity_tokens is None


async def test_it_stands_for_its_claims() -> None:
    link = ScriptedEngine(report("m")).link
    assert (link.worker_id, link.incarnation, tuple(link.claiming), link.is_reannouncing) == (
        "e1:8000",
        7,
        (9, 8),
        False,
    )


async def test_without_an_incarnation_from_the_index_it_has_a_number_that_the_index_gives_nobody() -> None:
    """Engines that shared one would be taken to have each other's prompts in hand."""
    links = [ScriptedEngine("starting", engine_id=name, anchor=0).link for name in ("e1:80", "e2:80")]
    index = MemoryIndex()
    assert links[0].incarnation != links[1].incarnation
    assert all(1 << 30 <= link.incarnation < 1 << 32 for link in links)
    assert links[0].incarnation == ScriptedEngine("starting", engine_id="e1:80", anchor=0).link.incarnation
    boundaries = Boundaries.of([1, 2, 3])
    commit = Commit(
        verb="place",
        request_id=bytes(12),
        boundaries=boundaries,
        incarnation=links[0].incarnation,
        proxy_id="a" * 16,
        load=links[0].ledger.record(),
    )
    assert await index.commit(commit) == {}
    assert (await index.match([1, 2, 3])).pending == {}
    await index.check_integrity()


async def test_the_longest_context_of_its_models_counts_and_an_unknown_one_is_no_limit() -> None:
    engine = ScriptedEngine(report("m"))
    assert engine.link.max_model_len > 1 << 40
    await engine.link.look()
    assert engine.link.max_model_len == 4_096


async def test_requests_of_others_are_those_that_are_not_ours() -> None:
    assert requests_of_others(EngineMetrics(num_running=5, num_waiting=2), own=0) == (2, 5)
    assert requests_of_others(EngineMetrics(num_running=5, num_waiting=2), own=6) == (1, 0)
    assert requests_of_others(EngineMetrics(num_running=5, num_waiting=0), own=9) == (0, 0)
    assert requests_of_others(EngineMetrics(), own=3) == (0, 0)
    engine = ScriptedEngine(report("m", metrics=EngineMetrics(num_running=3, num_waiting=1)))
    engine.link.ledger.place(1.0).started()
    await engine.link.look()
    assert (engine.link.num_waiting, engine.link.num_running) == (1, 3)


async def test_an_engine_without_prefix_caching_is_told_once(caplog: pytest.LogCaptureFixture) -> None:
    engine = ScriptedEngine(report("m", caches_prefixes=False))
    with caplog.at_level(logging.INFO):
        for _ in range(3):
            await engine.link.look()
    assert caplog.text.count("runs without prefix caching") == 1


async def test_a_cache_that_it_was_told_to_forget_is_lost(caplog: pytest.LogCaptureFixture) -> None:
    engine = ScriptedEngine(report("m"))
    await engine.link.look()
    since = engine.link.process
    engine.link.note_lost_cache("/reset_prefix_cache was asked of it")
    assert engine.claims.num_begun == 1
    assert engine.link.process != since, "nor does a proxy believe what it placed there itself"
    assert "e1:8000: /reset_prefix_cache was asked of it, what it had cached is taken for lost" in caplog.text


async def test_it_is_looked_at_without_delay_when_it_was_told_to_change(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("proxy.engines.engine_link.ENGINE_ASK_S", 3600.0)
    engine = ScriptedEngine(report("m"))
    task = asyncio.create_task(engine.link.run())
    try:
        await eventually(lambda: engine.prober.num_probes == 1)
        engine.link.look_soon()
        await eventually(lambda: engine.prober.num_probes == 2)
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def test_an_engine_that_came_up_without_a_model_is_told_too() -> None:
    engine, told_of = ScriptedEngine(report()), []
    engine.link.on_change = lambda: told_of.append(engine.link.is_up)
    await engine.finds(report())
    await engine.finds(report())
    assert told_of == [True]


async def test_new_models_are_told() -> None:
    engine, told_of = ScriptedEngine(report("m")), []
    engine.link.on_change = lambda: told_of.append(len(engine.link.models))
    for finds in (report("m"), report("m"), report("m", "adapter"), report("m")):
        await engine.finds(finds)
    assert told_of == [1, 2]
    await engine.finds("dead", times=2)
    await engine.finds(report("m"))
    assert told_of == [1, 2, 1]
