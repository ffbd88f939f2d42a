"""Eight equal prompts at once through the engine on a real, tiny model: computed once, and answered alike."""

from __future__ import annotations

from tests.support.engine_harness import running_engine
from tests.support.packed_steps import runner_of
from tests.support.requests import generate
from tests.support.seeds import seeded
from tests.support.tiny_models import VOCAB_SIZE, tiny_model

EIGHT = [f"r{number}" for number in range(8)]


def test_eight_equal_prompts_compute_one_and_seven_tokens() -> None:
    random = seeded("eight equal prompts")
    prompt = [random.randrange(VOCAB_SIZE) for _ in range(2_048)]
    model = tiny_model("Llama", max_position_embeddings=4_096)
    with running_engine(
        runner_of(model, num_blocks=256), requests=[generate(name, prompt, max_tokens=4) for name in EIGHT]
    ) as running:
        running.wait_for(lambda: all(running.ending(name) for name in EIGHT), 60.0)
        usages = [running.end(name).usage for name in EIGHT]
        assert sum(usage.computed_tokens for usage in usages) == len(prompt) + 7
        assert all(each.computed_tokens + each.copied_tokens + each.cached_tokens == len(prompt) for each in usages)
        assert len({tuple(running.tokens(name)) for name in EIGHT}) == 1
        running.assert_nothing_is_held()
