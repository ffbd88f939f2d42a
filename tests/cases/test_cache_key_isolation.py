"""Class cache-key-isolation: KV is shared exactly by those who share model, salt and prefix, whatever process asks."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path

import httpx
import msgspec
import pytest

from prefixcache.protocol import Sampling
from prefixcache.rendering.renderer import Renderer
from prefixcache.store import RedisStore
from tests.cases.catalogue import Call, Placeholders
from tests.cases.outcome import Outcome, send
from tests.cases.world import MATCH_DEADLINE_S, RESERVED, open_world
from tests.support.program_fleet import ProgramFleet, all_ready, running_fleet
from tests.support.proxy_harness import RunningProxy, running_proxy
from tests.support.scripted_runner import ScriptedRunner, expected_output
from tests.support.tiny_tokenizer import TINY_EOS_ID, tiny_tokenizer_files
from tests.support.valkey import Server
from tests.support.waiting import eventually
from tests.support.worker_harness import RunningWorker, running_worker

INDEX_BLOCK_TOKENS = 64


def _is_right(outcome: Outcome) -> bool:
    return 0 <= outcome.cached_tokens - outcome.hit_tokens < INDEX_BLOCK_TOKENS


async def test_rw_020_a_salt_shares_with_itself_only(valkey: Server) -> None:
    async with open_world(valkey) as world:
        first, other_salt, same_salt, no_salt = await world.play("RW-020")
        prompt_tokens = first.usage["prompt_tokens"]
        assert prompt_tokens > 2 * INDEX_BLOCK_TOKENS
        for outcome in (first, other_salt, no_salt):
            assert (outcome.cached_tokens, outcome.hit_tokens) == (0, 0)
        assert same_salt.cached_tokens == (prompt_tokens - 1) // 16 * 16
        assert same_salt.hit_tokens > 0 and _is_right(same_salt)


@asynccontextmanager
async def _two_models(valkey: Server) -> AsyncIterator[RunningProxy]:
    """Models a and b, with one tokenizer, each on a worker of its own."""
    files = tiny_tokenizer_files()
    async with RedisStore.open(valkey.url, match_deadline_s=MATCH_DEADLINE_S) as store:
        vocab_size = Renderer(files).vocab_size

        def serving(model: str) -> AbstractAsyncContextManager[RunningWorker]:
            return running_worker(
                ScriptedRunner(vocab_size=vocab_size, reserved=RESERVED),
                store=store,
                worker_id=f"on-{model}",
                model=model,
                tokenizer=files,
                stop_token_ids=(TINY_EOS_ID,),
            )

        async with (
            serving("a"),
            serving("b"),
            running_proxy(store) as proxy,
        ):
            await proxy.ready(2)
            yield proxy


async def test_rw_024_models_with_one_tokenizer_share_nothing(valkey: Server) -> None:
    async with _two_models(valkey) as proxy:
        prompt = Placeholders(model="a").ids(100)

        async def ask(model: str) -> Outcome:
            body = {"model": model, "prompt": prompt, "max_tokens": 8, "temperature": 0}
            return await send(
                proxy.client, Call(method="POST", path="/v1/completions", content=json.dumps(body).encode())
            )

        cold, warm, other = [await ask(model) for model in ("a", "a", "b")]
        assert [outcome.headers["x-prefixcache-worker"] for outcome in (cold, warm, other)] == ["on-a", "on-a", "on-b"]
        assert (cold.cached_tokens, warm.cached_tokens) == (0, 96)
        assert (other.cached_tokens, other.hit_tokens) == (0, 0)
        sampling = Sampling(seed=0, temperature=0)
        renderer = proxy.fleet.model("b").renderer
        expected = expected_output(prompt, 8, vocab_size=renderer.vocab_size, sampling=sampling, reserved=RESERVED)
        detokenizer = renderer.detokenizer()
        assert other.text == detokenizer.feed(expected) + detokenizer.flush()


async def test_rw_027_a_worker_with_another_hash_scheme_is_left_out(
    valkey: Server, caplog: pytest.LogCaptureFixture
) -> None:
    """By name and at once, instead of a hit rate of zero with every light green."""
    async with open_world(valkey) as world, RedisStore.open(valkey.url) as store:
        (worker,) = world.workers
        foreign = msgspec.structs.replace(worker.record, worker_id="foreign", namespace="0123456789abcdef")
        registration = await store.index(foreign.namespace).register()
        await store.registry().announce(msgspec.structs.replace(foreign, incarnation=registration.incarnation))
        await eventually(lambda: "worker foreign is left out" in caplog.text)
        assert foreign.namespace in caplog.text and worker.record.namespace in caplog.text
        assert [link.worker_id for link in world.proxy.fleet.links] == [worker.record.worker_id]


def _claims(server: Server) -> bytes:
    """What stands in all buckets of the index; the order in which the server lists it says nothing."""
    script = (
        "local all = {} for _, key in ipairs(redis.call('KEYS', '*:b:*')) do "
        "local content = redis.call('HGETALL', key) "
        "for at = 1, #content, 2 do all[#all + 1] = key .. content[at] .. content[at + 1] end end "
        "table.sort(all) return redis.sha1hex(table.concat(all, '|'))"
    )
    return server.command("EVAL", script, 0)


async def test_rw_027_every_replica_gives_a_prompt_the_same_keys(valkey: Server, tmp_path: Path) -> None:
    async with running_fleet(tmp_path, valkey.url) as fleet:
        worker = fleet.start_worker("w")
        await worker.said(" ready at ")
        text = Placeholders(model="sim").text(200, seed="replicas")
        first = await _ask_through_a_new_proxy(fleet, text, hash_seed=1)
        assert first.hit_tokens == 0
        await eventually(lambda: b":0\r\n" != valkey.command("EVAL", "return #redis.call('KEYS', '*:b:*')", 0))
        await eventually(lambda: b":0\r\n" == valkey.command("EVAL", "return #redis.call('KEYS', '*:p:*')", 0))
        claims = _claims(valkey)
        for hash_seed in (2, 3):
            again = await _ask_through_a_new_proxy(fleet, text, hash_seed=hash_seed)
            assert again.hit_tokens > INDEX_BLOCK_TOKENS and _is_right(again)
        assert _claims(valkey) == claims


async def _ask_through_a_new_proxy(fleet: ProgramFleet, text: str, *, hash_seed: int) -> Outcome:
    """One request to a proxy process that has never seen another one, and is stopped afterwards."""
    proxy = await fleet.start_proxy(f"p{hash_seed}", environment={"PYTHONHASHSEED": str(hash_seed)})
    await all_ready(proxy, 1)
    body = {"model": "sim", "messages": [{"role": "user", "content": text}], "max_tokens": 1}
    call = Call(method="POST", path="/v1/chat/completions", content=json.dumps(body).encode())
    async with httpx.AsyncClient(base_url=proxy.url, timeout=20.0, trust_env=False) as client:
        outcome = await send(client, call)
    assert outcome.status == 200
    await proxy.stop()
    return outcome
