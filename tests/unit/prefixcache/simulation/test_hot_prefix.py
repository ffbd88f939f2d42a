"""Skew of prefixes."""

from __future__ import annotations

import pytest

from prefixcache.simulation.hot_prefix import with_hot_prefix
from prefixcache.simulation.setup import hot
from tests.unit.prefixcache.simulation.traces import BLOCK, chats, coding


def test_a_share_of_the_conversations_begins_alike() -> None:
    for each in (chats(), coding()):
        skewed = with_hot_prefix(each, 0.5, 6)
        pairs = list(zip(each.requests, skewed.requests, strict=True))
        changed = [(before, after) for before, after in pairs if before != after]
        assert 0.3 < len(changed) / len(pairs) < 0.7
        [prefix] = {after.blocks[:6] for _, after in changed}
        for before, after in changed:
            assert after.prompt_tokens == before.prompt_tokens + 6 * BLOCK
            assert after.reusable_blocks == before.reusable_blocks + 6
            assert len(after.blocks) == len(before.blocks) + 6
        old = {block for before, after in pairs if before == after for block in before.blocks}
        new = {block for _, after in changed for block in after.blocks}
        assert set(prefix) <= new and not old & new
        # Sharing among the changed ones is as it was.
        by_block = {b: a for before, after in changed for b, a in zip(before.blocks, after.blocks[6:], strict=True)}
        assert len(set(by_block.values())) == len(by_block)


def test_a_session_keeps_its_prefix() -> None:
    skewed = with_hot_prefix(coding(), 0.5, 2)
    for session in {each.session for each in skewed.requests}:
        changed = {
            before.blocks == after.blocks
            for before, after in zip(coding().requests, skewed.requests, strict=True)
            if after.session == session and before.blocks
        }
        assert len(changed) == 1


@pytest.mark.parametrize(("share", "name"), [(0.0, "coding_part"), (0.2, "coding_part+hot")])
def test_without_a_share_nothing_changes(share: float, name: str) -> None:
    [only] = hot([coding()], share, 4)
    assert only.name == name
    assert (only == coding()) is (share == 0.0)
