"""Several engines, by the models they serve."""

from __future__ import annotations

import asyncio

import pytest
from prometheus_client.parser import text_string_to_metric_families

from prefixcache.errors import EngineUnreachable, ModelNotFound, Unavailable
from prefixcache.limits import ENGINE_SUSPECT_S
from prefixcache.metrics import ProxyMetrics, exposition
from proxy.engines.engine_fleet import EngineFleet
from proxy.engines.engine_model import EngineModel
from proxy.engines.probe import EngineReport
from proxy.served_name import ServedName
from tests.support.engine_links import ScriptedEngine, report
from tests.support.waiting import eventually

SLOW_S = ENGINE_SUSPECT_S + 1


class World:
    """A fleet of engines that find what they are told."""

    def __init__(self, *finds: EngineReport | str) -> None:
        self.metrics = ProxyMetrics()
        self.engines = [
            ScriptedEngine(each, engine_id=f"e{number}:80", metrics=self.metrics)
            for number, each in enumerate(finds, start=1)
        ]
        self.fleet = EngineFleet([engine.link for engine in self.engines], self.metrics)

    async def look(self) -> World:
        for engine in self.engines:
            await engine.link.look()
        return self

    def ready(self, name: str) -> list[str]:
        return [link.engine_id for link in self.fleet.ready_links(name)]

    def names(self) -> list[str]:
        return [served.name for served in self.fleet.served_names()]

    def metric(self, name: str, engine: str, label: str = "engine") -> float:
        families = text_string_to_metric_families(exposition(self.metrics.registry).decode())
        samples = [sample for family in families for sample in family.samples if sample.name == name]
        return next(sample.value for sample in samples if sample.labels == {label: engine})


async def test_a_model_goes_to_the_engines_that_serve_it() -> None:
    world = await World(report("a"), report("b"), report("a", "b"), "down").look()
    assert world.ready("a") == ["e1:80", "e3:80"]
    assert world.ready("b") == ["e2:80", "e3:80"]
    assert world.ready("c") == []
    assert world.names() == ["a", "b"]
    assert world.fleet.num_up == 3 and not world.fleet.all_answered


async def test_no_prediction_is_finer_than_the_largest_block_of_a_models_engines() -> None:
    world = await World(report("a", block_size=128), report("a", "b", block_size=32), report("c")).look()
    assert [world.fleet.block_size(name) for name in "abcd"] == [128, 32, 16, 16]


async def test_the_slow_are_left_out_unless_all_are_slow() -> None:
    world = await World(report("a"), report("a", latency_s=SLOW_S), report("b", latency_s=SLOW_S)).look()
    assert world.ready("a") == ["e1:80"]
    assert world.ready("b") == ["e3:80"], "no other one has it"
    await world.engines[0].finds(report("a", latency_s=SLOW_S))
    assert world.ready("a") == ["e1:80", "e2:80"]


async def test_an_engine_appears_and_vanishes_with_its_models() -> None:
    world = await World(report("a"), "starting").look()
    assert world.names() == ["a"]
    await world.engines[1].finds(report("b"))
    assert world.names() == ["a", "b"]
    await world.engines[1].finds("dead", times=2)
    assert world.names() == ["a"]
    await world.engines[0].finds(report("a", "adapter"))
    assert world.names() == ["a", "adapter"]


async def test_who_serves_nothing_for_nobody_is_told_so() -> None:
    world = await World(report("a"), report("b")).look()
    world.fleet.check("a")
    with pytest.raises(ModelNotFound, match=r"^The model `c` does not exist$") as missing:
        world.fleet.check("c")
    assert (missing.value.status, missing.value.param, missing.value.code) == (404, "model", "model_not_found")
    with pytest.raises(ModelNotFound) as long:
        world.fleet.check("x" * 100_000)
    assert len(str(long.value)) < 200


async def test_as_long_as_it_may_turn_out_that_somebody_has_it_it_is_unavailable() -> None:
    world = await World(report("a"), "starting").look()
    with pytest.raises(Unavailable, match="not all engines have told"):
        world.fleet.check("c")
    await world.engines[1].finds(report("b"))
    with pytest.raises(ModelNotFound):
        world.fleet.check("c")
    await world.engines[1].finds("dead", times=2)
    with pytest.raises(Unavailable, match="no engine that serves this model is up"):
        world.fleet.check("b")
    with pytest.raises(ModelNotFound):
        world.fleet.check("c")


async def test_one_name_of_several_engines_is_one_entry() -> None:
    def model(**fields: object) -> EngineReport:
        entry = EngineModel(name="m", **fields)  # type: ignore[arg-type]  # by the tests below
        return EngineReport(models=(entry,), latency_s=0.0, metrics=report("m").metrics)

    world = await World(
        model(max_model_len=4_096, created=20, root="/models/m", owned_by="vllm"),
        model(max_model_len=8_192, created=10, parent="base"),
    ).look()
    assert world.fleet.served_names() == [
        ServedName(name="m", created=10, max_model_len=8_192, root="/models/m", parent="base", owned_by="vllm")
    ]
    await world.engines[0].finds(model())
    assert world.fleet.served_names() == [
        ServedName(name="m", created=10, max_model_len=None, root="m", parent="base", owned_by="engine")
    ], "a context that one does not tell may be longer"


async def test_waiting_for_an_engine_ends_when_one_comes_up() -> None:
    world = await World("starting", report("b")).look()
    waiting = asyncio.create_task(world.fleet.ready_within("a", 30.0))
    await asyncio.sleep(0)
    await world.engines[1].finds(report("b", "c"))
    await asyncio.sleep(0)
    assert not waiting.done(), "that was another model"
    await world.engines[0].finds(report("a"))
    assert [link.engine_id for link in await waiting] == ["e1:80"]


async def test_waiting_ends_without_one() -> None:
    world = await World("starting", report("b")).look()
    with pytest.raises(Unavailable):
        await world.fleet.ready_within("a", 0.01)
    waiting = asyncio.create_task(world.fleet.ready_within("a", 30.0))
    await asyncio.sleep(0)
    await world.engines[0].finds(report("x"))
    with pytest.raises(ModelNotFound):
        await waiting


async def test_waiting_for_any_engine() -> None:
    world = World("starting", "starting")
    waiting = asyncio.create_task(world.fleet.any_up_within(30.0))
    await world.look()
    assert not waiting.done()
    await world.engines[1].finds(report())
    await waiting
    await world.fleet.any_up_within(0.0)
    await world.engines[1].finds("dead", times=2)
    with pytest.raises(Unavailable, match="no engine is up"):
        await world.fleet.any_up_within(0.01)


async def test_all_engines_are_asked_until_the_owner_ends_it() -> None:
    world = World(report("a"), report("b"))
    task = asyncio.create_task(world.fleet.run())
    await eventually(lambda: world.fleet.num_up == 2)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    assert not [each for each in asyncio.all_tasks() if each.get_name().startswith("engine ")]


async def test_metrics() -> None:
    world = await World(report("a"), report("a", latency_s=SLOW_S)).look()
    assert [world.metric("prefixcache_engine_up", engine) for engine in ("e1:80", "e2:80")] == [1, 1]
    assert [world.metric("prefixcache_engine_slow", engine) for engine in ("e1:80", "e2:80")] == [0, 1]
    world.engines[0].link.ledger.place(1.0)
    world.engines[0].link.ledger.place(1.0).started()
    assert world.metric("prefixcache_num_requests_waiting", "e1:80", "worker") == 1
    assert world.metric("prefixcache_num_requests_running", "e1:80", "worker") == 1
    assert world.metric("prefixcache_engine_probe_failures_total", "e1:80") == 0
    await world.engines[0].finds("dead", times=3)
    assert world.metric("prefixcache_engine_up", "e1:80") == 0
    assert (
        world.metric("prefixcache_engine_answered_timestamp_seconds", "e1:80") == world.engines[0].link.answered_at > 0
    )
    assert world.metric("prefixcache_engine_probe_failures_total", "e1:80") == 3


async def test_a_refused_request_takes_an_engine_out_at_once() -> None:
    world = await World(report("a"), report("a")).look()
    world.engines[0].link.note_failure(EngineUnreachable("refused"))
    assert world.ready("a") == ["e2:80"]
