"""What is told to every engine: forgetting, sleeping, adapters; and what follows from it for predictions."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest

import proxy.engines.engine_link
from tests.support.answer_bytes import chat_answer, json_answer, whole
from tests.support.engine_proxy import Answer, EngineProxy, chat, engine_answers, engine_proxy
from tests.support.scripted_engine import ReceivedRequest, Step, reset, when
from tests.support.waiting import eventually

LONG = "a word that is repeated " * 200
DONE = json_answer({"success": True})


def _answers(*steps: Step, models: Sequence[str] = ()) -> Answer:
    """Of an engine that answers control requests so, and chats as usual."""

    def then(request: ReceivedRequest) -> Sequence[Step]:
        return (chat_answer("hi"),) if request.target == "/v1/chat/completions" else steps

    return engine_answers(*models, then=then)


def _control(fleet: EngineProxy, path: str) -> list[list[ReceivedRequest]]:
    """Of each engine: those that were for all."""
    return [[each for each in fleet.asked(engine) if each.target.startswith(path)] for engine in fleet.engines]


@pytest.mark.parametrize(
    ("method", "path"),
    [("POST", "/reset_prefix_cache?reset_external=true"), ("GET", "/flush_cache"), ("POST", "/sleep?level=1")],
)
async def test_every_engine_forgets_and_predictions_begin_anew(method: str, path: str) -> None:
    async with engine_proxy(_answers(DONE), _answers(DONE), _answers(DONE)) as fleet:
        await fleet.chat(LONG)
        await eventually(lambda: any(link.num_claims for link in fleet.fleet.links))
        assert int((await fleet.chat(LONG)).headers["x-prefixcache-hit-tokens"]) > 0
        answer = await fleet.client.request(method, path)
        assert (answer.status_code, answer.json()) == (200, {"success": True})
        assert [len(asked) for asked in _control(fleet, path)] == [1, 1, 1]
        assert answer.headers["x-prefixcache-engines"] == ", ".join(f"{x.engine_id}=200" for x in fleet.fleet.links)
        await eventually(lambda: all(not link.is_reannouncing and not link.num_claims for link in fleet.fleet.links))
        again = await fleet.chat(LONG)
        assert (again.headers["x-prefixcache-hit-tokens"], again.headers["x-prefixcache-reason"]) == ("0", "no_prefix")
        await eventually(lambda: any(link.num_claims for link in fleet.fleet.links))
        assert int((await fleet.chat(LONG)).headers["x-prefixcache-hit-tokens"]) > 0, "and are made again"


async def test_the_only_engine_s_answer_is_the_answer() -> None:
    told = whole(b"Cache flushed.\n", ("content-type", "text/plain"), ("set-cookie", "a=b"))
    async with engine_proxy(_answers(told)) as fleet:
        answer = await fleet.client.post("/flush_cache", headers={"x-request-id": "mine"})
        assert (answer.status_code, answer.text) == (200, "Cache flushed.\n")
        assert answer.headers["content-type"] == "text/plain" and "set-cookie" not in answer.headers
        assert answer.headers["x-request-id"] == "mine"
        assert fleet.asked()[0].header("x-request-id") == "mine"


@pytest.mark.parametrize(
    ("bad", "status", "code"),
    [
        (json_answer({"error": "busy"}, status=500), 500, None),
        (json_answer({"detail": "Not Found"}, status=404), 404, None),
        (json_answer({"success": False}), 200, None),
        (reset(), 502, "engine_fault"),
    ],
)
async def test_the_worst_answer_is_told_and_who_gave_it_keeps_its_claims(
    bad: Step, status: int, code: str | None
) -> None:
    async with engine_proxy(_answers(DONE), _answers(bad), _answers(DONE)) as fleet:
        begun: list[str] = []
        for link in fleet.fleet.links:
            link.note_lost_cache = lambda why, name=link.engine_id: begun.append(name)  # type: ignore[method-assign,misc]
        good, worst, other = (link.engine_id for link in fleet.fleet.links)
        answer = await fleet.client.post("/reset_prefix_cache")
        assert answer.status_code == status
        assert answer.headers["x-prefixcache-worker"] == worst
        assert answer.headers["x-prefixcache-engines"] == f"{good}=200, {worst}={status}, {other}=200"
        if code is not None:
            assert answer.json()["error"]["code"] == code
        elif status == 200:
            assert answer.json() == {"success": False}
        assert sorted(begun) == sorted([good, other])


async def test_an_engine_is_forgotten_about_while_another_one_takes_its_time() -> None:
    gate = asyncio.Event()
    async with engine_proxy(_answers(DONE), _answers(when(gate), DONE)) as fleet:
        begun: list[str] = []
        for link in fleet.fleet.links:
            link.note_lost_cache = lambda why, name=link.engine_id: begun.append(name)  # type: ignore[method-assign,misc]
        fast, slow = (link.engine_id for link in fleet.fleet.links)
        asking = asyncio.create_task(fleet.client.post("/reset_prefix_cache"))
        await eventually(lambda: begun == [fast])
        assert not asking.done()
        gate.set()
        assert (await asking).status_code == 200
        assert begun == [fast, slow]


async def test_an_engine_that_is_down_is_told_of_not_waited_for() -> None:
    async with engine_proxy(_answers(DONE), _answers(DONE)) as fleet:
        gone = fleet.engines[1]
        gone.stop_listening()
        gone.close_idle()
        await eventually(lambda: not gone.connections)
        answer = await fleet.client.post("/reset_prefix_cache")
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "engine_unreachable")
        assert answer.headers["x-prefixcache-engines"].endswith("=503")
        assert len(fleet.asked(fleet.engines[0])) == 1, "the other one has forgotten"


async def test_bodies_and_keys_reach_every_engine_and_new_models_are_seen_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(proxy.engines.engine_link, "ENGINE_ASK_S", 3600.0)
    content = b'{"lora_name": "sql", "lora_path": "/adapters/sql"}'
    async with engine_proxy(_answers(whole(b"Success")), _answers(whole(b"Success"))) as fleet:
        assert (await fleet.client.post("/v1/chat/completions", json=chat() | {"model": "sql"})).status_code == 404
        for engine in fleet.engines:
            engine.answer = _answers(whole(b"Success"), models=("demo", "sql"))
        answer = await fleet.client.post(
            "/v1/load_lora_adapter", content=content, headers={"authorization": "Bearer k", "content-type": "a/json"}
        )
        assert (answer.status_code, answer.content) == (200, b"Success")
        for (request,) in _control(fleet, "/v1/load_lora_adapter"):
            assert request.body == content
            assert (request.header("authorization"), request.header("content-type")) == ("Bearer k", "a/json")
        await eventually(lambda: fleet.fleet.knows("sql"))
        assert (await fleet.client.post("/v1/chat/completions", json=chat() | {"model": "sql"})).status_code == 200


async def test_other_paths_and_methods_go_to_one_engine() -> None:
    async with engine_proxy(_answers(DONE), _answers(DONE)) as fleet:
        for method, path in (("POST", "/reset_prefix_cache/x"), ("GET", "/is_sleeping"), ("PUT", "/sleep")):
            before = len(fleet.asked())
            assert (await fleet.client.request(method, path)).status_code == 200
            assert len(fleet.asked()) == before + 1
