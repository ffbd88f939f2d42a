"""TorchRunner on tiny random models: packed, paged, chunked and cached equals a plain forward."""

from __future__ import annotations

import ctypes
import threading
from pathlib import Path

import pytest
import torch

from prefixcache.errors import ConfigError, WorkerFault
from prefixcache.protocol import Sampling
from tests.support.engine_harness import RunningEngine, running_engine
from tests.support.packed_steps import GREEDY, runner_of, worst_error
from tests.support.requests import generate, sample_spec
from tests.support.seeds import seeded
from tests.support.tiny_models import MAX_POSITIONS, NUM_LAYERS, tiny_model, write_model
from worker.model_folder import ModelFolder
from worker.model_runner import TorchRunner, load_runner
from worker.runner import Drawn, SampleSpec, StepShare

BYTES_PER_TOKEN = NUM_LAYERS * 2 * 2 * 16 * 4


@pytest.mark.parametrize("family", ["DeepseekV3", "GPT2", "Gemma2", "Llama"])
def test_logits_equal_a_plain_forward(family: str) -> None:
    assert worst_error(tiny_model(family), seeded(family)) < 1e-5


@pytest.mark.parametrize("family", ["GPT2", "Gemma2", "GptOss", "Llama", "Mistral", "Qwen3"])
def test_bfloat16_logits_are_off_by_rounding_alone(family: str) -> None:
    """By 4 % of their size, cached or not; they are compared to a forward that rounds in another order."""
    assert worst_error(tiny_model(family).bfloat16(), seeded(family)) < 0.04


def test_a_seed_gives_the_same_text_whatever_the_batch() -> None:
    """In float32: alone and cold, among five others, and on cached KV."""
    source = seeded("texts")
    prompts = [[source.randrange(3, 500) for _ in range(source.randint(1, 60))] for _ in range(6)]

    def submit(engine: RunningEngine, name: str, place: int, root: int) -> None:
        sampling = Sampling(seed=place, temperature=1.5)
        engine.submit(generate(name, prompts[place], max_tokens=24, root=root, sampling=sampling))

    with running_engine(runner_of(tiny_model("Llama"), num_blocks=80)) as engine:
        for place in range(6):
            submit(engine, f"alone {place}", place, root=place + 2)
            engine.wait_ended(f"alone {place}")
        for wave in ("together", "cached"):
            names = [f"{wave} {place}" for place in range(6)]
            for place, name in enumerate(names):
                submit(engine, name, place, root=1)
            engine.wait_ended(*names)
        for place in range(6):
            alone = engine.tokens(f"alone {place}")
            assert len(set(alone)) > 12
            assert engine.tokens(f"together {place}") == engine.tokens(f"cached {place}") == alone


@pytest.fixture(scope="module")
def runner() -> TorchRunner:
    return runner_of(tiny_model("Llama"), num_blocks=8)


def _share(*token_ids: int, block: int, sample: SampleSpec | None = GREEDY) -> StepShare:
    return StepShare(token_ids=token_ids, start=0, block_table=(block,), sample=sample)


def _drawn(runner: TorchRunner, share: StepShare) -> Drawn:
    (result,) = runner.execute([share])
    assert isinstance(result, Drawn), result
    return result


def test_results_stand_in_the_order_of_the_shares(runner: TorchRunner) -> None:
    alone = [runner.execute([_share(*ids, block=0)])[0] for ids in ((5, 6, 7), (8, 9))]
    assert all(isinstance(drawn, Drawn) for drawn in alone)
    together = runner.execute([_share(8, 9, block=2), _share(3, 4, block=1, sample=None), _share(5, 6, 7, block=0)])
    assert together == [alone[1], None, alone[0]]


def test_a_step_without_samples_draws_nothing(runner: TorchRunner) -> None:
    assert runner.execute([_share(1, 2, block=0, sample=None)]) == [None]


def test_draws_follow_seed_choice_and_index(runner: TorchRunner) -> None:
    hot = Sampling(seed=11, temperature=5.0)
    specs = [sample_spec(hot, choice=choice, index=index) for choice in range(2) for index in range(20)]
    tokens = [_drawn(runner, _share(5, 6, block=0, sample=spec)).token_id for spec in specs]
    assert tokens == [_drawn(runner, _share(5, 6, block=3, sample=spec)).token_id for spec in specs]
    assert len(set(tokens)) > 20


def test_log_probabilities_are_those_of_a_plain_forward(runner: TorchRunner) -> None:
    """Whatever the sampling does to the logits."""
    ids = [5, 6, 7, 9, 11]
    with torch.inference_mode():
        logits = tiny_model("Llama")(input_ids=torch.tensor([ids]), use_cache=False).logits[0, -1]
    truth = logits.float().log_softmax(-1)
    sampling = Sampling(
        seed=3, temperature=0.7, top_k=5, logit_bias={20: 100.0}, repetition_penalty=1.3, top_logprobs=4
    )
    spec = sample_spec(sampling, prompt=ids[:3], output=ids[3:])
    drawn = _drawn(runner, _share(*ids, block=1, sample=spec))
    assert drawn.token_id == 20
    assert drawn.logprobs is not None
    assert drawn.logprobs.logprob == pytest.approx(float(truth[20]), abs=1e-4)
    best = truth.topk(4)
    assert [token for token, _ in drawn.logprobs.top] == best.indices.tolist()
    assert [value for _, value in drawn.logprobs.top] == pytest.approx(best.values.tolist(), abs=1e-4)


def test_ids_outside_the_vocabulary_fail_their_share_alone(runner: TorchRunner) -> None:
    good = _share(5, 6, block=0)
    expected = runner.execute([good])
    results = runner.execute(
        [_share(5, 512, block=1), good, StepShare(token_ids=(), start=0, block_table=(), sample=None)]
    )
    assert isinstance(results[0], WorkerFault)
    assert results[1:2] == expected
    assert isinstance(results[2], WorkerFault)
    assert isinstance(runner.execute([_share(10**6, block=0)])[0], WorkerFault)


def test_logits_that_are_not_numbers_fail_their_share_alone() -> None:
    model = tiny_model("Llama", tie_word_embeddings=False)
    model.get_parameter("model.embed_tokens.weight")[7] = torch.nan
    runner = runner_of(model, num_blocks=2)
    good, bad = runner.execute([_share(5, 6, block=0), _share(7, 6, block=1)])
    assert isinstance(good, Drawn)
    assert isinstance(bad, WorkerFault)


def test_a_step_uses_its_threads_on_whatever_thread_it_runs(runner: TorchRunner) -> None:
    """OpenMP's setting belongs to the thread that set it, and the engine's step thread is not the one that loaded."""
    maps = Path("/proc/self/maps").read_text(encoding="utf-8").splitlines()
    openmp = ctypes.CDLL(next(line.split()[-1] for line in maps if "libgomp" in line))
    seen: list[int] = []

    def step() -> None:
        openmp.omp_set_num_threads(3)
        runner.execute([_share(5, block=0)])
        seen.append(openmp.omp_get_max_threads())

    thread = threading.Thread(target=step)
    thread.start()
    thread.join()
    assert seen == [1]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> ModelFolder:
    return ModelFolder.open(write_model(tiny_model("Llama"), tmp_path_factory.mktemp("models") / "tiny-llama"))


class TestLoadRunner:
    def test_limits_follow_memory_and_model(self, folder: ModelFolder) -> None:
        runner = load_runner(
            folder,
            dtype="float32",
            num_blocks=None,
            kv_memory=100 * 16 * BYTES_PER_TOKEN + 1,
            max_model_len=None,
            threads=1,
        )
        limits = runner.limits
        assert (limits.block_size, limits.num_blocks, limits.max_model_len) == (16, 100, MAX_POSITIONS)
        assert (limits.vocab_size, limits.kv_bytes_per_token) == (512, BYTES_PER_TOKEN)

    @pytest.mark.parametrize(("num_blocks", "max_model_len", "expected"), [(3, None, 48), (3, 40, 40), (100, 200, 200)])
    def test_the_smallest_bound_is_the_maximum_length(
        self, folder: ModelFolder, num_blocks: int, max_model_len: int | None, expected: int
    ) -> None:
        runner = load_runner(
            folder,
            dtype="bfloat16",
            num_blocks=num_blocks,
            kv_memory=0,
            max_model_len=max_model_len,
            threads=1,
        )
        assert runner.limits.max_model_len == expected
        assert runner.limits.kv_bytes_per_token == BYTES_PER_TOKEN // 2

    @pytest.mark.parametrize(
        ("num_blocks", "max_model_len", "message"),
        [
            (3, 49, "3 KV blocks hold 48 tokens"),
            (None, None, "too few for one block"),
            (100, MAX_POSITIONS + 1, "over the 256 positions that model tiny-llama has"),
        ],
    )
    def test_what_does_not_fit_is_refused(
        self, folder: ModelFolder, num_blocks: int | None, max_model_len: int | None, message: str
    ) -> None:
        with pytest.raises(ConfigError, match=message):
            load_runner(
                folder,
                dtype="float32",
                num_blocks=num_blocks,
                kv_memory=1_000,
                max_model_len=max_model_len,
                threads=1,
            )

    def test_a_loaded_runner_draws_what_the_model_says(self, folder: ModelFolder) -> None:
        runner = load_runner(folder, dtype="float32", num_blocks=4, kv_memory=0, max_model_len=None, threads=1)
        with torch.inference_mode():
            logits = tiny_model("Llama")(input_ids=torch.tensor([[5, 6, 7]]), use_cache=False).logits[0, -1]
        assert _drawn(runner, _share(5, 6, 7, block=2)).token_id == int(logits.argmax())

    def test_a_family_that_cannot_be_served_is_refused(self, tmp_path: Path) -> None:
        folder = write_model(tiny_model("Bloom"), tmp_path)
        config = (folder / "config.json").read_text(encoding="utf-8")
        (folder / "config.json").write_text(config.replace("{", '{"max_position_embeddings": 256,', 1))
        with pytest.raises(ConfigError, match=r"models of type bloom.*0 of its 4 layers"):
            load_runner(
                ModelFolder.open(folder),
                dtype="float32",
                num_blocks=4,
                kv_memory=0,
                max_model_len=None,
                threads=1,
            )
