"""The `generate` frames of one prompt: one for each choice, and another one wherever a choice is sent again."""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterator

import msgspec

from prefixcache.protocol import Generate
from proxy.placement import Placement
from proxy.prediction import Prompt
from proxy.sampling_fields import GenerationOptions
from proxy.worker_link import WorkerLink


class PromptFrames:
    """Of a prompt with its options; every frame of it draws by the same seed."""

    def __init__(
        self, prompt: Prompt, options: GenerationOptions, *, request_numbers: Iterator[int], received_at: float
    ) -> None:
        """`request_numbers`: of this process, each taken once; `received_at` by time.perf_counter()."""
        self._prompt = prompt
        self._options = options
        self._request_numbers = request_numbers
        self.received_at = received_at
        # One for each prompt: the same prompt given twice is to be answered in two ways.
        self._seed = options.seed if options.seed is not None else secrets.randbits(64)

    @property
    def num_choices(self) -> int:
        return self._options.n

    def frame(self, placement: Placement[WorkerLink], choice: int, *, is_first: bool) -> Generate:
        """To be sent now. A prediction goes along only with the first frame of the first choice.

        The other choices reuse what that one computes, and one that is sent again goes by what was known before.
        """
        options = self._options
        model_stop_ids = () if options.ignore_eos else placement.link.record.stop_token_ids
        predicted = placement.claimed_hit_tokens if is_first and choice == 0 else None
        return Generate(
            id=f"{next(self._request_numbers):x}",
            root=self._prompt.root,
            prompt_ids=self._prompt.packed,
            sampling=msgspec.structs.replace(
                options.sampling,
                seed=self._seed,
                min_tokens=min(options.sampling.min_tokens, placement.max_tokens),
            ),
            stop_token_ids=tuple(dict.fromkeys((*model_stop_ids, *options.stop_token_ids))),
            choice=choice,
            max_tokens=placement.max_tokens,
            waited_s=time.perf_counter() - self.received_at,
            predicted_hit_tokens=predicted,
            predicted_for=placement.incarnation if predicted is not None else 0,
        )
