"""One proxy's stream when a request on it goes wrong: that one fails, everything else on it goes on."""

from __future__ import annotations

import math

import msgspec
import pytest

from prefixcache.errors import Overloaded, Unavailable
from prefixcache.protocol import Abort, End, Fail, FailKind, Frame, Generate, Sampling, Step, StepEntry, encode
from tests.support.requests import generate
from tests.support.scripted_runner import ScriptedRunner, expected_output, made_up_logprobs
from tests.support.stream_client import connected
from tests.support.waiting import eventually
from tests.support.worker_harness import RunningWorker, running_worker
from worker import stream
from worker.engine import Engine, Owner

PROMPT = list(range(40))
TRUTH = expected_output(PROMPT, 6, vocab_size=1_000)


def num_requests(running: RunningWorker, reason: str) -> float:
    return float(running.worker.metrics.requests.labels(reason)._value.get())


def sampled(**parameters: object) -> Generate:
    return generate("bad", PROMPT, sampling=msgspec.structs.replace(Sampling(seed=0), **parameters))


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        (sampled(temperature=math.nan), "temperature is nan"),
        (sampled(presence_penalty=math.inf), "presence_penalty is inf"),
        (sampled(logit_bias={5: -math.inf}), "logit_bias of token 5 is -inf"),
        (sampled(logit_bias={5_000: 1.0}), "logit_bias has token id 5000"),
        (sampled(top_k=-1), "top_k is -1"),
        (sampled(top_logprobs=21), "top_logprobs is 21"),
        (generate("bad", PROMPT, stop_token_ids=[1_000]), "stop_token_ids has token id 1000"),
    ],
)
async def test_a_value_out_of_range_is_refused_and_nothing_else_is_disturbed(request_: Generate, message: str) -> None:
    async with running_worker() as running, connected(running.address, namespace=running.record.namespace) as client:
        client.send(generate("good", PROMPT, max_tokens=6), request_)
        fail = await client.ended("bad")
        assert isinstance(fail, Fail) and fail.kind == "refused"
        assert message in fail.message
        assert isinstance(await client.ended("good"), End)
        assert client.tokens("good") == TRUTH
        assert num_requests(running, "refused") == 1
        assert num_requests(running, "length") == 1


async def test_a_malformed_frame_is_counted_too() -> None:
    async with running_worker() as running, connected(running.address, namespace=running.record.namespace) as client:
        body = msgspec.msgpack.encode({"type": "generate", "id": "bad", "sampling": {"seed": 0, "top_k": "many"}})
        client.send_bytes(len(body).to_bytes(4, "big") + body)
        assert isinstance(await client.ended("bad"), Fail)
        assert num_requests(running, "refused") == 1


@pytest.mark.parametrize(
    ("error", "kind", "retry_after_s"),
    [
        (RuntimeError("scripted"), "worker_fault", 0.0),
        (Unavailable("scripted"), "draining", 0.0),
        (Overloaded("scripted", retry_after_s=7), "overloaded", 7.0),
    ],
)
async def test_a_request_that_the_engine_cannot_take_fails_alone(
    error: Exception, kind: FailKind, retry_after_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    submit = Engine.submit

    def broken(engine: Engine, owner: Owner, request: Generate) -> int:
        if request.id == "bad":
            raise error
        return submit(engine, owner, request)

    monkeypatch.setattr(Engine, "submit", broken)
    async with running_worker() as running, connected(running.address, namespace=running.record.namespace) as client:
        client.send(generate("bad", PROMPT), generate("good", PROMPT, max_tokens=6))
        expected = Fail(id="bad", kind=kind, message="scripted", retry_after_s=retry_after_s)
        assert await client.ended("bad") == expected
        await client.ended("good")
        assert client.tokens("good") == TRUTH
        assert num_requests(running, kind) == 1


async def test_tokens_that_cannot_be_written_fail_their_request_alone(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Its one last word is the failure, although the engine ends it later as aborted; its id is free again then."""

    def encode_or_fail(frame: Frame) -> bytes:
        if isinstance(frame, Step) and any(entry.id == "bad" and entry.index == 2 for entry in frame.entries):
            raise OverflowError("scripted")
        return encode(frame)

    monkeypatch.setattr(stream, "encode", encode_or_fail)
    async with (
        running_worker(ScriptedRunner(step_delay_s=0.001)) as running,
        connected(running.address, namespace=running.record.namespace) as client,
    ):
        running.runner.pause()
        client.send(generate("bad", PROMPT, max_tokens=2_000), generate("good", PROMPT, max_tokens=6))
        await eventually(lambda: running.engine.load.waiting + running.engine.load.running == 2)
        running.runner.resume()
        fail = await client.ended("bad")
        assert isinstance(fail, Fail) and fail.kind == "worker_fault"
        assert "scripted" in fail.message
        assert isinstance(await client.ended("good"), End)
        assert client.tokens("good") == TRUTH
        assert client.tokens("bad") == TRUTH[:2]
        await eventually(lambda: num_requests(running, "aborted") == 1)
        await client.beat()
        assert [f for f in client.received if isinstance(f, End | Fail) and f.id == "bad"] == [fail]
        assert "could not be written whole" in caplog.text
        monkeypatch.setattr(stream, "encode", encode)
        client.send(Abort(id="bad"), generate("next", PROMPT, max_tokens=6))
        await client.ended("next")
        assert client.tokens("next") == TRUTH


async def test_a_stream_that_cannot_be_served_any_more_is_cut_alone(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async with (
        running_worker() as running,
        connected(running.address, namespace=running.record.namespace) as broken,
        connected(running.address, namespace=running.record.namespace) as sound,
    ):

        def encode_or_fail(frame: Frame) -> bytes:
            if isinstance(frame, End) and frame.id == "bad":
                raise OverflowError("scripted")
            return encode(frame)

        monkeypatch.setattr(stream, "encode", encode_or_fail)
        running.runner.pause()
        broken.send(generate("bad", PROMPT, max_tokens=6))
        sound.send(generate("good", PROMPT, max_tokens=6))
        await eventually(lambda: running.engine.load.waiting + running.engine.load.running == 2)
        running.runner.resume()
        await broken.closed()
        assert isinstance(await sound.ended("good"), End)
        assert sound.tokens("good") == TRUTH
        assert "its events could not be delivered" in caplog.text


async def test_log_probabilities_reach_the_proxy() -> None:
    sampling = Sampling(seed=0, temperature=0, top_logprobs=2)
    async with running_worker() as running, connected(running.address, namespace=running.record.namespace) as client:
        client.send(generate("a", PROMPT, max_tokens=3, sampling=sampling))
        await client.ended("a")
        told = [(made_up_logprobs(token, 2, vocab_size=1_000),) for token in TRUTH[:3]]
        assert client.entries("a") == [
            StepEntry(id="a", index=index, ids=(TRUTH[index],), logprobs=told[index]) for index in range(3)
        ]


async def test_stop_ids_that_the_model_cannot_draw_are_not_announced() -> None:
    """A tokenizer may have more ids than the model; a request with such a stop id would be refused."""
    async with running_worker(stop_token_ids=(7, 1_000)) as running:
        assert running.record.stop_token_ids == (7,)


async def test_an_abort_if_waiting_ends_only_what_has_not_started() -> None:
    async with running_worker() as running, connected(running.address, namespace=running.record.namespace) as client:
        running.runner.pause()
        client.send(generate("a", PROMPT, max_tokens=6))
        await eventually(lambda: running.engine.load.running == 1)
        client.send(generate("b", PROMPT), Abort(id="a", if_waiting=True), Abort(id="b", if_waiting=True))
        await eventually(lambda: running.engine.load.waiting == 1)
        running.runner.resume()
        end = await client.ended("b")
        assert isinstance(end, End) and end.reason == "aborted"
        assert client.tokens("b") == []
        end = await client.ended("a")
        assert isinstance(end, End) and end.reason == "length"
        assert client.tokens("a") == TRUTH
