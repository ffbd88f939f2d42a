"""What the registries promise to those who read them: names, prefixes, series that are there from the start."""

from __future__ import annotations

import os

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry

import prefixcache
from prefixcache.errors import Overloaded, PrefixCacheError, RequestError, Unavailable, WorkerFault
from prefixcache.metrics import REUSES, SERVER_ERROR_CODES, ProxyMetrics, WorkerMetrics, misses_of, reuse_of


def names(registry: CollectorRegistry) -> set[str]:
    return {family.name for family in registry.collect()}


def test_proxy_and_worker_share_no_name_and_all_are_ours() -> None:
    proxy, worker = names(ProxyMetrics().registry), names(WorkerMetrics().registry)
    assert not proxy & worker
    assert all(name.startswith("prefixcache_") for name in proxy | worker)


def subclasses(kind: type[PrefixCacheError]) -> set[type[PrefixCacheError]]:
    return {kind}.union(*(subclasses(each) for each in kind.__subclasses__()))


def test_every_error_of_the_server_is_counted_from_the_start() -> None:
    told = subclasses(Unavailable) | subclasses(WorkerFault)
    assert set(SERVER_ERROR_CODES) == {str(vars(each).get("code") or each.code) for each in told} | {"internal_error"}  # type: ignore[attr-defined]
    assert not set(SERVER_ERROR_CODES) & {each.code for each in subclasses(RequestError)}  # type: ignore[attr-defined]
    registry = ProxyMetrics().registry
    for code in SERVER_ERROR_CODES:
        assert registry.get_sample_value("prefixcache_request_errors_total", {"code": code}) == 0
    assert Overloaded.code in SERVER_ERROR_CODES


@pytest.mark.parametrize(
    ("prompt_tokens", "cached_tokens", "reuse"),
    [(100, 0, "none"), (0, 0, "none"), (100, 1, "part"), (100, 49, "part"), (100, 50, "most"), (100, 99, "most")],
)
def test_reuse(prompt_tokens: int, cached_tokens: int, reuse: str) -> None:
    assert reuse in REUSES
    assert reuse_of(prompt_tokens=prompt_tokens, cached_tokens=cached_tokens) == reuse


def test_ttft_by_reuse_is_apart() -> None:
    metrics = ProxyMetrics()
    metrics.observe_reuse("m", 0.2, prompt_tokens=100, cached_tokens=90)
    metrics.observe_reuse("m", 3.0, prompt_tokens=100, cached_tokens=0)
    read = metrics.registry.get_sample_value
    name = "prefixcache_time_to_first_token_by_reuse_seconds_sum"
    assert read(name, {"model": "m", "reuse": "most"}) == 0.2
    assert read(name, {"model": "m", "reuse": "none"}) == 3.0
    assert read(name, {"model": "m", "reuse": "part"}) is None


@pytest.mark.parametrize(
    ("cached", "hit", "best", "misses"),
    [
        (0, 0, 0, (100, 0, 0)),
        (64, 64, 64, (36, 0, 0)),
        (0, 0, 80, (20, 80, 0)),  # another one had it and more ahead
        (16, 64, 64, (36, 0, 48)),  # evicted meanwhile
        (16, 48, 80, (20, 32, 32)),
        (96, 64, 80, (4, 0, 0)),  # not announced yet
        (70, 64, 80, (20, 10, 0)),
        (0, 128, 192, (0, 0, 100)),  # estimates may be longer than the prompt
    ],
)
def test_misses(cached: int, hit: int, best: int, misses: tuple[int, int, int]) -> None:
    assert misses_of(prompt_tokens=100, cached_tokens=cached, hit_tokens=hit, best_hit_tokens=best) == misses


@given(*[st.integers(0, 300)] * 4)
def test_misses_are_what_was_computed(prompt: int, cached: int, hit: int, best: int) -> None:
    cached = min(cached, prompt)
    tokens = misses_of(prompt_tokens=prompt, cached_tokens=cached, hit_tokens=hit, best_hit_tokens=best)
    assert min(tokens) >= 0 and sum(tokens) == prompt - cached


def test_a_process_tells_who_it_is() -> None:
    proxy, worker = ProxyMetrics().registry, WorkerMetrics()
    assert proxy.get_sample_value("prefixcache_proxy_build_info", {"version": prefixcache.__version__}) == 1
    worker.identify(worker="w1", model="m")
    labels = {"version": prefixcache.__version__, "worker": "w1", "model": "m"}
    assert worker.registry.get_sample_value("prefixcache_worker_build_info", labels) == 1


@pytest.mark.skipif(not os.path.exists("/proc/self/stat"), reason="no /proc")
def test_a_process_tells_its_memory_and_its_start() -> None:
    for registry, name in ((ProxyMetrics().registry, "proxy"), (WorkerMetrics().registry, "worker")):
        assert (registry.get_sample_value(f"prefixcache_{name}_process_resident_memory_bytes") or 0) > 1 << 20
        assert (registry.get_sample_value(f"prefixcache_{name}_process_start_time_seconds") or 0) > 1e9
