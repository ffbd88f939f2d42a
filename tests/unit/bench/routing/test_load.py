"""The chats of the routing benchmark, and what is counted of their answers."""

from __future__ import annotations

from dataclasses import replace

from tests.bench.routing.load import Tally, new_chats
from tests.bench.routing.sizes import FULL

WORKLOAD = FULL.workload


def test_a_seed_always_gives_the_same_chats_and_another_one_others() -> None:
    def said(seed: int) -> list[str]:
        chats = new_chats(WORKLOAD, seed)
        for chat in chats:
            chat.ask(WORKLOAD.user_words)
        return [message["content"] for chat in chats for message in chat.messages]

    assert said(1) == said(1)
    assert not set(said(1)) & set(said(2))


def test_chats_share_few_system_prompts_and_nothing_else() -> None:
    chats = new_chats(WORKLOAD, 3)
    for chat in chats:
        chat.ask(WORKLOAD.user_words)
    systems = {chat.messages[0]["content"] for chat in chats}
    assert len(systems) == WORKLOAD.num_systems
    assert all(len(system.split()) == WORKLOAD.system_words + 2 for system in systems)
    assert len({chat.messages[1]["content"] for chat in chats}) == len(chats) == WORKLOAD.num_chats


def test_a_salt_keeps_chats_apart_and_as_long() -> None:
    one, other = (new_chats(WORKLOAD, 3, salt) for salt in (("red", "blue"), ("blue", "red")))
    assert not {chat.messages[0]["content"] for chat in one} & {chat.messages[0]["content"] for chat in other}
    assert [len(chat.messages[0]["content"]) for chat in one] == [len(chat.messages[0]["content"]) for chat in other]


def test_what_a_chat_says_does_not_depend_on_the_others() -> None:
    alone = new_chats(replace(WORKLOAD, num_chats=1), 1)[0]
    first = new_chats(WORKLOAD, 1)[0]
    for chat in (alone, first):
        chat.ask(5)
        chat.messages.append({"role": "assistant", "content": "yes"})
        chat.ask(5)
    assert alone.messages == first.messages
    assert alone.messages[1]["content"].startswith("Turn 0 of chat 0: ")
    assert alone.messages[3]["content"].startswith("Turn 1 of chat 0: ")


def _usage(prompt_tokens: int, cached_tokens: int | None) -> dict[str, object]:
    details = None if cached_tokens is None else {"cached_tokens": cached_tokens}
    return {"prompt_tokens": prompt_tokens, "prompt_tokens_details": details}


def test_predictions_are_held_against_what_was_cached() -> None:
    tally = Tally()
    ours = {"x-prefixcache-reason": "longest_prefix", "x-prefixcache-hit-tokens": "64"}
    tally.count(ours, _usage(100, 48))
    tally.count(ours, _usage(100, 96))
    tally.count({}, _usage(100, None))
    assert (tally.prompt_tokens, tally.cached_tokens) == (300, 144)
    assert (tally.over_predicted_tokens, tally.under_predicted_tokens) == (16, 32)
    assert tally.reasons == {"longest_prefix": 2}
