"""The clients of a live run, one process: sends the requests of a trace by its clock and notes when answers begin.

Reads the order from the file it is told of, writes `ready`, waits for a line on stdin, sends, and writes its figures.
The loop is open: a request is sent when it is due, whatever became of those before it. Times count from when it was
due, so a client that is late shows in them, and how late it was is told besides.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from pathlib import Path

import aiohttp
import msgspec
import uvloop

from prefixcache.simulation.trace import TraceRequest
from tests.bench.routing.live_prompts import prompt_json

ANSWER_TIMEOUT_S = 300.0
LEAD_S = 0.5
"""From the start to the first arrival."""
READ_EVERY_S = 0.25
"""Once an answer has begun it is read so often: a wake-up for every token of all would take a tenth of two cores."""
_TAIL_BYTES = 4096
"""The last of a stream that is kept: its usage is there."""


class Order(msgspec.Struct, frozen=True, kw_only=True):
    """What to send: requests in turn to the URLs."""

    urls: list[str]
    model: str
    block_tokens: int
    requests: list[TraceRequest]


class Answer(msgspec.Struct, frozen=True, kw_only=True):
    """What came of one request."""

    due_s: float
    late_s: float
    """From when it was due to when it was sent."""
    prompt_tokens: int
    ttft_s: float | None = None
    """From when it was due to the first byte of the answer's body; None where it failed."""
    cached_tokens: int = 0
    predicted_tokens: int = 0
    worker: str = ""
    reason: str = ""
    error: str = ""


class Figures(msgspec.Struct, frozen=True, kw_only=True):
    answers: list[Answer]
    cpu_s: float
    took_s: float


async def run(order: Order) -> Figures:
    bodies = [_body(order, number) for number in range(len(order.requests))]
    timeout = aiohttp.ClientTimeout(total=ANSWER_TIMEOUT_S)
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=connector, timeout=timeout) as session:
        print("ready", flush=True)
        await asyncio.to_thread(sys.stdin.readline)
        began_s, began_cpu_s = time.perf_counter(), time.process_time()
        asked: list[asyncio.Task[Answer]] = []
        for number, request in enumerate(order.requests):
            due_s = began_s + LEAD_S + request.arrival_s
            await asyncio.sleep(due_s - time.perf_counter())
            url = order.urls[number % len(order.urls)] + "/v1/completions"
            asked.append(asyncio.create_task(_ask(session, url, bodies[number], request, due_s)))
        answers = await asyncio.gather(*asked)
        return Figures(
            answers=answers, cpu_s=time.process_time() - began_cpu_s, took_s=time.perf_counter() - began_s - LEAD_S
        )


def _body(order: Order, number: int) -> bytes:
    request = order.requests[number]
    fields = {
        "model": order.model,
        "max_tokens": request.output_tokens,
        "ignore_eos": True,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    prompt = prompt_json(request, number, order.block_tokens)
    return f'{json.dumps(fields)[:-1]}, "prompt": {prompt}}}'.encode()


async def _ask(session: aiohttp.ClientSession, url: str, body: bytes, request: TraceRequest, due_s: float) -> Answer:
    late_s = time.perf_counter() - due_s
    failed = Answer(due_s=request.arrival_s, late_s=late_s, prompt_tokens=request.prompt_tokens)
    try:
        async with session.post(url, data=body, headers={"content-type": "application/json"}) as response:
            if response.status != 200:
                return msgspec.structs.replace(failed, error=f"{response.status}: {(await response.text())[:200]}")
            ttft_s, tail = None, b""
            async for piece in response.content.iter_any():
                ttft_s = time.perf_counter() - due_s if ttft_s is None else ttft_s
                tail = (tail + piece)[-_TAIL_BYTES:]
                await _pause(response)
            usage = usage_in(tail)
    except (aiohttp.ClientError, TimeoutError, ValueError) as error:
        return msgspec.structs.replace(failed, error=f"{type(error).__name__}: {error}")
    return msgspec.structs.replace(
        failed,
        prompt_tokens=usage["prompt_tokens"],
        ttft_s=ttft_s,
        cached_tokens=usage["cached_tokens"],
        predicted_tokens=int(response.headers["x-prefixcache-hit-tokens"]),
        worker=response.headers["x-prefixcache-worker"],
        reason=response.headers["x-prefixcache-reason"],
    )


async def _pause(response: aiohttp.ClientResponse) -> None:
    """What comes meanwhile stays in the kernel."""
    connection = response.connection
    if connection is not None and connection.protocol is not None:
        connection.protocol.pause_reading()
        await asyncio.sleep(READ_EVERY_S)
        connection.protocol.resume_reading()


def usage_in(tail: bytes) -> dict[str, int]:
    """Of the end of a stream. Raises ValueError for one that did not end as it should."""
    events = tail.split(b"\n\n")
    if events[-2:] != [b"data: [DONE]", b""]:
        raise ValueError(f"the stream ended with {tail[-200:]!r}")
    usage = json.loads(events[-3].removeprefix(b"data: "))["usage"]
    return {
        "prompt_tokens": usage["prompt_tokens"],
        "cached_tokens": usage["prompt_tokens_details"]["cached_tokens"],
    }


if __name__ == "__main__":
    content = uvloop.run(run(msgspec.json.decode(Path(sys.argv[1]).read_bytes(), type=Order)))
    sys.stdout.buffer.write(msgspec.json.encode(content) + b"\n")
