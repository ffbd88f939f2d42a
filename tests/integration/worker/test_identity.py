"""`--deterministic`: models whose answers depend on no cut are served, others are refused by name."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from prefixcache.cpu import auto_dtype
from prefixcache.errors import ConfigError
from prefixcache.memory import parse_memory
from prefixcache.protocol import Sampling, StepEntry, TokenLogprobs
from tests.support.engine_harness import RunningEngine, running_engine
from tests.support.packed_steps import runner_of
from tests.support.requests import generate
from tests.support.seeds import seeded
from tests.support.tiny_models import MAX_POSITIONS, VOCAB_SIZE, tiny_model, write_model
from worker import identity
from worker.model_folder import ModelFolder
from worker.model_runner import TorchRunner, load_runner
from worker.runner import StepShare

FAMILIES = (
    "DeepseekV3",
    "Gemma",
    "Gemma2",
    "Gemma3Text",
    "GPT2",
    "GptOss",
    "Granite",
    "Llama",
    "Mistral",
    "Nemotron",
    "Olmo2",
    "Phi3",
    "Qwen2",
    "Qwen3",
    "Starcoder2",
)
needs_bfloat16 = pytest.mark.skipif(auto_dtype() != "bfloat16", reason="a CPU that multiplies bfloat16 itself")


def _runner(model: PreTrainedModel) -> TorchRunner:
    return runner_of(model, num_blocks=identity.NUM_BLOCKS)


class _Noise:
    """The runner's logits; where a step is `struck`, they or the K written last are off by one bit."""

    def __init__(self, runner: TorchRunner, struck: str, *, in_kv: bool = False) -> None:
        self._runner = runner
        self._struck = struck
        self._in_kv = in_kv

    def __call__(self, shares: Sequence[StepShare]) -> Tensor:
        logits = self._runner.logits(shares)
        share = shares[-1]
        is_struck = {
            "hit": share.start == 16 and len(share.token_ids) > 100,
            "chunk": share.start == 97,
            "neighbour": len(shares) == 2,
            "decode": len(share.token_ids) == 1 and share.start == 150,
        }[self._struck]
        if not is_struck:
            return logits
        if self._in_kv:
            keys = self._runner.cache.layers[2].keys
            keys[share.block_table[share.start // 16], share.start % 16, 0, 0] += 1
            return logits
        return logits + 1 if share.sample is not None else logits


def _require(model: PreTrainedModel, runner: TorchRunner, struck: str | None = None, *, in_kv: bool = False) -> None:
    logits_of = runner.logits if struck is None else _Noise(runner, struck, in_kv=in_kv)
    identity.require(model, runner.cache, logits_of, vocab_size=VOCAB_SIZE, max_model_len=MAX_POSITIONS)


@needs_bfloat16
@pytest.mark.parametrize("family", FAMILIES)
def test_bfloat16_answers_depend_on_no_cut(family: str) -> None:
    model = tiny_model(family).bfloat16()
    _require(model, _runner(model))


@needs_bfloat16
@pytest.mark.parametrize(
    ("struck", "in_kv", "finding"),
    [
        ("hit", False, "logits differ after a hit of 16 tokens"),
        ("hit", True, "K and V of layer 2 differ after a hit of 16 tokens"),
        ("chunk", True, "K and V of layer 2 differ after chunks of 7, 90 and more tokens"),
        ("neighbour", False, "logits differ beside another sequence"),
        ("decode", True, "logits differ where decodes wrote K and V"),
    ],
)
def test_each_difference_is_found(struck: str, in_kv: bool, finding: str) -> None:
    model = tiny_model("Llama").bfloat16()
    with pytest.raises(ConfigError, match=f"models of type llama in bfloat16 here: {finding}; leave it away"):
        _require(model, _runner(model), struck, in_kv=in_kv)


@needs_bfloat16
def test_what_was_computed_on_another_way_is_not_taken_for_a_hit() -> None:
    """A step that computes nothing would find everything in place."""
    model = tiny_model("Llama").bfloat16()
    runner = _runner(model)

    def lazy(shares: Sequence[StepShare]) -> Tensor:
        (share,) = shares
        return torch.empty(0, VOCAB_SIZE) if len(share.token_ids) == 80 else runner.logits(shares)

    with pytest.raises(ConfigError, match="logits differ after a hit of 80 tokens"):
        identity.require(model, runner.cache, lazy, vocab_size=VOCAB_SIZE, max_model_len=MAX_POSITIONS)


def test_a_model_with_experts_is_told_so() -> None:
    model = tiny_model("Mixtral").bfloat16()
    with pytest.raises(ConfigError, match="its experts compute rows in groups that depend on the neighbours"):
        _require(model, _runner(model), "hit")


def test_short_sequences_are_enough_for_a_trial() -> None:
    model = tiny_model("Llama").bfloat16()
    runner = _runner(model)
    for longest in (2, 16, 17, 70):
        identity.require(model, runner.cache, runner.logits, vocab_size=VOCAB_SIZE, max_model_len=longest)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> ModelFolder:
    return ModelFolder.open(write_model(tiny_model("Llama"), tmp_path_factory.mktemp("models") / "tiny-llama"))


def _told(engine: RunningEngine, name: str, prompt: list[int], *, root: int) -> list[TokenLogprobs | None]:
    """What a request is told of each token, greedily drawn."""
    sampling = Sampling(seed=0, temperature=0, top_logprobs=3)
    engine.submit(generate(name, prompt, max_tokens=20, root=root, sampling=sampling))
    engine.wait_ended(name)
    entries = [event for event in engine.events[name] if isinstance(event, StepEntry)]
    return [told for entry in entries for told in entry.logprobs or (None,)]


def _tokens(source: Random, count: int) -> list[int]:
    return [source.randrange(3, 500) for _ in range(count)]


class TestLoad:
    def _load(self, folder: ModelFolder, dtype: str, *, deterministic: bool = True) -> TorchRunner:
        return load_runner(
            folder,
            dtype=dtype,
            num_blocks=40,
            kv_memory=parse_memory("1MiB", setting="test"),
            max_model_len=None,
            threads=1,
            deterministic=deterministic,
        )

    @needs_bfloat16
    @pytest.mark.parametrize("seed", [None, "464032893/turns"], ids=["any", "a decode that torch multiplied by itself"])
    def test_warm_and_cold_answers_are_the_same_bits(self, folder: ModelFolder, seed: str | None) -> None:
        """Also of a second turn, whose prefix decodes wrote, and beside others. Log probabilities tell a bit."""
        source = seeded("turns") if seed is None else Random(seed)
        first, strangers = _tokens(source, 50), [_tokens(source, source.randint(1, 90)) for _ in range(3)]
        with running_engine(self._load(folder, "bfloat16")) as engine:
            cold = _told(engine, "cold", first, root=1)
            for place, prompt in enumerate(strangers):
                engine.submit(generate(f"stranger {place}", prompt, max_tokens=40, root=9))
            warm = _told(engine, "warm", first, root=1)
            second = [*first, *engine.tokens("cold"), *_tokens(source, 9)]
            warm_second = _told(engine, "warm second", second, root=1)
            cold_second = _told(engine, "cold second", second, root=2)
            assert engine.end("warm").usage.cached_tokens > 0
            assert engine.end("warm second").usage.cached_tokens > len(first)
        assert warm == cold
        assert warm_second == cold_second

    def test_float32_is_refused(self, folder: ModelFolder) -> None:
        """Its attention rounds a chunk after cached KV otherwise than a fresh one."""
        with pytest.raises(ConfigError, match=r"in float32 here: .* differ .*; choose --dtype bfloat16"):
            self._load(folder, "float32")

    def test_without_the_flag_nothing_is_tried(self, folder: ModelFolder, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(identity, "require", lambda *_args, **_kwargs: pytest.fail("tried"))
        assert self._load(folder, "bfloat16", deterministic=False).limits.num_blocks == 40

    def test_the_trial_leaves_nothing_behind(self, folder: ModelFolder) -> None:
        """It writes NaN, into a cache of its own."""
        runner = self._load(folder, "bfloat16")
        assert not any(torch.isnan(layer.keys).all() for layer in runner.cache.layers.values())
