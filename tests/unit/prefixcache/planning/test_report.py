"""A plan in words and as JSON."""

from __future__ import annotations

import pytest

from prefixcache.planning.kv_layout import KVLayout, LayerKV
from prefixcache.planning.plan import Plan
from prefixcache.planning.report import PlanReport

WIDE = LayerKV(num_kv_heads=8, key_dim=128, value_dim=128)
NARROW = LayerKV(num_kv_heads=1, key_dim=24, value_dim=16)
GIB = 2**30


def report(
    *,
    layers: tuple[LayerKV, ...] = (WIDE,) * 32,
    num_blocks: int = 4_096,
    weights: int | None = 16 * GIB,
    memory: int | None = 24 * GIB,
    workers: int = 1,
    context: int = 4_096,
    shared: int = 1_024,
) -> PlanReport:
    plan = Plan(
        layout=KVLayout(layers=layers),
        element_bytes=2,
        max_positions=8_192,
        num_blocks=num_blocks,
        weights_bytes=weights,
        memory_bytes=memory,
    )
    return PlanReport(
        model="big", dtype="bfloat16", plan=plan, num_workers=workers, context_tokens=context, shared_tokens=shared
    )


WHOLE = """\
model             big, bfloat16
KV of a token     131,072 bytes: 32 layers x 8 KV heads x (128 + 128) x 2 bytes
KV of a block     2,097,152 bytes: 16 tokens
weights           16.0 GiB
KV cache          8.00 GiB: 4,096 blocks, 65,536 tokens
longest sequence  8,192 tokens, of 8,192 that the model has
memory            24.0 GiB: 0 B left besides weights and KV cache
at 4,096 tokens   16 requests at once, 21 that share their first 1,024 tokens; on 2 workers 32 and 42

context  blocks  KV memory  requests at once  sharing 1,024  on 2 workers  sharing
  1,024      64    128 MiB                64              -           128        -
  2,048     128    256 MiB                32             63            64      126
  4,096     256    512 MiB                16             21            32       42
  8,192     512   1.00 GiB                 8              9            16       18"""


def test_the_whole_of_it() -> None:
    assert report(workers=2).text() == WHOLE


def line(text: str, name: str) -> str:
    return next(line.removeprefix(name).strip() for line in text.splitlines() if line.startswith(name))


def test_layers_of_several_kinds() -> None:
    text = report(layers=(WIDE, NARROW, WIDE)).text()
    assert line(text, "KV of a token") == (
        "8,272 bytes: (2 layers x 8 KV heads x (128 + 128) + 1 layer x 1 KV head x (24 + 16)) x 2 bytes"
    )


def test_what_is_not_known_is_not_made_up() -> None:
    text = report(weights=None, memory=10 * GIB).text()
    assert line(text, "weights") == "not at hand"
    assert line(text, "memory") == "10.0 GiB: 2.00 GiB left for the weights and all else"
    assert "\nmemory " not in report(memory=None).text()


def test_a_context_that_does_not_fit_says_what_it_takes() -> None:
    text = report(num_blocks=100).text()
    assert line(text, "at 4,096 tokens") == "no request fits: that takes 256 blocks, 312 MiB more"
    assert line(text, "longest sequence") == "1,600 tokens, of 8,192 that the model has"


@pytest.mark.parametrize(("num_blocks", "told"), [(64 * 256, False), (64 * 257, True)])
def test_the_most_that_run_at_once_is_told_where_memory_is_not_the_limit(num_blocks: int, told: bool) -> None:
    text = report(num_blocks=num_blocks, memory=None, shared=0).text()
    assert ("A worker runs at most 256 requests at once; more of them wait." in text) is told


def test_without_a_prefix_in_common_sharing_is_nothing_else() -> None:
    assert line(report(shared=0).text(), "at 4,096 tokens") == "16 requests at once"


def test_figures_are_about_one_worker() -> None:
    figures = report(workers=2).figures()
    assert figures["context"] == {
        "context_tokens": 4_096,
        "num_blocks": 256,
        "kv_bytes": GIB // 2,
        "num_requests": 16,
        "num_requests_sharing": 21,
    }
    assert [row["context_tokens"] for row in figures["contexts"]] == [1_024, 2_048, 4_096, 8_192]
    assert figures["contexts"][0]["num_requests_sharing"] is None
    del figures["context"], figures["contexts"]
    assert figures == {
        "model": "big",
        "dtype": "bfloat16",
        "num_workers": 2,
        "kv_bytes_per_token": 131_072,
        "kv_bytes_per_block": 2_097_152,
        "block_size_tokens": 16,
        "num_blocks": 4_096,
        "num_tokens": 65_536,
        "kv_bytes": 8 * GIB,
        "weights_bytes": 16 * GIB,
        "memory_bytes": 24 * GIB,
        "left_bytes": 0,
        "longest_sequence_tokens": 8_192,
        "shared_prefix_tokens": 1_024,
    }
