"""The product in this process: proxy, Valkey and real workers, whose runner draws what the test says."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field

from tokenizers import Tokenizer

from prefixcache.hashing import block_hashes, index_hashes
from prefixcache.protocol import Sampling
from prefixcache.rendering.renderer import Renderer
from prefixcache.rendering.tokenizer_files import TOKENIZER_JSON, TokenizerFiles
from prefixcache.store import RedisStore
from prefixcache.types import pack_tokens
from proxy.app import SECRET
from tests.cases.catalogue import Call, Placeholders, calls
from tests.cases.outcome import Outcome, send, send_all
from tests.support.proxy_harness import RunningProxy, running_proxy
from tests.support.scripted_runner import Script, ScriptedRunner, expected_output
from tests.support.tiny_tokenizer import TINY_EOS_ID, TINY_SPECIAL_TOKENS, tiny_tokenizer_files
from tests.support.valkey import Server
from tests.support.worker_harness import RunningWorker, running_worker

MODEL = "tiny"
RESERVED = len(TINY_SPECIAL_TOKENS)
"""The runner draws special tokens only where a script says so."""

MATCH_DEADLINE_S = 2.0
"""A busy machine costs no prediction: the cases are about what is predicted, not about how soon."""


@dataclass(slots=True, kw_only=True)
class Prompts:
    """A script that keeps every prompt the runner computed, as read back from the KV blocks."""

    script: Script | None
    seen: list[list[int]] = field(default_factory=list)

    def __call__(self, prompt: Sequence[int], index: int) -> int | None:
        if index == 0:
            self.seen.append(list(prompt))
        return None if self.script is None else self.script(prompt, index)


@dataclass(frozen=True, slots=True, kw_only=True)
class World:
    """What a case is played against."""

    proxy: RunningProxy
    workers: list[RunningWorker]
    prompts: list[list[int]]
    """Token ids of every prompt that any worker began to answer, in order."""
    renderer: Renderer
    tokenizer: Tokenizer
    placeholders: Placeholders

    def calls(self, case_id: str) -> list[Call]:
        return calls(case_id, self.placeholders)

    async def play(self, case_id: str) -> list[Outcome]:
        """Every request of the case, one after the other."""
        return await send_all(self.proxy.client, self.calls(case_id))

    async def send(self, call: Call) -> Outcome:
        return await send(self.proxy.client, call)

    async def predicts(self, prompt: Sequence[int]) -> bool:
        """Whether the index knows a block of this prompt by now."""
        model = self.proxy.fleet.model(MODEL)
        root = model.root_hash(seed=self.proxy.app[SECRET].seed, cache_salt="")
        geometry = model.geometry
        hashes = block_hashes(root, pack_tokens(prompt), geometry.block_size)
        return bool((await model.index.match(index_hashes(hashes, geometry.stride))).depths)

    def output(self, prompt: Sequence[int], num_tokens: int) -> list[int]:
        """What a correct engine draws greedily after a prompt that no script knows."""
        sampling = Sampling(seed=0, temperature=0)
        vocab_size = self.renderer.vocab_size
        return expected_output(prompt, num_tokens, vocab_size=vocab_size, sampling=sampling, reserved=RESERVED)

    def decoded(self, ids: Sequence[int]) -> str:
        """The text of output ids, decoded in one go by the tokenizer itself."""
        text: str = self.tokenizer.decode(list(ids), skip_special_tokens=True)
        return text

    @property
    def num_running(self) -> int:
        return sum(worker.engine.load.running + worker.engine.load.waiting for worker in self.workers)


@asynccontextmanager
async def open_world(
    valkey: Server,
    *,
    num_workers: int = 1,
    files: TokenizerFiles | None = None,
    stop_token_ids: tuple[int, ...] = (TINY_EOS_ID,),
    num_blocks: int = 256,
    max_model_len: int = 2048,
    step_delay_s: float = 0.0,
    script: Script | None = None,
    match_deadline_s: float = MATCH_DEADLINE_S,
) -> AsyncIterator[World]:
    """Ends with the integrity of every pool and of the index checked."""
    files = files or tiny_tokenizer_files()
    renderer = Renderer(files)
    prompts = Prompts(script=script)
    async with RedisStore.open(valkey.url, match_deadline_s=match_deadline_s) as store, AsyncExitStack() as stack:
        workers = [
            await stack.enter_async_context(
                running_worker(
                    ScriptedRunner(
                        vocab_size=renderer.vocab_size,
                        reserved=RESERVED,
                        num_blocks=num_blocks,
                        max_model_len=max_model_len,
                        step_delay_s=step_delay_s,
                        script=prompts,
                    ),
                    store=store,
                    worker_id=f"w{number}",
                    model=MODEL,
                    tokenizer=files,
                    stop_token_ids=stop_token_ids,
                )
            )
            for number in range(num_workers)
        ]
        async with running_proxy(store) as proxy:
            await proxy.ready(num_workers)
            yield World(
                proxy=proxy,
                workers=workers,
                prompts=prompts.seen,
                renderer=renderer,
                tokenizer=Tokenizer.from_buffer(files.files[TOKENIZER_JSON]),
                placeholders=Placeholders(model=MODEL, vocab_size=renderer.vocab_size),
            )
        await stack.aclose()  # it reads the index in many steps, so nobody may write meanwhile
        await store.index(workers[0].record.namespace).check_integrity()
