"""Class metrics-truth: a hit is a prompt token that nobody computed, and nothing else."""

from __future__ import annotations

import asyncio

from tests.cases.catalogue import Call, changed
from tests.cases.world import MODEL, open_world
from tests.support.valkey import Server

NUM_PROMPTS = 200
AT_ONCE = 10


async def test_rw_131_unique_prompts_under_pressure(valkey: Server) -> None:
    """So few blocks that running requests lose theirs and begin again from what is still there of them: no hits."""
    async with open_world(valkey, num_workers=1, num_blocks=48, max_model_len=512) as world:
        (worker,) = world.workers
        call = Call(method="POST", path="/v1/completions", content=b"{}")
        going = asyncio.Semaphore(AT_ONCE)

        async def one(number: int) -> int:
            prompt = world.placeholders.text(60, seed=f"{number} of its own")
            async with going:
                outcome = await world.send(
                    changed(call, model=MODEL, prompt=f"{number:03} {prompt}", max_tokens=70, ignore_eos=True)
                )
            assert outcome.status == 200, outcome.content
            return outcome.cached_tokens

        cached = sum(await asyncio.gather(*(one(number) for number in range(NUM_PROMPTS))))
        metrics = worker.worker.metrics
        assert metrics.preemptions._value.get() > 0, "there was pressure"
        prompt_tokens = world.proxy.metric("prefixcache_prompt_tokens_total")
        print(f"{cached} of {prompt_tokens:g} tokens cached, {metrics.preemptions._value.get():g} preemptions")
        assert cached <= 0.01 * prompt_tokens
        assert world.proxy.metric("prefixcache_cached_tokens_total") == cached
        assert metrics.cached_tokens._value.get() == cached
        assert metrics.prompt_tokens._value.get() == prompt_tokens
        stats = (await world.proxy.client.get("/cache/stats")).json()["total"]["since_start"]
        assert (stats["prompt_tokens"], stats["cached_tokens"]) == (prompt_tokens, cached)
