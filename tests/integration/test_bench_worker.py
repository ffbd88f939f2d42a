"""`make bench-worker` still runs: a smoke of it on a tiny model, and what its figures are made of."""

from __future__ import annotations

from pathlib import Path
from random import Random

import pytest
import torch

from tests.bench.worker.clock import Cost
from tests.bench.worker.decode import SAMPLINGS
from tests.bench.worker.driven_engine import driven_engine
from tests.bench.worker.plain_model import PlainModel
from tests.bench.worker.prompts import new_prompt
from tests.support.quick_bench import quick_bench
from tests.support.tiny_models import tiny_model, write_model
from worker.model_runner import TorchRunner

TITLES = ["Time to the first token", "Decode after", "Memory of a worker", "Memory of a simulated worker"]
FLOORS = (
    "step of 4 decodes, greedy: overhead over the model's forward",
    "step of 4 decodes, sampled: overhead over the model's forward",
    "decode, batch 1: step over plain transformers'",
    "worker's memory over a bare process, packed weights and its KV blocks",
    "simulated worker's memory after 200 requests over that after 100",
)
TIMEOUT_S = 240


def test_the_worker_benchmark_runs_and_writes_all_its_figures(tmp_path: Path) -> None:
    printed, content = quick_bench("worker", folder=tmp_path, timeout_s=TIMEOUT_S)
    assert "left out: vLLM: --quick" in printed
    prefill, decode, memory, _ = tables = content["tables"]
    assert all(map(str.startswith, (table["title"] for table in tables), TITLES)), tables
    assert [(row["prompt"], row["tokens"], row["cached"]) for row in prefill["rows"]] == [
        ("cold", 64, 0),
        ("cold", 256, 0),
        ("0.9 cached", 256, 224),
        ("sent again", 256, 240),
    ]
    assert [row["batch"] for row in decode["rows"]] == [1, 4]
    # Times of a tiny model are noise, but what lies within a step is there.
    assert all(row[f"over its forward, {name}"][0] > 0 for row in decode["rows"] for name in SAMPLINGS), decode
    assert [row["prompts"] for row in memory["rows"]] == [0, 2, 4, 6, 8]
    assert all(row["worker MB"] > row["bare process MB"] > 100 for row in memory["rows"]), memory
    floors = {floor["what"]: floor["value"] for floor in content["floors"]}
    assert all(floors[name] > 0 for name in FLOORS), floors


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("models") / "tiny"
    made.mkdir()
    return write_model(tiny_model("Llama"), made)


def test_plain_decode_goes_on_as_its_model_would_and_can_be_repeated(folder: Path) -> None:
    """A batch padded on the left draws what each prompt draws alone; both twice, for the cache is taken back."""
    torch.set_num_threads(1)
    plain = PlainModel(folder, torch.float32)
    prompts = [new_prompt(Random(number), 20 + 7 * number) for number in range(3)]
    alone = [_drawn(plain, [prompt]) for prompt in prompts]
    assert [row for (row,) in alone] == _drawn(plain, prompts)


def _drawn(plain: PlainModel, prompts: list[list[int]]) -> list[list[int]]:
    """The first six tokens of each answer."""
    batch = plain.prefilled(prompts)
    first, second = batch.decode(5), batch.decode(5)
    assert first.tokens == second.tokens and len(first.costs) == len(second.costs) == 5
    return first.tokens


def test_the_driven_engine_tells_steps_of_the_whole_batch_and_the_forwards_in_them(folder: Path) -> None:
    prompts = [new_prompt(Random(number), 20) for number in range(3)]
    with driven_engine(folder, "float32", 32) as engine:
        answers = engine.ask(*prompts, max_tokens=6)
        steps = list(answers.full_steps())
        assert 1 <= len(steps) <= 5 and sum(drawn for _, drawn in answers.steps) == 18
        for began, ended in steps:
            assert engine.forward_within(began, ended).wall_s < (ended - began).wall_s
        with pytest.raises(AssertionError, match="0 tokens were cached, expected were 16"):
            engine.first_token(new_prompt(Random(9), 20), cached=16)
        assert engine.first_token(prompts[0], cached=16).cpu_s > 0


def test_a_request_that_fails_is_no_measurement(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> None:
        raise RuntimeError("a broken step")

    with driven_engine(folder, "float32", 32) as engine:
        monkeypatch.setattr(TorchRunner, "execute", broken)
        with pytest.raises(AssertionError, match="a broken step"):
            engine.ask(new_prompt(Random(1), 20))


def test_a_median_is_taken_of_each_clock_for_itself() -> None:
    costs = [Cost(cpu_s=1.0, wall_s=9.0), Cost(cpu_s=2.0, wall_s=7.0), Cost(cpu_s=3.0, wall_s=8.0)]
    assert Cost.median(costs) == Cost(cpu_s=2.0, wall_s=8.0)
