"""Own workers and engines behind one list of models."""

from __future__ import annotations

from typing import cast

import pytest

from prefixcache.errors import ModelNotFound, Unavailable
from prefixcache.metrics import ProxyMetrics
from proxy.engines.engine_fleet import EngineFleet
from proxy.fleet import Fleet
from proxy.served_models import ServedModels
from proxy.served_name import ServedName
from tests.support.engine_links import ScriptedEngine, report


class Workers:
    """What is needed of a fleet of own workers."""

    def __init__(self, *names: str) -> None:
        self.served = list(names)
        self.registry_read_at: float | None = 1.0

    def knows(self, name: str) -> bool:
        return name in self.served

    def served_names(self) -> list[ServedName]:
        return [ServedName(name=name, created=1, max_model_len=100, root="own") for name in self.served]

    def model(self, name: str) -> None:
        if name not in self.served:
            raise Unavailable("no worker is ready to serve this model yet")


class World:
    def __init__(self, workers: Workers, *engines: ScriptedEngine) -> None:
        self.workers = workers
        fleet = EngineFleet([engine.link for engine in engines], ProxyMetrics())
        self.served = ServedModels(cast(Fleet, workers), fleet)


async def engine(*names: str) -> ScriptedEngine:
    scripted = ScriptedEngine(report(*names))
    await scripted.link.look()
    return scripted


async def test_a_name_that_engines_serve_is_theirs() -> None:
    world = World(Workers("own", "both"), await engine("both", "theirs"))
    assert [served.name for served in world.served.names()] == ["both", "own", "theirs"]
    assert world.served.is_of_engines("both") and world.served.is_of_engines("theirs")
    assert not world.served.is_of_engines("own")
    assert world.served.named("both").root == "both"
    assert world.served.named("own").root == "own"
    with pytest.raises(ModelNotFound):
        world.served.is_of_engines("nobody's")
    with pytest.raises(ModelNotFound):
        world.served.named("nobody's")


async def test_without_engines_all_is_as_ever() -> None:
    world = World(Workers("own"))
    assert not world.served.is_of_engines("own") and not world.served.is_of_engines("other")
    with pytest.raises(Unavailable, match="no worker is ready"):
        world.served.named("other")


async def test_an_engine_that_is_down_keeps_its_names() -> None:
    scripted = await engine("m")
    world = World(Workers(), scripted)
    await scripted.finds("dead", times=2)
    assert world.served.is_of_engines("m"), "own workers do not know it"
    with pytest.raises(Unavailable):
        world.served.named("m")
    assert world.served.names() == []


async def test_nobody_is_told_that_a_model_does_not_exist_before_all_have_been_asked() -> None:
    starting = ScriptedEngine("starting")
    world = World(Workers("own"), starting)
    assert not world.served.is_of_engines("own")
    with pytest.raises(Unavailable, match="not all engines"):
        world.served.is_of_engines("m")
    await starting.finds(report("x"))
    world.workers.registry_read_at = None
    with pytest.raises(Unavailable, match="registered workers"):
        world.served.is_of_engines("m")
    world.workers.registry_read_at = 1.0
    with pytest.raises(ModelNotFound):
        world.served.is_of_engines("m")
