"""A server of the benchmark's own, and what it costs: CPU, memory, time of each call."""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from redis import Redis

from prefixcache.cli.valkey import EmbeddedValkey

SLOW_CALL_S = 0.002
"""Of calls that seem to take longer the server is asked."""
_SCAN_COUNT = 2_000


class BenchServer:
    """Administration of one running server, on a connection that takes no part in what is measured."""

    def __init__(self, embedded: EmbeddedValkey) -> None:
        self.url = embedded.url
        self._redis = Redis(unix_socket_path=self.url.removeprefix("unix://"))
        self._cpu_clock = ~embedded.pid << 3 | 2
        """clockid_t of another process's CPU time, as clock_getcpuclockid(3) makes it."""
        self.command("CONFIG", "SET", "slowlog-log-slower-than", round(SLOW_CALL_S * 1e6))
        self._last_slow_call: int | None = None

    @property
    def version(self) -> str:
        about = self.command("INFO", "server")
        valkey = about.get("valkey_version")
        return f"Valkey {valkey}" if valkey else f"Redis {about['redis_version']}"

    def command(self, *words: str | int | bytes) -> Any:
        return self._redis.execute_command(*words)  # type: ignore[no-untyped-call]  # redis-py has no types

    def cpu_s(self) -> float:
        """CPU time of the whole process so far: what INFO cpu says, without asking the server for it."""
        return time.clock_gettime(self._cpu_clock)

    def used_memory_bytes(self) -> int:
        return int(self.command("INFO", "memory")["used_memory"])

    def flush(self) -> None:
        self.command("FLUSHALL", "SYNC")

    def largest_hash(self) -> int:
        """Fields of the largest HASH among all keys."""
        largest, cursor = 0, 0
        while True:
            cursor, names = self.command("SCAN", cursor, "COUNT", _SCAN_COUNT, "TYPE", "hash")
            with self._redis.pipeline(transaction=False) as pipeline:
                for name in names:
                    pipeline.hlen(name)
                lengths: list[int] = pipeline.execute()
            largest = max(largest, *lengths, 0)
            if cursor == 0:
                return largest

    def slow_call_s(self) -> float | None:
        """Seconds of the last call that took longer than SLOW_CALL_S by the server's clock, if there is a new one."""
        for number, _, micros, *_ in self.command("SLOWLOG", "GET", 1):
            if number != self._last_slow_call:
                self._last_slow_call = number
                return float(micros) / 1e6
        return None


@contextmanager
def bench_server(kind: str) -> Iterator[BenchServer]:
    """`kind`: redis, the one on PATH; valkey, the embedded one; any, the first of these that is there."""
    on_path = shutil.which("redis-server")
    if kind == "redis" and on_path is None:
        raise SystemExit("--server redis: no redis-server on PATH")
    binary = Path(on_path) if on_path is not None and kind != "valkey" else None
    with EmbeddedValkey(binary) as embedded:
        yield BenchServer(embedded)
