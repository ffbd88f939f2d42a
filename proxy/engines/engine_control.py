"""Requests that change an engine instead of asking it something: each engine gets them, the worst answer is told.

    POST /reset_prefix_cache ──► every engine, up or not, at once ──► status, headers and body of the worst answer
                                        │                             x-prefixcache-engines: a:8000=200, b:8000=503
                                        └── done, and its cache is gone: what was claimed of it begins anew

Whoever asks a server to forget, to sleep or to load an adapter means all that stand behind its URL: had one of them
been chosen, the others would answer from what should be gone. The paths are those of vLLM and SGLang.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

import msgspec
from aiohttp import web

from prefixcache.errors import EngineUnreachable, Unavailable, WorkerFault
from prefixcache.limits import ENGINE_CONTROL_S
from proxy.engines.engine_fleet import EngineFleet
from proxy.engines.engine_link import EngineLink
from proxy.engines.engine_request import ClientRequest
from proxy.engines.headers import HeaderRules
from proxy.engines.http_message import EngineRequest, FetchedResponse
from proxy.error_answers import error_answer, error_code

_FORGETTING = frozenset(
    "/reset_prefix_cache /sleep /release_kv_cache_memory /pause "
    "/flush_cache /release_memory_occupation /update_weights_from_disk".split()
)
"""After these an engine holds nothing any more."""
_CONTROL = _FORGETTING | frozenset(
    "/reset_mm_cache /reset_encoder_cache /wake_up /resume /start_profile /stop_profile "
    "/resume_memory_occupation /pause_generation /continue_generation "
    "/v1/load_lora_adapter /v1/unload_lora_adapter /load_lora_adapter /unload_lora_adapter".split()
)
_METHODS = frozenset(("POST", "GET"))
"""SGLang takes both, vLLM refuses the second itself."""
_MOST_ANSWER_BYTES = 1024 * 1024


def is_control(request: web.Request) -> bool:
    """Whether it is for every engine."""
    return request.method in _METHODS and request.path in _CONTROL


@dataclass(frozen=True, slots=True, kw_only=True)
class _Answer:
    link: EngineLink
    told: FetchedResponse | Unavailable | WorkerFault

    @property
    def status(self) -> int:
        return self.told.status

    @property
    def is_done(self) -> bool:
        """vLLM answers {"success": false} with status 200 while blocks of its cache are in use."""
        if not isinstance(self.told, FetchedResponse) or self.status >= 300:
            return False
        try:
            said = msgspec.json.decode(self.told.body)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            return True
        return not (isinstance(said, dict) and said.get("success") is False)

    @property
    def badness(self) -> tuple[int, bool]:
        return self.status, not self.is_done


class EngineControl:
    """One for the process."""

    def __init__(self, fleet: EngineFleet, rules: HeaderRules) -> None:
        self._fleet = fleet
        self._rules = rules

    async def answer(self, asked: ClientRequest) -> web.Response:
        """Returns when every engine has answered or cannot."""
        request = asked.to_engine(self._rules)
        answers = await asyncio.gather(*(self._ask(link, request, asked.path) for link in self._fleet.links))
        worst = max(answers, key=lambda answer: answer.badness)
        record, told = asked.record, worst.told
        record.worker = worst.link.engine_id
        if isinstance(told, FetchedResponse):
            if told.status >= 400:
                record.error_code = f"engine_status_{told.status}"
            response = self._passed_on(told, worst.link)
        else:
            record.error_code = error_code(told)
            response = error_answer(told)
        response.headers["x-request-id"] = record.request_id
        response.headers["x-prefixcache-worker"] = worst.link.engine_id
        response.headers["x-prefixcache-engines"] = ", ".join(
            f"{each.link.engine_id}={each.status}" for each in answers
        )
        return response

    async def _ask(self, link: EngineLink, request: EngineRequest, path: str) -> _Answer:
        """Whatever the others are doing: a cache that is gone is gone."""
        answer = _Answer(link=link, told=await self._told(link, request))
        if answer.is_done and path in _FORGETTING:
            link.note_lost_cache(f"{path} was asked of it")
        link.look_soon()
        return answer

    async def _told(self, link: EngineLink, request: EngineRequest) -> FetchedResponse | Unavailable | WorkerFault:
        try:
            return await link.pool.fetch(
                request.method,
                request.target,
                headers=request.headers,
                body=request.body,
                timeout_s=ENGINE_CONTROL_S,
                most_bytes=_MOST_ANSWER_BYTES,
            )
        except (Unavailable, WorkerFault) as error:
            if isinstance(error, EngineUnreachable):
                link.note_failure(error)
            return error

    def _passed_on(self, told: FetchedResponse, link: EngineLink) -> web.Response:
        response = web.Response(status=told.status, body=told.body)
        for name, value in self._rules.to_client(told.headers, link.pool.place):
            if name.lower() != b"content-length":
                response.headers[name.decode("latin-1")] = value.decode("latin-1")
        return response
