"""Prompts of a given size whose text never repeats itself."""

from __future__ import annotations

import random

_WORDS = (
    "river stone lantern harbor copper meadow signal winter garden bridge quiet window letter engine forest "
    "number silver morning border island paper market thunder violet kitchen captain mirror season ladder pocket"
).split()


def filler(num_words: int, seed: int) -> str:
    """`num_words` words in sentences of twelve; about 1.1 tokens a word with the demo model's tokenizer."""
    chosen = random.Random(seed)
    words = [chosen.choice(_WORDS) for _ in range(num_words)]
    sentences = [" ".join(words[start : start + 12]).capitalize() + "." for start in range(0, num_words, 12)]
    return " ".join(sentences)
