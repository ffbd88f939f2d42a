"""The simulated engine's language model: made-up text of plain words, a pure function of the tokens before.

Output is bytes of words from a short list, so that every answer reads as text:

    output so far                 may follow, each with a logit drawn by hash from the whole context
    (nothing), "... the "         the first letter of any word
    "... ri"                      letters that continue a word: v, g            (river, right)
    "... river"                   blank, comma, full stop, and letters where a longer word begins so
    "... river,"                  blank
    "... river."                  blank, or the end of the answer

A different token anywhere in the context changes all logits. Answers have about 100 tokens; from ANSWER_TOKENS on
the sentence at hand is the last.
"""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Mapping, Sequence

import xxhash

from prefixcache.rendering.byte_tokenizer import BYTE_STOP_ID, BYTE_VOCAB_SIZE

ANSWER_TOKENS = 512
"""No answer goes on for more than a word or two after this many tokens."""

FLOOR_LOGIT = -50.0
"""Of every token that may not follow: low enough never to be drawn, and a logit bias of 100 still lifts it over all."""

VOCAB_SIZE = BYTE_VOCAB_SIZE

_WORDS = (
    "a about after all an and any are as at be before best between both but by can clear close cold come day deep door "
    "down each early even every far few field find first for from garden get give go good great green hand has have "
    "here high hill home hour house how if in into is it just keep kind lake land large last late leave less light "
    "like line little long look made make many may middle might more morning most much must near never new next night "
    "no not now of off often old on once one only open or other our out over part path place quiet rain right river "
    "road room same say sea second see set she short side small so some soon still stone summer sun take than that the "
    "their then there these they thing this through time to today together town tree two under until up very village "
    "wait walk warm was water way we well were what when where which while white who why will wind winter with word "
    "work world year yet you young"
).split()

REVISION = hashlib.sha256(" ".join(_WORDS).encode()).hexdigest()[:16]
"""Names the text this model makes: what two workers must share to share KV."""

_BLANK, _COMMA, _STOP = b" ,."
_LETTERS = frozenset(range(ord("a"), ord("z") + 1))
_LONGEST_WORD = max(map(len, _WORDS))

_SPREAD = 4.0
"""Logits of tokens that may follow lie in 0 .. _SPREAD, plus what stands in the next three."""
_AFTER_WORD = {_BLANK: 2.0, _COMMA: -0.5, _STOP: 0.5}
_AFTER_SENTENCE = {_BLANK: 1.0, BYTE_STOP_ID: 0.0}
_LAST_SENTENCE = 20.0
"""Added to the tokens that end an answer once it is long enough."""


def _letters_by_beginning() -> Mapping[bytes, Mapping[int, float]]:
    """Beginning of a word -> what may follow it; the empty beginning included."""
    following: defaultdict[bytes, dict[int, float]] = defaultdict(dict)
    for word in (word.encode() for word in _WORDS):
        for size in range(len(word)):
            following[word[:size]][word[size]] = 0.0
        following[word].update(_AFTER_WORD)
    return dict(following)


_FOLLOWING = _letters_by_beginning()


def next_logits(context: bytes, output: Sequence[int]) -> dict[int, float]:
    """Those after a whole sequence, packed; see `logits_after`."""
    return logits_after(xxhash.xxh3_64_digest(context), output)


def logits_after(digest: bytes, output: Sequence[int]) -> dict[int, float]:
    """Logits of the tokens that may follow, by id in ascending order; of all others FLOOR_LOGIT.

    `digest`: xxh3_64 of the whole sequence, packed. `output`: what of it was generated; its last word counts.
    """
    ends = _LAST_SENTENCE if len(output) >= ANSWER_TOKENS else 0.0
    logits: dict[int, float] = {}
    for token, preference in sorted(_candidates(output).items()):
        draw = xxhash.xxh3_64_intdigest(digest, seed=token) / 2**64
        logits[token] = preference + _SPREAD * draw + (ends if token in (_STOP, BYTE_STOP_ID) else 0.0)
    return logits


def _candidates(output: Sequence[int]) -> Mapping[int, float]:
    last = output[-1] if output else None
    if last == _STOP:
        return _AFTER_SENTENCE
    if last == _COMMA:
        return {_BLANK: 0.0}
    start = len(output)
    while start and len(output) - start <= _LONGEST_WORD and output[start - 1] in _LETTERS:
        start -= 1
    # A tail that begins no word was forced on the model: it goes on as after a word.
    return _FOLLOWING.get(bytes(list(output[start:])), _AFTER_WORD)
