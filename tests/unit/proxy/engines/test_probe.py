"""What a probe asks, and what it makes of answers that are late, wrong or missing."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import pytest

from prefixcache.errors import EngineFault, EngineUnreachable
from proxy.engines.probe import PROBES_BETWEEN_INFOS, Fetched, Headers, ProbeFailed, Prober
from tests.support.engine_answers import LLAMA_CPP_MODELS, SGLANG_INFO, SGLANG_METRICS, VLLM_METRICS, VLLM_MODELS
from tests.support.manual_clock import ManualClock


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    status: int = 200
    body: bytes = b""


class Server:
    """Answers by path; what is not there is a 404, what is an exception is raised."""

    def __init__(
        self, answers: Mapping[str, bytes | int | Exception], delay: Callable[[], None] = lambda: None
    ) -> None:
        self.answers = dict(answers)
        self.asked: list[str] = []
        self.headers: list[Headers] = []
        self.delay = delay

    async def fetch(
        self, method: str, path: str, *, headers: Headers = (), body: bytes = b"", timeout_s: float, most_bytes: int
    ) -> Fetched:
        assert method == "GET" and not body and timeout_s > 0 and most_bytes > 0
        self.asked.append(path)
        self.headers.append(headers)
        self.delay()
        answer = self.answers.get(path, 404)
        if isinstance(answer, Exception):
            raise answer
        return Answer(status=answer) if isinstance(answer, int) else Answer(body=answer)


def prober(server: Server) -> Prober:
    return Prober(server, "http://e:1")


VLLM: Mapping[str, bytes | int | Exception] = {
    "/v1/models": VLLM_MODELS,
    "/metrics": VLLM_METRICS,
    "/health": 200,
}


async def test_vllm_tells_all_with_three_questions() -> None:
    server = Server(VLLM)
    found = await prober(server).probe()
    assert [model.name for model in found.models] == ["Qwen/Qwen3-8B", "sql-adapter"]
    assert (found.block_size, found.capacity_tokens, found.caches_prefixes) == (16, 89_600, True)
    assert sorted(server.asked) == ["/health", "/metrics", "/v1/models"]


@pytest.mark.parametrize("path", ["/server_info", "/get_server_info"])
async def test_sglang_tells_its_cache_under_either_name_and_once(path: str) -> None:
    server = Server({"/v1/models": VLLM_MODELS, "/metrics": SGLANG_METRICS, path: SGLANG_INFO})
    asking = prober(server)
    for _ in range(3):
        found = await asking.probe()
        assert (found.block_size, found.capacity_tokens, found.caches_prefixes) == (1, 442_368, True)
        assert found.metrics.num_running == 4
    assert server.asked.count(path) == 1
    assert server.asked.count("/health") == 1, "SGLang generates a token for each"
    asking.forget()
    await asking.probe()
    assert server.asked.count(path) == 2, "an engine that started anew may have another cache"


async def test_an_engine_that_tells_nothing_is_up_all_the_same() -> None:
    server = Server({"/v1/models": LLAMA_CPP_MODELS})
    asking = prober(server)
    for _ in range(PROBES_BETWEEN_INFOS + 1):
        found = await asking.probe()
        assert found.block_size is None and found.capacity_tokens is None and found.metrics.num_running is None
    assert server.asked.count("/server_info") == 1
    await asking.probe()
    assert server.asked.count("/server_info") == 2, "asked again now and then"


@pytest.mark.parametrize("path", ["/metrics", "/health"])
@pytest.mark.parametrize(
    "answer", [404, 401, EngineFault("broke off"), EngineUnreachable("gone"), b"\xff\x00", OSError()]
)
async def test_questions_that_need_no_answer(path: str, answer: bytes | int | Exception) -> None:
    found = await prober(Server({**VLLM, path: answer})).probe()
    assert len(found.models) == 2


@pytest.mark.parametrize("status", [500, 502, 503])
async def test_an_engine_that_says_it_is_not_well_has_failed(status: int) -> None:
    with pytest.raises(ProbeFailed, match=f"answers {status} to GET /health"):
        await prober(Server({**VLLM, "/health": status})).probe()


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (EngineUnreachable("the engine at http://e:1 cannot be reached: refused"), "refused"),
        (EngineFault("broke off"), "broke off"),
        (TimeoutError(), "no answer within"),
        (404, "without /v1"),
        (503, "answers 503"),
        (b"<html>", "no list of models"),
        (401, "PREFIXCACHE_ENGINE_API_KEY"),
        (403, "PREFIXCACHE_ENGINE_API_KEY"),
    ],
)
async def test_without_a_list_of_models_it_has_failed(answer: bytes | int | Exception, said: str) -> None:
    with pytest.raises(ProbeFailed, match=said) as failed:
        await prober(Server({**VLLM, "/v1/models": answer})).probe()
    assert "http://e:1" in str(failed.value)


async def test_the_latency_is_that_of_the_list_of_models() -> None:
    clock = ManualClock()

    def passes() -> None:
        clock.now += 0.5

    found = await Prober(Server(VLLM, passes), "http://e:1", clock=clock).probe()
    assert found.latency_s == 0.5


async def test_the_key_goes_with_every_question() -> None:
    server = Server(VLLM)
    key = [(b"Authorization", b"Bearer k")]
    await Prober(server, "http://e:1", headers=key).probe()
    assert server.headers == [key] * 3
