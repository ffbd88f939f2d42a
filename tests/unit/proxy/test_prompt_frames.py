"""What a worker is told of a prompt, the first time and again."""

from __future__ import annotations

import itertools
import time
from typing import Any

from prefixcache.protocol import Generate, Sampling
from prefixcache.routing.base import Decision
from prefixcache.types import unpack_tokens
from proxy.expectation import Expectation
from proxy.placement import Placement
from proxy.prediction import Prompt
from proxy.prompt_frames import PromptFrames
from proxy.sampling_fields import GenerationOptions
from proxy.worker_link import WorkerLink
from tests.support.reservations import idle_link

PROMPT = Prompt(packed=bytes(4 * 100), root=7, index_hashes=[1], field="prompt")


def _placement(expectation: Expectation, max_tokens: int = 10) -> Placement[WorkerLink]:
    return Placement(
        link=idle_link("w", incarnation=5, stop_token_ids=(2, 3)),
        incarnation=5,
        decision=Decision(worker_id="w", reason="longest_prefix", hit_tokens=64),
        expectation=expectation,
        best_hit_tokens=64,
        uncached_tokens=36,
        prefill_s=0.036,
        max_tokens=max_tokens,
    )


CLAIMED = _placement(Expectation(blocks=1, claimed_blocks=1))
PENDING = _placement(Expectation(blocks=1, source="pending"))


def _frames(received_at: float = 0.0, **options: Any) -> PromptFrames:
    return PromptFrames(
        PROMPT,
        GenerationOptions(model="tiny", **options),
        request_numbers=itertools.count(10),
        received_at=received_at,
    )


def _predictions(frame: Generate) -> tuple[int | None, int]:
    return frame.predicted_hit_tokens, frame.predicted_for


def test_a_prediction_goes_along_once_by_claims_alone_and_with_the_first_choice() -> None:
    frames = _frames(n=2)
    assert _predictions(frames.frame(CLAIMED, 0, is_first=True)) == (64, 5)
    assert _predictions(frames.frame(CLAIMED, 1, is_first=True)) == (None, 0), "it reuses what the first one computes"
    assert _predictions(frames.frame(CLAIMED, 0, is_first=False)) == (None, 0)
    assert _predictions(frames.frame(PENDING, 0, is_first=True)) == (None, 0)


def test_every_frame_has_its_id_and_all_draw_alike() -> None:
    frames = _frames()
    first, again = (frames.frame(CLAIMED, 0, is_first=is_first) for is_first in (True, False))
    assert (first.id, again.id) == ("a", "b")
    assert first.sampling == again.sampling
    assert (first.root, first.prompt_ids) == (again.root, again.prompt_ids) == (7, PROMPT.packed)
    assert _frames().frame(CLAIMED, 0, is_first=True).sampling.seed != first.sampling.seed, "another prompt"
    assert _frames(seed=3).frame(CLAIMED, 0, is_first=True).sampling.seed == 3


def test_limits_are_those_of_the_worker_it_goes_to() -> None:
    frames = _frames(sampling=Sampling(seed=0, min_tokens=8), stop_token_ids=(3, 9))
    frame = frames.frame(_placement(Expectation(), max_tokens=5), 0, is_first=True)
    assert (frame.max_tokens, frame.sampling.min_tokens, frame.stop_token_ids) == (5, 5, (2, 3, 9))
    assert frames.frame(CLAIMED, 0, is_first=True).sampling.min_tokens == 8
    assert _frames(ignore_eos=True).frame(CLAIMED, 0, is_first=True).stop_token_ids == ()


def test_what_was_generated_goes_along_and_counts_against_the_limits() -> None:
    frames = _frames(sampling=Sampling(seed=0, min_tokens=12))
    first = frames.frame(CLAIMED, 0, is_first=True)
    assert (first.output_ids, first.max_tokens, first.sampling.min_tokens) == (b"", 10, 10)
    rest = frames.frame(_placement(Expectation(), max_tokens=7), 0, is_first=False, output=(5, 6, 7))
    assert tuple(unpack_tokens(rest.output_ids)) == (5, 6, 7)
    assert (rest.max_tokens, rest.sampling) == (10, first.sampling)


def test_the_wait_counts_from_the_request() -> None:
    frames = _frames(received_at=time.perf_counter() - 5.0)
    first = frames.frame(CLAIMED, 0, is_first=True).waited_s
    assert 5.0 <= first <= frames.frame(CLAIMED, 0, is_first=False).waited_s
