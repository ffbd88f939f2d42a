"""The walk of one request to a plain engine: which prompt it has, which engine may have it, and who is asked next.

    body ──► prompt ──match, policy──► place ──held queue──► engine ──► client
              │                          ▲                      │
              └── none: least loaded     └── not reachable, or a fault before the client got a byte: another one
                                             none is up: wait for one, for a while

An engine that cannot be reached has seen nothing, so that all others may be asked; after a fault one more is.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from statistics import fmean

from aiohttp import web

from prefixcache.errors import EngineFault, EngineUnreachable, Overloaded, Unavailable
from prefixcache.hashing import engine_namespace
from prefixcache.limits import HELD_DOWN_S, MAX_HELD_REQUESTS, RETRY_AFTER_S
from prefixcache.rendering.engine_prompt import EnginePrompt, EnginePrompts
from proxy.engines.answer_claims import AnswerClaims
from proxy.engines.engine_control import EngineControl, is_control
from proxy.engines.engine_exchange import EngineExchange, PlacedPrompt
from proxy.engines.engine_fleet import EngineFleet
from proxy.engines.engine_link import EngineLink
from proxy.engines.engine_request import ClientRequest
from proxy.engines.headers import HeaderRules
from proxy.engines.prompt_geometry import PromptGeometry
from proxy.exchange import Books
from proxy.load_table import LoadTable
from proxy.placer import Placer, Wanted
from proxy.secret import DeploymentSecret
from proxy.store import Store

MOST_FAULTS = 1
"""After which another engine is asked; one that fails may have been made to by the request itself."""


class EngineHandler:
    """One for the process; holds nothing of any request."""

    def __init__(
        self,
        *,
        fleet: EngineFleet,
        store: Store,
        secret: DeploymentSecret,
        new_prompts: Callable[[int], EnginePrompts],
        placer: Placer,
        loads: LoadTable,
        books: Books,
        answers: AnswerClaims,
        rules: HeaderRules,
    ) -> None:
        """`new_prompts` makes what reads prompts for engines whose KV blocks have so many tokens."""
        self._fleet = fleet
        self._index = store.index(engine_namespace())
        self._secret = secret
        self._new_prompts = new_prompts
        self._prompts: dict[int, EnginePrompts] = {}
        """By block size."""
        self._placer = placer
        self._loads = loads
        self._books = books
        self._answers = answers
        self._rules = rules
        self._control = EngineControl(fleet, rules)
        self._num_without_engine = 0

    async def answer(self, asked: ClientRequest, turn: ExitStack) -> web.StreamResponse:
        """Of the engines that serve the body's model, of any where it names none, or of all where it is for all.

        Closes `turn`, in which the body was taken apart, once its prompt is known.
        """
        if is_control(asked.request):
            turn.close()
            return await self._control.answer(asked)
        asked.record.counted = asked.is_predicted
        asked.record.model = asked.model or ""
        prompt = await self._prompt(asked)
        asked.forget_parsed()
        turn.close()
        return await self._answer(asked, prompt)

    async def _answer(self, asked: ClientRequest, prompt: EnginePrompt | None) -> web.StreamResponse:
        record, model = asked.record, asked.model
        loop = asyncio.get_running_loop()
        give_up_at: float | None = None
        failed: dict[str, Exception] = {}
        while True:
            links = self._links(model, failed)
            if not links and failed:
                raise next(reversed(failed.values()))
            if not links:
                give_up_at = give_up_at or loop.time() + HELD_DOWN_S
                await self._wait_for_engine(model, give_up_at - loop.time())
                continue
            is_last = len(links) == 1 or len(failed) >= MOST_FAULTS
            try:
                with ExitStack() as scope:
                    link, placed = await self._place(asked, prompt, failed, scope)
                    record.worker = link.engine_id
                    exchange = EngineExchange(
                        asked,
                        link,
                        placed=placed,
                        model=model or "",
                        books=self._books,
                        answers=self._answers,
                        rules=self._rules,
                        may_refuse=asked.is_predicted and not is_last,
                        is_first=not failed,
                    )
                    return await exchange.run()
            except EngineUnreachable:
                # It is down by now; the next look finds the others.
                give_up_at = give_up_at or loop.time() + HELD_DOWN_S
                if loop.time() >= give_up_at:
                    raise
            except EngineFault as error:
                if is_last or not asked.is_predicted:
                    raise
                failed[link.engine_id] = error

    async def _prompt(self, asked: ClientRequest) -> EnginePrompt | None:
        if not asked.is_predicted or asked.parsed is None or asked.model is None:
            return None
        block_size = self._fleet.block_size(asked.model)
        prompts = self._prompts.get(block_size)
        if prompts is None:
            prompts = self._prompts[block_size] = self._new_prompts(block_size)
        return await prompts.of(
            asked.path, asked.parsed, body_bytes=len(asked.body), seed=self._secret.seed, model=asked.model
        )

    def _links(self, model: str | None, failed: dict[str, Exception]) -> Sequence[EngineLink]:
        """Those to choose from."""
        if model is None:
            up = [link for link in self._fleet.links if link.is_up]
            ready: Sequence[EngineLink] = [link for link in up if not link.is_slow] or up
        else:
            ready = self._fleet.ready_links(model)
        return [link for link in ready if link.engine_id not in failed]

    async def _place(
        self, asked: ClientRequest, prompt: EnginePrompt | None, failed: dict[str, Exception], scope: ExitStack
    ) -> tuple[EngineLink, PlacedPrompt | None]:
        """Raises EngineUnreachable if the last engine went down just now."""
        links = self._links(asked.model, failed)
        if prompt is None:
            if not links:
                raise EngineUnreachable("the engine went down as it was chosen, try again")
            return min(links, key=self._load), None
        geometry = PromptGeometry(engine=prompt.geometry, tokens_per_unit=_tokens_per_unit(prompt, links))
        num_tokens = sum(_num_tokens(each, geometry) for each in (prompt, *prompt.others))
        wanted = Wanted(
            index=self._index,
            ready=lambda: self._links(asked.model, failed),
            geometry=geometry,
            index_hashes=prompt.chain,
            num_tokens=num_tokens,
            is_refused_elsewhere=True,
        )
        try:
            reserved = await self._placer.place_wanted(wanted, scope)
        except Unavailable as error:
            raise EngineUnreachable(str(error)) from error
        asked.record.prompt_tokens = num_tokens
        asked.record.hit_tokens = reserved.placement.decision.hit_tokens
        placed = PlacedPrompt(
            prompt=prompt,
            prompts=self._prompts[prompt.geometry.block_size],
            geometry=geometry,
            num_tokens=num_tokens,
            reserved=reserved,
        )
        return reserved.placement.link, placed

    def _load(self, link: EngineLink) -> tuple[int, float, float]:
        return link.num_waiting + link.num_running, self._loads.ahead_s(link), random.random()

    async def _wait_for_engine(self, model: str | None, timeout_s: float) -> None:
        """Raises what is to be told when there is no hope, or no time left."""
        if self._num_without_engine >= MAX_HELD_REQUESTS:
            raise Overloaded("too many requests wait for an engine to come up", retry_after_s=RETRY_AFTER_S)
        self._num_without_engine += 1
        try:
            if model is None:
                await self._fleet.any_up_within(timeout_s)
            else:
                await self._fleet.ready_within(model, timeout_s)
        finally:
            self._num_without_engine -= 1


def _tokens_per_unit(prompt: EnginePrompt, links: Sequence[EngineLink]) -> float:
    """Engines of one model have one tokenizer: what any of them has learnt holds for all."""
    if prompt.unit == "token" or not links:
        return 1.0
    estimates = [link.estimate for link in links]
    return fmean(
        (estimate.tokens_per_byte for estimate in estimates),
        weights=[estimate.tokens_per_byte_weight for estimate in estimates],
    )


def _num_tokens(prompt: EnginePrompt, geometry: PromptGeometry) -> int:
    if prompt.prompt_tokens_estimate is not None:
        return prompt.prompt_tokens_estimate
    return max(1, round(prompt.num_units * geometry.tokens_per_unit))
