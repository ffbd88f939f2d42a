"""What an engine's /metrics tell: block size, capacity, counters and load, in the spellings of vLLM and SGLang.

    vllm:cache_config_info{block_size="16",num_gpu_blocks="5600",engine="0",...} 1
    vllm:prefix_cache_queries_total{engine="0",model_name="m"} 1024    also without _total, also vllm:gpu_prefix_cache_*
    sglang:cached_tokens_total{cache_source="device",...} 512            of sglang:prompt_tokens_total

Several samples of one name are parts of one server, such as its data-parallel ranks: they are added up.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

_COUNTS = {
    "vllm:prefix_cache_queries_total": "queries",
    "vllm:prefix_cache_queries": "queries",
    "vllm:gpu_prefix_cache_queries_total": "queries",
    "vllm:gpu_prefix_cache_queries": "queries",
    "vllm:prefix_cache_hits_total": "hits",
    "vllm:prefix_cache_hits": "hits",
    "vllm:gpu_prefix_cache_hits_total": "hits",
    "vllm:gpu_prefix_cache_hits": "hits",
    "vllm:num_requests_running": "running",
    "vllm:num_requests_waiting": "waiting",
    "vllm:prompt_tokens_total": "prompt_tokens",
    "vllm:generation_tokens_total": "generation_tokens",
    "sglang:prompt_tokens_total": "prompt_tokens",
    "sglang:generation_tokens_total": "generation_tokens",
    "sglang:cached_tokens_total": "cached_tokens",
    "sglang:num_running_reqs": "running",
    "sglang:num_queue_reqs": "waiting",
    "sglang:max_total_num_tokens": "capacity_tokens",
    "process_start_time_seconds": "started_at",
}
"""Name -> what it counts; the spellings of one thing stand beside each other, and the first one present speaks."""
_CACHE_CONFIG = "vllm:cache_config_info"
_SAMPLE = re.compile(r"(?:\{(.*)\})?[ \t]+(\S+)(?:\s.*)?", re.DOTALL)
"""What follows the name of a sample on its line: labels, value, and a time stamp that nobody writes."""
_LABEL = re.compile(r'(?:^|,)([a-zA-Z_][a-zA-Z0-9_]{0,63})="((?:[^"\\]|\\.){0,256})"')
_MOST_BLOCKS = 1 << 40
_MOST_LINE_BYTES = 16 * 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineMetrics:
    """None for what is not told."""

    kind: str | None = None
    """vllm or sglang."""
    block_size: int | None = None
    capacity_tokens: int | None = None
    """Of the KV cache."""
    caches_prefixes: bool | None = None
    queried_tokens: float | None = None
    """Counter: prompt tokens looked up in the prefix cache; hit_tokens of them were found."""
    hit_tokens: float | None = None
    computed_tokens: float | None = None
    """Counter of prompt and output tokens, of which any growth is a sign of life."""
    num_running: int | None = None
    num_waiting: int | None = None
    started_at: float | None = None
    """Of its process, in seconds since the epoch, by its own clock."""


def read_metrics(body: bytes) -> EngineMetrics:
    """Whatever the text is, never an error: what is not told, or not readable, is None. Takes 8 ms a MB."""
    by_name: dict[str, float] = {}
    configs: list[Mapping[str, str]] = []
    for name, labels, value in _samples(body):
        if name == _CACHE_CONFIG:
            configs.append(dict(_LABEL.findall(labels)))
        else:
            by_name[name] = by_name.get(name, 0.0) + value
    counts: dict[str, float] = {}
    for name, meaning in _COUNTS.items():
        if name in by_name:
            counts.setdefault(meaning, by_name[name])
    sizes = [size for config in configs if (size := _whole(config.get("block_size"))) is not None]
    is_sglang = any(name.startswith("sglang:") for name in by_name)
    is_vllm = bool(configs) or any(name.startswith("vllm:") for name in by_name)
    prompts = counts.get("prompt_tokens")
    return EngineMetrics(
        kind="vllm" if is_vllm else "sglang" if is_sglang else None,
        block_size=max(sizes, default=None),
        capacity_tokens=_capacity_tokens(configs) or _count(counts.get("capacity_tokens")) or None,
        caches_prefixes=_caches_prefixes(configs),
        queried_tokens=counts.get("queries", prompts if "cached_tokens" in counts else None),
        hit_tokens=counts.get("hits", counts.get("cached_tokens")),
        computed_tokens=None if prompts is None else prompts + counts.get("generation_tokens", 0.0),
        num_running=_count(counts.get("running")),
        num_waiting=_count(counts.get("waiting")),
        started_at=counts.get("started_at"),
    )


def _samples(body: bytes) -> Iterator[tuple[str, str, float]]:
    """Name, labels and value of each sample with a name of interest and a finite, non-negative value."""
    text = b"\n" + body
    for name in (*_COUNTS, _CACHE_CONFIG):
        wanted = b"\n" + name.encode()
        at = text.find(wanted)
        while at >= 0:
            begin = at + len(wanted)
            end = text.find(b"\n", begin, begin + _MOST_LINE_BYTES)
            line = text[begin : end if end >= 0 else begin + _MOST_LINE_BYTES]
            sample = _SAMPLE.fullmatch(line.decode(errors="replace"))
            if sample is not None and (value := _value(sample[2])) is not None:
                yield name, sample[1] or "", value
            at = text.find(wanted, begin)


def _value(text: str) -> float | None:
    try:
        value = float(text)
    except ValueError:
        return None
    return value if math.isfinite(value) and value >= 0.0 else None


def _capacity_tokens(configs: list[Mapping[str, str]]) -> int | None:
    """Of all ranks together; None unless each of them tells it."""
    total = 0
    for config in configs:
        size, blocks = _whole(config.get("block_size")), _whole(config.get("num_gpu_blocks"))
        tokens = _whole(config.get("kv_cache_size_tokens"))
        if tokens is not None:
            total += tokens  # of a hybrid model less than its blocks, which layers of several kinds share
        elif size is not None and blocks is not None:
            total += size * blocks
        else:
            return None
    return total or None


def _caches_prefixes(configs: list[Mapping[str, str]]) -> bool | None:
    told = {config.get("enable_prefix_caching", "").lower() for config in configs}
    return True if told == {"true"} else False if told == {"false"} else None


def _whole(text: str | None) -> int | None:
    """A positive whole number of a label; they also say "None"."""
    if text is None or not text.isascii() or not text.isdecimal() or len(text) > 15:
        return None
    return int(text) or None


def _count(value: float | None) -> int | None:
    return None if value is None or value > _MOST_BLOCKS else round(value)
