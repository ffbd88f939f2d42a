"""What is read out of the metrics of engines, and out of anything else."""

from __future__ import annotations

import time
from dataclasses import fields

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from proxy.engines.engine_metrics import EngineMetrics, read_metrics
from tests.support.engine_answers import OLD_VLLM_METRICS, SGLANG_METRICS, VLLM_METRICS


def test_vllm() -> None:
    assert read_metrics(VLLM_METRICS) == EngineMetrics(
        kind="vllm",
        block_size=16,
        capacity_tokens=5600 * 16,
        caches_prefixes=True,
        queried_tokens=1_341_177,
        hit_tokens=1_020_544,
        computed_tokens=62_000,
        num_running=3,
        num_waiting=1,
        started_at=1_764_390_123.45,
    )


def test_old_vllm() -> None:
    assert read_metrics(OLD_VLLM_METRICS) == EngineMetrics(
        kind="vllm",
        block_size=16,
        capacity_tokens=573 * 16,
        caches_prefixes=False,
        queried_tokens=800,
        hit_tokens=200,
        num_running=2,
    )


def test_sglang() -> None:
    assert read_metrics(SGLANG_METRICS) == EngineMetrics(
        kind="sglang",
        queried_tokens=4_096,
        hit_tokens=3_168,
        computed_tokens=4_608,
        num_running=4,
        num_waiting=2,
    )


@pytest.mark.parametrize("name", ["vllm:prefix_cache_queries", "vllm:gpu_prefix_cache_queries"])
@pytest.mark.parametrize("suffix", ["", "_total"])
def test_each_spelling_of_a_counter(name: str, suffix: str) -> None:
    text = f"{name}{suffix} 12\n{name.replace('queries', 'hits')}{suffix} 5\n".encode()
    read = read_metrics(text)
    assert (read.queried_tokens, read.hit_tokens) == (12, 5)


def test_two_spellings_of_one_counter_are_not_added_up() -> None:
    both = b"vllm:gpu_prefix_cache_queries_total 7\nvllm:prefix_cache_queries_total 9\nvllm:prefix_cache_queries 9\n"
    assert read_metrics(both).queried_tokens == 9


def test_data_parallel_ranks_are_one_cache_each() -> None:
    config = 'vllm:cache_config_info{{block_size="16",engine="{}",num_gpu_blocks="{}"}} 1\n'
    queries = 'vllm:prefix_cache_queries_total{{engine="{}"}} {}\n'
    text = config.format(0, 100) + config.format(1, 200) + queries.format(0, 5) + queries.format(1, 7)
    read = read_metrics(text.encode())
    assert (read.capacity_tokens, read.queried_tokens) == (4_800, 12)
    unknown = read_metrics((config.format(0, 100) + config.format(1, "None")).encode())
    assert (unknown.block_size, unknown.capacity_tokens) == (16, None), "half of a capacity is none"


def test_a_capacity_in_tokens_is_the_better_one() -> None:
    config = b'vllm:cache_config_info{block_size="16",kv_cache_size_tokens="1000",num_gpu_blocks="100"} 1\n'
    assert read_metrics(config).capacity_tokens == 1_000


@pytest.mark.parametrize(
    "line",
    [
        b"vllm:prefix_cache_queries_total NaN",
        b"vllm:prefix_cache_queries_total +Inf",
        b"vllm:prefix_cache_queries_total -1",
        b"vllm:prefix_cache_queries_total",
        b"vllm:prefix_cache_queries_total{a=",
        b"vllm:prefix_cache_queries_total{} ",
        b"vllm:prefix_cache_queries_totals 5",
        b"# vllm:prefix_cache_queries_total 5",
        b"vllm:prefix_cache_queries_created 5",
    ],
)
def test_what_is_no_sample_says_nothing(line: bytes) -> None:
    assert read_metrics(line + b"\n").queried_tokens is None


@pytest.mark.parametrize("value", ["None", "", "-16", "1e3", "0", "16.0", "9" * 400, "\u0661"])
def test_labels_that_are_no_count(value: str) -> None:
    read = read_metrics(f'vllm:cache_config_info{{block_size="{value}",num_gpu_blocks="{value}"}} 1'.encode())
    assert read.block_size is None and read.capacity_tokens is None


def test_labels_may_hold_anything() -> None:
    text = b'vllm:num_requests_running{model_name="a } b{ \\"x\\" ,c=\\"d"} 4 1764390123\n'
    assert read_metrics(text).num_running == 4


def test_values_that_no_count_can_have() -> None:
    assert read_metrics(b"vllm:num_requests_running 1e300\n").num_running is None


_NAMES = [line.split(b" ")[0].split(b"{")[0] for line in (VLLM_METRICS + SGLANG_METRICS).splitlines() if line]
_PIECES = st.one_of(
    st.sampled_from([*_NAMES, b'{block_size="', b'"}', b"{", b"}", b" ", b"\n", b"1", b"1e9", b"NaN", b"_total"]),
    st.binary(max_size=8),
)


@given(st.lists(_PIECES, max_size=40).map(b"".join))
@example(b"\xff\xfe")
@example(b"vllm:cache_config_info{} 1")
def test_any_bytes_give_values_or_none(body: bytes) -> None:
    read = read_metrics(body)
    for field in fields(read):
        value = getattr(read, field.name)
        assert value is None or isinstance(value, bool | str) or value >= 0, field.name


@given(st.binary(max_size=200), st.integers(0, len(VLLM_METRICS)))
def test_a_text_that_was_cut_and_goes_on_as_something_else(tail: bytes, cut: int) -> None:
    read_metrics(VLLM_METRICS[:cut] + tail)


@pytest.mark.parametrize("labels", ["a" * 15_000, 'a="' * 5_000, 'a="\\' * 3_000, "} " * 8_000, ',a="b"' * 2_000])
def test_lines_made_to_take_long_do_not(labels: str) -> None:
    """A pattern that goes back to every character of a name took minutes for these."""
    page = f"vllm:cache_config_info{{{labels}}} 1\nvllm:num_requests_running{{{labels}}} 1\n".encode() * 20
    begun_s = time.process_time()
    read_metrics(page)
    assert time.process_time() - begun_s < 1.0
