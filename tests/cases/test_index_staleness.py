"""Class index-staleness: what the index says of a worker is true of the worker as it is now."""

from __future__ import annotations

import json
from pathlib import Path

import httpx

from prefixcache.index.keys import DEFAULT_KEY_PREFIX, NamespaceKeys
from tests.cases.catalogue import Call, Placeholders
from tests.cases.outcome import Outcome, send
from tests.cases.world import MODEL, World, open_world
from tests.support.ports import free_port
from tests.support.program_fleet import all_connected, all_ready, running_fleet
from tests.support.valkey import Server
from tests.support.waiting import eventually
from tests.support.worker_harness import RunningWorker

INDEX_BLOCK_TOKENS = 64


async def test_rw_030_a_worker_restarted_in_place_has_an_empty_cache(valkey: Server, tmp_path: Path) -> None:
    async with running_fleet(tmp_path, valkey.url) as fleet:
        workers = {
            name: fleet.start_worker(name, "--listen", f"127.0.0.1:{free_port()}") for name in ("first", "second")
        }
        proxy = await fleet.start_proxy("proxy")
        await all_connected(workers.values(), [proxy])
        text = Placeholders(model="sim").text(300, seed="stale")
        body = {"model": "sim", "messages": [{"role": "user", "content": text}], "max_tokens": 1}
        call = Call(method="POST", path="/v1/chat/completions", content=json.dumps(body).encode())
        async with httpx.AsyncClient(base_url=proxy.url, timeout=20.0, trust_env=False) as client:
            warm = [await send(client, call) for _ in range(2)]
            holder = warm[0].headers["x-prefixcache-worker"]
            assert warm[1].headers["x-prefixcache-worker"] == holder
            assert warm[1].hit_tokens > INDEX_BLOCK_TOKENS and warm[1].cached_tokens > 0

            workers[holder].kill()
            again = fleet.restart(workers[holder])
            await again.said(" ready at ")
            await all_ready(proxy, 2)
            cold = await send(client, call)
            assert cold.status == 200, cold.content
            assert (cold.hit_tokens, cold.cached_tokens) == (0, 0)
            taken = cold.headers["x-prefixcache-worker"]
            await eventually(lambda: _is_warm_on(client, call, taken))


async def _is_warm_on(client: httpx.AsyncClient, call: Call, worker: str) -> bool:
    """Once it really caches it is preferred again."""
    outcome = await send(client, call)
    return outcome.hit_tokens > 0 and outcome.cached_tokens > 0 and outcome.headers["x-prefixcache-worker"] == worker


POOL_BLOCKS = 64
PROMPT_TOKENS = 10 * 16 + 1


async def test_rw_032_predictions_follow_evictions(valkey: Server) -> None:
    async with open_world(valkey, num_blocks=POOL_BLOCKS, max_model_len=512) as world:
        prompts = [_prompt(world, number) for number in range(40)]
        for prompt in prompts:
            assert (await _ask(world, prompt)).status == 200
        (worker,) = world.workers
        await _all_told(worker, valkey)
        await eventually(lambda: valkey.command("EVAL", "return #redis.call('KEYS', '*:p:*')", 0) == b":0\r\n", 10.0)
        for prompt in prompts[:10]:
            outcome = await _ask(world, prompt)
            assert 0 <= outcome.cached_tokens - outcome.hit_tokens < INDEX_BLOCK_TOKENS
            await _all_told(worker, valkey)
            again = await _ask(world, prompt)
            assert again.cached_tokens == PROMPT_TOKENS - 1
            assert 0 <= again.cached_tokens - again.hit_tokens < INDEX_BLOCK_TOKENS
            await _all_told(worker, valkey)
        index = world.proxy.fleet.model(MODEL).index
        await index.check_integrity({worker.record.incarnation: POOL_BLOCKS // 4})


def _prompt(world: World, number: int) -> list[int]:
    """Another beginning for each number."""
    ids = world.placeholders.ids(PROMPT_TOKENS + number)
    return ids[number:]


async def _ask(world: World, prompt: list[int]) -> Outcome:
    body = {"model": MODEL, "prompt": prompt, "max_tokens": 1, "temperature": 0}
    return await world.send(Call(method="POST", path="/v1/completions", content=json.dumps(body).encode()))


async def _all_told(worker: RunningWorker, valkey: Server) -> None:
    """The index counts as many claims as the pool holds index blocks, and no change is on its way."""
    record = worker.record
    claims_held = NamespaceKeys(key_prefix=DEFAULT_KEY_PREFIX, namespace=record.namespace).claims_held

    def is_told() -> bool:
        counted = valkey.command("HGET", claims_held, record.incarnation).split(b"\r\n")[1]
        return not worker.engine.index_changes and int(counted) == len(worker.engine.index_changes.held())

    await eventually(is_told)
