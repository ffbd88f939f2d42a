"""What this proxy learns of one engine from its answers: how fast it prefills, and how many tokens a byte of prompt is.

Without a tokenizer a prompt is known in bytes of its canonical request; the engine's own count of its tokens, in the
usage of the answer, says what they were worth.
"""

from __future__ import annotations

import math

from prefixcache.routing.prefill_rate import PrefillRate

FORGOTTEN_PREFILL_TOKENS = 65_536
"""Some dozen prompts: their times hold more noise than those of an engine's own steps."""
FIRST_TOKENS_PER_BYTE = 0.25
"""English text."""
FIRST_WEIGHT_BYTES = 2_048
"""What that first guess weighs against what was counted."""
FORGOTTEN_BYTES = 1_048_576
FEWEST_TOKENS_PER_BYTE = 1 / 64
MOST_TOKENS_PER_BYTE = 2.0
"""A count beyond these is of a prompt whose tokens do not come from its bytes, as those of an image do not."""


class TokensPerByte:
    """Tokens by bytes over the latest prompts, those of equal length weighing alike."""

    def __init__(self) -> None:
        self._bytes = float(FIRST_WEIGHT_BYTES)
        self._tokens = FIRST_TOKENS_PER_BYTE * FIRST_WEIGHT_BYTES

    @property
    def value(self) -> float:
        return self._tokens / self._bytes

    @property
    def weight(self) -> float:
        """Bytes that it was learnt from, the first guess included."""
        return self._bytes

    def observe(self, *, prompt_tokens: int, prompt_bytes: int) -> None:
        if not FEWEST_TOKENS_PER_BYTE * prompt_bytes <= prompt_tokens <= MOST_TOKENS_PER_BYTE * prompt_bytes:
            return
        kept = math.exp(-prompt_bytes / FORGOTTEN_BYTES)
        self._bytes = self._bytes * kept + prompt_bytes
        self._tokens = self._tokens * kept + prompt_tokens


class PrefillEstimate:
    """Of one engine."""

    def __init__(self) -> None:
        self._rate = PrefillRate(forgotten_tokens=FORGOTTEN_PREFILL_TOKENS)
        self._tokens_per_byte = TokensPerByte()

    @property
    def prefill_rate(self) -> float | None:
        """Uncached prompt tokens a second; None while nothing was measured."""
        return self._rate.tokens_per_s

    @property
    def tokens_per_byte(self) -> float:
        return self._tokens_per_byte.value

    @property
    def tokens_per_byte_weight(self) -> float:
        """What it counts against that of another engine with the same tokenizer."""
        return self._tokens_per_byte.weight

    def observe_prefill(self, *, uncached_tokens: int, seconds: float) -> None:
        """From the moment at which the engine had nothing else to prefill to the first byte of the answer."""
        if uncached_tokens > 0 and seconds > 0:
            self._rate.observe(tokens=uncached_tokens, seconds=seconds)

    def observe_prompt(self, *, prompt_tokens: int, prompt_bytes: int) -> None:
        """What the engine counted of a prompt, and the bytes of its canonical request."""
        if prompt_tokens > 0 and prompt_bytes > 0:
            self._tokens_per_byte.observe(prompt_tokens=prompt_tokens, prompt_bytes=prompt_bytes)
