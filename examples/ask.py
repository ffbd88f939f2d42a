#!/usr/bin/env python3
"""Asks a question behind a long system prompt and prints how long the first token took. Standard library only.

python3 examples/ask.py "May I sell a product that contains this?"
OPENAI_API_KEY=... python3 examples/ask.py          # where keys are asked for
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

SYSTEM_PROMPT = (Path(__file__).resolve().parent.parent / "LICENSE").read_text(encoding="utf-8")[:7200]


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    arguments.add_argument("question", nargs="?", default="May I sell a product that contains this?")
    arguments.add_argument("--port", type=int, default=8000)
    arguments.add_argument("--max-tokens", type=int, default=32)
    options = arguments.parse_args()

    connection = http.client.HTTPConnection("127.0.0.1", options.port)
    key = os.environ.get("OPENAI_API_KEY")
    headers = {"content-type": "application/json"} | ({"authorization": f"Bearer {key}"} if key else {})
    try:
        connection.request("GET", "/v1/models", headers=headers)
    except OSError as error:
        sys.exit(f"no proxy at 127.0.0.1:{options.port} ({error}); start one with `make up`, or name its --port")
    models = connection.getresponse()
    if models.status != http.client.OK:
        sys.exit(f"HTTP {models.status}: {models.read().decode()}")
    model = json.load(models)["data"][0]["id"]
    body = {
        "model": model,
        "messages": [{"role": "system", "content": SYSTEM_PROMPT}, {"role": "user", "content": options.question}],
        "temperature": 0,
        "max_tokens": options.max_tokens,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    began = time.perf_counter()
    connection.request("POST", "/v1/chat/completions", json.dumps(body), headers)
    answer = connection.getresponse()
    if answer.status != http.client.OK:
        sys.exit(f"HTTP {answer.status}: {answer.read().decode()}")
    ttft_s: float | None = None
    usage: dict[str, Any] = {}
    for line in answer:
        if not line.startswith(b"data: {"):
            continue
        chunk = json.loads(line[len(b"data: ") :])
        if "error" in chunk:
            sys.exit(chunk["error"]["message"])
        for choice in chunk["choices"]:
            if choice["delta"].get("content"):
                ttft_s = ttft_s if ttft_s is not None else time.perf_counter() - began
                print(choice["delta"]["content"], end="", flush=True)
        usage = chunk.get("usage") or usage
    cached = usage["prompt_tokens_details"]["cached_tokens"]
    worker, reason = answer.headers["x-prefixcache-worker"], answer.headers["x-prefixcache-reason"]
    shown = f"{ttft_s:.3f} s" if ttft_s is not None else "none (empty answer)"
    print(f"\n\nTTFT {shown} | prompt {usage['prompt_tokens']} tokens, cached {cached} | {worker}, {reason}")


if __name__ == "__main__":
    main()
