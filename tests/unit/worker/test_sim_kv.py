"""The simulated KV cache: what is read back is what was written there, or it is a fault."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from prefixcache.errors import WorkerFault
from prefixcache.types import pack_tokens
from tests.support.seeds import seeded
from worker.runner import StepShare
from worker.sim_kv import SimKV


def share(token_ids: Sequence[int], start: int, table: Sequence[int]) -> StepShare:
    return StepShare(token_ids=token_ids, start=start, block_table=table, sample=None)


def kv() -> SimKV:
    return SimKV(num_blocks=8, block_size=4)


def test_random_chunks_read_back_whole() -> None:
    random = seeded("sim kv")
    for _ in range(200):
        cache = SimKV(num_blocks=40, block_size=4)
        tokens = [random.randrange(259) for _ in range(random.randrange(1, 100))]
        table = random.sample(range(40), 25)
        start = 0
        while start < len(tokens):
            end = random.randrange(start, len(tokens)) + 1
            chunk = share(tokens[start:end], start, table)
            cache.write(chunk)
            assert cache.read(chunk) == pack_tokens(tokens[:end])
            start = end


def test_two_sequences_share_a_prefix() -> None:
    cache = kv()
    cache.write(share([1, 2, 3, 4, 5], 0, [6, 2]))
    cache.write(share([9], 4, [6, 3]))
    assert cache.read(share([9], 4, [6, 3])) == pack_tokens([1, 2, 3, 4, 9])
    assert cache.read(share([5], 4, [6, 2])) == pack_tokens([1, 2, 3, 4, 5])


def test_a_block_taken_over_holds_only_the_new_content() -> None:
    cache = kv()
    cache.write(share([1, 2, 3, 4], 0, [0]))
    cache.write(share([7, 8], 0, [0]))
    assert cache.read(share([7, 8], 0, [0])) == pack_tokens([7, 8])


def test_a_copied_beginning_is_read_and_leaves_the_other_block_as_it_was() -> None:
    cache = kv()
    cache.write(share([1, 2, 3, 4, 5, 6, 7], 0, [0, 1]))
    copied = StepShare(token_ids=[9, 8, 7], start=6, block_table=[0, 2, 3], sample=None, copied_block=1)
    cache.write(copied)
    assert cache.read(copied) == pack_tokens([1, 2, 3, 4, 5, 6, 9, 8, 7])
    assert cache.read(share([7], 6, [0, 1])) == pack_tokens([1, 2, 3, 4, 5, 6, 7])


def test_a_beginning_copied_from_another_place_or_a_shorter_one_is_a_fault() -> None:
    cache = kv()
    cache.write(share([1, 2, 3, 4, 5, 6, 7], 0, [0, 1]))
    for start, source in ((6, 0), (8 - 1, 5)):
        with pytest.raises(WorkerFault, match="lacks the tokens before slot"):
            cache.write(StepShare(token_ids=[9], start=start, block_table=[0, 2], sample=None, copied_block=source))


def test_a_block_at_another_place_is_a_fault() -> None:
    cache = kv()
    cache.write(share([1, 2, 3, 4, 5, 6, 7, 8], 0, [0, 1]))
    with pytest.raises(WorkerFault, match=r"places \[1, 0\]"):
        cache.read(share([4], 7, [1, 0]))


def test_a_block_that_lacks_tokens_is_a_fault() -> None:
    cache = kv()
    cache.write(share([1, 2], 0, [0]))
    with pytest.raises(WorkerFault, match="lacks the tokens before slot 3"):
        cache.write(share([4], 3, [0]))
    cache.write(share([5], 4, [0, 1]))
    with pytest.raises(WorkerFault, match="hold 3 tokens, not 5"):
        cache.read(share([5], 4, [0, 1]))


def test_a_block_never_written_is_a_fault() -> None:
    cache = kv()
    cache.write(share([5], 4, [0, 1]))
    with pytest.raises(WorkerFault, match=r"places \[None, 1\]"):
        cache.read(share([5], 4, [0, 1]))


def test_what_a_failed_share_was_to_write_is_gone_and_nothing_else() -> None:
    cache = kv()
    cache.write(share([1, 2, 3, 4, 5, 6, 7, 8], 0, [0, 1]))
    cache.spoil(share([5, 6, 7, 8], 4, [0, 1]))
    assert cache.read(share([4], 3, [0, 1])) == pack_tokens([1, 2, 3, 4])
    with pytest.raises(WorkerFault):
        cache.read(share([8], 7, [0, 1]))
