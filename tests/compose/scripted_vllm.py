"""A stand-in for vLLM's server in its container: the same command line, the same paths, made-up words.

    python3 scripted_vllm.py MODEL --host HOST --port PORT [--enable-prompt-tokens-details]

It has the standard library alone; GATE in the environment names a file.

Listens once the gate is there, as an engine does that has loaded its model. It caches prompts whole: those tokens of a
prompt are cached that begin one which it had before.
"""

from __future__ import annotations

import argparse
import json
import os
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

BLOCK_TOKENS = 16
NUM_BLOCKS = 1_024
CHARS_PER_TOKEN = 4
WORDS = ("one", "two", "three", "four")


class Engine:
    """What is counted and cached."""

    def __init__(self, model: str, *, tells_cached: bool) -> None:
        self.model = model
        self.tells_cached = tells_cached
        self._prompts: list[str] = []
        self._lock = threading.Lock()
        self._num_tokens = 0
        self._num_hits = 0

    def take(self, prompt: str) -> tuple[int, int]:
        """Its tokens, and those that are cached."""
        with self._lock:
            shared = max((_common(other, prompt) for other in self._prompts), default=0)
            self._prompts.append(prompt)
            num_tokens = len(prompt) // CHARS_PER_TOKEN + 1
            cached = min(shared // CHARS_PER_TOKEN, num_tokens - 1) // BLOCK_TOKENS * BLOCK_TOKENS
            self._num_tokens += num_tokens
            self._num_hits += cached
        return num_tokens, cached

    def metrics(self) -> str:
        label = f'model_name="{self.model}"'
        return "".join(
            f"{line}\n"
            for line in (
                "# TYPE vllm:cache_config_info gauge",
                f'vllm:cache_config_info{{block_size="{BLOCK_TOKENS}",num_gpu_blocks="{NUM_BLOCKS}",'
                'enable_prefix_caching="True"} 1.0',
                "# TYPE vllm:num_requests_running gauge",
                f"vllm:num_requests_running{{{label}}} 0.0",
                "# TYPE vllm:num_requests_waiting gauge",
                f"vllm:num_requests_waiting{{{label}}} 0.0",
                "# TYPE vllm:prefix_cache_queries_total counter",
                f"vllm:prefix_cache_queries_total{{{label}}} {self._num_tokens}.0",
                "# TYPE vllm:prefix_cache_hits_total counter",
                f"vllm:prefix_cache_hits_total{{{label}}} {self._num_hits}.0",
            )
        )


def _common(one: str, other: str) -> int:
    """Characters that both begin with."""
    most = min(len(one), len(other))
    return next((place for place in range(most) if one[place] != other[place]), most)


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    engine: Engine

    def do_GET(self) -> None:
        if self.path == "/health":
            self._send(b"", "text/plain")
        elif self.path == "/v1/models":
            model = {"id": self.engine.model, "object": "model", "owned_by": "vllm", "max_model_len": 4_096}
            self._send(json.dumps({"object": "list", "data": [model]}).encode(), "application/json")
        elif self.path == "/metrics":
            self._send(self.engine.metrics().encode(), "text/plain; version=0.0.4")
        else:
            self.send_error(404)

    def do_POST(self) -> None:
        if self.path == "/sleep":
            self._send(b"", "text/plain")
            return
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        prompt = json.dumps(asked["messages"]) if "messages" in asked else str(asked["prompt"])
        num_tokens, cached = self.engine.take(prompt)
        words = WORDS[: asked.get("max_tokens") or len(WORDS)]
        usage: dict[str, Any] = {
            "prompt_tokens": num_tokens,
            "completion_tokens": len(words),
            "total_tokens": num_tokens + len(words),
        }
        if self.engine.tells_cached:
            usage["prompt_tokens_details"] = {"cached_tokens": cached}
        if asked.get("stream"):
            self._stream(asked, words, usage)
            return
        choice: dict[str, Any] = {"index": 0, "finish_reason": "stop"}
        text = " ".join(words)
        choice |= {"message": {"role": "assistant", "content": text}} if "messages" in asked else {"text": text}
        self._send(json.dumps(self._frame(choices=[choice], usage=usage)).encode(), "application/json")

    def _stream(self, asked: Any, words: tuple[str, ...], usage: Any) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        for word in words:
            delta = {"index": 0, "delta": {"content": f"{word} "}, "finish_reason": None}
            self._event(json.dumps(self._frame(choices=[delta])))
        self._event(json.dumps(self._frame(choices=[{"index": 0, "delta": {}, "finish_reason": "stop"}])))
        if (asked.get("stream_options") or {}).get("include_usage"):
            self._event(json.dumps(self._frame(choices=[], usage=usage)))
        self._event("[DONE]")
        self.wfile.write(b"0\r\n\r\n")

    def _frame(self, **fields: Any) -> dict[str, Any]:
        return {"id": "scripted-1", "object": "chat.completion", "created": 1, "model": self.engine.model, **fields}

    def _event(self, data: str) -> None:
        event = f"data: {data}\n\n".encode()
        self.wfile.write(b"%x\r\n%b\r\n" % (len(event), event))

    def _send(self, body: bytes, content_type: str) -> None:
        self.send_response(200)
        self.send_header("Content-Type", content_type)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *arguments: Any) -> None:
        """Nobody reads it."""


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("model")
    parser.add_argument("--host", required=True)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--enable-prompt-tokens-details", action="store_true")
    given = parser.parse_args()
    gate = Path(os.environ["GATE"])
    while not gate.exists():
        time.sleep(0.1)
    Handler.engine = Engine(given.model, tells_cached=given.enable_prompt_tokens_details)
    ThreadingHTTPServer((given.host, given.port), Handler).serve_forever()


if __name__ == "__main__":
    main()
