"""The simulated engine draws what the torch engine's sampler would draw from the same logits."""

from __future__ import annotations

import pytest
import torch

from prefixcache.protocol import Sampling
from tests.support.requests import sample_spec
from tests.support.seeds import seeded
from worker.runner import Drawn
from worker.sampler import sample
from worker.sim_model import FLOOR_LOGIT, VOCAB_SIZE, next_logits
from worker.sim_sampler import draw


def test_random_requests_get_the_same_token_and_log_probabilities() -> None:
    random = seeded("sim sampler")
    for _ in range(300):
        output = [random.choice(b"abcdefghijklmnopqrstuvwxyz ,.") for _ in range(random.randrange(12))]
        logits = next_logits(random.randbytes(8), output)
        sampling = Sampling(
            seed=random.getrandbits(64),
            temperature=random.choice([0.0, random.uniform(0.2, 2.0)]),
            top_k=random.choice([None, random.randrange(1, 30)]),
            top_p=random.choice([1.0, random.uniform(0.01, 0.999)]),
            min_p=random.choice([0.0, random.random()]),
            presence_penalty=random.choice([0.0, random.uniform(-2, 2)]),
            frequency_penalty=random.choice([0.0, random.uniform(-2, 2)]),
            repetition_penalty=random.choice([1.0, random.uniform(0.5, 2)]),
            logit_bias=random.choice([{}, {random.randrange(VOCAB_SIZE): random.uniform(-20, 100)}]),
            min_tokens=random.choice([0, 6]),
            top_logprobs=5,
        )
        spec = sample_spec(sampling, prompt=[*b"some of it"], output=output, stop_token_ids=[258])
        dense = torch.full((1, VOCAB_SIZE), FLOOR_LOGIT, dtype=torch.float64)
        for token, logit in logits.items():
            dense[0, token] = logit
        [reference] = sample(dense, [spec])
        result = draw(logits, spec)
        assert isinstance(reference, Drawn) and reference.logprobs is not None and result.logprobs is not None
        assert result.token_id == reference.token_id, (spec, logits)
        assert [token for token, _ in result.logprobs.top] == [token for token, _ in reference.logprobs.top]
        logprobs, expected = (
            [one.logprob, *(logprob for _, logprob in one.top)] for one in (result.logprobs, reference.logprobs)
        )
        assert logprobs == pytest.approx(expected, rel=1e-4, abs=1e-4)
